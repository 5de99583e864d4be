"""One rank's exchange with the seed about each publish: begun, streamed, sealed; over a new connection if need be.

    rank 0:   PublishBegin ---> seed
    all:      PublishOpened <--- seed      then PublishBlocks... and PublishEnd ---> seed, then PublishSealed <--- seed

A version that a restart of the seed interrupts is begun again. The messages are in `node.trainers.messages`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from node.ipc.channel import ChannelTimeout
from node.ipc.sockets import process_named
from node.trainers.attach import Attachment
from node.trainers.connection.link import Link
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import expect, speaking
from node.trainers.connection.seedwatch import SeedWatch
from node.trainers.errors import PublishFailed, SwarmDown, SwarmTimeout
from node.trainers.messages import (
    GoBack,
    PublishBegin,
    PublishEnd,
    PublishOpened,
    PublishSealed,
    WentBack,
)
from node.trainers.publish import encoding
from node.trainers.publish.attempt import Attempt
from node.trainers.publish.batches import BlockBatches
from node.trainers.publish.encoding import Encoder, not_published
from node.trainers.publish.entries import Entry, Rollback
from node.trainers.ranks.copies import LOOK_S
from node.trainers.ranks.peers import have, named
from node.trainers.ranks.progress import RankProgress

__all__ = ["VersionSender"]

SEALED_WITHIN_S: Final = 600.0
"""How long a seal may take. It waits for the seed's disk and its replica, never for a node."""
OPENED_WITHIN_S: Final = 180.0
"""How long a version may take to begin: the seed waits for the last rank to attach, rank 0 for a restarted seed."""
TRIES: Final = 4
"""How often a version is begun: more often than the seed is restarted, or another trainer publishes, meanwhile."""
FOLLOW_S: Final = 0.2
"""How often a rank that waits for the seed or for another rank checks whether it still should."""


class _Stale(SwarmDown):
    """Another trainer has published since this one attached, so this rank's view of the replica is old."""


class VersionSender:
    """Sends the publishes of one rank to the seed, one at a time. Called from the line's thread, except where noted.

    `link`: the connection at present; `_reconnect` replaces it.
    """

    def __init__(
        self,
        attachment: Attachment,
        ranks: RankProgress,
        watch: SeedWatch,
        encoder: Encoder,
        claim: Callable[[Entry], bool],
        prepare: Callable[[Entry, Link, Callable[[str], Any]], None] | None = None,
    ) -> None:
        """`claim(entry)`: mark a publish as begun; False when a newer one has replaced it. `prepare`: see
        `PublishLine`."""
        self.link = attachment.link
        self._rank_info, self._copies = attachment.rank_info, attachment.copies
        self._ranks, self._watch, self._encoder, self._claim = ranks, watch, encoder, claim
        self._prepare = prepare
        self._layout = attachment.link.replica.layout
        self._cause: Callable[[], str] = lambda: "nothing"
        """What the line's thread waits for at the moment, in words."""
        self._unread: list[Any] = []
        """What the seed has said of a publish that this rank has not reached yet: at most one message."""
        self._attempt: Attempt | None = None
        """The newest try at the publish that is being sent."""
        self._failed = 0
        """Number of the newest publish that failed on this rank: the seed may still say that it is open."""
        self._closing = False
        self._given_up = False

    def waits_for(self) -> str:
        """What the publish that is being sent waits for, such as "rank 1 of 2, which has not published step 3". May be
        called from any thread."""
        if (away_s := self._watch.away_s) is not None:
            return f"the seed of {self._rank_info.home}, which ended {away_s:.0f} s ago, to be started again"
        return self._cause()

    def note_closing(self) -> None:
        """No new publish will come. A rank other than 0 stops waiting for one to begin. From the trainer's thread."""
        self._closing = True

    def give_up(self) -> None:
        """Disconnect, and do not reconnect. From the trainer's thread."""
        self._given_up = True
        self.link.channel.close()

    def note_finished(self, entry: Entry | Rollback, *, failed: bool) -> None:
        """The entry was sealed, replaced by a newer one, or failed."""
        self._cause = lambda: "nothing"
        if failed:
            self._failed = entry.number
            if not self._unread:  # if the next one has begun, its first message has been read: that one opens anew
                self.link.channel.close()

    def send(self, entry: Entry | Rollback) -> None:
        """Publish or roll back, over a new connection if the seed is restarted meanwhile.

        Raises `PublishFailed`, `UsageError`, `SwarmTimeout`, `SwarmDown`.
        """
        self._attempt = None
        for tries_left in range(TRIES, 0, -1):
            try:
                if isinstance(entry, Rollback):
                    with speaking("it was asked to go back"):
                        return self._go_back(entry)
                with speaking(f"step {entry.publication.step} was published"):
                    return self._publish(entry)
            except SwarmDown:
                if tries_left == 1 or self._given_up:
                    raise
                self._reconnect()
                if isinstance(entry, Entry) and self._attempt is not None and self._attempt.sealed_by(self.link):
                    assert self.link.unheard is not None  # the seed sealed it, and only its answer was lost
                    seal = self.link.unheard
                    entry.publication.note_sealed(seal.root, seal.payload_bytes, seal.changed, self._elements(entry))
                    return None
        return None

    def _reconnect(self) -> None:
        self.link.channel.close()
        while True:
            try:
                link = Link(self._rank_info, self._attempt.unheard if self._attempt else None)
                break
            except SwarmDown as error:
                self._watch.note_lost()
                if self._given_up or self._watch.given_up:
                    raise SwarmDown(self._watch.explain()) from error
                time.sleep(FOLLOW_S)
        self._watch.note_back()
        if link.replica.layout.hash != self._layout.hash:
            raise PublishFailed("The seed was restarted with another model. Attach again.")
        self.link.close()
        self.link = link
        self._unread.clear()

    def _go_back(self, rollback: Rollback) -> None:
        if self._rank_info.leads:
            self.link.channel.send(GoBack(rollback.number, rollback.wanted))
            expect(self.link.channel, WentBack, SEALED_WITHIN_S)
        else:
            self._await_begin(WentBack, rollback)
        self._reconnect()  # the replica has changed, and its hashes with it

    # ------------------------------------------------------------ one version

    def _publish(self, entry: Entry) -> None:
        publication = entry.publication
        opened = self._open(entry)
        if opened is None:
            return
        began = time.perf_counter()
        if opened.parent != self.link.root:
            raise _Stale("Another trainer has published.")
        publication.note_opened(opened.epoch, opened.version)
        if self._prepare is not None:
            self._prepare(entry, self.link, lambda name: self._copies.tensor(entry.slot, self._layout.tensor(name)))
        attempt = self._attempt = Attempt(self._encoder.blocks, opened, self.link)
        self._stream(entry, opened, attempt)
        encoded = time.perf_counter()
        sealed = self._await_sealed(entry)
        if self._rank_info.world == 1 and sealed.root != attempt.root:
            raise PublishFailed("The root that the seed sealed differs from this trainer's.")
        self.link.note_sealed(opened.epoch, opened.version, sealed, attempt.hashes)
        publication.seconds |= {
            "queue": max(0.0, began - entry.copied_at) if entry.copied_at else 0.0,
            "encode": encoded - began,
            "seal": time.perf_counter() - encoded,
        }
        publication.note_sealed(sealed.swarm_root, sealed.payload_bytes, sealed.changed, self._elements(entry))

    def _elements(self, entry: Entry) -> int:
        """Of the model, or of the adapter and its configuration."""
        return entry.elements or sum(tensor.elements for tensor in self._layout.tensors)

    def _open(self, entry: Entry) -> PublishOpened | None:
        """Begin the version (rank 0), or hear that it has begun. None: a newer publish has replaced it."""
        if self._rank_info.leads:
            self._cause = lambda: "this process to load its encoder"
            self._encoder.await_ready()
            self._cause = lambda: f"this process to copy {entry.what}"
            while not self._copies.begun(entry.slot, entry.number, self._rank_info.rank):
                if entry.publication.superseded:
                    return None
                entry.written.wait(FOLLOW_S)  # checking more often would take the GIL from the thread that copies
            if not self._claim(entry):
                return None
            begin = PublishBegin(entry.publication.step, entry.number, entry.again, entry.expected_bytes)
            self.link.channel.send(begin)
        return self._await_begin(PublishOpened, entry)

    def _await_begin(self, kind: Any, entry: Entry | Rollback) -> Any:
        """What the seed says to all ranks when rank 0 has begun. None: a newer publish has replaced this one.

        Rank 0 checks the other ranks meanwhile: one that could not copy its weights has hung up, and the seed waits
        for it.
        """
        waited_for = self._seed_named if self._rank_info.leads else lambda: self._ranks.first
        self._cause = lambda: f"{waited_for()} to begin {entry.what}"
        wait = Wait(OPENED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
        while True:
            if isinstance(entry, Entry) and entry.publication.superseded:
                return None
            self._check_ranks(entry)
            try:
                message = self._unread.pop() if self._unread else expect(self.link.channel, kind, FOLLOW_S)[0]
            except ChannelTimeout as error:
                stop = self._given_up if self._rank_info.leads else self._closing
                if stop or wait.over:
                    text = f"{entry.what.capitalize()} waited {wait.waited_s:.0f} s for {waited_for()} to begin it."
                    raise SwarmTimeout(text) from error
                wait.log_if_due()
                continue
            if message.number == entry.number:
                return message
            if message.number <= self._failed:
                continue
            if message.number < entry.number or not isinstance(entry, Entry):
                raise PublishFailed("The ranks of this trainer do not publish the same steps.")
            self._unread.append(message)  # a newer publish replaces this one, and this rank has yet to make it
            self._cause = lambda: "this rank to publish a step that the others have published"
            while not entry.publication.superseded:
                self._check_ranks(entry)
                if wait.over:
                    raise SwarmTimeout("This rank did not publish a step that the others did.")
                wait.log_if_due()
                time.sleep(LOOK_S)

    def _seed_named(self) -> str:
        return f"the seed ({process_named(self.link.channel.pid)})"

    def _check_ranks(self, entry: Entry | Rollback) -> None:
        if isinstance(entry, Entry):
            self._ranks.check(entry.slot, entry.number, entry.what)
        else:
            self._ranks.check_all(entry.what)

    def _stream(self, entry: Entry, opened: PublishOpened, attempt: Attempt) -> None:
        """Diff, encode and send this rank's blocks, and then the end of its part."""
        link, slot, number = self.link, entry.slot, entry.number
        wait = Wait(encoding.COPIED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")

        def still_wanted(late: Sequence[int]) -> None:
            self._check_ranks(entry)
            with contextlib.suppress(ChannelTimeout):  # the seed speaks here only when another rank has hung up
                expect(self.link.channel, PublishSealed, LOOK_S)
            wait.log_if_due()

        self._cause = lambda: self._ranks.describe_wait(slot, number, entry.what, self._seed_named())
        batches = BlockBatches(link, opened, still_wanted)
        link.replica.base_values = opened.base_values
        for found in self._encoder.deltas(
            link.replica, slot, number, opened.coder, still_wanted, entry.what, entry.source, entry.kept
        ):
            attempt.add_delta(found.encoded.delta, found.encoded.changed)
            batches.add(found)
        if entry.source is not None:
            entry.source.check_unchanged()
        batches.flush()
        link.channel.send(PublishEnd(attempt.changed, attempt.runs, attempt.root))
        attempt.ended = True
        self._copies.note_sent(slot, self._rank_info.rank, number)

    def _await_sealed(self, entry: Entry) -> PublishSealed:
        """This rank has sent everything: wait for the other ranks, then for the seal."""
        copying = Wait(encoding.COPIED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
        sealing: Wait | None = None
        while True:
            self._check_ranks(entry)
            late = self._ranks.uncopied(entry.slot, entry.number)
            try:
                return expect(self.link.channel, PublishSealed, FOLLOW_S)[0]
            except ChannelTimeout as error:
                if late and copying.over:
                    raise SwarmTimeout(not_published(late, self._ranks.world, entry.what)) from error
                if not late and sealing is None:
                    sealing = Wait(SEALED_WITHIN_S, lambda: f"{entry.what} waits for {self.waits_for()}")
                if sealing is not None and sealing.over:
                    text = f"{entry.what.capitalize()} was not sealed within {SEALED_WITHIN_S:.0f} s: it waits for "
                    raise SwarmTimeout(f"{text}{self.waits_for()}.") from error
                (sealing or copying).log_if_due()
            except PublishFailed as error:
                if not late:
                    raise
                subject = named(late, self._ranks.world).capitalize()
                raise PublishFailed(f"{error} {subject} {have(late)} not published {entry.what}.") from error
