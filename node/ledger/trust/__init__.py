"""Whether rollouts and the nodes that send them can be trusted. Pure.

`acceptance` decides about each rollout. Some are checked: `verifier` draws them and weighs what panels of nodes find
(`judgements`); `checks` is for nodes whose engines cannot judge. `rewards` checks every reward. `reputation` counts
failures, `quarantine` acts on all that, and `budgets` bounds what a node may send at all.

Modules:

- `acceptance`: Decides whether a rollout counts, by its lease, its group, the sealed versions and earlier rollouts
- `budgets`: Budgets of the messages that a node may send to the ledger, checked before a message is decoded
- `checks`: Other nodes score the tokens of an accepted rollout under the version that the rollout claims
- `judgements`: Nodes of an author's panel compute what its tokens should look like
- `quarantine`: Gives no work to nodes that failed too often or were proven to lie, and releases them
- `reputation`: Counts a node's recent failures, and decides when they are too many
- `reward_functions`: Which function counts for each reward name, where nodes have several
- `rewards`: Every reward is computed by a second node before the trainer gets the sample
- `verifier`: Draws which rollouts are checked, learns what honest numbers are like, and keeps the evidence
"""
