"""What scenarios share: processes of a swarm, environments, printed rows, plots.

Modules:

- `environments`: Environments of their own for what cannot live in the project's
- `plot`: How scenarios draw
- `processes`: A seed and nodes of their own for the trainer's and the ledger's scenarios
"""
