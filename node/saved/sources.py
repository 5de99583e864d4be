"""Finds the nodes that hold something: from the address of any one node, for a machine that fetches without a seed; or
among the members of the roster, for the seed.

Without a seed, each node that is asked names others of the roster, those first that a state is placed with first. A
node is not believed: what it sends counts by digest and signature only, and one that answers wrongly is asked nothing
more. A wrong address that it names for another one does not keep that one out: each address that anybody names is
tried.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from codec.errors import PeerError
from codec.sign import Key
from node.saved.conversation import STATE_PROTOCOL, Conversation
from node.saved.messages import AskHeld, Done, Held, HeldState, NodeAddress, Show, seal_pass
from node.saved.record import StateRecord, open_record
from swarm.guard import Source, guarded
from swarm.protocol.membership.roster import Member
from swarm.transport.base import Unreachable
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.probe import who_answers

__all__ = ["NodeSource", "SignedRecords", "Sources"]

MAX_ANSWERED: Final = 64
"""Nodes that were named by others, or are members, and have answered. Once there are so many, no more are asked."""
MAX_ADDRESSES: Final = 64
"""Of one node, however many others name some."""
ADDRESSES_AT_ONCE: Final = 16
"""Of them, in one dial: as many as a transport takes."""
FOUND_S: Final = 180.0
"""For all of them to be found: nodes that lie could name some that do not answer without end."""
AT_ONCE: Final = 24
"""Of them at a time: a dial to a machine that is gone takes seconds."""
ANSWERED_S: Final = 15.0
"""For a node to be reached, and to say what it holds."""
PASS_S: Final = 3600.0
"""For how long a pass is good: the clocks of machines differ, and a node asks for it at the beginning only."""


@dataclass(eq=False, slots=True)
class _Named:
    """A node that somebody named. `addresses`: all that were named, and whether each was tried. `is_asked`: it is being
    asked, or has answered."""

    addresses: dict[str, bool] = field(default_factory=dict)
    is_asked: bool = False

    def add(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if len(self.addresses) < MAX_ADDRESSES:
                self.addresses.setdefault(address, False)

    def take_untried(self) -> tuple[str, ...]:
        """Some that were not tried yet; from now on they were."""
        found = tuple(address for address, is_tried in self.addresses.items() if not is_tried)[:ADDRESSES_AT_ONCE]
        self.addresses.update(dict.fromkeys(found, True))
        return found


@dataclass(eq=False, slots=True)
class NodeSource:
    """A node that answers. `held`: what it says it holds. `turn`: held while it is asked something. `is_in_body`: a
    body has not come to its end, so nothing else can be asked."""

    peer: bytes
    conversation: Conversation
    held: Held
    turn: trio.Lock = field(default_factory=trio.Lock)
    is_in_body: bool = False


class SignedRecords:
    """The records that nodes named and the swarm's key has signed. Each is in memory once, however many name it."""

    def __init__(self, swarm: bytes) -> None:
        self._swarm = swarm
        self._known: dict[bytes, tuple[bytes, StateRecord]] = {}

    @property
    def records(self) -> list[tuple[bytes, StateRecord]]:
        """All of them, signed and decoded."""
        return list(self._known.values())

    @property
    def newest(self) -> StateRecord | None:
        """The one with the highest serial; None: there is none."""
        return max((record for _, record in self._known.values()), key=lambda record: record.serial, default=None)

    def of(self, held: Held) -> tuple[HeldState, ...]:
        """The states that a node says it holds, without those whose record is not signed."""
        found = []
        for state in held.states:
            with contextlib.suppress(PeerError):
                if state.record not in self._known:
                    self._known[state.record] = state.record, open_record(state.record, self._swarm)
                found.append(HeldState(self._known[state.record][0], state.fragments))
        return tuple(found)


class Sources:
    """The nodes that answered, while the block of `found` or `among` runs."""

    def __init__(self, transport: Libp2pTransport, key: Key) -> None:
        """`transport`: serves; the seed's own has the swarm's key, and needs no pass. `key`: the swarm's, which signs
        passes."""
        self._transport, self._key = transport, key
        self._named: dict[bytes, _Named] = {}
        self.signed = SignedRecords(key.public)
        """Of the nodes that `among` asked."""
        self.nodes: list[NodeSource] = []
        self.errors: list[str] = []
        """Why nodes did not answer."""

    @classmethod
    @contextlib.asynccontextmanager
    async def found(cls, transport: Libp2pTransport, key: Key, addresses: Sequence[str]) -> AsyncIterator["Sources"]:
        """Ask the nodes at these addresses (multiaddr text), and those that they name. Their streams stay open while
        the block runs."""
        sources = cls(transport, key)
        async with trio.open_nursery() as streams:
            limiter = trio.CapacityLimiter(AT_ONCE)
            with trio.move_on_after(FOUND_S):
                async with trio.open_nursery() as nursery:
                    for address in addresses:
                        nursery.start_soon(sources._begin, address, nursery, streams, limiter)
            yield sources
            streams.cancel_scope.cancel()

    @classmethod
    @contextlib.asynccontextmanager
    async def among(cls, transport: Libp2pTransport, key: Key, members: Sequence[Member]) -> AsyncIterator["Sources"]:
        """Ask these members, in their order, which fragments they hold. The streams of those that hold some stay open
        while the block runs. A state that a member names is ignored unless the swarm's key has signed its record."""
        sources = cls(transport, key)
        async with trio.open_nursery() as streams:
            limiter = trio.CapacityLimiter(AT_ONCE)
            with trio.move_on_after(FOUND_S):
                async with trio.open_nursery() as nursery:
                    for member in members:
                        nursery.start_soon(sources._ask_member, member, streams, limiter)
            yield sources
            streams.cancel_scope.cancel()

    async def _ask_member(self, member: Member, streams: trio.Nursery, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            if len(self.nodes) >= MAX_ANSWERED:
                return
            with guarded(Source.STREAM, member.peer) as outcome, trio.fail_after(ANSWERED_S):
                source = await streams.start(self._hold_signed, NodeAddress(member.peer, member.addrs))
        if outcome.error is not None:
            self.errors.append(outcome.why)
        elif source is not None:
            self.nodes.append(source)

    async def _hold_signed(self, node: NodeAddress, *, task_status: trio.TaskStatus[NodeSource | None]) -> None:
        """Open a stream, and keep it open if the node holds fragments of a state."""
        async with self._talking(node) as (conversation, held):
            states = self.signed.of(held)
            task_status.started(NodeSource(node.peer, conversation, Held(states, ())) if states else None)
            if states:
                await trio.sleep_forever()

    async def _begin(
        self, address: str, nursery: trio.Nursery, streams: trio.Nursery, limiter: trio.CapacityLimiter
    ) -> None:
        with guarded(Source.STREAM, address) as outcome:
            peer = await who_answers(self._transport.host, address)
            await self._ask(NodeAddress(peer, (address,)), nursery, streams, limiter, is_named_here=True)
        if outcome.error is not None:
            self.errors.append(f"{address}: {outcome.why}")

    async def _ask(
        self,
        node: NodeAddress,
        nursery: trio.Nursery,
        streams: trio.Nursery,
        limiter: trio.CapacityLimiter,
        *,
        is_named_here: bool = False,
    ) -> None:
        """Ask a node, then those that it names. `is_named_here`: by this machine's user, so it does not count."""
        named = self._named.setdefault(node.peer, _Named())
        named.add(node.addrs)
        if is_named_here:
            named.addresses.update(dict.fromkeys(node.addrs, False))
        if named.is_asked:
            return
        named.is_asked = True
        while addresses := named.take_untried():
            async with limiter:
                if not is_named_here and len(self.nodes) >= MAX_ANSWERED:
                    break
                with guarded(Source.STREAM, node.peer) as outcome, trio.fail_after(ANSWERED_S):
                    source = await streams.start(self._hold, NodeAddress(node.peer, addresses))
            if outcome.error is None:
                self.nodes.append(source)
                for other in source.held.near:
                    nursery.start_soon(self._ask, other, nursery, streams, limiter)
                return
            self.errors.append(f"{', '.join(addresses)}: {outcome.why}")
        named.is_asked = False

    async def _hold(self, node: NodeAddress, *, task_status: trio.TaskStatus[NodeSource]) -> None:
        """Open a stream and keep it open."""
        async with self._talking(node) as (conversation, held):
            task_status.started(NodeSource(node.peer, conversation, held))
            await trio.sleep_forever()

    @contextlib.asynccontextmanager
    async def _talking(self, node: NodeAddress) -> AsyncIterator[tuple[Conversation, Held]]:
        """A conversation with a node that has said what it holds."""
        await self._transport.connect(node.peer, node.addrs)
        stream = await self._transport.open_bulk_stream(node.peer, STATE_PROTOCOL)
        async with stream:
            conversation = Conversation(stream)
            if self._transport.key != self._key.public:
                await conversation.ask(Show(seal_pass(self._key, self._transport.key, time.time() + PASS_S)), Done)
            yield conversation, await conversation.ask(AskHeld(), Held)

    def drop(self, source: NodeSource, why: str) -> None:
        """Ask this node nothing more."""
        if source in self.nodes:
            self.nodes.remove(source)
            self.errors.append(why)

    def require(self) -> None:
        """Raise `Unreachable` when no node is left, with what went wrong."""
        if not self.nodes:
            raise Unreachable(
                "No node of the swarm of this key answers; look at --node and --key "
                f"({'; '.join(self.errors[-3:]) or 'nothing answers'})."
            )
