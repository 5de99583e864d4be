"""Helpers that scenarios share: processes of a swarm, virtual environments and plots.

Modules:

- `environments`: Virtual environments for packages that cannot be installed in the project's own environment
- `made_up_swarm`: The status of a swarm that does not exist, to look at and to measure with
- `plot`: Plots of scenarios, saved as PNG files without a display
- `processes`: A seed and nodes as real processes on loopback, for scenarios of the trainer and of the ledger
"""
