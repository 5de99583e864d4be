"""libp2p's TLS (/tls/1.0.0), with large reads and writes.

The wire format is the specification's: TLS 1.3, and both ends present a self-signed certificate whose extension binds
its key to the peer's identity key (`certificate`). We replace the library's record IO, which reads 4 KiB at a time.

A server must request the dialer's certificate and accept any issuer. OpenSSL can do that, but Python's `ssl` has no
setting for it. `accept_any_certificate` makes the setting through the OpenSSL library that Python's `_ssl` is linked
to, and only after checking that it holds the right object. Where it cannot check (a statically linked Python) it raises
`TlsUnavailable`, and the transport offers noise instead.
"""

import ctypes
import ssl
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from typing import Final

import trio
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from multiaddr import Multiaddr

from swarm.transport.connection.certificate import make_certificate, verified_key
from swarm.transport.connection.tcp import CountedSocket
from swarm.transport.yamux.link import Offer

__all__ = ["PROTOCOL_ID", "TlsSession", "TlsTransport", "TlsUnavailable", "accept_any_certificate"]

PROTOCOL_ID: Final = "/tls/1.0.0"
_NO_MUXER: Final = "libp2p"
_READ_BYTES: Final = 524_288
"""Longest read: two pieces with one wake-up. Reads of 256 KiB cost an eighth more, longer ones save nothing."""
_RECORD_BYTES: Final = 16_384
_SMALL_BYTES: Final = 4_096
"""Smaller parts are joined before they are encrypted: another record costs about as much as copying 4 KiB."""
HANDSHAKE_BYTES: Final = 8_192
"""Bytes that we read of the other end's handshake. A client's two flights have 900 bytes, or 2,100 with a post-quantum
key share."""


class _Scratch(threading.local):
    """Two buffers: for what a read of the socket brings, and for its plaintext. All sessions of a thread share them:
    they are used before another task runs."""

    def __init__(self) -> None:
        self._views: tuple[memoryview, memoryview] | None = None

    def views(self) -> tuple[memoryview, memoryview]:
        if self._views is None:
            self._views = memoryview(bytearray(_READ_BYTES)), memoryview(bytearray(_READ_BYTES + _RECORD_BYTES))
        return self._views


_scratch = _Scratch()


class TlsUnavailable(Exception):
    """This Python's OpenSSL cannot be set to accept libp2p's certificates; the text says why."""


@cache
def _openssl() -> ctypes.CDLL:
    """The library that `_ssl` calls, found through `_ssl` itself: by name we might find another OpenSSL."""
    import _ssl

    if sys.implementation.name != "cpython":
        raise TlsUnavailable(f"the layout of SSLContext is not known for {sys.implementation.name}")
    path = getattr(_ssl, "__file__", None)
    if path is None:
        raise TlsUnavailable("OpenSSL is linked into this Python statically")
    library = ctypes.CDLL(path)
    try:
        library.SSL_CTX_get_verify_mode.argtypes = [ctypes.c_void_p]
        library.SSL_CTX_get_verify_mode.restype = ctypes.c_int
        library.SSL_CTX_set_verify.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        library.SSL_CTX_set_verify.restype = None
    except AttributeError as error:
        raise TlsUnavailable("OpenSSL is linked into this Python's _ssl module statically") from error
    return library


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
def _accept(_chain_is_trusted: int, _store: int) -> int:
    return 1


def accept_any_certificate(context: ssl.SSLContext) -> None:
    """Make a server's `context` demand a certificate and accept any; the caller checks it after the handshake.

    Raises `TlsUnavailable` where that cannot be done safely.
    """
    openssl = _openssl()
    # SSL_CTX* is the first field of the object behind SSLContext. Read three settings back through it before writing.
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__).value
    for mode in (ssl.CERT_NONE, ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL):
        context.verify_mode = mode
        if not pointer or openssl.SSL_CTX_get_verify_mode(pointer) != {0: 0, 1: 1, 2: 3}[mode]:
            raise TlsUnavailable("the layout of this Python's SSLContext is not the known one")
    openssl.SSL_CTX_set_verify(pointer, 3, ctypes.cast(_accept, ctypes.c_void_p))
    if context.verify_mode is not ssl.CERT_REQUIRED:
        raise TlsUnavailable("this Python's OpenSSL did not take the setting")


class TlsTransport(ISecureTransport):
    """Secures connections for one identity, with one certificate for its lifetime."""

    def __init__(self, key_pair: KeyPair, muxers: Sequence[str]) -> None:
        """`muxers`: the protocols offered in ALPN, which saves a round trip if the peer offers them, too.

        Raises `TlsUnavailable`.
        """
        self._private = key_pair.private_key
        self._local = ID.from_pubkey(key_pair.public_key)
        certificate, key = make_certificate(key_pair)
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.check_hostname = False
        self._client.verify_mode = ssl.CERT_NONE  # the identity is in the certificate's extension, checked afterwards
        accept_any_certificate(self._server)
        self._server.num_tickets = 0  # no session is ever resumed
        with tempfile.NamedTemporaryFile("w") as file:  # Python loads certificates from files only
            file.write(certificate + key)
            file.flush()
            for context in (self._server, self._client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_cert_chain(file.name)
                context.set_alpn_protocols([*muxers, _NO_MUXER])

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return await self._secure(conn, self._server, server_side=True)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return await self._secure(conn, self._client, expected=peer_id)

    async def secure_unknown(self, conn: IRawConnection) -> ISecureConn:
        """As the dialer, with any peer that answers; the session's remote key says which."""
        return await self._secure(conn, self._client)

    async def _secure(
        self, raw: IRawConnection, context: ssl.SSLContext, *, server_side: bool = False, expected: ID | None = None
    ) -> "TlsSession":
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
        left_bytes = HANDSHAKE_BYTES
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                if outgoing.pending:
                    await raw.write(outgoing.read())
                if not left_bytes:
                    raise HandshakeFailure(f"over {HANDSHAKE_BYTES} bytes of TLS handshake") from None
                data = await raw.read(left_bytes)
                if not data:
                    raise HandshakeFailure("the connection ended during the TLS handshake") from None
                left_bytes -= len(data)
                incoming.write(data)
            except ssl.SSLError as error:
                raise HandshakeFailure(f"TLS: {error}") from error
        if outgoing.pending:
            await raw.write(outgoing.read())
        public = verified_key(_only_certificate(tls))
        if expected is not None and ID.from_pubkey(public) != expected:
            raise HandshakeFailure(f"expected {expected}, but {ID.from_pubkey(public)} answered")
        return TlsSession(raw, tls, incoming, outgoing, self._private, self._local, public)


def _only_certificate(tls: ssl.SSLObject) -> bytes:
    """The certificate (DER) that the peer has shown. Raises `HandshakeFailure` if it has shown none or several."""
    certificate = tls.getpeercert(binary_form=True)
    if certificate is None:
        raise HandshakeFailure("TLS: the peer has no certificate")
    chain = tls._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # has a public name since Python 3.13
    if len(chain) != 1:
        raise HandshakeFailure(f"TLS: {len(chain)} certificates, where one is expected")
    return certificate


class TlsSession(ISecureConn):
    """A secured connection: libp2p's interface while the muxer is agreed on, a `yamux.ByteLink` afterwards."""

    def __init__(
        self,
        raw: IRawConnection,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        private: PrivateKey,
        local: ID,
        remote_key: PublicKey,
    ) -> None:
        self.is_initiator = raw.is_initiator
        protocol = tls.selected_alpn_protocol()
        self.muxer = None if protocol == _NO_MUXER else protocol
        """The muxer that the handshake agreed on, or None when it is still to be negotiated."""
        self._raw = raw
        self._tls: ssl.SSLObject | None = tls
        """None once closed, which frees OpenSSL's 40 KiB. A connection's objects refer to one another, so the garbage
        collector frees them late, and strangers that come and go would take 150 MiB until then."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._private = private
        self._local = local
        self._remote_key = remote_key
        self._remote = ID.from_pubkey(remote_key)
        self._ciphertext, self._view = _scratch.views()
        self._read_bytes = _RECORD_BYTES  # of the next read; grows when a read brings as many
        stream = raw.stream if isinstance(raw, RawConnection) else None
        self._socket = stream if isinstance(stream, CountedSocket) else None
        self._spare = b""  # decrypted, but not read yet
        self._unsent = memoryview(b"")  # encrypted and not written, as the socket did not take it

    # As a yamux.ByteLink.

    async def receive(self) -> bytes | memoryview:
        if self._spare:
            data, self._spare = self._spare, b""
            return data
        try:
            return await self._decrypt()
        except IOException as error:
            raise trio.BrokenResourceError(str(error)) from error

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._open()
            if self._unsent:
                assert self._socket is not None
                data, self._unsent = self._unsent, memoryview(b"")
                await self._socket.write(data)
            if parts:
                self._encrypt_all(parts)
                await (self._socket or self._raw).write(self._outgoing.read())
        except IOException as error:
            raise trio.BrokenResourceError(str(error)) from error

    @property
    def offer(self) -> Offer | None:
        return None if self._socket is None or self._tls is None else self._offer

    def _offer(self, parts: Sequence[bytes | memoryview]) -> bool:
        assert self._socket is not None
        try:
            self._encrypt_all(parts)
        except ssl.SSLError:
            self._tls = None  # so that `send` raises: the sender is no part of this connection
            return False
        data = self._outgoing.read()
        taken = self._socket.offer(data)
        self._unsent = memoryview(data)[taken:]
        return not self._unsent

    async def aclose(self) -> None:
        await self.close()

    def _open(self) -> ssl.SSLObject:
        """OpenSSL's object. Raises `ConnectionClosedError` once we have closed the session."""
        if self._tls is None:
            raise ConnectionClosedError("the connection is closed")
        return self._tls

    async def _decrypt(self) -> memoryview:
        """Decrypt what one read of the socket brings; empty at the end. The view is valid until the next call."""
        view, length = self._view, 0
        while True:
            read = self._open().read
            try:
                while length < _READ_BYTES:
                    taken = read(_RECORD_BYTES, view[length:])  # type: ignore[arg-type]
                    if not taken:
                        return view[:length]
                    length += int(taken)
                return view[:length]
            except ssl.SSLWantReadError:
                if length:
                    return view[:length]
            except ssl.SSLError as error:
                if length:
                    return view[:length]
                if isinstance(error, ssl.SSLZeroReturnError):
                    return view[:0]
                raise ConnectionClosedError(f"TLS: {error}") from error
            if not await self._fill():
                return view[:0]

    async def _fill(self) -> int:
        """Read the socket once into OpenSSL's input. Returns the number of bytes; 0 at the end."""
        if self._socket is None:
            data = await self._raw.read(_READ_BYTES)
            return self._incoming.write(data) if data else 0
        length = await self._socket.read_into(self._ciphertext[: self._read_bytes])
        if not length:
            return 0
        self._incoming.write(self._ciphertext[:length])  # no other task has run since the read
        if length == self._read_bytes < _READ_BYTES:
            self._read_bytes = min(4 * length, _READ_BYTES)
        return length

    def _encrypt_all(self, parts: Sequence[bytes | memoryview]) -> None:
        small = bytearray()
        for part in parts:
            if len(part) < _SMALL_BYTES:
                small += part
                continue
            if small:
                self._encrypt(small)
                small = bytearray()
            self._encrypt(part)
        if small:
            self._encrypt(small)

    def _encrypt(self, part: bytes | bytearray | memoryview) -> None:
        view = memoryview(part)
        while view:
            view = view[self._open().write(view) :]

    # As libp2p's ISecureConn.

    async def read(self, n: int | None = None) -> bytes:
        if not self._spare:
            self._spare = bytes(await self._decrypt())
        length = len(self._spare) if n is None else n
        data, self._spare = self._spare[:length], self._spare[length:]
        return data

    async def write(self, data: bytes) -> None:
        self._encrypt(data)
        await self._raw.write(self._outgoing.read())

    async def close(self) -> None:
        self._tls, self._incoming, self._outgoing = None, ssl.MemoryBIO(), ssl.MemoryBIO()
        await self._raw.close()

    def get_local_peer(self) -> ID:
        return self._local

    def get_local_private_key(self) -> PrivateKey:
        return self._private

    def get_remote_peer(self) -> ID:
        return self._remote

    def get_remote_public_key(self) -> PublicKey:
        return self._remote_key

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._raw.get_connection_type()
