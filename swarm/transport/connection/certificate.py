"""libp2p's TLS certificates: how ours is made, and what a peer's must prove before we believe its key.

A certificate is self-signed with a key of its own. One extension names the peer: it has the peer's identity key and
that key's signature over the certificate's public key (https://github.com/libp2p/specs/blob/master/tls/tls.md). There
is no authority, so names and dates mean nothing: ours is valid from 1975 to 4096, as rust-libp2p's are, and we check no
dates of a peer's. With dates, a machine whose clock is a day ahead could join no swarm.

Our check is stricter than py-libp2p's, which a stranger can make raise errors that its callers do not expect, and which
accepts critical extensions that it does not know.
"""

from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.tls.certificate import generate_certificate

__all__ = ["make_certificate", "verified_key"]

MAX_BYTES: Final = 4096
"""Longest certificate. One with P-256, which every libp2p implementation makes, has 400 to 600 bytes."""
_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_PREFIX: Final = b"libp2p-tls-handshake:"
_KEY_AT: Final = bytes.fromhex("3068 0424 0801 1220")
"""DER of the extension up to the key: a SEQUENCE of 104 bytes, an OCTET STRING of 36, and in it libp2p's protobuf of an
Ed25519 key. Our peers have no other type of key (`identity`), and DER has only one encoding of this."""
_SIGNATURE_AT: Final = bytes.fromhex("0440")
_KEY_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_BEGINS: Final = datetime(1975, 1, 1, tzinfo=UTC)
_ENDS: Final = datetime(4096, 1, 1, tzinfo=UTC)
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_HASHES: Final = (hashes.SHA256, hashes.SHA384, hashes.SHA512)


def make_certificate(identity: KeyPair) -> tuple[str, str]:
    """Make a certificate for `identity`; returns it and its own private key, both PEM.

    It has no extension but libp2p's: js-libp2p looks at the first extension only.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    template = (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINS)
        .not_valid_after(_ENDS)
        .subject_name(name)
        .issuer_name(name)
    )
    return generate_certificate(identity.private_key, template)


def verified_key(der: bytes) -> PublicKey:
    """The identity key that a peer's certificate (DER) proves. Raises `HandshakeFailure` and no other error."""
    if len(der) > MAX_BYTES:
        raise HandshakeFailure(f"TLS certificate: {len(der)} bytes")
    try:
        return _verified(x509.load_der_x509_certificate(der))
    except HandshakeFailure:
        raise
    except Exception as error:  # any error of the library means that the stranger's bytes are not valid
        raise HandshakeFailure(f"TLS certificate: {str(error) or type(error).__name__}") from error


def _verified(certificate: x509.Certificate) -> PublicKey:
    value = None
    for extension in certificate.extensions:  # raises if one occurs twice
        if extension.oid == _EXTENSION and isinstance(extension.value, x509.UnrecognizedExtension):
            value = extension.value.value
        elif extension.critical:
            raise HandshakeFailure(f"TLS certificate: unknown critical extension {extension.oid.dotted_string}")
    if value is None:
        raise HandshakeFailure("TLS certificate: it names no peer")
    _check_own_signature(certificate)
    key, signature = _signed_key(value)
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, _PREFIX + spki)
    return Ed25519PublicKey.from_bytes(key)


def _check_own_signature(certificate: x509.Certificate) -> None:
    public = certificate.public_key()
    signed, signature = certificate.tbs_certificate_bytes, certificate.signature
    if isinstance(public, ed25519.Ed25519PublicKey):
        public.verify(signature, signed)
        return
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, _CURVES):
        raise HandshakeFailure("TLS certificate: its key is neither on a NIST curve nor Ed25519")
    digest = certificate.signature_hash_algorithm
    if not isinstance(digest, _HASHES):
        raise HandshakeFailure("TLS certificate: the hash of its signature is not SHA-2")
    public.verify(signature, signed, ec.ECDSA(digest))


def _signed_key(value: bytes) -> tuple[bytes, bytes]:
    """The key and the signature in the extension's value."""
    key_end = len(_KEY_AT) + _KEY_BYTES
    signature_at = key_end + len(_SIGNATURE_AT)
    if (
        len(value) != signature_at + _SIGNATURE_BYTES
        or not value.startswith(_KEY_AT)
        or value[key_end:signature_at] != _SIGNATURE_AT
    ):
        raise HandshakeFailure("TLS certificate: its extension holds no signed Ed25519 key")
    return value[len(_KEY_AT) : key_end], value[signature_at:]
