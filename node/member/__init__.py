"""A member's process: it joins the swarm, follows versions, and generates rollouts or relays chunks.

`join` starts a rollout node, `relay` one without a model. `worker` asks the ledger for work and runs it on the
engine; `engine_updater` stages and commits each version.

Modules:

- `engine_client`: What a node's working life asks of its engine, wherever that runs
- `engine_runtime`: A node's engine and its work, tied to the node's replica
- `engine_updater`: An engine that follows its node's replica
- `following`: A member's way from one swarm to its successor
- `join`: A member's process
- `lease_inventory`: What a node holds of the ledger
- `relay`: A relay's process
- `scorer`: Says how likely the tokens of others' samples are, one at a time
- `time_accounting`: Where a node's time goes
- `worker`: The node's working life
"""
