"""PeerIds: they agree with py-libp2p, and invalid ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.peer.id import ID

from codec.errors import PeerError
from codec.sign import Key
from swarm.transport.identity import peer_id, peer_key


@given(st.binary(min_size=32, max_size=32))
def test_round_trip(key: bytes) -> None:
    assert peer_key(peer_id(key)) == key


def test_agrees_with_libp2p() -> None:
    key = Key(bytes(range(32)))
    assert peer_id(key.public) == str(ID.from_pubkey(Ed25519PublicKey.from_bytes(key.public)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0OIl",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA PeerId (SHA-256 multihash)
        peer_id(bytes(32))[:-1],
        peer_id(bytes(32)) + "1",
        "1" + peer_id(bytes(32)),
        "z" * 10_000,
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(PeerError, match="peer id"):
        peer_key(text)


def test_wrong_length_is_our_bug() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id(b"short")
