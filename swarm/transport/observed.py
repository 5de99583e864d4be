"""At which address a peer sees us: asked with libp2p's identify.

Two peers that were dialed from one port of ours (`TcpTransport.from_listen_port`) and see two ports tell that a NAT
gives each target a port of its own.
"""

from typing import Final

from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.utils import decode_varint_with_size
from multiaddr import Multiaddr

from codec.errors import PeerError
from swarm.protocol.core.reach import is_circuit
from swarm.transport.base import PeerKey
from swarm.transport.libp2p import Libp2pTransport

__all__ = ["observed_by"]

_IDENTIFY: Final = "/ipfs/id/1.0.0"
_MAX_BYTES: Final = 64 << 10
"""An answer lists addresses and protocols, and has some 2 KB."""


async def observed_by(transport: Libp2pTransport, peer: PeerKey) -> str | None:
    """Our address as `peer` sees it (multiaddr text); None when it does not say, or reaches us through a relay.

    The peer must be connected, and may lie. Raises `PeerError` for an answer that is not identify's, `Unreachable`,
    and what a broken stream raises; the deadline is the caller's.
    """
    answer = b""
    async with await transport.open_protocol_stream(peer, _IDENTIFY) as stream:
        while more := await stream.receive_some(_MAX_BYTES):
            answer += more
            if len(answer) > _MAX_BYTES:
                raise PeerError(f"identify: more than {_MAX_BYTES} bytes")
    return _observed(answer)


def _observed(answer: bytes) -> str | None:
    try:
        _, prefix = decode_varint_with_size(answer)
        seen = Identify.FromString(answer[prefix:]).observed_addr
        text = str(Multiaddr(seen)) if seen else ""
    except Exception as error:  # protobuf's and multiaddr's errors have no common class
        raise PeerError(f"identify: not an answer ({type(error).__name__})") from error
    return None if not text or is_circuit(text) else text
