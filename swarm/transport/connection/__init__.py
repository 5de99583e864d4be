"""From a TCP socket to a secured, multiplexed connection, with bounded cost.

`reception` accepts sockets, `handshakes` decides which handshake may begin, `upgrade` runs it with a deadline for each
step, and `gate` bounds what a peer may do before the authority has admitted it.

Modules:

- `addresses`: Multiaddr text of TCP addresses
- `handshakes`: Decides which inbound connections may begin a handshake, and when
- `certificate`: libp2p's TLS certificates
- `departed`: Bytes of IP packets that a TCP connection has sent, as the kernel counts them
- `gate`: Bounds the connections of strangers
- `migrating_connection`: A connection that moves from one link to the next
- `multistream`: multistream-select 1.0.0
- `muxer`: Our yamux under py-libp2p's interfaces
- `ports`: Listening ports
- `reception`: Accepts inbound connections, and starts their handshakes
- `tcp`: TCP for py-libp2p
- `tls`: libp2p's TLS (/tls/1.0.0), with large reads and writes
- `upgrade`: Upgrades a TCP connection to an authenticated, multiplexed one
"""
