"""Benchmarks of single parts in one or two processes: codec, transport, gossip, restart.

Each prints a table, or JSON with `--json`. None needs root or a network.

Modules:

- `check_tolerance`: How far apart two honest nodes' log-probabilities are, and how far a lie is
- `codec`: How small and how fast
- `codec_bounds`: The bounds that no coder of a kind can beat, in bits a change
- `codec_data`: What the codec's benchmark measures on
- `codec_measure`: The benchmark's loop
- `gossip`: Do announcements get through? Peers in one process, one publishes at a steady rate, the others count
- `restart`: How long does a node's start take that has its model on disk already
- `sparsity`: How much of a policy changes, against learning rate and steps between publishes; real runs, and what
  theory says
- `transport`: What a gigabyte costs
- `transport_ends`: The two processes of `scenarios.bench.transport`
"""
