"""What publishing costs a trainer: real processes of one or several ranks on this machine.

`overhead` is the first table; `trainer_cost`, `trainer_shapes` and `trainer_restart` look at parts of it.

Modules:

- `overhead`: What a swarm costs a trainer, and whether it changes anything
- `trainer_cost`: What publishing costs the training loop, how soon the first chunk is out, and how encoding gains
  by a second rank
- `trainer_ranks`: One rank of the trainer's scenario
- `trainer_restart`: The trainer is killed at one of four moments of a publish, and starts again from its disk
- `trainer_shapes`: What `publish` takes from a training loop under FSDP2, against copying the same weights once in
  the same run
"""
