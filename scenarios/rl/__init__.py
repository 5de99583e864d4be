"""Whole RL loops over a swarm, with unequal nodes, faults, slow trainers or little bandwidth.

Most run the product's ledger and workers under trio's virtual clock (`ledger_sim`). `faults_real`, `fidelity`,
`pressure_real` and `hetero --real` run processes.

Modules:

- `bandwidth`: The lowest link rate that keeps 90 % of a training run's tokens per second
- `cost`: Tokens a dollar of the published training runs, with the traffic of every machine priced
- `cost_model`: What a step of a training run costs, by the way that its versions travel
- `faults`: The cost of failing nodes: 1 % to 20 % of them are killed, hang or lie in every step
- `faults_real`: Faults among real processes on this machine, for `python -m scenarios.rl.faults --real`
- `fidelity`: Checks that a policy trained through the swarm has the same bits as one trained in one process
- `hetero`: How much of unequal nodes' speed the ledger uses, compared with equal shares
- `ledger_sim`: A ledger and its nodes under trio's virtual clock, for more nodes than one machine can run
- `paced`: An engine with a limited rate, for real nodes of different speeds on one machine, and one that lies
- `paced_node`: A `swarm-node join` whose engine process runs `scenarios.rl.paced:PacedEngine`
- `pressure`: How many tokens nodes generate that a slower trainer never uses
- `pressure_real`: Back-pressure among real processes on this machine, for `python -m scenarios.rl.pressure --real`
- `wan`: What a training run loses to the network
"""
