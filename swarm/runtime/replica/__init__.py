"""The replica on this host: opened, staged, committed, checkpointed, and restored.

Every change of the model's bits goes through `model`, under `gate`; worker threads do the work (`jobs`), and
what a start needs to find again is kept by `keep`, `restore` and `rewind`.

Modules:

- `gate`: Who may write a replica's bits
- `intake`: A trainer's own chunks on their way to the disk and into scratch, beside the swarm, which has them
  already
- `jobs`: The core's jobs, carried out in worker threads
- `keep`: What of a replica is on disk
- `manifests`: The manifests that the authority has sealed, as far as we have seen them
- `model`: The replica and what is staged for it
- `replay`: Bring blocks along a version's chunks one by one
- `restore`: Bring back the newest version that a store can prove
- `rewind`: The way back to an older version, block by block, from what the seed keeps
- `scratch`: What is decoded and waits for its version's seal
"""
