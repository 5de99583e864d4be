"""How many tokens convict a node that cheats: measured on real GRPO steps, with the statistics of `node.verification`.

Modules:

- `cheating`: A node that cheats, or lies as a checker: a real process whose engine client does not do what it was told
- `cheats`: The command: checked tokens until really cheating nodes are in quarantine, among honest ones
- `cost`: The command: what a replay and a reading in one pass cost
- `lives`: Lives of nodes, many at once, by the product's rules
- `models`: Models of versions, as they are or quantised
- `numbers`: What the product finds in samples that were recorded
- `power`: The command: tokens until a cheat is quarantined, and honest lives
- `quantising`: The transformers engine of a cheat whose weights are rounded
- `real_swarm`: A swarm of real processes that learns by GRPO, with nodes that can be told to cheat
- `records`: Which samples are drawn, and which checkers read them
- `samples`: Samples of honest and cheating nodes, drawn and scored for real
- `simulate`: How soon simulated nodes that cheat are quarantined, and how many honest ones are
- `sources`: Where the versions come from: kept steps, or two checkpoints of the user
- `steps`: Makes real GRPO steps and keeps each as the bits that changed
- `task`: The task of these steps: chat answers of some thirty tokens that end by themselves
- `vllm_author`: A node that draws with vLLM, for checkers of transformers
"""
