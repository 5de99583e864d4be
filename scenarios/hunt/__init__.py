"""The fault factory: the product's own processes on virtual machines, with a fault at any effect.

A run has a seed with a trainer, and some nodes with engines. Their code is the product's, from the assembly of a
process down (`Coordinator`, `Member`, `Runtime`, `Peer`, `Authority`, `Store`, `Book`, `NodeWorker`). What it asks of
its operating system is answered by a virtual one: clock, threads, disk, network. A schedule says what strikes: machines
are killed before or after an effect, power fails, disks lie and fill, paths fall silent. At each effect the invariants
are checked against an oracle; after the last fault everything is repaired, and everybody must hold the head. One number
decides a run, and what fails is made small (`shrink`) and kept as a file.

From the inside out; a module imports from those before it:

- `hashes`: Fixed hashes of strings and bytes
- `schedule`: What strikes whom and when
- `shrink`: Makes a failing schedule small
- `diary`: When things happened in a run
- `oracle`: What is true in a run, and the violations that were found
- `coverage`: Which events came in which states, and which never did
- `disk`: A machine's disk, and what a power failure leaves of it
- `sqlite_files`: Sees what SQLite writes and syncs
- `network`: The network between the machines
- `engine`: A model of an engine that has real bits
- `hostile`: A hostile node, which sends something else than its core decides
- `machine`: A machine, its process, and the faults that wait for it
- `bounds`: What one process may send, hold and queue at most
- `observed`: The product's runtime and coordinator, and a look at each effect
- `restarts`: What a machine would start with if its power failed now
- `trainer`: A model of a trainer
- `strikes`: Faults strike
- `virtual_os`: What the product asks of its operating system, answered for the machine that asks
- `world`: One run
- `guide`: Which schedule is run next
- `command`: The command line
- `availability`: How soon each class of faults is noticed, and all goes on
- `mutations`: Planted bugs, which a hunt must find
"""
