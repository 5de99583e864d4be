"""The publishes of one rank that are not sealed yet, and the thread that sends them: publishing without waiting.

The trainer's thread copies its weights into shared memory and goes on. The line's thread compares the copy, block by
block, with the replica that the seed shares as memory, and sends each change as it finds it (see `sender`). The replica
holds the parent until the seed has sealed the version, so one version is encoded at a time; a second may wait as a
copy. With several ranks, each rank runs all of this for its own share and numbers its publishes alike. Rank 0 decides
into which copy each publish goes, and begins it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

from codec.bits import Bits
from codec.errors import SwarmError
from codec.parts import draft_blocks
from node.trainers.attach import Attachment
from node.trainers.connection.link import Link
from node.trainers.connection.patience import Wait, log, logged_wait
from node.trainers.connection.seedwatch import SeedWatch
from node.trainers.errors import PublishFailed, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import VersionRef
from node.trainers.publish.encoding import BlockSource, Encoder
from node.trainers.publish.entries import Entry, Rollback
from node.trainers.publish.publication import Holders, Publication
from node.trainers.publish.sender import VersionSender
from node.trainers.ranks.copies import BUSY, DOWN, SLOTS, Decision
from node.trainers.ranks.progress import RankProgress
from node.trainers.tensors.drafted import Drafted
from node.trainers.tensors.weights import Copier

__all__ = ["OnBusy", "PublishLine"]

OnBusy = Literal["wait", "coalesce"]

IDLE_LOOK_S: Final = 1.0
"""How often a line with nothing to publish checks that the seed is up."""


class PublishLine:
    """At most two versions that are not sealed: one being encoded, one waiting as a copy.

    Its methods are called from one thread, the trainer's. `last_error`: of the newest publish that failed in the
    background.
    """

    def __init__(
        self,
        attachment: Attachment,
        threads: int,
        holders: Callable[[Publication, float], Holders],
        *,
        in_place: bool = False,
        prepare: Callable[[Entry, Link, Callable[[str], Any]], None] | None = None,
    ) -> None:
        """`threads`: encoder threads of this rank. `holders(publication, within_s)`: which nodes hold a publication;
        raises when the seed does not answer in time. `in_place`: for `publish_blocks` only, so that no copy is made.
        `prepare(entry, link, bytes_of)`: called before the copy of an opened version is compared with the replica;
        `bytes_of(tensor)` is the copy's memory, uint8."""
        rank_info, copies, ownership = attachment.rank_info, attachment.copies, attachment.ownership
        self.layout = attachment.link.replica.layout
        self._rank_info, self._copies, self._holders = rank_info, copies, holders
        self._ranks = RankProgress(rank_info, copies, attachment.peers)
        self._watch = SeedWatch(rank_info.home, attachment.seed)
        self._encoder = Encoder(copies, ownership, rank_info.rank, threads, self.layout)
        self._sender = VersionSender(attachment, self._ranks, self._watch, self._encoder, self._claim, prepare)
        self._draft_blocks = draft_blocks(self.layout)
        self._copier = Copier(self.layout, copies, ownership, rank_info.rank, self.bits)
        if not in_place:
            self._copier.touch_pages()
        self._number = 0
        """Of the newest publish or rollback."""
        self._lock = threading.Condition()
        """Guards the attributes below, and is notified when one of them changes."""
        self._free_slots = set(range(SLOTS))
        self._line: deque[Entry | Rollback] = deque()
        self._closed = False
        """No new publish is accepted."""
        self._given_up = ""
        """Set by `close` when time runs out: after how long, and what the line still waited for."""
        self.last_error: SwarmError | None = None
        self._thread = threading.Thread(target=self._send_all, name="swarm-publish", daemon=True)
        self._thread.start()

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._sender.link.epoch, self._sender.link.version

    def bits(self, name: str) -> Bits:
        """The bits that the seed's replica has of a tensor. Raises `KeyError`."""
        return self._sender.link.replica.bits(name)

    def unsealed(self) -> list[Publication]:
        """The publications on their way, oldest first."""
        with self._lock:
            return [entry.publication for entry in self._line if isinstance(entry, Entry)]

    # ------------------------------------------------------------ the trainer's thread

    def publish(
        self,
        source: Any,
        step: int,
        on_busy: OnBusy,
        timeout_s: float,
        again: VersionRef | None = None,
        elements: int = 0,
    ) -> Publication:
        """Copy `source` and queue it; see `Swarm.publish`. `again`: its bits are those of this sealed version.
        `elements`: see `Entry`."""
        self._check_open()
        self._number += 1
        started = time.perf_counter()
        publication = Publication(step, _holders=self._holders, _waits_for=self.waits_for)
        slot = self._take_slot(self._number, step, on_busy, timeout_s)
        kept = range(0) if isinstance(source, Drafted) else self._draft_blocks
        entry = Entry(self._number, publication, slot, again, elements=elements, kept=kept)
        waited = time.perf_counter()
        self._append(entry)
        try:
            self._copier.fill(slot, entry.number, source, entry.written.set)
        except BaseException:
            entry.copy_failed = True
            self._copies.note_copied(slot, self._rank_info.rank, entry.number, failed=True)
            entry.written.set()
            raise
        entry.copied_at = time.perf_counter()
        publication.seconds |= {"wait": waited - started, "copy": entry.copied_at - waited}
        return publication

    def publish_blocks(
        self, source: BlockSource, step: int, timeout_s: float, *, expected_bytes: int = 0, keep_draft: bool = True
    ) -> Publication:
        """Queue what `source` has, which must not change until the publication has ended. For a trainer of one rank.

        `expected_bytes`: about what the version's payload will have; 0: unknown. `keep_draft`: the draft model, if the
        swarm has one, stays as it is, and `source` need not have its blocks.
        """
        self._check_open()
        self._number += 1
        publication = Publication(step, _holders=self._holders, _waits_for=self.waits_for)
        slot = self._take_slot(self._number, step, "wait", timeout_s)
        entry = Entry(self._number, publication, slot, source=source, expected_bytes=expected_bytes)
        entry.kept = self._draft_blocks if keep_draft else range(0)
        entry.copied_at = time.perf_counter()
        rank = self._rank_info.rank
        self._copies.note_written(slot, rank, entry.number, slice(None))
        self._copies.note_copied(slot, rank, entry.number)
        entry.written.set()
        self._append(entry)
        return publication

    def go_back(self, wanted: VersionRef, timeout_s: float) -> None:
        """Make a sealed version the head again, after the publishes that are queued.

        Raises what the seed refuses it with, `SwarmTimeout`, `SwarmDown`.
        """
        self._check_open()
        self._number += 1
        rollback = Rollback(self._number, wanted)
        self._append(rollback)
        wait = Wait(timeout_s, lambda: f"going back to an older version waits for {self.waits_for()}")
        while not rollback.done.wait(wait.slice_s()):
            if wait.over:
                raise SwarmTimeout(
                    f"The swarm was not back at an older version within {timeout_s:.0f} s: it waits for "
                    f"{self.waits_for()}."
                )
            wait.log_if_due()
        if rollback.error is not None:
            raise rollback.error

    def drain(self, timeout_s: float) -> bytes:
        """Wait until every publish is sealed or has failed. Returns the root of the head. Raises `SwarmTimeout`."""
        wait = Wait(timeout_s, lambda: f"what was published last waits for {self.waits_for()}")
        while self.unsealed():
            if wait.over:
                raise SwarmTimeout(
                    f"What was published was not sealed within {timeout_s:.0f} s: it waits for {self.waits_for()}."
                )
            wait.log_if_due()
            with self._lock:
                self._lock.wait_for(lambda: not self._line, wait.slice_s())
        return self._sender.link.swarm_root

    def waits_for(self) -> str:
        """What the oldest unsealed publish waits for, in words."""
        return self._sender.waits_for()

    def close(self, timeout_s: float) -> None:
        """Finish the queued publishes, then disconnect. Safe to call twice.

        Raises the error of the first publication that was not sealed.
        """
        with self._lock:
            self._closed = True
            pending = [entry.publication for entry in self._line if isinstance(entry, Entry) and not entry.copy_failed]
            self._lock.notify_all()
        self._sender.note_closing()
        wait = Wait(timeout_s, lambda: f"close waits for {self.waits_for()}")
        while self._thread.is_alive() and not wait.over:
            self._thread.join(wait.slice_s())
            wait.log_if_due()
        if self._thread.is_alive():
            self._given_up = f"after {timeout_s:.0f} s of waiting for {self.waits_for()}"
        self._sender.give_up()
        self._thread.join(5.0)
        self._encoder.close()
        self._ranks.close()
        errors = [publication.error for publication in pending if publication.error is not None]
        if errors:
            raise errors[0]

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmDown("This swarm was closed.")

    def _append(self, entry: Entry | Rollback) -> None:
        with self._lock:
            self._line.append(entry)
            self._lock.notify_all()

    def _take_slot(self, number: int, step: int, on_busy: OnBusy, timeout_s: float) -> int:
        """The copy that this publish may use: decided by rank 0, followed by the other ranks."""
        if self._rank_info.leads:
            return self._decide(number, step, on_busy, timeout_s)
        decision = self._ranks.await_decision(number, step, timeout_s)
        if decision.slot == DOWN:
            raise SwarmDown(f"Step {step} was not published: rank 0 found no seed. Its error says more.")
        if decision.slot != BUSY:
            with logged_wait(timeout_s, lambda: f"publish of step {step} waits for {self.waits_for()}"), self._lock:
                self._withdraw(decision.replaces)
                if self._lock.wait_for(lambda: decision.slot in self._free_slots, timeout_s):
                    self._free_slots.remove(decision.slot)
                    return decision.slot
            self._copies.note_copied(decision.slot, self._rank_info.rank, number, failed=True)
        raise self._busy(timeout_s)

    def _decide(self, number: int, step: int, on_busy: OnBusy, timeout_s: float) -> int:
        """On rank 0: wait for the seed and a free copy, and write the decision for the other ranks."""
        wait = Wait(timeout_s, lambda: f"publish of step {step} waits for {self.waits_for()}")
        replaces = 0
        try:
            while True:
                self._watch.wait_until_up(self._sender.link.channel, step, wait)
                with self._lock:
                    older = self._newest_waiting() if on_busy == "coalesce" and not self._free_slots else None
                    if older is not None:
                        replaces = older.number
                        self._withdraw(replaces)
                    free = self._free_slots or self._lock.wait_for(lambda: bool(self._free_slots), wait.slice_s())
                    if free and self._watch.away_s is None:  # the seed may have ended during the wait
                        slot = min(self._free_slots)
                        self._free_slots.remove(slot)
                        break
                if wait.over:
                    raise self._busy(timeout_s)
                wait.log_if_due()
        except BaseException as error:  # the other ranks wait for the decision
            self._copies.decide(number, Decision(DOWN if isinstance(error, SwarmDown) else BUSY, 0))
            raise
        self._copies.decide(number, Decision(slot, replaces))
        return slot

    def _busy(self, timeout_s: float) -> SwarmBusy:
        return SwarmBusy(
            f"Two versions are not sealed yet, after waiting {timeout_s:.0f} s for one of them. The older one waits "
            f"for {self.waits_for()}."
        )

    def _newest_waiting(self) -> Entry | None:
        """The publish that a newer one may replace: not begun, and of a new version. The caller holds the lock."""
        last = self._line[-1] if self._line else None
        return last if isinstance(last, Entry) and not last.begun and last.again is None else None

    def _withdraw(self, number: int) -> None:
        """A newer publish replaces this one (0: none). The caller holds the lock."""
        for entry in [entry for entry in self._line if isinstance(entry, Entry) and entry.number == number]:
            self._line.remove(entry)
            self._free_slots.add(entry.slot)
            entry.publication.supersede()
            entry.written.set()

    # ------------------------------------------------------------ the line's own thread

    def _send_all(self) -> None:
        while (entry := self._next()) is not None:
            error: SwarmError | None = None
            try:
                self._sender.send(entry)
            except SwarmError as failure:
                error = failure
            except Exception as failure:  # a bug here: the threads that wait must hear of it instead of waiting forever
                error = PublishFailed(f"Publishing failed: {failure!r}")
                error.__cause__ = failure
            self._finish(entry, error)

    def _next(self) -> Entry | Rollback | None:
        """The oldest entry, which stays in the line until it has ended. None: closed, and every entry has ended."""
        while True:
            with self._lock:
                if self._lock.wait_for(lambda: bool(self._line) or self._closed, IDLE_LOOK_S):
                    return self._line[0] if self._line else None
            self._watch.check_hung_up(self._sender.link.channel)

    def _claim(self, entry: Entry) -> bool:
        """Mark a publish as begun, so that no newer one replaces it. False: one has replaced it already."""
        with self._lock:
            entry.begun = not entry.publication.superseded
            return entry.begun

    def _finish(self, entry: Entry | Rollback, error: SwarmError | None) -> None:
        """Take an entry out of the line, sealed or failed, and tell its caller."""
        self._sender.note_finished(entry, failed=error is not None)
        if error is not None and self._given_up:
            what = f"Step {entry.publication.step}" if isinstance(entry, Entry) else entry.what.capitalize()
            error = SwarmTimeout(f"{what} was given up when the swarm was closed, {self._given_up}.")
        with self._lock:
            if entry not in self._line:
                return  # a newer publish replaced it
            self._line.remove(entry)
            if isinstance(entry, Rollback):
                entry.error = error
                entry.done.set()
            else:
                self._free_slots.add(entry.slot)
                if error is not None and not entry.copy_failed:
                    self.last_error = error
                    log.warning("Publishing step %d failed: %s", entry.publication.step, error)
                entry.publication.end(error)
            self._lock.notify_all()
