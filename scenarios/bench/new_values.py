"""Measures first copies and an adapter's first steps: bytes of the codec against zstd level 19 of byte planes.

    python -m scenarios.bench.new_values                          an adapter of `small`, and whole copies of it
    python -m scenarios.bench.new_values --size smollm2           135 million parameters (needs the smollm2 extra)

A LoRA adapter of peft, on all linear layers, is trained with AdamW on text, and its bf16 weights are coded as a swarm
codes them: the first publication against an empty slot, then the step from each version to the next. The model is
coded as its first copy, in bf16 and in each format. `zstd -19` gets the same elements with their bytes sorted into
planes (the high bytes of all, then the low ones): of the new values for first copies; of new XOR old for steps, unless
the new values are shorter; and what it makes no shorter counts as it is. Its program must be installed. A ratio is the
codec's bytes, each block with its 38 bytes in a header, through zstd's. `enc`, `dec`: new bits a second of one core, in
megabytes, while rice or new values are coded and decoded; block hashes count for `enc` only.

The program ends with 1 if a ratio is above 1.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.adapter import AdapterSlots, linear_layers
from codec.bits import DTYPES, Bits, DType
from codec.checkpoint import Checkpoint
from codec.chunk import BlockEntry
from codec.errors import UsageError
from codec.formats.spec import FORMATS, FormatTensor, is_quantised
from codec.layout import BLOCK_ELEMENTS
from codec.staging import encode_changes, forward, warm_up
from node.tools.format_sizes import bands_of
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["main"]

_HEADER_BYTES: Final = 38
"""What a block costs beside its payload: its hash, and its number, coder and length."""
_ROWS, _WIDTH = 8, 64
"""Sequences of a batch, and their tokens."""


def coded(old: Bits, new: Bits, dtype: DType) -> tuple[int, float, float]:
    """(bytes, seconds to encode, seconds to decode) of a tensor's change, block by block.

    Raises `AssertionError` when a block does not come back.
    """
    total, encode_s, decode_s = 0, 0.0, 0.0
    for start in range(0, new.size, BLOCK_ELEMENTS):
        before, after = old[start : start + BLOCK_ELEMENTS], new[start : start + BLOCK_ELEMENTS]
        began = time.thread_time()
        encoded = encode_changes(0, before, after, dtype, new_values=True)
        encode_s += time.thread_time() - began
        if encoded is None:
            continue
        delta = encoded.delta
        total += len(delta.payload) + _HEADER_BYTES
        copy = before.copy()
        entry = BlockEntry(0, delta.coder, delta.new_hash, len(delta.payload))
        began = time.thread_time()
        forward(entry, bytes(delta.payload), copy, dtype)
        decode_s += time.thread_time() - began
        assert np.array_equal(copy, after)
    return total, encode_s, decode_s


def zstd_bytes(bits: Bits) -> int:
    """The size of the elements in zstd level 19, their bytes sorted into planes. Raises `UsageError` without zstd."""
    if (program := shutil.which("zstd")) is None:
        raise UsageError("This benchmark needs the program zstd: install it, and start again.")
    planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T[::-1])
    done = subprocess.run([program, "-19", "-q", "-c"], input=planes.tobytes(), capture_output=True, check=True)
    return min(len(done.stdout), bits.nbytes)


def compare(what: str, pairs: list[tuple[Bits, Bits, DType]]) -> dict[str, Any]:
    """One row. `pairs`: (old, new, dtype) of each tensor."""
    ours, encode_s, decode_s, raw, theirs = 0, 0.0, 0.0, 0, 0
    for old, new, dtype in pairs:
        nbytes, encoding_s, decoding_s = coded(old, new, dtype)
        ours, encode_s, decode_s, raw = ours + nbytes, encode_s + encoding_s, decode_s + decoding_s, raw + new.nbytes
        theirs += zstd_bytes(new) if not old.any() else min(zstd_bytes(new), zstd_bytes(new ^ old))
    return {
        "what": what,
        "raw_bytes": raw,
        "bytes": ours,
        "zstd_bytes": theirs,
        "ratio": ours / theirs,
        "encode_mb_s": raw / 1e6 / encode_s,
        "decode_mb_s": raw / 1e6 / decode_s,
    }


class LoraRun:
    """A LoRA adapter of `rank` in training. `modules`: names of its linear layers."""

    def __init__(self, folder: Path, rank: int, lr: float) -> None:
        """`folder`: the base, in Hugging Face's form. Raises `UsageError` without peft."""
        import torch
        from transformers import AutoModelForCausalLM

        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise UsageError("This benchmark needs peft: pip install peft, and start again.") from error

        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model: Any = get_peft_model(model, config)
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=lr)
        base = Checkpoint.open(folder).layout
        self.modules = sorted(linear_layers(base))
        self.elements = AdapterSlots.reserve(base, 1, rank).elements

    def bits(self) -> NDArray[np.uint16]:
        """The slot's weights tensor: A and B of each module, then zeros."""
        import torch

        state = {name.replace(".default.", "."): weight for name, weight in self._model.state_dict().items()}
        found = np.zeros(self.elements, np.uint16)
        at = 0
        for module in self.modules:
            for matrix in "AB":
                weight = state[f"base_model.model.{module}.lora_{matrix}.weight"].to(torch.bfloat16)
                flat = weight.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
                found[at : at + flat.size] = flat
                at += flat.size
        return found

    def step(self, ids: NDArray[np.int64]) -> None:
        """One step of AdamW on a batch of token ids (rows, width)."""
        import torch

        batch = torch.from_numpy(ids)
        self._model(input_ids=batch, labels=batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _folder(size: str) -> Path:
    from node.trainers.grpo.small import small_folder
    from node.trainers.grpo.smollm2 import smollm2_folder
    from node.trainers.grpo.tiny import tiny_folder

    return {"tiny": tiny_folder, "small": small_folder, "smollm2": smollm2_folder}[size](print)


def _batches(folder: Path) -> Iterator[NDArray[np.int64]]:
    """Endless batches of text: this repository's documents, by the model's own tokenizer."""
    from transformers import AutoTokenizer

    docs = Path(__file__).resolve().parents[2] / "docs"
    text = "\n".join(path.read_text() for path in sorted(docs.glob("*.md")))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, ids.size - _WIDTH, _ROWS)
        yield np.stack([ids[start : start + _WIDTH] for start in starts])


def adapter_rows(folder: Path, rank: int, lr: float, steps: int) -> Iterator[dict[str, Any]]:
    """The first publication of an adapter, and the step after each of `steps` - 1 more."""
    run, batches, dtype = LoraRun(folder, rank, lr), _batches(folder), DTYPES["BF16"]
    old = run.bits()
    yield compare("adapter: first publication", [(np.zeros_like(old), old, dtype)])
    for number in range(1, steps + 1):
        run.step(next(batches))
        new = run.bits()
        changed = int(np.count_nonzero(new != old)) / new.size
        name = "B's first step" if number == 1 else f"step {number}"
        yield compare(f"adapter: {name} ({changed:.0%} changed)", [(old, new, dtype)])
        old = new


def copy_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The first copies of a model: in bf16, in float32, and in each format."""
    checkpoint = Checkpoint.open(folder)
    tensors = [(spec, checkpoint.bits(spec.name)) for spec in checkpoint.layout.tensors]
    yield compare("model: bf16", [(np.zeros_like(bits), bits, spec.type) for spec, bits in tensors])
    wide = [bits.astype(np.uint32) << np.uint32(16) for spec, bits in tensors if spec.dtype == "BF16"]
    yield compare("model: bf16 as float32", [(np.zeros_like(bits), bits, DTYPES["F32"]) for bits in wide])
    for form in FORMATS.values():
        pairs: list[tuple[Bits, Bits, DType]] = []
        for spec, bits in tensors:
            if not is_quantised(spec, form):
                continue
            tensor = FormatTensor(form, spec)
            bands = bands_of(tensor, bits)
            for name, part in (("codes", tensor.codes), ("scales", tensor.scales)):
                new = np.concatenate([getattr(band, name) for band in bands]).view(part.type.bits)
                pairs.append((np.zeros_like(new), new, part.type))
        yield compare(f"model: {form.name}", pairs)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['what']:45s} {row['raw_bytes']:>12,} {row['bytes']:>12,} {row['zstd_bytes']:>12,} "
        f"{row['ratio']:7.3f} {row['encode_mb_s']:8.0f} {row['decode_mb_s']:8.0f}"
    )


def main(words: list[str] | None = None) -> int:
    """Run the benchmark; `words`: the command line."""
    parser = json_parser(__doc__)
    parser.add_argument("--size", default="small", choices=("tiny", "small", "smollm2"), help="default small")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: 16)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of AdamW (default: 1e-4)")
    parser.add_argument("--steps", type=int, default=6, help="of the adapter (default: 6)")
    parser.add_argument("--no-model", action="store_true", help="measure the adapter only")
    options = parser.parse_args(words)
    folder = _folder(options.size)
    for name in ("BF16", "F32", "F8_E4M3", "I8", "U8", "F8_E8M0"):
        warm_up(DTYPES[name])
    rows: list[dict[str, Any]] = []
    if not options.json:
        print(f"{'':45s} {'raw':>12s} {'bytes':>12s} {'zstd -19':>12s} {'ratio':>7s} {'enc MB/s':>8s} {'dec MB/s':>8s}")
    for found in (
        adapter_rows(folder, options.rank, options.lr, options.steps),
        iter(()) if options.no_model else copy_rows(folder),
    ):
        for row in found:
            rows.append(row)
            if not options.json:
                print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(any(row["ratio"] > 1 for row in rows))


if __name__ == "__main__":
    run_as_program(main)
