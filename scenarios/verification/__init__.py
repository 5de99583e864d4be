"""How many tokens convict a node that cheats: measured on real GRPO steps, with the statistics of `node.verification`.

Modules:

- `cheating`: A node that cheats, or lies as a checker: a real process whose engine client does not do what it was told
- `cheats`: The command: checked tokens until really cheating nodes are in quarantine, among honest ones
- `lives`: Lives of nodes, simulated from measured numbers
- `models`: Models of kept versions, as they are or quantised
- `numbers`: The numbers that a check of one sample may yield
- `power`: The command: tokens until a cheat is quarantined, and honest lives
- `quantising`: The transformers engine of a cheat whose weights are rounded
- `real_swarm`: A swarm of real processes that learns by GRPO, with nodes that can be told to cheat
- `records`: Which samples are drawn, and which checkers read them
- `samples`: Samples of honest and cheating nodes, drawn and scored for real
- `steps`: Makes real GRPO steps and keeps each as the bits that changed
- `task`: The task of these steps: chat answers of some ten tokens that end by themselves
"""
