"""The council: the operator's machines of which one leads a swarm, and any of the others can take over.

Each machine of a council holds the swarm's key, but only the leader uses it. A majority elects the leader of a term,
lends it the lead for a short time, and stores each entry of the leader's log before anybody hears of what the entry
says. `docs/standby.md` argues the rules and lists the faults under which they hold.

- `events`: What can happen to a machine of the council, and what it asks for
- `followers`: What a leader knows of the other machines, and until when it may lead
- `log_window`: The newest entries of a machine's log, in memory
- `machine`: The machine itself: follower, candidate or leader
- `messages`: The messages between the machines
- `timing`: The times of a council, and the lease that follows from them
"""
