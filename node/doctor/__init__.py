"""`swarm-node doctor`: says in advance whether this machine will be useful to a swarm, and what to do where it is not.

Probes look (`machine`, `visit`), each with a deadline, and write down what they found (`facts`); a table of rules turns
that into lines (`rules`): ok, or what it costs and the command that mends it. The rules are pure.

Modules:

- `checks`: Runs the probes that a ticket and a config ask for
- `facts`: What the probes found, as plain values
- `lines`: A line of the answer: verdict, finding, cost, command
- `machine`: The probes of this machine
- `machine_rules`: The rules about this machine
- `report`: The lines as text
- `rules`: The table of all rules, in order
- `swarm_rules`: The rules about the swarm and the way to it
- `visit`: The probe of the swarm: a short visit with the ticket
"""
