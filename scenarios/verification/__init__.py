"""How many tokens convict a node that cheats: measured on real GRPO steps, with the statistics of `node.verification`.

Modules:

- `steps`: Makes real GRPO steps and keeps each as the bits that changed
- `task`: The task of these steps: chat answers of some ten tokens that end by themselves
"""
