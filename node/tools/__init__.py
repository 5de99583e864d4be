"""Commands that need no running swarm: delta and apply, and the demo, which starts its own.

`delta` compares two checkpoints, `delta_file` stores the result, and `delta_baselines` has published formats to compare
with; `reckon` answers the same for a model that is known by its shapes alone; `demo` runs a whole swarm on one machine.

Modules:

- `delta`: `swarm-node delta OLD NEW` and `swarm-node apply BASE DELTA OUT`
- `delta_baselines`: Published formats for sparse steps, to measure on the same bits
- `delta_file`: A version's delta as one file
- `demo`: A whole swarm on one machine, each part in its own process
- `distribution`: Seconds and dollars of bringing a version to N nodes
- `made_up`: Made-up training steps
- `packed`: A version's chunks before they are signed, and their bytes on the wire
- `prices`: Price lists of providers and object stores
- `reckon`: `swarm-node delta --shapes NAME`
- `shapes`: Tensor tables of public models
- `starter`: The folder that `swarm-node demo --keep` leaves
- `table`: Figures for people
- `talking_model`: A tiny model that says which version it is
"""
