"""How a running swarm is shown: what a process says of itself, the socket to ask it, and the view in a terminal.

`schema` defines every field; `query` asks the process of this `SWARM_HOME` over its Unix socket; `terminal` draws the
answer.

Modules:

- `keys`: Keys as they are pressed, for a live view
- `piece_map`: How far the newest version has arrived in this process
- `progress`: One line on stderr for work that takes longer than two seconds
- `query`: Asks the swarm process of this machine for its status
- `reached`: How peers are reached, for the status and the log
- `roster`: The roster's trees, as the status shows them
- `schema`: What a swarm process says about itself
- `sleeping`: Has a node put its engines to sleep, or wake them
- `terminal`: The swarm as a person watches it in a terminal
- `work_schema`: What a process says of its work
"""
