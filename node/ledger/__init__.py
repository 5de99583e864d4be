"""The ledger: request groups in, work leases out, accepted rollouts back, each durable before told.

`rules` is pure and decides, `service` connects it with members and trainers, `book` is its SQLite file.
`docs/ledger.md` specifies it.

Modules:

- `binding`: What a session's key stands for
- `book`: The ledger's memory on disk
- `callers`: What each node may say to the ledger
- `facts`: What must be durable before anybody is told of it; `node.ledger.book` writes a list of facts as one
  transaction
- `intake`: What counts
- `messages`: What a node and the ledger say to one another, as the bytes that ride in the swarm's `Work` messages
- `model_limits`: What a model can read, as the `config.json` of its checkpoint says
- `report`: The ledger as people and programs see it
- `rules`: The rules of work
- `service`: The ledger at work, in the seed
- `session`: What a trainer, or a gateway, has with the ledger while it waits for groups
- `settings`: Every number that the ledger runs by, with its reason
- `state`: What the ledger knows
- `transitions`: Moves samples between their places, and notes each move as a fact
- `wording`: What the ledger decided, as messages to its nodes
"""
