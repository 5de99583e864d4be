"""Which node generates which samples: the assigner, and what it knows of nodes, trainers and versions.

`pool` holds the request groups that are wanted, `leases` the work leases that are granted, and `assigner` turns free
samples of one into leases of the other. Times are arguments; only `abilities` has a clock and an event.

Modules:

- `abilities`: What nodes' engines can do beyond plain sampling; a node is asked when it comes
- `assigner`: Assigns free samples to nodes: how many, which, until when
- `commit_stats`: The durations of each version's commit at the nodes' engines, by their timesheets
- `consumption`: How fast a trainer takes samples, and how many may therefore be begun for it
- `draws`: Which draws a lease asks for: portable ones by default
- `fair_share`: How many samples each node gets, and for how long: arithmetic over nodes' rates
- `leases`: The live work leases by deadline; and, for a while, how the ended ones ended
- `liveness`: Whether a node that has work is alive and generates
- `partial`: Groups that may be partial, and when they are due
- `pending_requests`: The requests for work that could not be filled yet
- `pool`: The request groups that are wanted
- `rate`: How fast a node generates: an exponential moving average and its spread
- `room`: How many groups a trainer should offer now
- `version_timing`: When versions are sealed, and how long after that each node's engine holds them
"""
