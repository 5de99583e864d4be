"""Real processes on emulated links, in Linux network namespaces. Needs root.

`network` is the emulator and `real` runs a swarm on it. The other modules measure: against BitTorrent, over long
paths, behind firewalls.

Modules:

- `network/`
- `bench_peers`: Compares the swarm with aria2 and libtorrent on the same emulated links
- `floor`: Measures how fast plain sockets pass bytes down striped trees on this machine
- `real`: A real swarm on the emulated network
- `torrents`: BitTorrent clients on emulated hosts
- `transport_wan`: The throughput of one connection pair over a long path
- `transport_wan_ends`: The two processes of `scenarios.emulator.transport_wan`
- `wan_table`: Measures the product's own processes on emulated links against targets
"""
