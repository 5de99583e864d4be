"""The transfer of chunks: down the trees, around slow parents, and to members that join late.

`exchange` pushes pieces down the trees; `repair` fetches what is late; `catchup` brings a replica to the current
version; `egress` and `allowance` bound what is sent.

- `repair/`
- `allowance`: The daily upload limit of a machine (`--up-gb-day`)
- `arrivals`: What becomes of a header or piece that arrives
- `assignment`: The authority's assignment of chunks to stripes
- `bootstrap_limiter`: The limit on members that fetch the model from the trainer itself
- `catchup`: Catch-up to a version of the swarm, from an empty, old or damaged replica
- `catchup_phases`: The phases of a catch-up, and every transition between them
- `catchup_requests`: What a catch-up has requested
- `chunks`: The record of the chunks and pieces that a peer holds of each version
- `edges`: The state of one edge of a tree, at either end
- `egress`: The trainer's egress budget (`--egress-copies`)
- `exchange`: Pieces down the trees, as far as credit reaches
- `exchange_context`: What an exchange needs of the rest of its core
- `givers`: Further members that a catch-up dials for the blocks of the model
- `late_joiners`: Members that joined during the version in flight
- `links`: A member's measurements of its neighbours
- `parents`: A child's end of the trees, which grants the credit
- `serving`: Answers to requests for manifests
- `sources`: The neighbours that a member asks for data outside the trees
- `staging`: A version from its first piece to the replica
"""
