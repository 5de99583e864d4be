"""What coordinator and members share on a machine: endpoint, addresses, daily limit, audit, raw files.

`endpoint` opens store, replica, transport, gossip and runtime in order, and closes them in reverse. The other modules
find out something about this machine, or count what it may send.

Modules:

- `announce`: The addresses at which others reach this machine
- `audit`: Hashes in the background what a start did not, and reports damaged blocks
- `child`: How a process of swarm-node starts another one
- `daily`: The bytes that this machine may send today (`--up-gb-day`), counted in its home
- `endpoint`: One process's end of the swarm
- `kernels`: Compiles the coder's kernels once on a machine, when a process starts
- `last_line`: The last line of a process's log, for the error that says why the process ended
- `raw`: Carries any file through a swarm of its own
- `rescue`: A checkpoint folder out of a member's home
- `stamp`: The files of a folder as they are
"""
