import numpy as np
import pytest
import torch
from blake3 import blake3

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.engines.live import LiveParameters


class Parts(torch.nn.Module):
    """Parameters of several kinds, a saved and an unsaved buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.wide = torch.nn.Parameter(torch.randn(7))
        self.scale = torch.nn.Parameter(torch.tensor(2.5))
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


LAYOUT = Layout(
    (
        TensorSpec("count", "I64", (4,)),
        TensorSpec("narrow", "BF16", (3, 5)),
        TensorSpec("scale", "F32", ()),
        TensorSpec("wide", "F32", (7,)),
    )
)


def test_every_dtype_is_written_patched_and_read_back():
    model = Parts()
    live = LiveParameters(model, LAYOUT)
    rng = np.random.default_rng(0)
    for spec in LAYOUT.tensors:
        bits = rng.integers(0, 1 << 16, spec.elements).astype(spec.type.bits)
        live.write(spec.name, bits.reshape(spec.shape))
        np.testing.assert_array_equal(live.read(spec.name), bits)
        indices = np.array([0, spec.elements - 1] if spec.elements > 1 else [0], np.int64)
        live.prepare(spec.name, indices, bits[indices] ^ 1).write()
        bits[indices] ^= 1
        np.testing.assert_array_equal(live.read(spec.name), bits)
        np.testing.assert_array_equal(live.read(spec.name, 1, 2), bits[1:3])
    assert model.count.dtype == torch.int64


def test_writes_reach_the_model_itself():
    model = Parts()
    LiveParameters(model, LAYOUT).write("scale", np.array([1.5], np.float32).view(np.uint32))
    assert model.scale.item() == 1.5


def test_preparing_writes_nothing_and_copies_its_arguments():
    model = Parts()
    live = LiveParameters(model, LAYOUT)
    before = live.read("narrow").copy()
    indices, bits = np.array([1, 4], np.int64), np.array([7, 8], np.uint16)
    patch = live.prepare("narrow", indices, bits)
    np.testing.assert_array_equal(live.read("narrow"), before)
    indices[:], bits[:] = 0, 0  # as when the patch's memory is unmapped
    patch.write()
    assert live.read("narrow")[[1, 4]].tolist() == [7, 8]


def test_a_tensor_that_is_not_contiguous_is_refused():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 6).t())
    with pytest.raises(UsageError, match="one piece"):
        LiveParameters(model, Layout((TensorSpec("weight", "F32", (6, 4)),)))


def test_blocks_of_a_large_tensor_are_hashed_separately():
    model = torch.nn.Linear(1 << 10, (1 << 11) + 1, bias=False, dtype=torch.bfloat16)
    layout = Layout((TensorSpec("weight", "BF16", tuple(model.weight.shape)),))
    flat = model.weight.detach().view(torch.int16).flatten().numpy()
    wanted = [blake3(flat[at : at + (1 << 20)].tobytes()).digest() for at in range(0, flat.size, 1 << 20)]
    assert len(wanted) == 3
    assert [row.tobytes() for row in LiveParameters(model, layout).hashes(layout)] == wanted
