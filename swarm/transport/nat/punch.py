"""From a circuit to a connection of one's own: both ends dial each other at the same time, from the port that they
listen on, so that each firewall takes the other's packets for answers.

Most firewalls and NATs let that through (all that keep one outside port for one inside port); the operating system
makes one connection of two dials that meet (TCP simultaneous open), or one end's dial reaches the other's listener. On
whatever comes about either end says a token first, which it has from the circuit; the end that dialed the circuit takes
the first connection that answers with it, and the circuit's connection goes on there (`path`), with no new handshake.
What py-libp2p has for this (DCUtR) needs its own sockets, its own relay client, and begins the session anew.
"""

import ipaddress
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final
from weakref import WeakKeyDictionary

import msgspec
import trio
from libp2p.io.exceptions import ConnectionClosedError

from codec.errors import PeerError
from codec.unpack import unpack
from swarm.guard import Source, guarded
from swarm.protocol.core.reach import scope
from swarm.transport.base import PathKind
from swarm.transport.connection.migrating_connection import DirectLink, MigratingConnection, lost_is_broken
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.connection.tcp import (
    TOKEN_BYTES,
    TOKEN_MARK,
    CountedSocket,
    connect_from,
    host_and_port_of,
    multiaddr_text,
)

if TYPE_CHECKING:
    from swarm.transport.libp2p import Libp2pTransport

__all__ = ["PUNCH_ID", "Puncher"]

PUNCH_ID: Final = "/swarm-node/punch/1"
_COMMIT: Final = b"\2"
_GO: Final = b"\3"
_MEET_S: Final = 6.0
"""A lost or dropped SYN is sent again after 1 and 3 seconds: by then the other end's has opened its firewall."""
_COMMIT_S: Final = 3.0
"""So much longer waits the end that follows: what the other one has chosen in its last moment counts."""
_AGAIN_S: Final = 0.2
_SETUP_S: Final = 10.0
_PAUSES_S: Final = (0.0, 30.0, 300.0)
"""Before each attempt for one connection; then it stays on its circuit. As the other end we take part in no more: each
has us dial for seconds wherever the peer says, and it may be anybody."""
_MAX_ADDRESSES: Final = 8
_MAX_BYTES: Final = 2048

_log = logging.getLogger(__name__)


class _Meeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an end will dial from, as far as it knows. `token`: of whoever asks; the answer repeats it."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    addrs: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=_MAX_ADDRESSES)]


_meeting_decoder: Final = msgspec.msgpack.Decoder(_Meeting)


class Puncher:
    """One for a transport."""

    def __init__(self, transport: "Libp2pTransport") -> None:
        self._transport = transport
        self._meetings: dict[bytes, tuple[bytes, trio.MemorySendChannel[CountedSocket]]] = {}
        """By the token that the other end says: what we say, and who waits for the connection."""
        self._followed: WeakKeyDictionary[MigratingConnection, int] = WeakKeyDictionary()
        """How often we were asked to dial, by connection."""
        self.punched = 0
        """Connections that left their circuit."""

    async def keep_trying(self, connection: MuxedConnection, path: MigratingConnection) -> None:
        """As the end that dialed the circuit: try, and now and then again."""
        for pause_s in _PAUSES_S:
            await trio.sleep(pause_s)
            if path.closed or path.path_kind is not PathKind.CIRCUIT:
                return
            with guarded(Source.PUNCH, connection.peer) as outcome, lost_is_broken():
                with trio.fail_after(_SETUP_S + _MEET_S):
                    await self._lead(connection, path)
            if outcome.error is not None:
                _log.info("not punched reason=%r", outcome.why)

    async def _lead(self, connection: MuxedConnection, path: MigratingConnection) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        async with await self._transport.open_on(connection, PUNCH_ID) as stream:
            await _send(stream, _Meeting(token, tuple(self._own_addresses())))
            begun_s = trio.current_time()
            answer = await _receive(stream)
            path_kind_s = (trio.current_time() - begun_s) / 2
            if answer.token != token:
                raise PeerError("punch: another meeting's token")
            await stream.send_all(_GO)
            await trio.sleep(path_kind_s)
            path.promise()
            sock = await self._meet(token, answer.addrs, leads=True)
            if sock is None:
                return
            await self._move(connection, path, sock)

    async def follow(self, connection: MuxedConnection, stream: trio.abc.HalfCloseableStream) -> None:
        """The other end asks us to dial it at the same time. Raises `PeerError`."""
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
                    raise PeerError("punch: no go")
            path.promise()
            sock = await self._meet(asked.token, asked.addrs, leads=False)
            if sock is not None:
                with suppress(ConnectionClosedError):
                    await self._move(connection, path, sock)

    async def _move(self, connection: MuxedConnection, path: MigratingConnection, sock: CountedSocket) -> None:
        await path.continue_on(DirectLink(sock, PathKind.PUNCHED, multiaddr_text(sock.remote)))
        self.punched += 1

    def _own_addresses(self) -> list[str]:
        """Where our dials seem to come from: what a relay saw of us, and that host with the port that we listen on."""
        tcp, seen_at = self._transport.tcp, self._transport.relayed_links.observed
        seen = host_and_port_of(seen_at) if seen_at else None
        if tcp is None or seen is None:
            return []
        ports = [port for host, port in tcp.listening if (":" in host) == (":" in seen[0])]
        return list(dict.fromkeys(multiaddr_text((seen[0], port)) for port in (seen[1], *ports)))[:_MAX_ADDRESSES]

    def _targets(self, addrs: Sequence[str]) -> set[tuple[str, int]]:
        """Of the other end's addresses those that are no nearer than ours, and no names, which may lead anywhere. It
        may be anybody, and would have us dial into our own network."""
        own = scope(self._transport.relayed_links.observed)
        targets = (host_and_port_of(address) for address in addrs if scope(address) >= own)
        return {target for target in targets if target is not None and _is_ip(target[0])}

    # Meeting.

    async def arrived(self, token: bytes, sock: CountedSocket) -> bool:
        """A connection at our listener begins with a meeting's token. True if it is one of ours; it is taken then."""
        if token not in self._meetings:
            return False
        say, channel = self._meetings[token]
        with guarded(Source.PUNCH), lost_is_broken(), suppress(trio.WouldBlock):
            await sock.write(TOKEN_MARK + say)
            channel.send_nowait(sock)
            return True
        return False

    async def _meet(self, token: bytes, addrs: Sequence[str], *, leads: bool) -> CountedSocket | None:
        """Dial all of `addrs` for a while, and take what dials us: the connection that both ends agree on."""
        send, receive = trio.open_memory_channel[CountedSocket](_MAX_ADDRESSES)
        # The two ends say different things: nobody who dials itself meets itself.
        say, expected = (token, _other(token)) if leads else (_other(token), token)
        self._meetings[expected] = say, send
        chosen: list[CountedSocket] = []
        met: list[CountedSocket] = []
        try:
            with trio.move_on_after(_MEET_S if leads else _MEET_S + _COMMIT_S):
                async with trio.open_nursery() as nursery:

                    async def agree(sock: CountedSocket) -> None:
                        with guarded(Source.PUNCH), lost_is_broken():
                            if leads:
                                chosen.append(sock)  # before any await: exactly one is committed to
                                nursery.cancel_scope.cancel()
                            elif await sock.read(1) == _COMMIT and not chosen:
                                chosen.append(sock)
                                nursery.cancel_scope.cancel()

                    for target in self._targets(addrs):
                        nursery.start_soon(self._dial_guarded, target, say, expected, send.clone())
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
        self, target: tuple[str, int], say: bytes, expected: bytes, found: trio.MemorySendChannel[CountedSocket]
    ) -> None:
        with guarded(Source.PUNCH), lost_is_broken():
            await self._dial(target, say, expected, found)

    async def _dial(
        self, target: tuple[str, int], say: bytes, expected: bytes, found: trio.MemorySendChannel[CountedSocket]
    ) -> None:
        """From our listening port, again and again, until somebody there knows the token."""
        while True:
            sock = await self._connect(target)
            if sock is not None:
                try:
                    await sock.write(TOKEN_MARK + say)
                    if await sock.read_exactly(1 + TOKEN_BYTES) == TOKEN_MARK + expected:
                        await found.send(sock)
                        return
                except ConnectionClosedError:
                    pass
                except BaseException:
                    sock.abort()
                    raise
                sock.abort()
            await trio.sleep(_AGAIN_S)

    async def _connect(self, target: tuple[str, int]) -> CountedSocket | None:
        tcp = self._transport.tcp
        ports = [port for host, port in tcp.listening if (":" in host) == (":" in target[0])] if tcp else []
        if tcp is None or not ports:
            return None
        try:
            stream = await connect_from(ports[0], target)
        except OSError:
            return None
        try:
            return tcp.own(stream)
        except OSError:
            await trio.aclose_forcefully(stream)
            return None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _other(token: bytes) -> bytes:
    """What the end that follows says in answer to `token`."""
    return bytes([token[0] ^ 1]) + token[1:]


async def _send(stream: trio.abc.SendStream, meeting: _Meeting) -> None:
    body = msgspec.msgpack.encode(meeting)
    await stream.send_all(len(body).to_bytes(2, "little") + body)


async def _receive(stream: trio.abc.ReceiveStream) -> _Meeting:
    length = int.from_bytes(await _exactly(stream, 2), "little")
    if length > _MAX_BYTES:
        raise PeerError(f"punch: {length} bytes")
    return unpack(_meeting_decoder, await _exactly(stream, length), "punch")


async def _exactly(stream: trio.abc.ReceiveStream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await stream.receive_some(length - len(data))
        if not more:
            raise PeerError("punch: the stream ended")
        data += more
    return data
