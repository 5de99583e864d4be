"""What runs in a trainer's process: `Swarm`, its rollouts, and adapters for RL frameworks.

`api` is what `from node import Swarm` gives. The rooms below hold the connection to the seed, publishing, and
the mapping of a model's tensors to a checkpoint's.

Modules:

- `grpo/`
- `api`: Three lines in a trainer
- `attach`: From a model and a seed's folder to a place at the seed's desk
- `errors`: What a trainer may have to catch
- `held_gateway`: A gateway whose address outlives the seed that serves it
- `messages`: What a trainer and the seed on its host say over the seed's Unix socket
- `prime_rl`: prime-rl on the swarm, without a change to it
- `prompts`: From what a trainer gives as a prompt to the token ids that nodes continue
- `publish_files`: `swarm-node publish FOLDER`, for trainers that only write checkpoints; and `publish --raw FILE`,
  for any file
- `rollouts`: Complete groups from the swarm, as an iterator that takes prompts only as fast as the nodes work them
  off
- `standing`: How the swarm stands, from what its seed says
- `trl`: TRL's `AsyncGRPOTrainer` on the swarm, without a change to it
- `verl`: verl on the swarm, without a change to it
- `watch`: A folder of checkpoints as a publisher, for trainers that only write files
"""
