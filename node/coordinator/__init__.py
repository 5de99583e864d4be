"""The seed process: it holds the swarm's key, serves trainers, publishes versions, leases work.

`coordinator` starts and joins the parts; `trainer_server` answers trainers over a Unix socket; `publisher`
turns block deltas into a sealed version; `admin` removes members and revokes tickets.

Modules:

- `admin`: Who is let in, and who is shown out
- `coordinator`: The trainer's own process
- `handover`: The last run of a swarm whose key was replaced
- `offline`: What a person may do about members and tickets while the seed does not run
- `publisher`: From block deltas to a sealed version
- `rank_group`: The ranks of one trainer at the seed's desk
- `rotation`: Replacing a swarm's key while its seed does not run
- `track`: What the seed remembers of each version for people
- `trainer_server`: The seed's end of its Unix socket
"""
