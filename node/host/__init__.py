"""What coordinator and members share on a machine: endpoint, addresses, limits, audit, raw files.

`endpoint` opens store, replica, transport, gossip and runtime in order, and closes them in reverse. The rest
measures this machine or counts what it may do.

Modules:

- `announce`: Where the world reaches this machine
- `audit`: Prove, beside everything else, what a start took on trust; and pass on what turns out to be damaged
- `daily`: What this machine may send today (`--up-gb-day`), counted in its home
- `endpoint`: One process's end of the swarm
- `kernels`: Compiling the coder's kernels once a machine, at start and out of the way, so that the first version is
  not late
- `raw`: Any file through a swarm of its own
"""
