"""Checkpoint bits converted to live bits: every 16-bit value both ways, and rounding like torch's."""

import numpy as np
import pytest
import torch

from node.engines.live import LiveParameters
from node.engines.widths import width_of
from node.models.dtypes import TORCH_DTYPES

ALL = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_every_16_bit_value_is_widened_exactly_and_comes_back(stored: str) -> None:
    width = width_of(stored, torch.float32)
    assert width is not None
    assert width.exact
    wide = width.convert(ALL)
    np.testing.assert_array_equal(width.back(wide), ALL)
    theirs = torch.from_numpy(ALL.view(np.int16)).view(TORCH_DTYPES[stored]).float()
    mine = wide.view(torch.float32)
    assert torch.equal(mine.isnan(), theirs.isnan())
    numbers = ~theirs.isnan()
    assert torch.equal(mine[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_a_float32_that_no_16_bit_value_equals_is_found(stored: str) -> None:
    width = width_of(stored, torch.float32)
    assert width is not None
    for value in (1.0 + 2**-20, 1e-30, 3.0e38):
        live = torch.tensor([value]).view(torch.int32)
        with pytest.raises(ValueError, match="more bits"):
            width.back(live)


@pytest.mark.parametrize(("stored", "live"), [("F32", torch.bfloat16), ("F32", torch.float16), ("F16", torch.bfloat16)])
def test_other_floats_are_rounded_as_torch_rounds(stored: str, live: torch.dtype) -> None:
    width = width_of(stored, live)
    assert width is not None
    assert not width.exact
    kind = TORCH_DTYPES[stored]
    values = (torch.randn(1000) * 3).to(kind)
    integers = values.view(torch.int32 if kind == torch.float32 else torch.int16).numpy()
    found = width.convert(integers.view(f"u{kind.itemsize}")).view(live)
    assert torch.equal(found, values.to(live))


def test_integers_and_floats_are_not_mixed() -> None:
    assert width_of("I64", torch.float32) is None
    assert width_of("F32", torch.int32) is None
    assert width_of("I64", torch.int64) is not None


def test_a_rounded_tensor_is_proven_by_the_kept_bits(tmp_path) -> None:
    """float32 stored, bfloat16 live: the hash is the checkpoint's while the live values are its bits, rounded."""
    from blake3 import blake3
    from transformers import GPT2Config, GPT2LMHeadModel

    from codec import Checkpoint

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    layout, name = checkpoint.layout, "transformer.wte.weight"
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    live = LiveParameters(model, layout, torch.bfloat16)
    assert not live.hashes(layout).any(), "nothing was written yet, so nothing is proven"
    for spec in layout.tensors:
        live.write(spec.name, checkpoint.bits(spec.name))
    weight = model.transformer.wte.weight
    stored = torch.from_numpy(checkpoint.bits(name).view(np.int32).copy()).view(torch.float32).view(40, 16)
    assert torch.equal(weight, stored.to(torch.bfloat16))

    bits = np.array(checkpoint.bits(name))
    where = np.array([3, 77], np.int64)
    bits[where] ^= 1  # too small a change for bfloat16
    live.prepare(name, where, bits[where]).write()
    (block,) = layout.blocks_of(name)
    assert live.hashes(layout)[block].tobytes() == blake3(bits.tobytes()).digest()
    with torch.no_grad():
        weight[0, 0] *= 1.5
    assert not live.hashes(layout)[block].any()
