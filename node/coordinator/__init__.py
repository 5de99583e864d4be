"""The seed process: it holds the swarm's key, serves trainers, publishes versions, leases work.

`coordinator` starts and joins the parts; `trainer_server` answers trainers over a Unix socket; `publisher`
turns block deltas into a sealed version; `admin` removes members and revokes tickets.

Modules:

- `adapters`: The adapters in the slots of a seed's replica, by name
- `admin`: Removes members, revokes tickets and undoes both, in a running seed
- `coordinator`: The seed process
- `draft`: The draft model of a seed, at its start and in its status
- `file_publisher`: Publishes checkpoint folders and raw files in the seed's own process
- `handover`: The last run of a swarm whose key was replaced
- `home_layout`: The layout of a seed's home, with the parts of its first start
- `leading`: A seed in a council: it serves while its machine leads
- `offline`: Removes members and revokes tickets while the seed does not run
- `publisher`: From block deltas to a sealed version
- `rank_group`: The ranks of one trainer, which publish a version together
- `recovery`: The seed's replica at a start
- `removal`: Removes an adapter: a version that makes its slot zeros
- `rotation`: Replaces a swarm's key while its seed does not run
- `samples`: Bundles of accepted samples, and the weights to draw them again from
- `seed_log`: What the seed's log says of its members and versions
- `seed_status`: The seed's status
- `slot_configs`: What the configurations in the slots of a seed's replica say
- `slots`: Which adapter has which slot
- `track`: What the seed remembers of each version for people
- `trainer_server`: Answers trainers over a Unix socket
- `turns`: The queue of trainers that want to publish
- `version_changes`: What each version changed, from its seal until the ledger hears of it
"""
