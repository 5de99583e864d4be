"""The ranks of one trainer on one host: processes, shared memory, and who owns which block.

`copies` holds two versions' bits in memory that all ranks share; `together` is one rank's view of the others;
`ownership` says who encodes what.

Modules:

- `copies`: Two versions' bits in memory that the ranks of one trainer share, and the few words that they need to
  agree on them
- `ownership`: Who holds which part of a model that several processes train together, and who encodes which block
- `peers`: The other ranks of a trainer as processes of this host
- `together`: The ranks of one trainer, as one of them sees the others through the memory that they share
"""
