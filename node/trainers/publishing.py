"""Publishing without waiting: the trainer copies its weights and goes on; a thread diffs, encodes and streams them.

The thread compares the copy with the truth replica, which the seed shares as memory, block by block, and sends what
changed as it finds it: the first chunk leaves while later tensors are still being compared. The replica holds the
parent until the seed says "sealed", so one version is encoded at a time; a second may wait as a copy.

Of a trainer with several ranks each runs all of this for its own share. Publishes are counted alike on all of them;
rank 0 decides into which copy each goes and begins it, the others follow.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from codec.errors import SwarmError
from node.local import ChannelTimeout
from node.trainers.attempt import Attempt
from node.trainers.copies import BUSY, LOOK_S, SLOTS, Copies, Decision, await_true
from node.trainers.encoding import Encoder
from node.trainers.errors import PublishFailed, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.link import Link, Seat
from node.trainers.messages import (
    Delta,
    GoBack,
    PublishBegin,
    PublishBlocks,
    PublishEnd,
    PublishOpened,
    PublishSealed,
    Wanted,
    WentBack,
)
from node.trainers.publication import Publication
from node.trainers.seedlink import expect, speaking
from node.trainers.shares import Shares
from node.trainers.weights import Copier

__all__ = ["OnBusy", "PublishLine"]

OnBusy = Literal["wait", "coalesce"]

SEALED_WITHIN_S: Final = 600.0
"""A seal waits for the disk and a scatter of the trainer's replica, never for a peer."""
OPENED_WITHIN_S: Final = 180.0
"""The seed waits for the last rank to attach, rank 0 for a seed that is restarted."""
TAKEN_WITHIN_S: Final = 300.0
"""The seed takes blocks as fast as its store does; one that takes none for this long is stuck."""
RECONNECT_S: Final = 60.0
"""A seed that is restarted within this costs nothing but the time."""
TRIES: Final = 4
"""Times that a version is begun anew: more than a seed is restarted, or another trainer publishes, in its time."""
FOLLOW_S: Final = 0.2
"""How often a rank that waits for rank 0 looks whether it still should."""


@dataclass(eq=False)
class _Entry:
    """A publish in the line. `slot`: where its copy is. `begun`: too late for a newer one to take its place."""

    number: int
    publication: Publication
    slot: int
    again: Wanted | None = None
    copied_at: float = 0.0
    begun: bool = False
    told: bool = False
    """Its copy failed here, and the caller knows why."""


@dataclass(eq=False)
class _Return:
    """A way back to an older version, in its turn."""

    number: int
    wanted: Wanted
    done: threading.Event = field(default_factory=threading.Event)
    error: SwarmError | None = None


class _Stale(SwarmDown):
    """Somebody else has published since we attached: what we know of the replica is old."""


class PublishLine:
    """At most two versions that are not sealed: one being encoded, one waiting as a copy. Called from one thread."""

    def __init__(
        self,
        seat: Seat,
        link: Link,
        copies: Copies,
        shares: Shares,
        threads: int,
        holders: Callable[[Publication, float], float],
    ) -> None:
        """`threads`: encoders of this rank. `holders`: the share of the nodes that hold a publication, or an
        error when the seed has not said it in so many seconds."""
        self.layout = link.replica.layout
        self._seat, self._link, self._copies = seat, link, copies
        self._heard: list[Any] = []
        """What the seed has said of a publish that is not ours yet: at most one."""
        self._failed = 0
        """The newest publish that failed here: the seed may still say that it is open."""
        self._holders = holders
        self._copier = Copier(self.layout, copies, shares, seat.rank, lambda name: self._link.replica.bits(name))
        self._encoder = Encoder(copies, shares, seat.rank, threads, self.layout)
        self._number = 0
        self._spare = set(range(SLOTS))
        self._line: deque[_Entry | _Return] = deque()
        self._news = threading.Condition()
        self._closed = self._over = False
        """No more is taken; what was taken is given up."""
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
            return [entry.publication for entry in self._line if isinstance(entry, _Entry)]

    # ------------------------------------------------------------ the trainer's thread

    def publish(
        self, source: Any, step: int, on_busy: OnBusy, timeout_s: float, again: Wanted | None = None
    ) -> Publication:
        """Copy `source`; see `Swarm.publish`. `again`: its bits are those of this sealed version."""
        self._check_open()
        self._number += 1
        started = time.perf_counter()
        publication = Publication(step, _holders=self._holders)
        slot = self._room(self._number, on_busy, timeout_s)
        entry = _Entry(self._number, publication, slot, again)
        waited = time.perf_counter()
        self._enter(entry)
        try:
            self._copier.fill(slot, entry.number, source)
        except BaseException:
            entry.told = True
            self._copies.finish(slot, self._seat.rank, entry.number, failed=True)
            raise
        entry.copied_at = time.perf_counter()
        publication.seconds |= {"wait": waited - started, "copy": entry.copied_at - waited}
        return publication

    def go_back(self, wanted: Wanted, timeout_s: float) -> None:
        """Make a sealed version the head again, after what is on its way. Raises what the seed says, `SwarmTimeout`."""
        self._check_open()
        self._number += 1
        back = _Return(self._number, wanted)
        self._enter(back)
        if not back.done.wait(timeout_s):
            raise SwarmTimeout(f"The swarm was not back at an older version within {timeout_s:.0f} s.")
        if back.error is not None:
            raise back.error

    def settle(self, timeout_s: float) -> bytes:
        """Wait until nothing is on its way; the root of the head then. Raises `SwarmTimeout`."""
        with self._news:
            if not self._news.wait_for(lambda: not self._line, timeout_s):
                raise SwarmTimeout(f"What was published was not sealed within {timeout_s:.0f} s.")
            return self._link.root

    def close(self, timeout_s: float) -> None:
        """Let what was published go out, then hang up. What is not sealed by then is abandoned. Safe to call twice."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(timeout_s)
        self._over = True
        self._link.channel.close()
        self._thread.join(5.0)
        self._encoder.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmDown("This swarm was closed.")

    def _enter(self, entry: _Entry | _Return) -> None:
        with self._news:
            self._line.append(entry)
            self._news.notify_all()

    def _room(self, number: int, on_busy: OnBusy, timeout_s: float) -> int:
        """The copy that this publish may use."""
        if self._seat.leads:
            return self._decide(number, on_busy, timeout_s)
        decision = Decision(BUSY, 0)

        def decided() -> bool:
            nonlocal decision
            found = self._copies.decision(number)
            decision = found or decision
            return found is not None

        await_true(decided, time.monotonic() + timeout_s + RECONNECT_S, "Rank 0 did not publish this step in time.")
        if decision.slot != BUSY:
            with self._news:
                self._withdraw(decision.instead)
                if self._news.wait_for(lambda: decision.slot in self._spare, timeout_s):
                    self._spare.remove(decision.slot)
                    return decision.slot
            self._copies.finish(decision.slot, self._seat.rank, number, failed=True)
        raise _busy(timeout_s)

    def _decide(self, number: int, on_busy: OnBusy, timeout_s: float) -> int:
        with self._news:
            older = self._newest_waiting() if on_busy == "coalesce" and not self._spare else None
            if older is not None:
                self._withdraw(older.number)
            elif not self._news.wait_for(lambda: bool(self._spare), timeout_s):
                self._copies.decide(number, Decision(BUSY, 0))
                raise _busy(timeout_s)
            slot = min(self._spare)
            self._spare.remove(slot)
        self._copies.decide(number, Decision(slot, older.number if older is not None else 0))
        return slot

    def _newest_waiting(self) -> _Entry | None:
        """The publish that a newer one may take the place of: not begun, and no way back. With the lock held."""
        last = self._line[-1] if self._line else None
        return last if isinstance(last, _Entry) and not last.begun and last.again is None else None

    def _withdraw(self, number: int) -> None:
        """A newer publish takes the place of this one (0: of none). With the lock held."""
        for entry in [entry for entry in self._line if isinstance(entry, _Entry) and entry.number == number]:
            entry.publication.superseded = True
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

    def _next(self) -> _Entry | _Return | None:
        """The oldest, which stays in the line until it has ended. None: closed, and all of them have."""
        with self._news:
            self._news.wait_for(lambda: bool(self._line) or self._closed)
            return self._line[0] if self._line else None

    def _ended(self, entry: _Entry | _Return, error: SwarmError | None) -> None:
        if error is not None:
            self._failed = entry.number
            if not self._heard:  # in the middle of a conversation, unless the next one has begun: that one opens anew
                self._link.channel.close()
        with self._news:
            if entry not in self._line:
                return  # another took its place
            self._line.remove(entry)
            if isinstance(entry, _Return):
                entry.error = error
                entry.done.set()
            else:
                self._spare.add(entry.slot)
                self.last_error = self.last_error if entry.told else error or self.last_error
                entry.publication.end(error)
            self._news.notify_all()

    def _run(self, entry: _Entry | _Return) -> None:
        """Do it, over a new connection if the seed was restarted meanwhile."""
        attempt = Attempt(self._encoder.blocks)
        for tries_left in range(TRIES, 0, -1):
            try:
                if isinstance(entry, _Return):
                    with speaking("it was asked to go back"):
                        return self._go_back(entry)
                with speaking(f"step {entry.publication.step} was published"):
                    return self._publish(entry, attempt)
            except SwarmDown:
                if tries_left == 1 or self._over:
                    raise
                self._reconnect(time.monotonic() + RECONNECT_S)
                if isinstance(entry, _Entry) and attempt.stands_in(self._link):  # only the answer was lost
                    entry.publication.root = self._link.root
                    return None
        return None

    def _reconnect(self, deadline: float) -> None:
        self._link.channel.close()
        while True:
            try:
                link = Link(self._seat)
                break
            except SwarmDown:
                if self._closed or time.monotonic() > deadline:
                    raise
                time.sleep(FOLLOW_S)
        if link.replica.layout.hash != self.layout.hash:
            raise PublishFailed("The seed was restarted with another model. Attach again.")
        self._link = link
        self._heard.clear()

    # ------------------------------------------------------------ one version

    def _publish(self, entry: _Entry, attempt: Attempt) -> None:
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
        sealed, _ = expect(self._link.channel, PublishSealed, SEALED_WITHIN_S)
        if self._seat.world == 1 and sealed.root != attempt.root:
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

    def _open(self, entry: _Entry) -> PublishOpened | None:
        """Begin the version (rank 0), or hear that it has begun. None: it was withdrawn meanwhile."""
        if self._seat.leads:
            self._encoder.await_ready()
            while not self._copies.begun(entry.slot, entry.number, self._seat.rank):
                if entry.publication.superseded:
                    return None
                time.sleep(LOOK_S)
            with self._news:
                if entry.publication.superseded:
                    return None
                entry.begun = True
            message = PublishBegin(entry.publication.step, entry.number, entry.again)
            self._link.channel.send(message)
        return self._follow(PublishOpened, entry)

    def _follow(self, kind: Any, entry: _Entry | _Return) -> Any:
        """What the seed says to all ranks when rank 0 has begun. None: a newer publish takes the place of this one.

        Rank 0 looks after the others meanwhile too: one that could not copy its weights has hung up, and the seed waits
        for it."""
        deadline = time.monotonic() + OPENED_WITHIN_S
        while True:
            if isinstance(entry, _Entry):
                if entry.publication.superseded:
                    return None
                self._copies.check(entry.slot, entry.number)
            try:
                message = self._heard.pop() if self._heard else expect(self._link.channel, kind, FOLLOW_S)[0]
            except ChannelTimeout:
                given_up = self._over if self._seat.leads else self._closed
                if given_up or time.monotonic() > deadline:
                    raise
                continue
            if message.number == entry.number:
                return message
            if message.number <= self._failed:
                continue
            if message.number < entry.number or not isinstance(entry, _Entry):
                raise PublishFailed("The ranks of this trainer do not publish the same steps.")
            self._heard.append(message)  # a newer one took this one's place: our own publish of it is still to come
            gone = partial(self._gone, entry)
            await_true(gone, deadline, "This rank did not publish a step that the others did.")

    def _gone(self, entry: _Entry) -> bool:
        """Another publish takes its place. Raises `PublishFailed` when that is so because a rank could not copy it."""
        self._copies.check(entry.slot, entry.number)
        return entry.publication.superseded

    def _stream(self, entry: _Entry, opened: PublishOpened, attempt: Attempt) -> None:
        """Diff, encode and send what is ours; then say so."""
        link, batch, size = self._link, [], 0
        slot, number = entry.slot, entry.number
        found = self._encoder.deltas(link.replica, slot, number, opened.coder, self._still_wanted)
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

    def _still_wanted(self) -> None:
        """Raises what the seed has to say, which it does of itself only when another rank has gone."""
        with contextlib.suppress(ChannelTimeout):
            expect(self._link.channel, PublishSealed, LOOK_S)

    def _go_back(self, back: _Return) -> None:
        if self._seat.leads:
            self._link.channel.send(GoBack(back.number, back.wanted))
            expect(self._link.channel, WentBack, SEALED_WITHIN_S)
        else:
            self._follow(WentBack, back)
        self._reconnect(time.monotonic() + RECONNECT_S)  # the replica is another: so are the hashes


def _busy(timeout_s: float) -> SwarmBusy:
    return SwarmBusy(f"Two versions are not sealed yet, after waiting {timeout_s:.0f} s for one of them.")
