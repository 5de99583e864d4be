"""What runs in a trainer's process: `Swarm`, its rollouts, and adapters for RL frameworks.

`api` is what `from node import Swarm` gives. The packages hold the connection to the seed, publishing, the ranks of a
sharded trainer, the mapping of a model's tensors to a checkpoint's, and the reference trainer.

Modules:

- `connection/`: The connection to the seed on the same host
- `grpo/`: The reference trainer: GRPO in plain torch on small models
- `publish/`: Publishing a version without stopping training
- `ranks/`: The ranks of one trainer on one host
- `tensors/`: A trainer's tensors as the bits of a checkpoint
- `adapter_messages`: The messages by which a command lists and removes adapters
- `api`: The trainer's API, `Swarm`
- `attach`: Attaches a trainer to the seed on its host as a publisher
- `delta_publisher`: Publishes the versions that a trainer has written as deltas of its own
- `disk_delta`: A tensor's delta in the folders that slime, miles and SkyRL write
- `errors`: The errors that a trainer may have to catch
- `file_messages`: The messages by which a command has the seed publish files
- `gathered`: The whole tensors of a model that several ranks hold in parts
- `gateway_client`: Asks the gateway for samples, for adapters of trainers
- `held_gateway`: A gateway whose address outlives the seed that serves it
- `megatron`: A Megatron-core model's tensors under the names of its checkpoint
- `importance`: Importance weights from log-probabilities, truncated
- `messages`: The messages between a trainer and the seed on its host
- `own_rewards`: The trainer's own look at rewards
- `prefix_sessions`: Which conversation a prompt continues, told by its tokens
- `prime_rl`: prime-rl on the swarm, without a change to it
- `prompts`: Turns a trainer's prompt into the token ids that nodes continue
- `publish_adapter`: Publishes an adapter's folder, and removes adapters, for `swarm-node`
- `publish_files`: Publishes checkpoint folders and raw files, for `swarm-node publish`
- `publish_here`: Publishes files from this process, for a seed that does not read them itself
- `published_steps`: Which version of the swarm each step of a trainer became
- `readiness`: Which nodes are ready to generate, and what is missing until enough are
- `rollout_group`: What a trainer gets for a prompt
- `rollout_stream`: The iterator that `Swarm.rollouts` returns
- `rollouts`: Complete groups from the swarm, as an iterator
- `routes`: Routes of experts replayed in the trainer's model
- `serving`: Serves an adapter's routes on one address until the process is interrupted
- `shared_gpu`: Lets a trainer use the GPU of a node's engines
- `skyrl`: SkyRL on the swarm: the control endpoints of an inference server
- `skyrl_deltas`: The folders in which SkyRL writes its versions
- `slime`: slime and miles on the swarm: the hook that publishes what they have written
- `slime_engine`: The swarm as the SGLang engine that slime and miles ask for tokens
- `standing`: The swarm's state as its seed reports it
- `torchtitan`: torchtitan's RL loop on the swarm, without a change to it
- `torchtitan_generator`: The swarm as a generator of torchtitan's RL loop
- `trl`: TRL's `AsyncGRPOTrainer` on the swarm, without a change to it
- `trl_rollouts`: TRL's `GRPOTrainer` on the swarm, without a change to it
- `verl`: verl on the swarm, without a change to it
- `watch`: Publishes each checkpoint that appears in a folder, for `swarm-node seed --watch`
"""
