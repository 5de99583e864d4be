"""The ranks of one trainer on one host: processes, shared memory, and which rank encodes which block.

`copies` holds two versions' bits in memory that all ranks share; `progress` is one rank's view of the others;
`ownership` decides which rank writes and encodes what; `meeting` brings the ranks together when they attach.

Modules:

- `copies`: Two versions' bits in shared memory, and the counters by which the ranks of one trainer agree on them
- `meeting`: The ranks of one trainer while they attach
- `ownership`: Which rank writes which part of a sharded model, and which rank encodes which block
- `peers`: The other ranks of a trainer as processes of this host
- `progress`: How far the other ranks are with a publish
"""
