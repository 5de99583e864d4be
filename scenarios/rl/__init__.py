"""Whole RL loops over a swarm: unequal nodes, faults, slow trainers, little bandwidth.

Most run the product's ledger and workers under trio's virtual clock (`ledger_sim`); `faults_real`, `fidelity`
and `hetero --real` run processes.

Modules:

- `bandwidth`: How little bandwidth a training run needs
- `cost`: Tokens a dollar of the published training runs, with the traffic of every machine priced
- `cost_model`: What a step of a training run costs, by the way that its versions travel
- `faults`: What do nodes cost that are killed, hang, or lie, 1 % to 20 % of them in every step?
- `faults_real`: Faults among real processes on this machine, for `python -m scenarios.rl.faults --real`
- `fidelity`: Is a policy that trains through the swarm, bit for bit, the one that trains in one process?
- `hetero`: How much of unequal nodes' speed does the ledger use, and what would equal shares make of them?
- `ledger_sim`: A ledger and its nodes under trio's virtual clock, for scenarios with more nodes than a machine can
  carry
- `paced`: An engine as slow as it is told, for real nodes of different speeds on one machine, and one that lies
- `paced_node`: A node as `swarm-node join` makes it, but for its engine process, which runs
  `scenarios.rl.paced:PacedEngine`
- `pressure`: How much do nodes draw that a trainer slower than they are never uses?
- `pressure_real`: Back-pressure among real processes on this machine, for `python -m scenarios.rl.pressure --real`
- `wan`: What a training run loses to the network
"""
