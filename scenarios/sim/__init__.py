"""Swarms under a virtual clock: the product's own core on simulated hosts and links.

`simulator` builds a world; each other module is an experiment on one (`egress` prints the README's table). A run is
repeatable: the same seed gives the same events in the same order.

Modules:

- `virtual/`: A network of simulated hosts under a virtual clock
- `agreement`: Runs a small swarm as real processes and in the simulator, and compares the two
- `churn`: Nodes that leave, join, are killed or frozen during a step
- `control`: The control messages, planning time and connections that a swarm needs
- `crowd`: A crowd of nodes on a simulated internet
- `egress`: How long a step takes to reach all nodes, and how much the trainer sends, against the number of nodes
- `flash_crowd`: Many nodes join at once during a step
- `partition`: The network is cut in two during a step, then heals
- `regions`: A step over one, three and six regions
- `rows`: Options, output and verdicts that the swarm scenarios share
- `simulator`: The swarm in one process under a virtual clock
- `trace`: Where a simulated step's time goes
"""
