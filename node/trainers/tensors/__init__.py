"""A trainer's tensors as the bits of a checkpoint: names, shards, adapters, dtypes.

`weights` copies them into memory laid out like a replica; `naming` finds the checkpoint's names; `fsdp2` says
which part each rank holds; `adapters` and `lora` merge on the way out.

Modules:

- `adapters`: Adapters, merged on the way out
- `fsdp2`: FSDP2 (`torch.distributed.fsdp.fully_shard`)
- `lora`: Plain LoRA merged by our own arithmetic, `W + scaling * B A`, which is peft's, operation by operation
- `naming`: A model's tensors under the checkpoint's names, as this process holds them
- `rounding`: A checkpoint's bits in another dtype, as torch's `.to()` makes them
- `weights`: A trainer's tensors -> the bits of the checkpoint, in memory laid out like a replica
"""
