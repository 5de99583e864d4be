"""Rewards that nodes compute: functions that a node's operator has installed, and that trainers ask for by name.

A function gets (prompt, completion, metadata) and returns a number. Nothing of it ever comes from the network: a
trainer sends a name and the metadata of each prompt. On a node the functions run in processes of their own, which a
deadline and a limit of memory end; a trainer that has a function itself calls it in its own process.

Modules:

- `builtin`: The rewards that every release has
- `functions`: The reward functions of this machine, by name, with their digests
- `host`: The node's side of the processes in which rewards are computed
- `local`: A reward that the trainer computes itself
- `messages`: The messages between a node and a process that computes rewards
- `outcome`: What a reward function made of a sample: a finite number, or the reason why there is none
- `texts`: Prompts and completions as the texts that reward functions get
- `worker`: The process in which rewards are computed
"""
