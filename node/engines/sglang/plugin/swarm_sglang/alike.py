"""What the plugin changes on CPUs with the flag `--rows-alike`, so that others can replay what was drawn: a row's bits
depend on no other row.

- Linear layers are computed in blocks of rows (`swarm_vllm.blocks`).
- Attention is computed by torch's kernel, as SGLang's `torch_native` does, but always for blocks of the same number of
  queries and keys, with a mask. Otherwise the bits of a row depend on how many rows and keys the call has: a token that
  is drawn would have other keys and values than the same token in a text that is read at once.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import inspect
import os
from typing import Any, Final

import torch
from swarm_vllm.blocks import AMX_ROWS, in_blocks
from torch.nn.functional import pad, scaled_dot_product_attention

from .calls import ROWS_ALIKE_VARIABLE
from .drawing import follows

__all__ = ["attend", "hook", "rows_alike"]

QUERIES: Final = 32
"""Rows of one block of queries: the kernel's own, for few."""
KEYS: Final = 512
"""Keys are padded to a multiple of this: the kernel's own block."""
_BLOCKS: Final = 64
"""Blocks of queries that are computed at a time; their mask has 64 kB for 512 keys and each 32 rows, in float32."""


def rows_alike() -> bool:
    """Whether this SGLang was started with the flag."""
    return os.environ.get(ROWS_ALIKE_VARIABLE) == "1"


def hook() -> None:
    """Register the hooks, with the flag."""
    if not rows_alike():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = "sglang.srt.layers"
    backend = f"{layers}.attention.torch_native_backend.TorchNativeAttnBackend"
    linear = f"{layers}.quantization.unquant.UnquantizedLinearMethod.apply"
    HookRegistry.register(linear, _linear, HookType.AROUND)
    HookRegistry.register(f"{layers}.logits_processor.LogitsProcessor._compute_lm_head", _head, HookType.AROUND)
    HookRegistry.register(f"{backend}._run_sdpa_forward_extend", _extend, HookType.AROUND)
    HookRegistry.register(f"{backend}._run_sdpa_forward_decode", _decode, HookType.AROUND)


def _linear(original: Any, method: Any, layer: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    if x.device.type != "cpu" or not follows():
        return original(method, layer, x, *more, **named)
    return in_blocks(lambda rows: original(method, layer, rows, *more, **named), x, _at_once())


def _head(original: Any, processor: Any, states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    if states.device.type != "cpu" or named.get("out") is not None or not follows():
        return original(processor, states, *more, **named)
    return in_blocks(lambda rows: original(processor, rows, *more, **named), states, _at_once())


def _at_once() -> int | None:
    return AMX_ROWS if torch.cpu._is_amx_tile_supported() else None


def _extend(original: Any, *args: Any, **named: Any) -> Any:
    return _attention(original, args, named, decodes=False)


def _decode(original: Any, *args: Any, **named: Any) -> Any:
    return _attention(original, args, named, decodes=True)


def _attention(original: Any, args: tuple[Any, ...], named: dict[str, Any], *, decodes: bool) -> Any:
    """`TorchNativeAttnBackend._run_sdpa_forward_*`, for plain causal attention on a CPU."""
    bound = inspect.signature(original).bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    window = given.get("sliding_window_size")
    plain = (decodes or given["causal"]) and not given["is_cross_attn"] and given["encoder_lens"] is None
    if given["query"].device.type != "cpu" or not plain or (window is not None and window > -1) or not follows():
        return original(*args, **named)
    query, output, caches = given["query"], given["output"], (given["k_cache"], given["v_cache"])
    lengths = given["seq_lens"].tolist()
    new = [1] * len(lengths) if decodes else given["extend_seq_lens"].tolist()
    at = 0
    for slot, length, count in zip(given["req_pool_indices"].tolist(), lengths, new):  # noqa: B905 - Python 3.10
        places = given["req_to_token"][slot, :length]
        keys, values = (cache[places].to(query.dtype) for cache in caches)
        output[at : at + count] = attend(query[at : at + count], keys, values, given["scaling"])
        at += count
    return output


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Causal attention of a text's last tokens: (tokens, heads, width of a value).

    `queries`: (tokens, heads, width). `keys`, `values`: (tokens of the whole text, their heads, width). A row's bits do
    not depend on the number of rows, nor on the keys after its own.
    """
    tokens, heads, width = queries.shape
    length, groups, _ = keys.shape
    shared = heads // groups
    more = -length % KEYS
    keys, values = (pad(part, (0, 0, 0, 0, 0, more)).permute(1, 0, 2)[None] for part in (keys, values))
    rows = queries.reshape(tokens, groups, shared, width).transpose(0, 1).reshape(groups, tokens * shared, width)
    blocks = -(-tokens * shared // QUERIES)
    rows = pad(rows, (0, 0, 0, blocks * QUERIES - tokens * shared)).view(groups, blocks, QUERIES, width).transpose(0, 1)
    last = (torch.arange(blocks * QUERIES) // shared + length - tokens).clamp_max_(length - 1)
    last, places = last.view(blocks, 1, QUERIES, 1), torch.arange(length + more)
    parts = []
    for at in range(0, blocks, _BLOCKS):
        some = rows[at : at + _BLOCKS]
        both = (part.expand(len(some), -1, -1, -1) for part in (keys, values))
        mask = places <= last[at : at + _BLOCKS]
        parts.append(scaled_dot_product_attention(some, *both, attn_mask=mask, scale=scale))
    found = torch.cat(parts).transpose(0, 1).reshape(groups, blocks * QUERIES, -1)[:, : tokens * shared]
    return found.view(groups, tokens, shared, -1).transpose(0, 1).reshape(tokens, heads, -1)
