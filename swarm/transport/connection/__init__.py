"""From a TCP socket to a secured, multiplexed connection, bounded in cost.

`admission` decides which handshake may begin, `reception` runs accepted sockets up to there, `upgrade` runs
its steps with a deadline each, and `gate` bounds what a peer may do before the authority knows it.

Modules:

- `admission`: Which strangers may begin a handshake, and when
- `certificate`: libp2p's certificates
- `departed`: What has left by a TCP connection, as the kernel counts it
- `gate`: What a peer may do that is neither known nor admitted
- `migrating_connection`: A connection's bytes over one leg after another
- `multistream`: multistream-select 1.0.0
- `muxer`: Our yamux under py-libp2p's interfaces, so that its swarm, identify, ping and GossipSub run over it
- `reception`: Inbound connections until their handshake
- `tcp`: TCP for py-libp2p
- `tls`: libp2p's TLS (/tls/1.0.0), with large reads and writes
- `upgrade`: From a TCP connection to an authenticated, multiplexed one
"""
