"""Certificates for libp2p's TLS with one value changed, signed correctly after the change."""

from datetime import UTC, datetime
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from scenarios.fuzz.inputs.binary import fields_of_values
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.scene import key_of

__all__ = ["certificate_kind"]

_EXTENSION: Final = "1.3.6.1.4.1.53594.1.1"
_PREFIX: Final = b"libp2p-tls-handshake:"
_OWN: Final = ec.derive_private_key(7, ec.SECP256R1())
_NAMES: Final = ["extension's start", "key's start", "key", "signature's start", "signature", "oid", "critical",
                 "second extension", "begins", "ends", "own key", "name"]  # fmt: skip
_OTHERS: Final = ("1.2.3", "2.5.29.19", "2.5.29.37", "2.5.29.17", _EXTENSION)


def _values(world: Any) -> list[Any]:
    identity = ed25519.Ed25519PrivateKey.from_private_bytes(key_of("certificate").seed)
    spki = _OWN.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    public = identity.public_key().public_bytes_raw()
    return [bytes.fromhex("3068"), bytes.fromhex("042408011220"), public, bytes.fromhex("0440"),
            identity.sign(_PREFIX + spki), _EXTENSION, 0, 0, 1975, 4096, 0, "libp2p"]  # fmt: skip


def _encode(values: list[Any]) -> bytes:
    """Return a certificate of these values; if they cannot form one, the concatenation of those that are bytes."""
    try:
        return _sign_certificate(values)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return b"".join(value for value in values if isinstance(value, bytes))


def _sign_certificate(values: list[Any]) -> bytes:
    *parts, oid, critical, second, begins, ends, own, name = values
    key = _OWN if not own else ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    builder = (
        x509.CertificateBuilder()
        .serial_number(7)
        .not_valid_before(datetime(min(max(begins, 1950), 9999), 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(min(max(ends, 1951), 9999), 1, 2, tzinfo=UTC))
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
    )
    value = b"".join(bytes(part) for part in parts)
    try:
        named = x509.ObjectIdentifier(oid)
    except (TypeError, ValueError):
        named = x509.ObjectIdentifier("1.2.3.4")
    builder = builder.add_extension(x509.UnrecognizedExtension(named, value), critical=bool(critical))
    if second:
        other = x509.ObjectIdentifier(_OTHERS[second % len(_OTHERS)])
        builder = builder.add_extension(x509.UnrecognizedExtension(other, b"\x30\x00"), critical=second % 2 == 1)
    digest = hashes.SHA256() if not own else None
    return builder.sign(key, digest).public_bytes(Encoding.DER)


def certificate_kind() -> Kind:
    """Return the kind of the certificate in a TLS handshake."""
    return Kind(
        "certificate", fields_of_values("Certificate", _values(None), _NAMES), _values, lambda w, body: body, _encode
    )
