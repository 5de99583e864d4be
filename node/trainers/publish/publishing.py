"""Publishing without waiting: the trainer copies its weights and goes on; a thread diffs, encodes and streams them.

The thread compares the copy, block by block, with the replica that the seed shares as memory, and sends each change as
it finds it. The replica holds the parent until the seed says "sealed", so one version is encoded at a time; a second
may wait as a copy. With several ranks, each runs all of this for its own share and counts publishes alike; rank 0
decides into which copy each publish goes and begins it.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from codec.errors import SwarmError
from node.ipc.channel import ChannelTimeout
from node.ipc.sockets import process_named
from node.trainers.connection.link import Link, RankInfo
from node.trainers.connection.patience import Wait, log, saying
from node.trainers.connection.seedlink import SeedProcess, expect, speaking
from node.trainers.connection.seedwatch import SeedWatch
from node.trainers.errors import PublishFailed, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import (
    Delta,
    GoBack,
    PublishBegin,
    PublishBlocks,
    PublishEnd,
    PublishOpened,
    PublishSealed,
    VersionRef,
    WentBack,
)
from node.trainers.publish import encoding
from node.trainers.publish.attempt import Attempt
from node.trainers.publish.encoding import Encoder, not_published
from node.trainers.publish.entries import Entry, Return
from node.trainers.publish.publication import Holders, Publication
from node.trainers.ranks.copies import BUSY, DOWN, LOOK_S, SLOTS, Copies, Decision
from node.trainers.ranks.ownership import Ownership
from node.trainers.ranks.peers import Peers, have, named
from node.trainers.ranks.together import Together
from node.trainers.tensors.weights import Copier

__all__ = ["OnBusy", "PublishLine"]

OnBusy = Literal["wait", "coalesce"]

SEALED_WITHIN_S: Final = 600.0
"""A seal waits for the disk and a scatter of the trainer's replica, never for a peer."""
OPENED_WITHIN_S: Final = 180.0
"""The seed waits for the last rank to attach, rank 0 for a seed that is restarted."""
TAKEN_WITHIN_S: Final = 300.0
"""The seed takes blocks as fast as its store does; one that takes none for this long is stuck."""
TRIES: Final = 4
"""Times that a version is begun anew: more than a seed is restarted, or another trainer publishes, in its time."""
FOLLOW_S: Final = 0.2
"""How often a rank that waits for the seed or for another rank looks whether it still should."""
IDLE_LOOK_S: Final = 1.0
"""How often a line with nothing to publish checks that the seed is alive."""


class _Stale(SwarmDown):
    """Another trainer has published since this one attached: what this one knows of the replica is old."""


class PublishLine:
    """At most two versions that are not sealed: one being encoded, one waiting as a copy. Called from one thread."""

    def __init__(
        self,
        rank_info: RankInfo,
        link: Link,
        copies: Copies,
        ownership: Ownership,
        threads: int,
        holders: Callable[[Publication, float], Holders],
        peers: Peers | None = None,
        seed: SeedProcess | None = None,
    ) -> None:
        """`threads`: encoders of this rank. `holders`: the nodes that hold a publication, or an error when the seed has
        not said it in so many seconds. `peers`: the processes of all ranks. `seed`: started by this process."""
        self.layout = link.replica.layout
        self._rank_info, self._link, self._copies = rank_info, link, copies
        self._ranks, self._watch = Together(rank_info, copies, peers or Peers()), SeedWatch(rank_info.home, seed)
        self._cause: Callable[[], str] = lambda: "nothing"  # what the line's thread waits for, when somebody asks
        self._heard: list[Any] = []
        """What the seed has said of a publish that is not ours yet: at most one."""
        self._failed = 0
        """The newest publish that failed here: the seed may still say that it is open."""
        self._holders = holders
        self._copier = Copier(
            self.layout, copies, ownership, rank_info.rank, lambda name: self._link.replica.bits(name)
        )
        self._encoder = Encoder(copies, ownership, rank_info.rank, threads, self.layout)
        self._number = 0
        self._spare = set(range(SLOTS))
        self._line: deque[Entry | Return] = deque()
        self._news = threading.Condition()
        self._closed = self._over = False
        """No more is taken; what was taken is given up."""
        self._given_up = ""  # by `close`: after how long, and what was still waited for
        self.last_error: SwarmError | None = None
        self._thread = threading.Thread(target=self._work, name="swarm-publish", daemon=True)
        self._thread.start()

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._link.epoch, self._link.version

    def unsealed(self) -> list[Publication]:
        """What is on its way, oldest first."""
        with self._news:
            return [entry.publication for entry in self._line if isinstance(entry, Entry)]

    # ------------------------------------------------------------ the trainer's thread

    def publish(
        self, source: Any, step: int, on_busy: OnBusy, timeout_s: float, again: VersionRef | None = None
    ) -> Publication:
        """Copy `source`; see `Swarm.publish`. `again`: its bits are those of this sealed version."""
        self._check_open()
        self._number += 1
        started = time.perf_counter()
        publication = Publication(step, _holders=self._holders, _waits_for=self.waits_for)
        slot = self._room(self._number, step, on_busy, timeout_s)
        entry = Entry(self._number, publication, slot, again)
        waited = time.perf_counter()
        self._enter(entry)
        try:
            self._copier.fill(slot, entry.number, source, entry.written.set)
        except BaseException:
            entry.told = True
            self._copies.finish(slot, self._rank_info.rank, entry.number, failed=True)
            entry.written.set()
            raise
        entry.copied_at = time.perf_counter()
        publication.seconds |= {"wait": waited - started, "copy": entry.copied_at - waited}
        return publication

    def go_back(self, wanted: VersionRef, timeout_s: float) -> None:
        """Make a sealed version the head again, after what is on its way. Raises what the seed says, `SwarmTimeout`."""
        self._check_open()
        self._number += 1
        back = Return(self._number, wanted)
        self._enter(back)
        wait = Wait(timeout_s, lambda: f"going back to an older version waits for {self.waits_for()}")
        while not back.done.wait(wait.slice_s()):
            if wait.over:
                raise SwarmTimeout(
                    f"The swarm was not back at an older version within {timeout_s:.0f} s: it waits for "
                    f"{self.waits_for()}."
                )
            wait.say()
        if back.error is not None:
            raise back.error

    def settle(self, timeout_s: float) -> bytes:
        """Wait until nothing is on its way; the root of the head then. Raises `SwarmTimeout`."""
        wait = Wait(timeout_s, lambda: f"what was published last waits for {self.waits_for()}")
        while self.unsealed():
            if wait.over:
                raise SwarmTimeout(
                    f"What was published was not sealed within {timeout_s:.0f} s: it waits for {self.waits_for()}."
                )
            wait.say()
            with self._news:
                self._news.wait_for(lambda: not self._line, wait.slice_s())
        return self._link.root

    def waits_for(self) -> str:
        """What the oldest publish that is not sealed waits for: "rank 1 of 2, which has not published step 3"."""
        if (away_s := self._watch.away_s) is not None:
            return f"the seed of {self._rank_info.home}, which ended {away_s:.0f} s ago, to be started again"
        return self._cause()

    def close(self, timeout_s: float) -> None:
        """Finish what was published, then disconnect; safe to call twice. Raises the error of what is not sealed."""
        with self._news:
            self._closed = True
            pending = [entry.publication for entry in self._line if isinstance(entry, Entry) and not entry.told]
            self._news.notify_all()
        wait = Wait(timeout_s, lambda: f"close waits for {self.waits_for()}")
        while self._thread.is_alive() and not wait.over:
            self._thread.join(wait.slice_s())
            wait.say()
        if self._thread.is_alive():
            self._given_up = f"after {timeout_s:.0f} s of waiting for {self.waits_for()}"
        self._over = True
        self._link.channel.close()
        self._thread.join(5.0)
        self._encoder.close()
        self._ranks.close()
        errors = [publication.error for publication in pending if publication.error is not None]
        if errors:
            raise errors[0]

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmDown("This swarm was closed.")

    def _enter(self, entry: Entry | Return) -> None:
        with self._news:
            self._line.append(entry)
            self._news.notify_all()

    def _room(self, number: int, step: int, on_busy: OnBusy, timeout_s: float) -> int:
        """The copy that this publish may use."""
        if self._rank_info.leads:
            return self._decide(number, step, on_busy, timeout_s)
        decision = self._ranks.await_decision(number, step, timeout_s)
        if decision.slot == DOWN:
            raise SwarmDown(f"Step {step} was not published: rank 0 found no seed. Its error says more.")
        if decision.slot != BUSY:
            with saying(timeout_s, lambda: f"publish of step {step} waits for {self.waits_for()}"), self._news:
                self._withdraw(decision.instead)
                if self._news.wait_for(lambda: decision.slot in self._spare, timeout_s):
                    self._spare.remove(decision.slot)
                    return decision.slot
            self._copies.finish(decision.slot, self._rank_info.rank, number, failed=True)
        raise self._busy(timeout_s)

    def _decide(self, number: int, step: int, on_busy: OnBusy, timeout_s: float) -> int:
        wait = Wait(timeout_s, lambda: f"publish of step {step} waits for {self.waits_for()}")
        instead = 0
        try:
            while True:
                self._watch.wait_until_there(self._link.channel, step, wait)
                with self._news:
                    older = self._newest_waiting() if on_busy == "coalesce" and not self._spare else None
                    if older is not None:
                        instead = older.number
                        self._withdraw(instead)
                    free = self._spare or self._news.wait_for(lambda: bool(self._spare), wait.slice_s())
                    if free and self._watch.away_s is None:  # it may have ended meanwhile
                        slot = min(self._spare)
                        self._spare.remove(slot)
                        break
                if wait.over:
                    raise self._busy(timeout_s)
                wait.say()
        except BaseException as error:  # the other ranks wait to hear it
            self._copies.decide(number, Decision(DOWN if isinstance(error, SwarmDown) else BUSY, 0))
            raise
        self._copies.decide(number, Decision(slot, instead))
        return slot

    def _busy(self, timeout_s: float) -> SwarmBusy:
        return SwarmBusy(
            f"Two versions are not sealed yet, after waiting {timeout_s:.0f} s for one of them. The older one waits "
            f"for {self.waits_for()}."
        )

    def _newest_waiting(self) -> Entry | None:
        """The publish that a newer one may take the place of: not begun, and no way back. With the lock held."""
        last = self._line[-1] if self._line else None
        return last if isinstance(last, Entry) and not last.begun and last.again is None else None

    def _withdraw(self, number: int) -> None:
        """A newer publish takes the place of this one (0: of none). With the lock held."""
        for entry in [entry for entry in self._line if isinstance(entry, Entry) and entry.number == number]:
            entry.publication.superseded = True
            entry.written.set()
            self._line.remove(entry)
            self._spare.add(entry.slot)
            entry.publication.end()

    # ------------------------------------------------------------ the line's own thread

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            error: SwarmError | None = None
            try:
                self._run(entry)
            except SwarmError as failure:
                error = failure
            except Exception as failure:  # our bug: whoever waits must hear of it, not wait for ever
                error = PublishFailed(f"Publishing failed: {failure!r}")
                error.__cause__ = failure
            self._ended(entry, error)

    def _next(self) -> Entry | Return | None:
        """The oldest, which stays in the line until it has ended. None: closed, and all of them have."""
        while True:
            with self._news:
                if self._news.wait_for(lambda: bool(self._line) or self._closed, IDLE_LOOK_S):
                    return self._line[0] if self._line else None
            self._watch.look(self._link.channel)

    def _ended(self, entry: Entry | Return, error: SwarmError | None) -> None:
        self._cause = lambda: "nothing"
        if error is not None and self._given_up:
            what = f"Step {entry.publication.step}" if isinstance(entry, Entry) else "The way back"
            error = SwarmTimeout(f"{what} was given up when the swarm was closed, {self._given_up}.")
        if error is not None:
            self._failed = entry.number
            if not self._heard:  # in the middle of a conversation, unless the next one has begun: that one opens anew
                self._link.channel.close()
        with self._news:
            if entry not in self._line:
                return  # another took its place
            self._line.remove(entry)
            if isinstance(entry, Return):
                entry.error = error
                entry.done.set()
            else:
                self._spare.add(entry.slot)
                if error is not None and not entry.told:
                    self.last_error = error
                    log.warning("Publishing step %d failed: %s", entry.publication.step, error)
                entry.publication.end(error)
            self._news.notify_all()

    def _run(self, entry: Entry | Return) -> None:
        """Do it, over a new connection if the seed was restarted meanwhile."""
        attempt = Attempt(self._encoder.blocks)
        for tries_left in range(TRIES, 0, -1):
            try:
                if isinstance(entry, Return):
                    with speaking("it was asked to go back"):
                        return self._go_back(entry)
                with speaking(f"step {entry.publication.step} was published"):
                    return self._publish(entry, attempt)
            except SwarmDown:
                if tries_left == 1 or self._over:
                    raise
                self._reconnect()
                if isinstance(entry, Entry) and attempt.stands_in(self._link):  # only the answer was lost
                    entry.publication.root = self._link.root
                    return None
        return None

    def _reconnect(self) -> None:
        self._link.channel.close()
        while True:
            try:
                link = Link(self._rank_info)
                break
            except SwarmDown as error:
                self._watch.note_lost()
                if self._over or self._watch.given_up:
                    raise SwarmDown(self._watch.says()) from error
                time.sleep(FOLLOW_S)
        self._watch.note_back()
        if link.replica.layout.hash != self.layout.hash:
            raise PublishFailed("The seed was restarted with another model. Attach again.")
        self._link = link
        self._heard.clear()

    # ------------------------------------------------------------ one version

    def _publish(self, entry: Entry, attempt: Attempt) -> None:
        publication = entry.publication
        opened = self._open(entry)
        if opened is None:
            return
        began = time.perf_counter()
        if opened.parent != self._link.root:
            raise _Stale("Another trainer has published.")
        publication.epoch, publication.version = opened.epoch, opened.version
        attempt.begin(opened, self._link)
        self._stream(entry, opened, attempt)
        encoded = time.perf_counter()
        sealed = self._await_sealed(entry)
        if self._rank_info.world == 1 and sealed.root != attempt.root:
            raise PublishFailed("The seed sealed another root than this trainer's.")
        self._link.hashes[:] = attempt.hashes
        self._link.epoch, self._link.version, self._link.root = opened.epoch, opened.version, sealed.root
        publication.seconds |= {
            "queue": max(0.0, began - entry.copied_at) if entry.copied_at else 0.0,
            "encode": encoded - began,
            "seal": time.perf_counter() - encoded,
        }
        publication.root, publication.bytes, publication.changed = sealed.root, sealed.payload_bytes, sealed.changed
        publication.density = sealed.changed / max(1, sum(tensor.elements for tensor in self.layout.tensors))

    def _open(self, entry: Entry) -> PublishOpened | None:
        """Begin the version (rank 0), or hear that it has begun. None: it was withdrawn meanwhile."""
        if self._rank_info.leads:
            self._cause = lambda: "this process to load its encoder"
            self._encoder.await_ready()
            self._cause = lambda: f"this process to copy {entry.what}"
            while not self._copies.begun(entry.slot, entry.number, self._rank_info.rank):
                if entry.publication.superseded:
                    return None
                entry.written.wait(FOLLOW_S)  # more looks would take the interpreter from the thread that copies
            with self._news:
                if entry.publication.superseded:
                    return None
                entry.begun = True
            message = PublishBegin(entry.publication.step, entry.number, entry.again)
            self._link.channel.send(message)
        return self._follow(PublishOpened, entry)

    def _follow(self, kind: Any, entry: Entry | Return) -> Any:
        """What the seed says to all ranks when rank 0 has begun. None: a newer publish takes the place of this one.

        Rank 0 looks after the others meanwhile too: one that could not copy its weights has hung up, and the seed waits
        for it."""
        who = self._seed_named if self._rank_info.leads else lambda: self._ranks.first
        self._cause = lambda: f"{who()} to begin {entry.what}"
        wait = Wait(OPENED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
        while True:
            if isinstance(entry, Entry) and entry.publication.superseded:
                return None
            self._check_ranks(entry)
            try:
                message = self._heard.pop() if self._heard else expect(self._link.channel, kind, FOLLOW_S)[0]
            except ChannelTimeout as error:
                given_up = self._over if self._rank_info.leads else self._closed
                if given_up or wait.over:
                    text = f"{entry.what.capitalize()} waited {wait.waited_s:.0f} s for {who()} to begin it."
                    raise SwarmTimeout(text) from error
                wait.say()
                continue
            if message.number == entry.number:
                return message
            if message.number <= self._failed:
                continue
            if message.number < entry.number or not isinstance(entry, Entry):
                raise PublishFailed("The ranks of this trainer do not publish the same steps.")
            self._heard.append(message)  # a newer one took this one's place: our own publish of it is still to come
            self._cause = lambda: "this rank to publish a step that the others have published"
            while not entry.publication.superseded:
                self._check_ranks(entry)
                if wait.over:
                    raise SwarmTimeout("This rank did not publish a step that the others did.")
                wait.say()
                time.sleep(LOOK_S)

    def _seed_named(self) -> str:
        return f"the seed ({process_named(self._link.channel.pid)})"

    def _check_ranks(self, entry: Entry | Return) -> None:
        if isinstance(entry, Entry):
            self._ranks.check(entry.slot, entry.number, entry.what)
        else:
            self._ranks.check_all(entry.what)

    def _await_sealed(self, entry: Entry) -> PublishSealed:
        """All of ours is at the seed: wait for the other ranks, then for the seal."""
        copying = Wait(encoding.COPIED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
        sealing: Wait | None = None
        while True:
            self._check_ranks(entry)
            late = self._ranks.uncopied(entry.slot, entry.number)
            try:
                return expect(self._link.channel, PublishSealed, FOLLOW_S)[0]
            except ChannelTimeout as error:
                if late and copying.over:
                    raise SwarmTimeout(not_published(late, self._ranks.world, entry.what)) from error
                if not late and sealing is None:
                    sealing = Wait(SEALED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
                if sealing is not None and sealing.over:
                    text = f"{entry.what.capitalize()} was not sealed within {SEALED_WITHIN_S:.0f} s: it waits for "
                    raise SwarmTimeout(f"{text}{self.waits_for()}.") from error
                (sealing or copying).say()
            except PublishFailed as error:
                if not late:
                    raise
                who = named(late, self._ranks.world).capitalize()
                raise PublishFailed(f"{error} {who} {have(late)} not published {entry.what}.") from error

    def _stream(self, entry: Entry, opened: PublishOpened, attempt: Attempt) -> None:
        """Diff, encode and send what is ours; then say so."""
        link, batch, size, slot, number = self._link, [], 0, entry.slot, entry.number
        wait = Wait(encoding.COPIED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")

        def still_wanted(late: Sequence[int]) -> None:
            self._check_ranks(entry)
            with contextlib.suppress(ChannelTimeout):  # the seed says something only when another rank has gone
                expect(self._link.channel, PublishSealed, LOOK_S)
            wait.say()

        self._cause = lambda: self._ranks.holds_up(slot, number, entry.what, self._seed_named())
        found = self._encoder.deltas(link.replica, slot, number, opened.coder, still_wanted, entry.what)
        for delta, changed in found:
            attempt.note(delta, changed)
            batch.append(Delta(delta.block, delta.coder, delta.new_hash, delta.payload))
            size += len(delta.payload)
            if size >= opened.batch_bytes:
                link.channel.send(PublishBlocks(tuple(batch)), timeout_s=TAKEN_WITHIN_S)
                batch, size = [], 0
        if batch:
            link.channel.send(PublishBlocks(tuple(batch)), timeout_s=TAKEN_WITHIN_S)
        link.channel.send(PublishEnd(attempt.changed, attempt.runs, attempt.root))
        attempt.ended = True
        self._copies.note_sent(slot, self._rank_info.rank, number)

    def _go_back(self, back: Return) -> None:
        if self._rank_info.leads:
            self._link.channel.send(GoBack(back.number, back.wanted))
            expect(self._link.channel, WentBack, SEALED_WITHIN_S)
        else:
            self._follow(WentBack, back)
        self._reconnect()  # the replica is another: so are the hashes
