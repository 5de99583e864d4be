"""The codec: lossless, signed deltas between two versions of a model, and the replicas that they are applied to.

Bits in, bytes out: no network, no clock, no threads, no torch. `docs/codec.md` specifies every byte. Each name is
imported when it is first used, so that a relay, which never decodes, never loads the compiler.

In reading order:

- `errors`: `PeerError` and `UsageError`
- `bits`: The dtypes of safetensors, and the order of floats on the number line
- `layout`: A model's tensors, blocks and small files
- `rice`, `pco`: The two coders of a block's changes; `scratch` is what both use, `kernels/` is compiled
- `values`: The coder of new values that are no small change of the old ones
- `choice`: The choice between the two coders
- `varint`, `unpack`, `sign`: Bounded readers and writers, and signatures
- `chunk`, `pack`: Signed chunks and their pieces, and the sizes of both
- `experts`: How many elements of each expert of a mixture a step changes
- `shards`: The blocks that each rank of a divided engine needs
- `parts`, `part_view`, `adapter`: The base, slots of adapters and other parts of a layout
- `base_sample`: A sample of a base's weights, which tells whether an adapter was trained on another base
- `zeros`: Blocks of zeros beyond the base, which are holes
- `manifest`: The root over all blocks, and the seal of a version
- `staging`: Decoding a chunk into scratch memory, before anything is written
- `replica`, `layered`, `shared`: The bits of one version in shared memory, or on disk with deltas on top; `slot_memory`
  is that of adapters
- `live`: Blocks read back out of the memory of an engine
- `patch`: A version's changes for an engine in another process
- `routes`: Routes of experts
- `checkpoint`, `block_files`: Hugging Face checkpoint folders, and blocks read out of their files
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from codec.errors import PeerError, SwarmError, UsageError

if TYPE_CHECKING:
    from codec.bits import DTYPES, DType
    from codec.checkpoint import Checkpoint, write_checkpoint
    from codec.chunk import BlockDelta, Chunk, ChunkHeader, ChunkKey, chunk_id, open_header, seal_chunk, verify_piece
    from codec.layered import Layered
    from codec.layout import BLOCK_ELEMENTS, BlockSpec, FileSpec, Layout, TensorSpec
    from codec.manifest import Manifest, open_manifest, state_root
    from codec.pack import Packer, chunk_target, piece_target
    from codec.patch import patch_hashes, read_patch, write_patch
    from codec.replica import Replica
    from codec.sign import Key
    from codec.staging import StagedBlock, StagedChunk, Torn

__all__ = [
    "BLOCK_ELEMENTS",
    "DTYPES",
    "BlockDelta",
    "BlockSpec",
    "Checkpoint",
    "Chunk",
    "ChunkHeader",
    "ChunkKey",
    "DType",
    "FileSpec",
    "Key",
    "Layered",
    "Layout",
    "Manifest",
    "Packer",
    "PeerError",
    "Replica",
    "StagedBlock",
    "StagedChunk",
    "SwarmError",
    "TensorSpec",
    "Torn",
    "UsageError",
    "chunk_id",
    "chunk_target",
    "open_header",
    "open_manifest",
    "patch_hashes",
    "piece_target",
    "read_patch",
    "seal_chunk",
    "state_root",
    "verify_piece",
    "write_checkpoint",
    "write_patch",
]

_HOMES = {
    "bits": ("DTYPES", "DType"),
    "checkpoint": ("Checkpoint", "write_checkpoint"),
    "chunk": (
        "BlockDelta",
        "Chunk",
        "ChunkHeader",
        "ChunkKey",
        "chunk_id",
        "open_header",
        "seal_chunk",
        "verify_piece",
    ),
    "layered": ("Layered",),
    "layout": ("BLOCK_ELEMENTS", "BlockSpec", "FileSpec", "Layout", "TensorSpec"),
    "manifest": ("Manifest", "open_manifest", "state_root"),
    "pack": ("Packer", "chunk_target", "piece_target"),
    "patch": ("patch_hashes", "read_patch", "write_patch"),
    "replica": ("Replica",),
    "sign": ("Key",),
    "staging": ("StagedChunk", "StagedBlock", "Torn"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'codec' has no attribute {name!r}")
    value = getattr(import_module(f"codec.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
