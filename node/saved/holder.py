"""A node's end: takes fragments from the seed, and gives back what it holds to a process with a pass.

Only the seed, whose key the connection proves, may place a fragment, and only under a record that this key has signed.
So no member can fill another one's disk. What is given back is ciphertext, or weights of which the pass's owner has the
key. Conversations are few and one at a time each, so what they take of memory, threads and descriptors is bounded.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from codec.errors import PeerError, UsageError
from node.saved.conversation import PART_BYTES, STATE_PROTOCOL, Conversation
from node.saved.folder import ComingFragment, FragmentFolder
from node.saved.messages import (
    MAX_PASS_BYTES,
    MAX_QUESTION_BYTES,
    NEAR,
    AskHeld,
    AskVersion,
    Body,
    Done,
    Fetch,
    FetchBlob,
    FetchBlock,
    Held,
    Message,
    NodeAddress,
    Place,
    Refused,
    Send,
    Settle,
    Show,
    Version,
    open_pass,
)
from node.saved.placement import order_of
from swarm.protocol.membership.roster import Roster
from swarm.runtime.sessions.pacing import Paced, Pacer
from swarm.runtime.threads import in_thread
from swarm.transport.base import PeerKey, Stream

__all__ = ["Holder", "ReplicaReader", "near_nodes"]

CONVERSATIONS: Final = 16
"""At a time: those of a seed that places and of a machine that fetches, and some to spare for streams that end late."""
UNPROVEN: Final = 64
"""Streams whose process has not shown its pass yet. One more ends the oldest, so that nobody is kept out by others."""
PASS_WITHIN_S: Final = 10.0
"""For the pass."""
EXPIRED_LOOK_S: Final = 3600.0
IDLE_S: Final = 3600.0
"""A conversation in which nothing is asked for so long is over."""
_log = structlog.get_logger(__name__)


class ReplicaReader:
    """What a node gives of its replica. Each function may wait; None: it is not here."""

    def __init__(
        self,
        manifest: Callable[[], Awaitable[bytes]],
        blob: Callable[[int, bytes], Awaitable[bytes | None]],
        block: Callable[[bytes, int], Awaitable[bytes | None]],
    ) -> None:
        """`manifest()`: of the version held, sealed; empty without one. `blob(kind, name)`: as
        `swarm.protocol.core.wire.WantBlob` names it. `block(root, number)`: of the version with
        this root, if that is held."""
        self.manifest, self.blob, self.block = manifest, blob, block


def near_nodes(roster: Roster | None, swarm: bytes) -> tuple[NodeAddress, ...]:
    """The nodes that are tried first for a state, as far as others can dial them."""
    members = [] if roster is None else [member for member in roster.members if member.addrs]
    by_peer = {member.peer: member for member in members}
    order = order_of(swarm, ((member.peer, member.dialable) for member in members))
    return tuple(NodeAddress(peer, by_peer[peer].addrs) for peer in order[:NEAR])


class _Taking:
    """A fragment that is coming."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()


class Holder:
    """Serves the streams of one node."""

    protocol: Final = STATE_PROTOCOL
    """Of its streams."""

    def __init__(
        self,
        swarm: bytes,
        folder: FragmentFolder,
        replica: ReplicaReader,
        roster: Callable[[], Roster | None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`swarm`: the seed's key. `clock`: Unix time, for passes."""
        self._swarm, self._folder, self._replica, self._roster, self._clock = swarm, folder, replica, roster, clock
        self.pacer = Pacer()
        """Of the uplink; the runtime's, once there is one."""
        self._visitors: dict[PeerKey, int] = {}
        """Processes that have shown a pass, the seed too, and how many conversations each has."""
        self._unproven: dict[trio.CancelScope, None] = {}  # the oldest first
        self._open = 0
        self._disk = trio.Lock()
        """Held while a question changes which fragments there are."""
        self._taking: dict[tuple[bytes, int], _Taking] = {}
        """By record and fragment: the conversation by which it comes."""

    def knows(self, peer: PeerKey) -> bool:
        """Whether the peer has shown a pass in a conversation that goes on: it is no stranger then."""
        return peer in self._visitors

    async def drop_expired(self) -> None:
        """Drop hourly, until cancelled, what the seed has not asked for during `KEEP_S`: it may be gone."""
        while True:
            await trio.sleep(EXPIRED_LOOK_S)
            async with self._disk:
                await in_thread(self._folder.drop_expired)

    async def serve(self, peer: PeerKey, stream: Stream) -> None:
        """Hold one conversation with `peer`, which opened the stream. Raises `PeerError`, and what `Conversation`
        raises."""
        paced = Paced(stream, self.pacer)

        async def write(part: bytes | memoryview) -> None:
            await paced.send([part], deferrable=True)

        async with stream:
            conversation = Conversation(stream, write)
            if peer != self._swarm and not await self._is_passed(conversation, peer):
                return
            if self._open >= CONVERSATIONS:
                raise PeerError("saved state: too many conversations")
            self._open += 1
            self._visitors[peer] = self._visitors.get(peer, 0) + 1
            try:
                await self._converse(conversation, is_seed=peer == self._swarm)
            finally:
                self._open -= 1
                self._visitors[peer] -= 1
                if not self._visitors[peer]:
                    del self._visitors[peer]

    async def _is_passed(self, conversation: Conversation, peer: PeerKey) -> bool:
        """Hear the pass of a process that is not the seed, and answer it."""
        shown: Message | None = None
        with trio.CancelScope() as scope:
            self._unproven[scope] = None
            if len(self._unproven) > UNPROVEN:
                next(iter(self._unproven)).cancel()
            try:
                shown = await conversation.receive(PASS_WITHIN_S, MAX_PASS_BYTES)
            finally:
                del self._unproven[scope]
        if not isinstance(shown, Show):
            raise PeerError("saved state: it has shown no pass")
        try:
            open_pass(shown.sealed, self._swarm, peer, self._clock())
        except PeerError as error:
            await conversation.send(Refused(str(error)))
            return False
        await conversation.send(Done())
        return True

    async def _converse(self, conversation: Conversation, *, is_seed: bool) -> None:
        while (question := await conversation.receive(IDLE_S, MAX_QUESTION_BYTES)) is not None:
            match question:
                case AskHeld():
                    held = await in_thread(self._folder.held)
                    await conversation.send(Held(held, near_nodes(self._roster(), self._swarm)))
                case Place() if is_seed:
                    if (answer := await self._take_alone(conversation, question)) is None:
                        return
                    await conversation.send(answer)
                case Settle() if is_seed:
                    async with self._disk:
                        await conversation.send(await self._settle(question))
                case Fetch():
                    await self._give_segment(conversation, question)
                case AskVersion():
                    await conversation.send(Version(await self._replica.manifest()))
                case FetchBlob():
                    await self._give(conversation, await self._replica.blob(question.kind, question.name))
                case FetchBlock():
                    await self._give(conversation, await self._replica.block(question.root, question.block))
                case _:
                    raise PeerError(f"saved state: {type(question).__name__} is no question for a node")

    async def _settle(self, asked: Settle) -> Message:
        try:
            await in_thread(self._folder.settle, asked.serial)
        except UsageError as error:  # a full disk; nothing was dropped
            return Refused(str(error)[:512])
        return Done()

    async def _take_alone(self, conversation: Conversation, asked: Place) -> Message | None:
        """Take a fragment; None when the seed asks for it again meanwhile: then this conversation is one that the seed
        has lost."""
        key = asked.record, asked.fragment
        while (other := self._taking.get(key)) is not None:
            other.scope.cancel()
            await other.over.wait()
        mine = self._taking[key] = _Taking()
        try:
            with mine.scope:
                return await self._take(conversation, asked)
            return None
        finally:
            del self._taking[key]
            mine.over.set()

    async def _take(self, conversation: Conversation, asked: Place) -> Message:
        """Take a fragment; returns the last answer."""
        coming: ComingFragment | None = None
        try:
            async with self._disk:
                coming = await in_thread(self._folder.begin, asked.record, asked.fragment, asked.whole)
            if coming is None:
                return Done()
            await in_thread(coming.resume)
            await conversation.send(Send(coming.segment))
            async for part in conversation.parts(coming.left_bytes):
                await in_thread(coming.write, part)
            await in_thread(coming.finish)
            _log.info("fragment_held", step=coming.record.step, bytes=coming.record.fragment_bytes)
            return Done()
        except (PeerError, UsageError) as error:  # what the seed, or this machine's user, can do something about
            _log.warning("fragment_refused", why=str(error))
            if coming is not None:  # the rest of the body is still to come: nothing more can be asked here
                await conversation.send(Refused(str(error)[:512]))
                raise PeerError(f"saved state: the fragment was given up: {error}") from error
            return Refused(str(error)[:512])
        finally:
            if coming is not None:
                coming.close()

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        found = await in_thread(self._folder.open_segment, asked.serial, asked.fragment, asked.segment)
        if found is None:
            await conversation.send(Refused("it is not here"))
            return
        file, size = found
        with file:
            await conversation.send(Body(size))
            left = size
            while left:
                part = await in_thread(file.read, min(left, PART_BYTES))
                if not part:
                    raise PeerError("saved state: the fragment is shorter than its record says")
                await conversation.send_part(part)
                left -= len(part)

    async def _give(self, conversation: Conversation, data: bytes | None) -> None:
        if data is None:
            await conversation.send(Refused("it is not here"))
            return
        await conversation.send(Body(len(data)))
        view = memoryview(data)
        for at in range(0, len(view), PART_BYTES):
            await conversation.send_part(view[at : at + PART_BYTES])
