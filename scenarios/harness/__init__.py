"""Helpers that scenarios and tests share: real processes, command lines, virtual environments and plots.

Modules:

- `processes`: Real processes on this machine: the one way to start them, wait for them and end them
- `forked`, `fork_server`, `forked_workers`: Processes of swarm-node and engine workers by a fork, for tests: they start
  without imports
- `swarm`: Swarms of real processes: a seed, nodes, and `swarm-node` commands, each with a home folder of its own
- `usage`: What processes and this machine use: memory, processor time and descriptors, from `/proc`
- `command`: What the command lines of scenarios share
- `environments`: Virtual environments for packages that cannot be installed in the project's own environment
- `made_up_swarm`: The status of a swarm that does not exist, to look at and to measure with
- `plot`: Plots of scenarios, saved as PNG files without a display
"""
