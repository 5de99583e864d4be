"""Long runs under faults with real processes on this machine: kills, partitions, and thousands of versions.

The model and the engine are small, so that what is seen is what the swarm does. `docs/long-runs.md` has what was found.

Modules:

- `small_model`: A model of a few megabytes that changes in every version, and its root
- `dice`: An engine of numpy arrays that draws random tokens
- `small_node`: A node with that engine
- `small_disk`: A home on a small disk that can be filled and freed
- `trainer`: The process of a trainer: it publishes what it is told to, and takes rollouts all the time
- `counting`: Whether every rollout is counted once
- `usage_table`: What processes and folders use, at the beginning and at the end of a run
- `long_run`: A seed, a trainer and nodes as real processes, which are killed and started again
- `kills`: SIGKILL of any process at random instants
- `partition`: Two sides of a network that is cut in two and heals
- `lost_seed`: The seed, its disk and a node are lost; weights and saved state come back on a new machine
- `soak`: Thousands of versions while nodes come and go and disks fill
"""
