"""Swarms under a virtual clock: the product's own core on simulated hosts and links.

`simulator` builds a world; each other module is an experiment on one (`egress` is the README's table). One
seed of the random generator gives one run, event by event.

Modules:

- `virtual/`
- `agreement`: The same small swarm run twice
- `churn`: Nodes that leave, come, are killed or frozen while a step travels
- `control`: What holding a swarm together costs
- `crowd`: A crowd of nodes on a simulated internet
- `egress`: How long until all nodes have a step, and how much the trainer sends for it, against the number of nodes
- `flash_crowd`: Many nodes join at once during a step
- `partition`: The network is cut in two during a step, then heals
- `regions`: A step over one, three and six regions
- `rows`: What the swarm scenarios share
- `simulator`: The swarm in one process under a virtual clock
- `trace`: Where a simulated step's time goes
"""
