"""How bytes reach a peer: one seam (`base`), two implementations (`libp2p`, `memory`).

The rooms below hold the parts of the first: secured connections, the admission of inbound ones, ways through
NATs, and yamux. No other ring imports py-libp2p; `tests/test_rings.py` checks it.

Modules:

- `yamux/`
- `base`: The one seam between the swarm and the network
- `dialer`: Whom to dial, when and where
- `host`: py-libp2p's host as we set it up
- `identity`: A peer's key and the two spellings of it
- `lanes`: The two lanes
- `libp2p`: The network
- `memory`: Peers that meet in one process
- `parallel`: How many connections an edge is worth
- `probe`: Who answers at an address? A handshake proves it, and then the connection is dropped
- `pubsub`: py-libp2p's GossipSub with bounds
- `tuning`: Socket options for streams that carry megabytes in bursts over long paths
"""
