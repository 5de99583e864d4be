"""How a running swarm is shown: the question to its process, and the view in a terminal.

`query` asks the process of this `SWARM_HOME` over its Unix socket; `terminal` draws the answer; `progress` is
the one line for whatever takes longer than two seconds.

Modules:

- `keys`: Keys as they are pressed, for a live view; nothing where there is no terminal
- `progress`: One line on stderr for whatever takes longer than two seconds
- `query`: Asking the swarm process of this machine how it stands
- `reached`: How peers are reached, for `status`
- `terminal`: The swarm as a person watches it in a terminal
"""
