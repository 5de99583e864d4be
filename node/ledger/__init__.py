"""The ledger: request groups come in, work leases go out, rollouts come back; each is durable before anybody is told.

`rules` is pure and decides, `service` connects it with nodes and trainers, `book` is its SQLite file. `assignment` has
the rules about which node gets which samples, `trust` those about which rollouts count. See `docs/ledger.md`.

Modules:

- `ability_messages`: The messages by which the ledger asks nodes what they can do
- `accepted`: The accepted samples in a ledger's file, read beside the seed that writes it
- `binding`: A session's key stands for one batch of work for ever
- `book`: The ledger's SQLite file, with one transaction for each list of facts
- `bundle`: A sample in one file, which a third person can check without the swarm
- `facts`: The facts that the ledger must make durable before anybody is told of them
- `held_images`: The images of the request groups that are open, at the seed
- `image_messages`: The messages by which a node fetches the images of a work lease
- `message_content`: The content of a conversation's messages, which is text
- `messages`: The messages between a node and the ledger, and their encoding
- `model_limits`: The limits of a model by its config.json: how many tokens it reads, and which
- `node_messages`: The conversation of the ledger with its nodes: reads what they send, and queues what they are told
- `packing`: Token ids and log-probabilities as bytes
- `part_history`: Which parts of the model each version changed, so that lag is counted by part
- `recent`: The newest entries of what the ledger must not forget at once, in little memory
- `report`: The ledger as people and programs see it
- `reward_messages`: What a node says of a sample's reward, and how another node is asked for the same
- `rollout_parts`: Rollouts that are larger than one message
- `route_reader`: Reads the routes of a group's samples
- `routes`: Routes of experts in rollouts
- `rules`: The rules of work: request groups become work leases, and work leases become accepted rollouts
- `service`: The ledger as it runs in the seed: connects rules and book with the nodes' messages and the trainer
- `session`: What a trainer or the gateway has with the ledger while it waits for request groups
- `settings`: The numbers that the ledger runs by, each with its reason
- `state`: The records that the ledger keeps: heads, request groups, work leases, accepted rollouts, nodes
- `statements`: The statements that make the ledger's facts durable
- `terms`: What a session asks of its request groups beyond their samples
- `token_messages`: The messages by which a node tells tokens as they are drawn
- `transitions`: The changes of a sample's state, each noted as a fact
- `turn_log`: What the seed's log says of a turn of the ledger
"""
