"""Our TLS: not offered where Python cannot be set to what libp2p needs, and peers without a proved key are refused."""

import _ctypes
import _ssl
import ctypes
import gc
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p_kit import echo, transport, two

from swarm.transport.base import Lane
from swarm.transport.connection import tls
from swarm.transport.host import security

HELLO = b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n"


LOOK_UP = tls._openssl


def is_offered() -> bool:
    return tls.PROTOCOL_ID in security(create_new_key_pair(bytes(32)))


needs_tls = pytest.mark.skipif(not is_offered(), reason="this Python's OpenSSL cannot be set: noise is used")


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    LOOK_UP.cache_clear()
    yield
    LOOK_UP.cache_clear()


class Foreign:
    """A library that reads another context than Python's, like a second OpenSSL in the process."""

    def __init__(self) -> None:
        self.written = False

    def SSL_CTX_get_verify_mode(self, pointer: int) -> int:
        return 1

    def SSL_CTX_set_verify(self, *_: object) -> None:
        self.written = True


def refusal() -> str:
    with pytest.raises(tls.TlsUnavailable) as caught:
        tls.accept_any_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    return str(caught.value)


def test_a_python_with_everything_linked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_ssl, "__file__")
    assert "statically" in refusal()
    assert not is_offered()


def test_an_ssl_module_with_openssl_linked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ssl, "__file__", _ctypes.__file__)  # a library that leads to no OpenSSL
    assert "statically" in refusal()


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy"))
    assert "pypy" in refusal()


def test_another_openssl_is_noticed_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = Foreign()
    monkeypatch.setattr(tls, "_openssl", lambda: foreign)
    assert "layout" in refusal()
    assert not foreign.written


@needs_tls
def test_an_openssl_that_does_not_take_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tls._openssl()
    deaf = SimpleNamespace(SSL_CTX_get_verify_mode=real.SSL_CTX_get_verify_mode, SSL_CTX_set_verify=lambda *_: None)
    monkeypatch.setattr(tls, "_openssl", lambda: deaf)
    assert "did not take" in refusal()


@needs_tls
def test_the_library_is_the_one_that_python_uses() -> None:
    library = tls._openssl()
    library.OpenSSL_version_num.restype = ctypes.c_ulong
    assert library.OpenSSL_version_num() == ssl.OPENSSL_VERSION_NUMBER


def nameless(folder: Path) -> Path:
    """A certificate like a website's, which names no peer."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nobody")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / "nobody.pem"
    pem = serialization.Encoding.PEM
    path.write_bytes(
        certificate.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


@needs_tls
@pytest.mark.parametrize("certificate", [True, False])
async def test_a_peer_that_proves_no_key_is_refused(tmp_path: Path, certificate: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["/yamux/1.0.0", "libp2p"])
    if certificate:
        context.load_cert_chain(nameless(tmp_path))
    node = transport(1)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(node.serve, echo)
            stream = await trio.open_tcp_stream("127.0.0.1", int(address.rsplit("/", 1)[1]))
            await stream.send_all(HELLO)
            heard = b""
            while len(heard) < len(HELLO):
                heard += await stream.receive_some(len(HELLO) - len(heard))
            assert heard == HELLO
            secured = trio.SSLStream(stream, context)
            with suppress(trio.BrokenResourceError):  # our end finishes the handshake before the node refuses us
                assert await secured.receive_some() == b""
            assert node.peers() == []
            await trio.aclose_forcefully(secured)
            nursery.cancel_scope.cancel()


@needs_tls
async def test_openssl_objects_of_a_connection_are_freed_without_garbage_collection() -> None:
    """A seed has so many objects that full collections are rare; strangers that came and went held 150 MiB."""
    gc.collect()
    gc.disable()
    try:
        async with two() as (a, b, addrs):
            for _ in range(5):
                with trio.fail_after(5):
                    await a.disconnect(b.key)
                    while a.peers() or b.peers():  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    await a.connect(b.key, addrs)
            held = sum(isinstance(each, ssl.SSLObject) for each in gc.get_objects())
    finally:
        gc.enable()
    assert held <= 4, "two ends of one connection, and of one that is ending"


@needs_tls
async def test_large_frames_cross_at_once_whatever_the_socket_takes() -> None:
    """Over real sockets with small buffers: what the socket does not take leaves before what comes after it."""
    async with two() as (a, b, _):
        stream = await a.open_stream(b.key, Lane.BULK)
        assert a.tcp is not None
        for sock in a.tcp.live:
            sock._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        pieces = [bytes([number]) * (65_536 + 7 * number) for number in range(40)]
        at_once = 0
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    nonlocal at_once
                    for piece in pieces:
                        if stream.send_now(piece[:100], piece[100:]):
                            at_once += 1
                        else:
                            await stream.send_all(piece)

                nursery.start_soon(send)
                for piece in pieces:
                    assert await stream.receive_exactly(len(piece)) == piece
        assert at_once >= 2


@needs_tls
async def test_a_peer_that_leaves_while_frames_are_sent_at_once_breaks_the_stream_only() -> None:
    async with two() as (a, b, _):
        stream = await a.open_stream(b.key, Lane.BULK)
        with trio.fail_after(10):
            await b.disconnect(a.key)
            while stream.send_now(bytes(65_536)):  # noqa: ASYNC110
                await trio.sleep(0.001)
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(bytes(1 << 20))
