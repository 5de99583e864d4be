"""Whether results and the nodes that send them can be believed.

`judge` checks one result against its lease, `checks` has a second node score it, `reputation` counts failures,
and `quarantine` acts on the count. Pure.

Modules:

- `checks`: Spot checks
- `judge`: Is this rollout what was asked for, from a version that counts? Pure checks of one result against one
  lease
- `quarantine`: Bad workers
- `reputation`: How a node behaves
"""
