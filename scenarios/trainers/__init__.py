"""What publishing costs a trainer, measured with real processes of one or several ranks on this machine.

`overhead` prints the main table; `trainer_cost`, `trainer_shapes` and `trainer_restart` look at parts of it.

Modules:

- `overhead`: What a swarm costs a trainer, and whether it changes the training
- `trainer_cost`: The cost of publishing in the training loop, the time to the first chunk, and the speed-up of encoding
  with a second rank
- `trainer_ranks`: One rank of the trainer in `overhead`
- `trainer_restart`: Kills the trainer at one of four moments of a publish, and restarts it from its disk
- `trainer_shapes`: The time of `publish` in a training loop under FSDP2, compared with one copy of the same weights in
  the same run
"""
