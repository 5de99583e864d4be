"""A member's process: it joins the swarm, follows versions, and generates rollouts or relays chunks.

`join` starts a rollout node, `relay` one without a model. `worker` asks the ledger for work and runs it on the
engine; `engine_updater` stages and commits each version.

Modules:

- `batch`: How many sequences a node has its engine generate at once, and how many it holds
- `changed_parts`: What a version changes of the base, and which other parts
- `draft`: The swarm's draft model at one node
- `engine_client`: What the rollout worker uses of an engine
- `engine_facts`: Tells the ledger what this node's engine can do, and which adapters it has
- `engine_memory`: The engine's memory as the node's replica
- `engine_runtime`: The engine, its processes and its worker on one node
- `engine_sleep`: Sleep and wake of a node's engines
- `engine_states`: What each engine of a node does, for people and programs
- `engine_updater`: Brings each version into the engine
- `finishing`: How a node ends on SIGTERM
- `flight`: Samples that the engine generates together
- `following`: A member's move from one swarm to its successor
- `held_version`: Which version of the swarm a node's engine holds
- `join`: A member's process
- `image_queue`: Fetches the images of the node's leases from the seed
- `judge_queue`: Has this node's engine judge other nodes' samples, so that the ledger can compare
- `lease_inventory`: The work leases that a node holds, and where each stands
- `milestones`: What a node tells the person who started it
- `pace`: How much work a node holds, and how often it speaks to the ledger
- `rate_meter`: How fast this node's engine generates
- `relay`: A relay's process
- `reward_queue`: Computes the rewards of this node's own samples, and those by which others' are checked
- `rollout`: What an engine is asked for a sample, and the rollout that the node signs
- `scorer`: Scores other nodes' samples on this node's engine
- `signing`: Signs finished samples, each with its reward if one was asked for
- `slot_bits`: Copies of adapter slots, for the engines
- `standby`: A member that follows a council's log, and becomes the seed when it leads
- `time_accounting`: How a node's time divides
- `worker`: The rollout worker
"""
