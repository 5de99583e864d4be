"""How chunks travel: down the trees, around a slow parent, and to those that come late.

`exchange` is the normal way of a piece; `pull`, `offers` and `load_shedding` repair what is late, `catchup`
brings a replica to the current version, and `egress` and `allowance` bound what is sent.

Modules:

- `allowance`: What a machine may send in a day (`--up-gb-day`)
- `assignment`: Dealing
- `bootstrap_limiter`: Whom the trainer gives blocks of the model, where no member has it
- `catchup`: From nothing, from an old folder or from damage to a version that the swarm holds, block by block, from
  many peers
- `catchup_phases`: The phases of a catch-up, and every transition between them
- `chunks`: What we hold of each version
- `edges`: The two ends of one edge of a tree
- `egress`: What the trainer may send (`--egress-copies`)
- `exchange`: Pieces down the trees
- `late_joiners`: Guests
- `links`: What a member measures of its neighbours
- `load_shedding`: Relief
- `offers`: Offers
- `pull`: Pull what lags
- `serving`: Answers to those who ask for chunks and seals
- `sources`: Which neighbours a member asks for what the trees do not bring
- `staging`: A version's way from its first piece to the replica
- `surroundings`: What an exchange asks of the rest of its core
"""
