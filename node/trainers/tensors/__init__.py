"""A trainer's tensors as the bits of a checkpoint: names, shards, adapters, dtypes.

`weights` copies them into memory that is laid out like a replica; `naming` finds the checkpoint's names; `sharding`
says which part each rank holds; `adapters` and `lora` merge adapters on the way.

Modules:

- `adapter_slot`: An adapter as the two tensors of its slot, and back
- `adapters`: Merges a model's adapters for publishing, without touching the model
- `drafted`: A policy and its draft model, which a trainer publishes as one version
- `lora`: Merges plain LoRA by its own arithmetic, `W + scaling * B A`
- `naming`: A model's tensors under the checkpoint's names, as this process holds them
- `own_base`: Finds out whether an adapter was trained on another base than the swarm's
- `plain_lora`: An adapter as plain LoRA: the matrices A and B of each adapted module
- `rounding`: Converts a checkpoint's bits to another dtype, as torch's `.to()` does
- `sharding`: Which part of a tensor that FSDP2 shards this process holds
- `weights`: Copies a trainer's tensors, as the bits of the checkpoint, into memory that is laid out like a replica
"""
