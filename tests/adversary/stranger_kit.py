"""Hostile connections without a grant: raw TCP, TLS with any certificate, yamux frames, and false listeners.

Written without the swarm's own transport, which sends only valid data.
"""

import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID, ObjectIdentifier
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.security.tls.certificate import LIBP2P_CERT_PREFIX, LIBP2P_EXTENSION_OID, encode_signed_key

from codec.sign import Key

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


@contextmanager
def quietly(*errors: type[BaseException]) -> Iterator[None]:
    """Like `contextlib.suppress`, also for these errors inside exception groups."""
    try:
        yield
    except errors:
        pass
    except BaseExceptionGroup as group:
        rest = group.split(errors)[1]
        if rest is not None:
            raise rest from None


GARBAGE_KEY = b"\xff" * 36
"""Sent in the place of a libp2p public key: the protobuf of no key."""


def negotiation(*texts: str) -> bytes:
    """These lines in the framing of multistream-select."""
    return b"".join(bytes([len(text) + 1]) + text.encode() + b"\n" for text in texts)


HEADER = "/multistream/1.0.0"
TLS = negotiation(HEADER, "/tls/1.0.0")
YAMUX = "/yamux/1.0.0"


async def tcp(port: int, source: str = "") -> trio.SocketStream:
    """A TCP connection, from any address of this machine (127.x.y.z)."""
    return await trio.open_tcp_stream("127.0.0.1", port, local_address=source or None)


# ------------------------------------------------------------ certificates


def certificate(
    key: Key,
    *,
    named: bytes | None = None,
    signature: bytes | None = None,
    extension: bytes | None = None,
    begins_in: timedelta = timedelta(hours=-1),
    unknown_critical: bool = False,
) -> tuple[bytes, bytes]:
    """libp2p's certificate of `key` and its TLS key, as PEM, optionally with an error in it.

    `named`: bytes in the place of the public key. `extension`: the whole libp2p extension.
    """
    pair = create_new_key_pair(key.seed)
    tls_key = ec.generate_private_key(ec.SECP256R1())
    spki = tls_key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = signature if signature is not None else pair.private_key.sign(LIBP2P_CERT_PREFIX + spki)
    body = encode_signed_key(named if named is not None else pair.public_key.serialize(), signed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    begins = datetime.now(UTC) + begins_in
    builder = (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=3650))
        .subject_name(name)
        .issuer_name(name)
        .public_key(tls_key.public_key())
        .add_extension(x509.UnrecognizedExtension(LIBP2P_EXTENSION_OID, extension or body), critical=False)
    )
    if unknown_critical:
        builder = builder.add_extension(
            x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.99999.7"), b"\x05\x00"), critical=True
        )
    made = builder.sign(tls_key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), tls_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def context(made: tuple[bytes, bytes], *, server: bool = False) -> ssl.SSLContext:
    """TLS 1.3 with this certificate; accepts any certificate of the other end."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname = False
    found.verify_mode = ssl.CERT_NONE
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    found.set_alpn_protocols([YAMUX, "libp2p"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(made))
        file.flush()
        found.load_cert_chain(file.name)
    return found


async def secured(port: int, made: ssl.SSLContext, source: str = "") -> trio.SSLStream:
    """Connect over TCP, multistream and TLS, ready for yamux. Raises the errors of a connection that breaks."""
    stream = await tcp(port, source)
    try:
        await stream.send_all(TLS)
        expected = len(TLS)
        while expected:
            got = await stream.receive_some(expected)
            if not got:
                raise trio.BrokenResourceError("hung up during the negotiation")
            expected -= len(got)
        tls = trio.SSLStream(stream, made)
        await tls.do_handshake()
        return tls
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


# ------------------------------------------------------------ yamux

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def frame(kind: int, flags: int = 0, stream: int = 0, length: int = 0, body: bytes = b"") -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream, length or len(body)) + body


def empty_frames(count: int) -> bytes:
    """Window updates by 0 of a stream that does not exist: cheap to send, without effect."""
    return frame(WINDOW, 0, 1, 0) * count


def pings(count: int) -> bytes:
    return frame(PING, SYN, 0, 7) * count


def streams_opened_and_reset(count: int, first: int = 1) -> bytes:
    return b"".join(frame(WINDOW, SYN, i) + frame(WINDOW, RST, i) for i in range(first, first + 2 * count, 2))


def control_stream(body: bytes, stream: int = 1) -> bytes:
    """An opened control stream, with `body` after the negotiation, in data frames of at most 64 KiB."""
    whole = negotiation(HEADER, "/swarm-node/control/1") + body
    parts = [whole[i : i + 65536] for i in range(0, len(whole), 65536)]
    return frame(WINDOW, SYN, stream) + b"".join(frame(DATA, 0, stream, body=part) for part in parts)


async def closed_by_peer(stream: trio.abc.ReceiveStream, within_s: float) -> bool:
    """Whether the other end closes the connection in time; data until then is discarded."""
    with trio.move_on_after(within_s):
        with quietly(*BROKEN):
            while await stream.receive_some(1 << 16):
                pass
        return True
    return False


async def frames(tls: trio.SSLStream) -> AsyncIterator[tuple[int, int, int, int]]:
    """The kind, flags, stream and length of each yamux frame that the other end sends; the data is discarded."""
    buffer = b""
    while data := await tls.receive_some(65536):
        buffer += data
        while len(buffer) >= 12:
            _, kind, flags, stream, length = struct.unpack("!BBHII", buffer[:12])
            whole = 12 + (length if kind == DATA else 0)
            if len(buffer) < whole:
                break
            buffer = buffer[whole:]
            yield kind, flags, stream, length


class ByHand:
    """One yamux stream on a connection, which obeys windows and answers pings, and nothing else."""

    def __init__(self, tls: trio.SSLStream, stream: int = 1) -> None:
        self.tls, self.stream = tls, stream
        self._window = 256 << 10
        self._news = trio.Event()
        self._writing = trio.Lock()

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self.tls.send_all(data)

    async def listen(self) -> None:
        """Until the connection ends: add window updates, answer pings, discard other frames."""
        with quietly(*BROKEN):
            async for kind, flags, stream, length in frames(self.tls):
                if kind == WINDOW and stream == self.stream:
                    self._window += length
                    self._news.set()
                elif kind == PING and flags & SYN:
                    await self._write(frame(PING, ACK, 0, length))

    async def send(self, body: bytes) -> None:
        """Send `body` as fast as the window allows."""
        while body:
            while not self._window:
                self._news = trio.Event()
                await self._news.wait()
            part, body = body[: min(self._window, 65536)], body[min(self._window, 65536) :]
            self._window -= len(part)
            await self._write(frame(DATA, 0, self.stream, body=part))


class StreamFiller:
    """Many streams on one connection; fills the window of each and never reads answers."""

    def __init__(self, tls: trio.SSLStream, streams: int, protocol: str, body: bytes) -> None:
        self._tls, self._body, self._protocol = tls, body, protocol
        self._windows = dict.fromkeys(range(1, 2 * streams, 2), 256 << 10)
        self.sent_bytes = 0

    async def run(self) -> None:
        """Fill the windows until the connection ends."""
        with quietly(*BROKEN):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, nursery.cancel_scope)
                hello = negotiation(HEADER, self._protocol)
                for stream in list(self._windows):
                    self._windows[stream] -= len(hello)
                    await self._tls.send_all(frame(WINDOW, SYN, stream) + frame(DATA, 0, stream, body=hello))
                while True:
                    for stream in list(self._windows):
                        size = min(self._windows.get(stream, 0), 16384)
                        if size > 0:
                            self._windows[stream] -= size
                            self.sent_bytes += size
                            await self._tls.send_all(frame(DATA, 0, stream, body=(self._body * size)[:size]))
                    await trio.sleep(0.01)

    async def _listen(self, scope: trio.CancelScope) -> None:
        with quietly(*BROKEN):
            async for kind, flags, stream, length in frames(self._tls):
                if kind == WINDOW and stream in self._windows:
                    self._windows[stream] += length
                if flags & (RST | FIN):
                    self._windows.pop(stream, None)
                if kind == PING and flags & SYN:
                    await self._answer(length)
        scope.cancel()

    async def _answer(self, value: int) -> None:
        with quietly(trio.BusyResourceError):  # another task writes; the next ping will be answered in time
            await self._tls.send_all(frame(PING, ACK, 0, value))


# ------------------------------------------------------------ crowds and listeners


def sources(count: int) -> Iterable[str]:
    """`count` addresses of this machine, none of them 127.0.0.1."""
    return (f"127.{1 + i // 62500}.{i // 250 % 250}.{1 + i % 250}" for i in range(count))


@asynccontextmanager
async def listening(behave: str, key: Key) -> AsyncIterator[tuple[int, list[float]]]:
    """A false listener: its port, and the time of each connection (the loop's clock, s).

    `behave`: "reset" (accepts and resets), "silent", "garbage key" or "garbage extension" (in its certificate), "wrong"
    (another peer's key), "garbage" (bytes of no protocol), "endless" (negotiates without end), "half" (closes amid the
    handshake).
    """
    came: list[float] = []
    shown = {"garbage key": {"named": GARBAGE_KEY}, "garbage extension": {"extension": b"\x30\x82\xff\xff\x00"}}
    contexts = {
        name: context(certificate(Key.generate() if name == "wrong" else key, **shown.get(name, {})), server=True)
        for name in ("garbage key", "garbage extension", "wrong")
        if name == behave
    }

    async def handle(stream: trio.SocketStream) -> None:
        came.append(trio.current_time())
        with quietly(*BROKEN, ssl.SSLError), trio.move_on_after(30):
            if behave == "reset":
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.socket.close()
            elif behave == "garbage":
                await stream.send_all(b"\xff\x00\x80" * 4000)
                await closed_by_peer(stream, 20)
            elif behave == "endless":
                while True:
                    await stream.send_all(negotiation(HEADER))
                    await trio.sleep(0.05)
            elif behave == "half":
                await stream.receive_some(1000)
                await stream.send_all(TLS)
                await stream.receive_some(100)
            elif behave in contexts:
                await stream.receive_some(len(TLS))
                await stream.send_all(TLS)
                tls = trio.SSLStream(stream, contexts[behave], server_side=True)
                await tls.do_handshake()
                await closed_by_peer(tls, 20)
            else:
                await trio.sleep(20)

    listeners = await trio.open_tcp_listeners(0, host="0.0.0.0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        yield listeners[0].socket.getsockname()[1], came
        nursery.cancel_scope.cancel()
