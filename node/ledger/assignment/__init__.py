"""Which node gets which samples: rates, fair shares, version timing, liveness, abilities.

`pool` holds what is wanted, `assigner` assigns it, `leases` records what is out. Pure: times are arguments, and
the modules here give plain numbers or lists to `node.ledger.rules`.

Modules:

- `abilities`: What nodes' engines can do beyond plain sampling, asked once there is work that needs it
- `assigner`: Deals free samples to nodes
- `commit_stats`: What each version took on the nodes' engines, as their timesheets say, the slowest node's counting
- `fair_share`: Who gets how much, and for how long
- `leases`: The leases that are out, by deadline; and for a while how those that are over ended
- `liveness`: Signs of life of a node that has work
- `pool`: The groups that are wanted
- `rate`: How fast a node generates
- `use`: How fast a trainer takes samples, and how many may therefore be begun for it
- `version_timing`: When versions come
- `waiting`: Requests for work that could not be filled yet, and which of them are worth another look
"""
