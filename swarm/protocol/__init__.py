"""The pure core: what a member and the authority decide, as functions of state, event and time.

Nothing in this ring does IO, reads a clock or draws random numbers; `tests/test_rings.py` checks it. `Peer` and
`Authority` wire the machines of the four rooms below to one `State`, and apply one event at a time.

Modules:

- `authority`: The trainer's end
- `member`: A member of the swarm
- `startup`: What an authority or a member is started with
- `state`: What one core knows
"""
