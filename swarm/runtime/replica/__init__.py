"""The replica on this host: opened, staged, applied, checkpointed, and restored.

Every change of the model's bits goes through `model`, under `write_gate`; worker threads do the work (`jobs`). `files`,
`restore` and `rewind` handle what is on disk.

Modules:

- `at_version`: The bits of one sealed version, from a store or a folder
- `base_folder`: The bits of the user's own folder, and whether they need to be copied
- `files`: A replica's checkpoints, and the file that an engine loads from
- `intake`: A trainer's own chunks on their way to the disk and into scratch memory
- `jobs`: The core's jobs, carried out in worker threads
- `manifests`: The verified manifests of recent versions
- `model`: The replica and what is staged for it
- `replay`: Applies a version's chunks to a replica whose blocks are of several versions
- `restore`: Restores the newest version that a store can prove
- `rewind`: The way back to an older version, block by block
- `scratch`: Decoded chunks that wait for their version's seal
- `write_gate`: One writer of a replica's bits at a time, and none while a reader needs them unchanged
"""
