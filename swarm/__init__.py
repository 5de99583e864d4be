"""The swarm: members that pass chunks on to one another, and the authority that plans their trees.

`protocol` decides and does no IO, `runtime` carries its decisions out on trio, `transport` moves bytes and
`store` keeps them. Nothing here knows of engines, trainers or commands: those are in `node`.

Modules:

- `protocol/`
- `runtime/`
- `store/`
- `transport/`
- `guard`: Where input from outside ends when our code cannot deal with it
"""
