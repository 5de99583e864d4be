"""What a peer's certificate must prove, and that any other one raises `HandshakeFailure` and no other error."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1_key_pair
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.tls.certificate import encode_signed_key, verify_certificate_chain

from swarm.transport.connection.certificate import make_certificate, verified_key

ANNA = create_new_key_pair(b"a" * 32)
PREFIX = b"libp2p-tls-handshake:"
OURS = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
OTHER = x509.ObjectIdentifier("1.2.3.4")
KEY: Any = ec.derive_private_key(7, ec.SECP256R1())
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def spki(key: Any) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signed_key(identity: Any = ANNA, key: Any = KEY) -> bytes:
    """The value of libp2p's extension."""
    return encode_signed_key(identity.public_key.serialize(), identity.private_key.sign(PREFIX + spki(key)))


def certificate(
    *extensions: tuple[x509.ExtensionType, bool],
    key: Any = KEY,
    signer: Any = None,
    begins: datetime = NOW - timedelta(days=1),
    ends: datetime = NOW + timedelta(days=1),
    digest: hashes.HashAlgorithm | None = hashes.SHA256(),  # noqa: B008
) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(begins).not_valid_after(ends)
    )  # fmt: skip
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer or key, digest).public_bytes(Encoding.DER)  # type: ignore[arg-type]


def names(value: bytes, critical: bool = False) -> tuple[x509.ExtensionType, bool]:
    return x509.UnrecognizedExtension(OURS, value), critical


def refusal(der: bytes) -> str:
    with pytest.raises(HandshakeFailure) as caught:
        verified_key(der)
    return str(caught.value)


def test_our_certificate_proves_our_key_to_us_and_to_the_library() -> None:
    pem, _ = make_certificate(ANNA)
    ours = x509.load_pem_x509_certificate(pem.encode())
    assert verified_key(ours.public_bytes(Encoding.DER)) == ANNA.public_key
    assert verify_certificate_chain([ours]) == ANNA.public_key
    assert (ours.not_valid_before_utc.year, ours.not_valid_after_utc.year) == (1975, 4096)
    assert [each.oid for each in ours.extensions] == [OURS]


@pytest.mark.parametrize("years", [-40, 40])
def test_no_clock_matters(years: int) -> None:
    begins = NOW + timedelta(days=365 * years)
    assert verified_key(certificate(names(signed_key()), begins=begins, ends=begins + timedelta(days=1)))


@pytest.mark.parametrize("make", [
    lambda: ec.derive_private_key(7, ec.SECP384R1()), lambda: ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)),
])  # fmt: skip
def test_other_keys_that_a_certificate_may_have(make: Callable[[], Any]) -> None:
    key = make()
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA384()
    assert verified_key(certificate(names(signed_key(key=key)), key=key, digest=digest)) == ANNA.public_key


def test_an_unknown_extension() -> None:
    strange = x509.UnrecognizedExtension(OTHER, b"x")
    assert verified_key(certificate((strange, False), names(signed_key()))) == ANNA.public_key
    assert verified_key(certificate(names(signed_key(), critical=True))) == ANNA.public_key
    assert "critical extension 1.2.3.4" in refusal(certificate((strange, True), names(signed_key())))
    assert "critical" in refusal(certificate(names(signed_key()), (x509.BasicConstraints(False, None), True)))


def test_certificates_that_prove_nothing() -> None:
    assert "names no peer" in refusal(certificate())
    other = ec.derive_private_key(8, ec.SECP256R1())
    assert "InvalidSignature" in refusal(certificate(names(signed_key(key=other))))  # signed for another certificate
    assert "InvalidSignature" in refusal(certificate(names(signed_key()), signer=other))
    assert "curve" in refusal(
        certificate(names(signed_key()), key=rsa.generate_private_key(public_exponent=65537, key_size=2048))
    )
    assert "bytes" in refusal(certificate(names(signed_key()), (x509.UnrecognizedExtension(OTHER, bytes(5000)), False)))


@pytest.mark.parametrize("identity", [create_rsa_key_pair(2048), create_secp256k1_key_pair()])
def test_a_peer_with_another_kind_of_key_is_refused(identity: Any) -> None:
    assert "no signed Ed25519 key" in refusal(certificate(names(signed_key(identity))))


@pytest.mark.parametrize("garbage", [
    b"", b"\x08\x01\x12\x20" + bytes(31), b"\xff" * 36, b"\x08\x01\x12\x20" + b"\xff" * 32,
])  # fmt: skip
def test_an_invalid_key_is_refused(garbage: bytes) -> None:
    """Regression: an unexpected `DecodeError` ended the process that dialed back."""
    value = bytes([0x30, len(garbage) + 68, 0x04, len(garbage)]) + garbage + b"\x04\x40" + bytes(64)
    refusal(certificate(names(value)))


VALID = certificate(names(signed_key()))


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused(changes: list[tuple[int, int]]) -> None:
    der = bytearray(VALID)
    for at, value in changes:
        der[at] = value
    if bytes(der) != VALID:
        refusal(bytes(der))


@given(st.integers(0, len(VALID)), st.binary(max_size=20), st.integers(0, 40))
def test_removed_and_inserted_bytes_are_refused(at: int, inserted: bytes, removed: int) -> None:
    der = VALID[:at] + inserted + VALID[at + removed :]
    if der != VALID:
        refusal(der)


@given(st.one_of(
    st.binary(max_size=120),
    st.tuples(st.integers(0, 105), st.integers(0, 255)).map(
        lambda change: signed_key()[: change[0]] + bytes([change[1]]) + signed_key()[change[0] + 1 :]
    ),
))  # fmt: skip
def test_any_extension_in_a_well_signed_certificate(value: bytes) -> None:
    if value != signed_key():
        refusal(certificate(names(value)))


@given(st.binary(max_size=300))
def test_any_bytes(der: bytes) -> None:
    refusal(der)
