"""How bytes reach a peer: one interface (`base`) with two implementations (`libp2p`, `memory`).

The packages are parts of the libp2p implementation: secured connections, NAT traversal, and yamux. No other ring but
`swarm.gossip.announcements` imports py-libp2p; `tests/test_rings.py` checks it.

Modules:

- `connection/`: From a TCP socket to a secured, multiplexed connection, with bounded cost
- `nat/`: Reaching peers that cannot be dialed
- `yamux/`: Several streams over one connection
- `base`: The interface between the swarm and the network
- `bulk_connections`: Makes further bulk connections to a peer
- `dialer`: Dials a peer at its addresses, and backs off from a peer that does not answer
- `host`: py-libp2p's host with our sockets, security, muxer and negotiation in it
- `identity`: A peer's identity
- `lanes`: The two lanes
- `left_out`: Keeps parts of py-libp2p that a process of ours never uses out of its memory
- `libp2p`: The network
- `memory`: Transports that meet in one process
- `observed`: At which address a peer sees us
- `parallel`: How many parallel connections a path to a peer needs
- `probe`: Finds out which peer answers at an address
- `pubsub`: py-libp2p's GossipSub with bounds
- `rules`: What configures a libp2p transport besides its key and addresses
- `tasks`: Starts the tasks of py-libp2p's services, each under a guard
- `tuning`: Socket options for connections that carry megabytes in bursts over long paths
"""
