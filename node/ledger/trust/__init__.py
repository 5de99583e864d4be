"""Whether rollouts and the nodes that send them can be trusted. Pure.

`acceptance` judges each rollout, `checks` has a second node score some of them, `reputation` counts failures,
`quarantine` acts on the counts, and `budgets` bounds what a node may send at all.

Modules:

- `acceptance`: Decides whether a rollout counts, by its lease, its group, the sealed versions and earlier rollouts
- `budgets`: Budgets of the messages that a node may send to the ledger, checked before a message is decoded
- `checks`: A second node scores the tokens of an accepted rollout under the version that the rollout claims
- `quarantine`: Gives no work to nodes that failed too often or were proven to lie, and releases them
- `reputation`: Counts a node's recent failures, and decides when they are too many
"""
