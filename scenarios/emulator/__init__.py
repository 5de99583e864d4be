"""Real processes on emulated links, in Linux network namespaces. Needs root.

`network` is the emulator, `real` runs a swarm on it, and the other modules measure: against BitTorrent, over
long paths, behind NATs.

Modules:

- `network/`
- `bench_peers`: The same file over the same emulated links by others
- `floor`: How soon bytes can go down striped trees on this machine when nothing is checked
- `real`: A real swarm on the emulated network
- `torrents`: BitTorrent as people run it, on emulated hosts
- `transport_wan`: What one edge reaches over a long path
- `transport_wan_ends`: The two processes of `scenarios.emulator.transport_wan`
- `wan_table`: The product's own processes on emulated links
"""
