"""Commands that need no running swarm: delta and apply, and the demo, which starts its own.

`delta` compares two checkpoints, `delta_file` stores the result, and `delta_baselines` has published formats to compare
with; `demo` runs a whole swarm on one machine.

Modules:

- `delta`: `swarm-node delta OLD NEW` and `swarm-node apply BASE DELTA OUT`
- `delta_baselines`: Published formats for sparse steps, to measure on the same bits
- `delta_file`: A version's delta as one file
- `demo`: A whole swarm on one machine, each part in its own process
"""
