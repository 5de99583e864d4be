"""A peer says at which address it sees us; what else it may say is refused."""

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.utils import varint
from multiaddr import Multiaddr

from codec.errors import PeerError
from codec.sign import Key
from swarm.transport.base import Lane, PeerKey, Stream
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.observed import _observed, observed_by

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


async def accept(peer: PeerKey, lane: Lane, stream: Stream) -> None:
    await trio.sleep_forever()


async def test_a_peer_that_was_dialed_from_the_listening_port_sees_that_port() -> None:
    one, other = (Libp2pTransport(Key(bytes([i]) * 32), LISTEN) for i in (1, 2))
    async with trio.open_nursery() as nursery:
        addrs = [await nursery.start(transport.serve, accept) for transport in (one, other)]
        assert one.tcp is not None
        one.tcp.from_listen_port.add(("127.0.0.1", int(addrs[1][0].rpartition("/")[2])))
        await one.connect(other.key, addrs[1])
        with trio.fail_after(20):
            assert await observed_by(one, other.key) == addrs[0][0]
        nursery.cancel_scope.cancel()


def answer(observed: bytes) -> bytes:
    data = Identify(public_key=b"k", observed_addr=observed).SerializeToString()
    return varint.encode_uvarint(len(data)) + data


def test_no_address_and_a_circuit_tell_nothing() -> None:
    assert _observed(answer(b"")) is None
    circuit = "/ip4/9.9.9.9/tcp/1/p2p/12D3KooWHZJuzc4QfXANK1LoojVm4SnsvQatDviAG3Ww31mNARCa/p2p-circuit"
    assert _observed(answer(Multiaddr(circuit).to_bytes())) is None


@pytest.mark.parametrize(
    "data", [b"\xff" * 40, answer(b"\x99rubbish"), answer(Multiaddr("/ip4/9.9.9.9/udp/1").to_bytes())]
)
def test_rubbish_is_the_peers_fault(data: bytes) -> None:
    with pytest.raises(PeerError, match="identify"):
        _observed(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_the_peers_fault(data: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(_observed(data), str | None)
