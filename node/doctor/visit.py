"""The probe of the swarm: a short visit with the ticket, as a leaf that relays nothing, which leaves at the end.

It needs no store, model or core. It dials each address of the ticket, connects to the seed, asks to join, measures the
round trip, fetches a few blocks from the seed and from one member and throws them away, looks whether the seed could
dial back, and releases its lease. Each step has a deadline, so has the whole visit, and the bytes are bounded
(`MAX_BLOCKS`, `MAX_LAYOUT`). Whatever a peer does wrong ends that step only.
"""

import errno
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import trio
from msgspec.structs import replace

from codec import Layout, open_manifest
from codec.errors import PeerError, UsageError
from codec.sign import Key
from node.doctor.facts import Dial, NeighbourFacts, Rate, VisitFacts
from node.doctor.session import Blocks, VisitSession
from node.settings.config import JoinConfig
from node.settings.contact import dialable
from node.settings.ticket import Ticket
from swarm.guard import Source, guarded
from swarm.protocol.core.documents import Report, heartbeat_hash, open_grant, open_heartbeat, seal
from swarm.protocol.core.reach import circuit, is_circuit, relay_of
from swarm.protocol.core.wire import (
    Blob,
    Bye,
    Hello,
    Join,
    Refused,
    RosterNews,
    WantBlob,
    WantBlock,
    WantRoster,
    Welcome,
)
from swarm.protocol.membership.roster import Member, Roster, open_whole
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.addresses import host_and_port_of
from swarm.transport.connection.ports import bind
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.observed import observed_by

__all__ = ["visit"]

DIAL_S: Final = 5.0
"""For a TCP connection to one address; two lost SYNs fit."""
CONNECT_S: Final = 15.0
"""For the handshake with the seed, and for its answer to the request to join."""
STEP_S: Final = 5.0
"""For each further answer."""
RATE_S: Final = 6.0
"""For the blocks of one peer: what has come until then is the measure."""
DIAL_BACK_S: Final = 12.0
"""The seed gives each address that it dials back 10 s."""
MEET_S: Final = 40.0
"""For all that concerns the member."""
VISIT_S: Final = 120.0
"""For the whole visit, from the handshake with the seed to the last answer: a little more than its steps together."""
LOOK_EVERY_S: Final = 0.5
LEAVE_S: Final = 2.0
MAX_BLOCKS: Final = 4
"""Blocks fetched from one peer: 8 MiB of a bf16 model."""
MAX_LAYOUT: Final = 8 << 20
"""Bytes of the list of tensors: that of a model of 1 T parameters has 6 MB."""
PINGS: Final = 3

_REASONS: Final = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ENETDOWN: "no route",
    errno.EADDRNOTAVAIL: "no route",
}


async def visit(ticket: Ticket, config: JoinConfig, key: Key, *, clock: Callable[[], float] = time.time) -> VisitFacts:
    """Visit the swarm of `ticket`, with the addresses and relays of `config`. `clock`: this machine's Unix time.

    Raises nothing that the network can cause.
    """
    try:
        for listener in (await bind(config.listen)).values():
            listener.close()
    except UsageError as error:
        return VisitFacts(listen_error=str(error))
    facts = VisitFacts(dials=tuple([await _dial(address) for address in ticket.addrs]))
    if not any(dial.rtt_ms is not None for dial in facts.dials):
        return facts
    blocks = Blocks()
    transport = Libp2pTransport(key, config.listen, config.announce, via=config.via)
    async with trio.open_nursery() as nursery:
        addrs = await nursery.start(transport.serve, blocks.accept)
        visitor = _Visitor(ticket, config, key, transport, blocks, tuple(addrs), clock, facts)
        with guarded(Source.STREAM, ticket.authority) as outcome, trio.fail_after(VISIT_S):
            await visitor.run()
        facts = visitor.facts
        if outcome.error is not None:
            facts = replace(facts, connect_error=facts.connect_error or outcome.why)
        nursery.cancel_scope.cancel()
    return facts


class _Visitor:
    """One visit; `facts` grows as it proceeds."""

    def __init__(
        self,
        ticket: Ticket,
        config: JoinConfig,
        key: Key,
        transport: Libp2pTransport,
        blocks: Blocks,
        addrs: tuple[str, ...],
        clock: Callable[[], float],
        facts: VisitFacts,
    ) -> None:
        self._ticket, self._config, self._key = ticket, config, key
        self._transport, self._blocks, self._addrs, self._clock = transport, blocks, addrs, clock
        self.facts = facts

    def _note(self, **found: object) -> None:
        self.facts = replace(self.facts, **found)

    async def run(self) -> None:
        """Raises `PeerError`, `Unreachable` and what broken streams raise; `facts` has what was found until then."""
        authority = self._ticket.authority
        self._dial_from_listen_port(self._ticket.addrs)
        try:
            with trio.fail_after(CONNECT_S):
                await self._transport.connect(authority, self._ticket.addrs)
        except (Unreachable, trio.TooSlowError) as error:
            self._note(connect_error=str(error) or "too slow")
            return
        self._note(connected=True)
        async with VisitSession.open(self._transport, authority) as seed:
            welcome = await self._join(seed)
            if welcome is None:
                return
            try:
                with guarded(Source.STREAM, authority) as outcome:
                    await self._look_around(seed, welcome)
                if outcome.error is not None and not self.facts.rate.nbytes:
                    self._note(rate=Rate(error=outcome.why))
            finally:
                with trio.move_on_after(LEAVE_S) as scope:
                    scope.shield = True
                    await self._leave(seed, welcome)

    def _dial_from_listen_port(self, addrs: Sequence[str]) -> None:
        """So that two peers which see two ports of ours tell a symmetric NAT."""
        tcp = self._transport.tcp
        for place in map(_place, addrs):
            if tcp is not None and place is not None:
                tcp.from_listen_port.add(place)

    async def _join(self, seed: VisitSession) -> Welcome | None:
        """Ask to join: a leaf without uplink to give, so that nobody waits for this machine."""
        config = self._config
        direct = config.announce or (self._addrs if not config.via else ())
        join = Join(
            self._ticket.capability, (*direct, *(circuit(relay) for relay in config.via))[:16], config.name,
            config.region, 0.0, 0.0, True,
        )  # fmt: skip
        await seed.send(join)
        answer = await seed.receive(Welcome | Refused, CONNECT_S)
        if isinstance(answer, Refused):
            self._note(refused=answer.why)
            return None
        if open_grant(answer.grant, self._ticket.authority).peer != self._key.public:
            raise PeerError("welcome: the grant is for another peer")
        beat = open_heartbeat(answer.heartbeat, self._ticket.authority)
        self._note(
            welcomed=True, own_time=self._clock(), seed_time=float(beat.time), seed_boot=beat.boot,
            claimed=direct, relayed=bool(config.via), own_addresses=dialable(self._addrs),
        )  # fmt: skip
        return answer

    async def _look_around(self, seed: VisitSession, welcome: Welcome) -> None:
        authority = self._ticket.authority
        self._note(rtt_ms=await seed.round_trip_ms(PINGS, STEP_S))
        self._note(own_port=self._own_port(), seen_by_seed=await self._seen_by(authority))
        layout = await self._layout(seed, welcome)
        if layout is not None:
            self._note(model_bytes=layout.full_bytes)
            self._note(rate=await self._rate(seed, layout))
        roster = await self._roster(seed, welcome)
        others = [] if roster is None else [other for other in roster.members if other.peer != self._key.public]
        self._note(members=len(others))
        reachable = [other for other in others if other.addrs]
        if reachable:
            await self._meet(random.choice(reachable), welcome, layout)
        await self._wait_for_dial_back(seed, roster)

    async def _layout(self, seed: VisitSession, welcome: Welcome) -> Layout | None:
        """The list of the model's tensors; None before the first version."""
        if not welcome.manifest:
            self._note(rate=Rate(error="no version is sealed yet"))
            return None
        manifest = open_manifest(welcome.manifest, self._ticket.authority)
        want = WantBlob(1, Blob.LAYOUT, manifest.layout_hash, 0)
        fetched = await self._blocks.fetch(seed, [want], [MAX_LAYOUT], RATE_S, exact=False)
        if fetched.lacked or not fetched.answers:
            self._note(rate=Rate(error="the seed did not send the list of tensors"))
            return None
        layout = Layout.from_bytes(fetched.answers[0])
        if layout.hash != manifest.layout_hash:
            raise PeerError("blob.hash: not the layout asked for")
        return layout

    async def _rate(self, session: VisitSession, layout: Layout) -> Rate:
        """Fetch a few random blocks, and throw them away."""
        chosen = random.sample(range(layout.n_blocks), min(MAX_BLOCKS, layout.n_blocks))
        wants = [WantBlock(2 + number, block) for number, block in enumerate(chosen)]
        sizes = [layout.block(block).nbytes for block in chosen]
        fetched = await self._blocks.fetch(session, wants, sizes, RATE_S, exact=True)
        if not fetched.nbytes:
            why = "it gives blocks to others at the moment" if fetched.lacked else "nothing came in time"
            return Rate(error=why)
        return Rate(fetched.nbytes, fetched.seconds)

    async def _roster(self, seed: VisitSession, welcome: Welcome) -> Roster | None:
        whole = welcome.roster
        if not whole:
            await seed.send(WantRoster(0))
            whole = (await seed.receive(RosterNews, STEP_S)).roster
        return open_whole(whole, self._ticket.authority)[0]

    async def _meet(self, other: Member, welcome: Welcome, layout: Layout | None) -> None:
        """Measure the way to one member."""
        name = other.name or "a member"
        found = NeighbourFacts(name=name)
        self._dial_from_listen_port(other.addrs)
        with guarded(Source.STREAM, other.peer) as outcome, trio.fail_after(MEET_S):
            with trio.fail_after(CONNECT_S):
                await self._transport.connect(other.peer, other.addrs)
            async with VisitSession.open(self._transport, other.peer) as session:
                beat = open_heartbeat(welcome.heartbeat, self._ticket.authority)
                await session.send(Hello(welcome.grant, 0, beat.stamp, 0, 0))
                await session.receive(Hello, STEP_S)
                found = replace(found, rtt_ms=await session.round_trip_ms(PINGS, STEP_S))
                self._note(seen_by_neighbour=await self._seen_by(other.peer))
                if layout is not None:
                    found = replace(found, rate=await self._rate(session, layout))
        self._note(neighbour=replace(found, error=outcome.why))

    async def _seen_by(self, peer: PeerKey) -> str | None:
        with guarded(Source.STREAM, peer), trio.move_on_after(STEP_S):
            return await observed_by(self._transport, peer)
        return None

    def _own_port(self) -> int | None:
        tcp = self._transport.tcp
        return tcp.listening[0][1] if tcp is not None and tcp.listening else None

    async def _wait_for_dial_back(self, seed: VisitSession, roster: Roster | None) -> None:
        """Look into the roster until the seed has confirmed one of our addresses."""
        if not self.facts.claimed:
            self._note(dialable=False)
            return
        with trio.move_on_after(DIAL_BACK_S):
            while not self._is_dialable(roster):
                await trio.sleep(LOOK_EVERY_S)
                await seed.send(WantRoster(0))
                news = await seed.receive(RosterNews, STEP_S)
                roster = open_whole(news.roster, self._ticket.authority)[0]
        self._note(dialable=self._is_dialable(roster))

    def _is_dialable(self, roster: Roster | None) -> bool:
        listed = None if roster is None else roster.member_of(self._key.public)
        return listed is not None and listed.dialable

    async def _leave(self, seed: VisitSession, welcome: Welcome) -> None:
        """Release the lease."""
        grant = open_grant(welcome.grant, self._ticket.authority)
        report = Report(
            grant.swarm, grant.peer, grant.slot, grant.serial, 1, heartbeat_hash(welcome.heartbeat), 0, 0, 0, 0, "",
            0, 0, 0.0, True, 0.0,
        )  # fmt: skip
        with guarded(Source.STREAM, self._ticket.authority):
            await seed.send(Bye(seal(report, self._key)))
            await seed.until_closed()


async def _dial(address: str) -> Dial:
    """Connect to an address, or to the relay before a circuit, and close at once."""
    place = _place(address)
    if place is None:
        return Dial(address=address, error="not an address")
    began = trio.current_time()
    with trio.move_on_after(DIAL_S):
        try:
            stream = await trio.open_tcp_stream(*place)
        except OSError as error:
            return Dial(address=address, error=_reason(error))
        rtt_ms = 1e3 * (trio.current_time() - began)
        await trio.aclose_forcefully(stream)
        return Dial(address=address, rtt_ms=rtt_ms)
    return Dial(address=address, error=f"no answer in {DIAL_S:.0f} s")


def _place(address: str) -> tuple[str, int] | None:
    """Host and port of an address; of a circuit, the relay's."""
    return host_and_port_of(relay_of(address)[0] if is_circuit(address) else address)


def _reason(error: BaseException) -> str:
    """Why a connection failed, in the words that the rules know. trio wraps the error of each attempt."""
    while isinstance(error, OSError) and error.errno is None and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, socket.gaierror):
        return "unknown name"
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno, error.strerror or str(error))
    return str(error)
