"""Hole punching: both ends of a circuit dial each other at the same time, and their connection leaves the circuit.

Each end dials from the port that it listens on, so that its firewall takes the other end's packets for answers. Most
firewalls let that through, and NATs that keep one outside port for one inside port. Either the operating system joins
two dials that meet into one connection (TCP simultaneous open), or one end's dial reaches the other end's listener. On
each connection either end first sends a token that they exchanged over the circuit. The end that dialed the circuit
commits to the first connection that answers with the right token, and the peers' connection moves there without a new
handshake (`MigratingConnection`).

py-libp2p's own hole punching (DCUtR) is not used: it needs the library's sockets and relay client, and it makes a
second connection, to which nothing moves.
"""

import ipaddress
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final
from weakref import WeakKeyDictionary

import msgspec
import trio
from libp2p.io.exceptions import ConnectionClosedError

from codec.errors import PeerError
from codec.unpack import unpack
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import scope
from swarm.transport.base import PathKind
from swarm.transport.connection.addresses import host_and_port_of, multiaddr_text
from swarm.transport.connection.migrating_connection import DirectLink, MigratingConnection, lost_is_broken
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.connection.tcp import TOKEN_BYTES, TOKEN_MARK, CountedSocket
from swarm.transport.nat.circuit import read_exactly
from swarm.transport.nat.connections import PeerConnections
from swarm.transport.nat.known_relays import KnownRelays

__all__ = ["PUNCH_ID", "Puncher"]

PUNCH_ID: Final = "/swarm-node/punch/1"
_COMMIT: Final = b"\2"
_GO: Final = b"\3"
_MEET_S: Final = 6.0
"""How long the leading end dials. A lost or dropped SYN is sent again after 1 and 3 seconds: by then the other end's
SYN has opened its firewall."""
_COMMIT_S: Final = 3.0
"""How much longer the following end waits: the leading end may commit in its last moment."""
_REDIAL_S: Final = 0.2
"""Pause between two dials of one address."""
_SETUP_S: Final = 10.0
"""For the exchange of tokens and addresses over the circuit."""
_PAUSES_S: Final = (0.0, 30.0, 300.0)
"""Pause before each attempt for one connection; after the last it stays on its circuit. The following end takes part in
no more attempts than these: in each it dials for seconds wherever the other peer says, which may be hostile."""
_MAX_ADDRESSES: Final = 8
_MAX_BYTES: Final = 2048
"""Longest meeting message."""

_log = logging.getLogger(__name__)


class _Meeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The addresses that an end will dial from, as far as it knows. The answer repeats the leading end's token."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    addrs: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=_MAX_ADDRESSES)]


_meeting_decoder: Final = msgspec.msgpack.Decoder(_Meeting)


class Puncher:
    """One for a transport. The end that dialed the circuit leads each attempt; the other end follows."""

    def __init__(self, connections: PeerConnections, relays: KnownRelays) -> None:
        self._connections = connections
        self._relays = relays
        self._meetings: dict[bytes, tuple[bytes, trio.MemorySendChannel[CountedSocket]]] = {}
        """By the token that the other end sends: the token that we send, and where the connection is to go."""
        self._followed: WeakKeyDictionary[MigratingConnection, int] = WeakKeyDictionary()
        """How many attempts we followed, by connection."""
        self.punched = 0
        """Connections that left their circuit."""

    async def keep_trying(self, connection: MuxedConnection) -> None:
        """Lead up to three attempts for a connection whose circuit we dialed."""
        path = connection.path
        assert path is not None
        for pause_s in _PAUSES_S:
            await trio.sleep(pause_s)
            if path.closed or path.path_kind is not PathKind.CIRCUIT:
                return
            with guarded(Source.PUNCH, connection.peer) as outcome, lost_is_broken():
                with trio.fail_after(_SETUP_S + _MEET_S):
                    await self._lead(connection, path)
            if outcome.error is not None:
                _log.info("hole punching failed reason=%r", outcome.why)

    async def _lead(self, connection: MuxedConnection, path: MigratingConnection) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        async with await self._connections.open_on(connection, PUNCH_ID) as stream:
            await _send(stream, _Meeting(token, tuple(self._own_addresses())))
            sent_at_s = trio.current_time()
            answer = await _receive(stream)
            one_way_s = (trio.current_time() - sent_at_s) / 2
            if answer.token != token:
                raise PeerError("punch: the answer has another meeting's token")
            await stream.send_all(_GO)
            await trio.sleep(one_way_s)  # both ends start to dial at the same time
            path.expect_link()
            sock = await self._meet(token, answer.addrs, leads=True)
            if sock is None:
                return
            await self._move(path, sock)

    async def follow(self, connection: MuxedConnection, stream: trio.abc.HalfCloseableStream) -> None:
        """Take part in an attempt that the other end leads. Raises `PeerError`."""
        path = connection.path
        if path is None:
            raise PeerError("punch: this connection goes through no relay")
        self._followed[path] = self._followed.get(path, 0) + 1
        if self._followed[path] > len(_PAUSES_S):
            raise PeerError("punch: it was tried often enough")
        async with stream:
            with trio.fail_after(_SETUP_S):
                asked = await _receive(stream)
                await _send(stream, _Meeting(asked.token, tuple(self._own_addresses())))
                if await stream.receive_some(1) != _GO:
                    raise PeerError("punch: the leading end did not say go")
            path.expect_link()
            sock = await self._meet(asked.token, asked.addrs, leads=False)
            if sock is not None:
                with suppress(ConnectionClosedError):
                    await self._move(path, sock)

    async def _move(self, path: MigratingConnection, sock: CountedSocket) -> None:
        await path.continue_on(DirectLink(sock, PathKind.PUNCHED, multiaddr_text(sock.remote)))
        self.punched += 1

    def _own_addresses(self) -> list[str]:
        """The addresses that our dials may come from: the one that a relay saw, and its host with our listening
        port."""
        tcp, seen_at = self._connections.tcp, self._relays.observed
        seen = host_and_port_of(seen_at) if seen_at else None
        if tcp is None or seen is None:
            return []
        ports = (seen[1], *tcp.ports_for(seen[0]))
        return list(dict.fromkeys(multiaddr_text((seen[0], port)) for port in ports))[:_MAX_ADDRESSES]

    def _targets(self, addrs: Sequence[str]) -> set[tuple[str, int]]:
        """The other end's addresses that we dial: no narrower in scope than our own, and no names, which may resolve to
        any host. The peer may be hostile and would otherwise make us dial into our own network."""
        own = scope(self._relays.observed)
        targets = (host_and_port_of(address) for address in addrs if scope(address) >= own)
        return {target for target in targets if target is not None and _is_ip(target[0])}

    # Meeting.

    async def accept_token(self, token: bytes, sock: CountedSocket) -> bool:
        """A connection at our listener begins with `token`. True if a meeting waits for it, which then owns it."""
        if token not in self._meetings:
            return False
        own_token, channel = self._meetings[token]
        with guarded(Source.PUNCH), lost_is_broken(), suppress(trio.WouldBlock):
            await sock.write(TOKEN_MARK + own_token)
            channel.send_nowait(sock)
            return True
        return False

    async def _meet(self, token: bytes, addrs: Sequence[str], *, leads: bool) -> CountedSocket | None:
        """Dial all of `addrs` for a while and take what dials us: the connection that both ends agree on, or None."""
        send, receive = trio.open_memory_channel[CountedSocket](_MAX_ADDRESSES)
        # The two ends send different tokens, so an end that reaches its own listener does not meet itself.
        own_token, expected = (token, _followers_token(token)) if leads else (_followers_token(token), token)
        self._meetings[expected] = own_token, send
        chosen: list[CountedSocket] = []
        met: list[CountedSocket] = []
        try:
            with trio.move_on_after(_MEET_S if leads else _MEET_S + _COMMIT_S):
                async with trio.open_nursery() as nursery:

                    async def agree(sock: CountedSocket) -> None:
                        with guarded(Source.PUNCH), lost_is_broken():
                            if leads:
                                chosen.append(sock)  # before any await: we commit to exactly one
                                nursery.cancel_scope.cancel()
                            elif await sock.read(1) == _COMMIT and not chosen:
                                chosen.append(sock)
                                nursery.cancel_scope.cancel()

                    for target in self._targets(addrs):
                        nursery.start_soon(self._dial_guarded, target, own_token, expected, send.clone())
                    async for sock in receive:
                        met.append(sock)
                        if leads and chosen:
                            continue
                        nursery.start_soon(agree, sock)
            if chosen and leads:
                await chosen[0].write(_COMMIT)
        finally:
            del self._meetings[expected]
            for sock in met:
                if sock not in chosen[:1]:
                    sock.abort()
        return chosen[0] if chosen else None

    async def _dial_guarded(
        self, target: tuple[str, int], own_token: bytes, expected: bytes, found: trio.MemorySendChannel[CountedSocket]
    ) -> None:
        with guarded(Source.PUNCH), lost_is_broken():
            await self._dial(target, own_token, expected, found)

    async def _dial(
        self, target: tuple[str, int], own_token: bytes, expected: bytes, found: trio.MemorySendChannel[CountedSocket]
    ) -> None:
        """Dial from our listening port, again and again, until the other end answers with the expected token."""
        while True:
            tcp = self._connections.tcp
            sock = await tcp.dial_from_listen_port(target) if tcp is not None else None
            if sock is not None:
                try:
                    await sock.write(TOKEN_MARK + own_token)
                    if await sock.read_exactly(1 + TOKEN_BYTES) == TOKEN_MARK + expected:
                        await found.send(sock)
                        return
                except ConnectionClosedError:
                    pass
                except BaseException:
                    sock.abort()
                    raise
                sock.abort()
            await trio.sleep(_REDIAL_S)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _followers_token(token: bytes) -> bytes:
    """The token that the following end sends: the leading end's with one bit of its first byte changed."""
    return bytes([token[0] ^ 1]) + token[1:]


async def _send(stream: trio.abc.SendStream, meeting: _Meeting) -> None:
    body = msgspec.msgpack.encode(meeting)
    await stream.send_all(len(body).to_bytes(2, "little") + body)


async def _receive(stream: trio.abc.ReceiveStream) -> _Meeting:
    length = int.from_bytes(await read_exactly(stream, 2, "punch"), "little")
    if length > _MAX_BYTES:
        raise PeerError(f"punch: {length} bytes")
    return unpack(_meeting_decoder, await read_exactly(stream, length, "punch"), "punch")
