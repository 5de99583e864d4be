"""Commands that need no running swarm: delta and apply, and the demo, which starts one of its own.

`delta` compares two checkpoints, `delta_file` stores the result, `delta_baselines` builds the published formats
to compare with; `demo` runs a whole swarm on one machine.

Modules:

- `delta`: `swarm-node delta OLD NEW` and `swarm-node apply BASE DELTA OUT`
- `delta_baselines`: The published ways to send a sparse step, built anew, to measure ours beside on the same bits
- `delta_file`: A version's delta as one file
- `demo`: A whole swarm on one machine, each part a process of its own
"""
