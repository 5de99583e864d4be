"""The two processes of `scenarios.bench.transport`: one serves, one pushes; each reports the CPU time it used.

Run as `python -m scenarios.bench.transport_ends serve|push KIND JSON`. Kinds: `ours`; `ours+hash`, which also hashes
each piece with BLAKE3 and signs each chunk as the swarm does; `stock`, unmodified py-libp2p (noise and its yamux);
`threads`, one thread per side on a blocking `ssl` socket, the least CPU time that Python can spend on TLS.
"""

import json
import logging
import os
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from blake3 import blake3

from codec.sign import Key, verify

CHUNK_BYTES = 1 << 20
PIECE_BYTES = 1 << 17
_READ_BYTES = 1 << 18
_DOMAIN = b"scenario"
_PUSHER, _SERVER = Key(bytes([1]) * 32), Key(bytes([2]) * 32)
_ANY = "/ip4/127.0.0.1/tcp/0"


class Meter:
    """Measures wall and CPU time of this process since its creation."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._cpu_s = _cpu_s()

    def report(self, length: int) -> dict[str, float]:
        seconds = time.perf_counter() - self._start_s
        return {
            "mb_s": round(length / 1e6 / seconds, 1),
            "cpu_s_per_gb": round((_cpu_s() - self._cpu_s) / (length / 1e9), 3),
        }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Checker:
    """A receiver's work on the data: hash each piece, and verify each chunk's signature."""

    def __init__(self, signatures: list[bytes]) -> None:
        self._signatures = signatures
        self._hasher = blake3()
        self._in_piece = 0
        self._digests = b""
        self.chunks = 0

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            part = view[: PIECE_BYTES - self._in_piece]
            self._hasher.update(part)
            self._in_piece += len(part)
            view = view[len(part) :]
            if self._in_piece == PIECE_BYTES:
                self._digests += self._hasher.digest()
                self._hasher, self._in_piece = blake3(), 0
                if len(self._digests) == 32 * CHUNK_BYTES // PIECE_BYTES:
                    verify(_PUSHER.public, _DOMAIN, self._digests, self._signatures[0])
                    self._digests = b""
                    self.chunks += 1


def _pieces(chunk: bytes) -> list[bytes]:
    return [chunk[start : start + PIECE_BYTES] for start in range(0, CHUNK_BYTES, PIECE_BYTES)]


def _sign(pieces: list[bytes]) -> bytes:
    return _PUSHER.sign(_DOMAIN, b"".join(blake3(piece).digest() for piece in pieces))


# Over our transport.


async def _serve_ours(options: dict[str, Any]) -> None:
    from swarm.transport.base import Lane, PeerKey
    from swarm.transport.libp2p import Libp2pTransport

    transport = Libp2pTransport(_SERVER, [_ANY])
    done = trio.Event()
    state: dict[str, Any] = {"left": options["bytes"], "meter": None}
    chunk = _pieces(bytes(CHUNK_BYTES))

    async def accept(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        if lane is Lane.CONTROL:
            async for data in stream:
                await stream.send_all(data)
            return
        checker = Checker([_sign(chunk)]) if options["hash"] else None
        while data := await stream.receive_some():
            state["meter"] = state["meter"] or Meter()
            state["left"] -= len(data)
            if checker:
                checker.feed(bytes(data))
        await stream.send_all(b"!")
        if not state["left"]:
            done.set()

    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(transport.serve, accept)
        _say(address=addresses[0])
        await done.wait()
        _say(**state["meter"].report(options["bytes"]))
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()


async def _push_ours(options: dict[str, Any]) -> None:
    from swarm.transport.base import Lane
    from swarm.transport.libp2p import Libp2pTransport

    transport = Libp2pTransport(_PUSHER, [_ANY])
    waits_ms: list[float] = []

    async def talk() -> None:
        """Send small messages on the control lane and wait for each echo, forever."""
        async with await transport.open_stream(_SERVER.public, Lane.CONTROL) as stream:
            while True:
                start_s = time.perf_counter()
                await stream.send_all(bytes(1000))
                left = 1000
                while left:
                    left -= len(await stream.receive_some(left))
                waits_ms.append((time.perf_counter() - start_s) * 1e3)
                await trio.sleep(0.02)

    async def push(length: int) -> None:
        pieces = _pieces(bytes(CHUNK_BYTES))
        async with await transport.open_stream(_SERVER.public, Lane.BULK) as stream:
            for _ in range(length // CHUNK_BYTES):
                if options["hash"]:
                    _sign(pieces)
                for piece in pieces:
                    await stream.send_all(piece)
            await stream.send_eof()
            await stream.receive_some()

    async def idle(*_: object) -> None: ...

    async with trio.open_nursery() as nursery:
        await nursery.start(transport.serve, idle)
        await transport.connect(_SERVER.public, [options["address"]])
        await (await transport.open_stream(_SERVER.public, Lane.BULK)).aclose()  # dial before the measurement
        nursery.start_soon(talk)
        await trio.sleep(0.5)
        waits_ms.clear()
        meter = Meter()
        streams = options["streams"]
        async with trio.open_nursery() as pushing:
            for _ in range(streams):
                pushing.start_soon(push, options["bytes"] // streams)
        waits_ms.sort()
        p95 = round(waits_ms[int(0.95 * len(waits_ms))], 1) if waits_ms else None
        _say(**meter.report(options["bytes"]), control_p95_ms=p95)
        nursery.cancel_scope.cancel()


# Over unmodified py-libp2p.


async def _serve_stock(options: dict[str, Any]) -> None:
    import libp2p
    from libp2p.custom_types import TProtocol
    from multiaddr import Multiaddr

    host = libp2p.new_host(listen_addrs=[Multiaddr(_ANY)])
    done = trio.Event()

    async def take(stream: Any) -> None:
        meter, left = Meter(), options["bytes"]
        while left:
            left -= len(await stream.read(min(left, _READ_BYTES)))
        _say(**meter.report(options["bytes"]))
        await stream.write(b"!")
        done.set()

    host.set_stream_handler(TProtocol("/scenario/1"), take)
    async with host.run([Multiaddr(_ANY)]):
        _say(address=str(host.get_addrs()[0]))
        await done.wait()
        await trio.sleep(0.5)


async def _push_stock(options: dict[str, Any]) -> None:
    import libp2p
    from libp2p.custom_types import TProtocol
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host = libp2p.new_host()
    piece = bytes(PIECE_BYTES)
    async with host.run([]):
        info = info_from_p2p_addr(Multiaddr(options["address"]))
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [TProtocol("/scenario/1")])
        await trio.sleep(0.5)
        meter = Meter()
        for _ in range(options["bytes"] // PIECE_BYTES):
            await stream.write(piece)
        await stream.read(1)
        _say(**meter.report(options["bytes"]))


# On threads.


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.security.tls.certificate import create_cert_template, generate_certificate

    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(generate_certificate(create_new_key_pair().private_key, create_cert_template())))
        file.flush()
        server.load_cert_chain(file.name)
    return server, client


def _serve_threads(options: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _say(address=listener.getsockname()[1])
        plain, _ = listener.accept()
        with _contexts()[0].wrap_socket(plain, server_side=True) as secured:
            buffer, left = memoryview(bytearray(_READ_BYTES)), options["bytes"]
            meter = Meter()
            while left:
                left -= secured.recv_into(buffer, min(left, _READ_BYTES))
            _say(**meter.report(options["bytes"]))
            secured.sendall(b"!")


def _push_threads(options: dict[str, Any]) -> None:
    plain = socket.create_connection(("127.0.0.1", options["address"]))
    piece = bytes(PIECE_BYTES)
    with _contexts()[1].wrap_socket(plain) as secured:
        meter = Meter()
        for _ in range(options["bytes"] // PIECE_BYTES):
            secured.sendall(piece)
        secured.recv(1)
        _say(**meter.report(options["bytes"]))


_ENDS: dict[tuple[str, str], Callable[[dict[str, Any]], Awaitable[None] | None]] = {
    ("serve", "ours"): _serve_ours,
    ("push", "ours"): _push_ours,
    ("serve", "stock"): _serve_stock,
    ("push", "stock"): _push_stock,
    ("serve", "threads"): _serve_threads,
    ("push", "threads"): _push_threads,
}


def main() -> None:
    side, kind, text = sys.argv[1:4]
    logging.disable(logging.CRITICAL)
    options = json.loads(text) | {"hash": kind.endswith("+hash")}
    end: Any = _ENDS[side, kind.removesuffix("+hash")]
    if kind == "threads":
        end(options)
    else:
        trio.run(end, options)
    sys.stdout.flush()
    os._exit(0)  # do not wait for the library's threads


if __name__ == "__main__":
    main()
