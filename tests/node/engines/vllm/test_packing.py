"""Experts in a kernel's own order: the order is learned by marks, or the kernel is refused. Needs no vLLM."""

import copy
import os

import numpy as np
import pytest
from layer_kit import HoldingLayer

torch = pytest.importorskip("torch")

from codec import Layout, Replica, write_patch  # noqa: E402
from codec.layout import BLOCK_ELEMENTS, TensorSpec  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm import packing as packing_module  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.boxes import Box  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.messages import Part, Tensor  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.packing import NotMoved, Packing, learn, slabs  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.shared import map_scratch, map_sealed  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.sources import OtherSource, ReplicaSource  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.weights import LiveWeights  # noqa: E402
from scenarios.engines.engine_models import step_of  # noqa: E402

EXPERTS, WIDE, HIDDEN, PADDED = 3, 6, 8, 8
"""Each expert's gate has `WIDE` rows of `HIDDEN`; the kernel pads the rows to `PADDED`."""


def tiled(weight):
    """(experts, rows, columns) -> tiles of 2 x 4, the second of two rows first; as kernels for matrix units do."""
    experts, rows, columns = weight.shape
    tiles = weight.reshape(experts, rows // 2, 2, columns // 4, 4).permute(0, 3, 1, 4, 2).flip(-1)
    return tiles.reshape(experts, rows, columns).contiguous()


def process(parameters):
    """What a kernel like vLLM's for CPUs does: gate and up padded with zeros, then tiles."""
    w13, w2 = parameters["w13"], parameters["w2"]
    padded = w13.new_zeros(EXPERTS, 2 * PADDED, HIDDEN)
    padded[:, :WIDE], padded[:, PADDED : PADDED + WIDE] = w13[:, :WIDE], w13[:, WIDE:]
    down = w2.new_zeros(EXPERTS, HIDDEN, PADDED)
    down[:, :, :WIDE] = w2
    return {"w13": tiled(padded), "w2": tiled(down)}


def loaded_form(device="meta", dtype=torch.bfloat16):
    return {
        "w13": torch.zeros(EXPERTS, 2 * WIDE, HIDDEN, dtype=dtype, device=device),
        "w2": torch.zeros(EXPERTS, HIDDEN, WIDE, dtype=dtype, device=device),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_the_order_is_that_of_the_kernel(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_MARKS", {kind: (first, 5) for kind, (first, _) in MARKS.items()})
    calls = []

    def counted(parameters):
        calls.append(1)
        as_integers = {name: p.view(getattr(torch, f"int{8 * dtype.itemsize}")) for name, p in parameters.items()}
        return {name: p.view(dtype) for name, p in process(as_integers).items()}

    packings = learn(counted, loaded_form(dtype=dtype))
    assert len(calls) > 4, "several digits"
    numbers = {name: torch.arange(1, p.numel() + 1).reshape(p.shape) for name, p in loaded_form().items()}
    for name, made in process(numbers).items():
        flat = numbers[name].reshape(-1).numpy()
        places = packings[name].live(np.arange(flat.size))
        assert np.array_equal(made.reshape(-1).numpy()[places], flat)
        assert not packings[name].identity


MARKS = dict(packing_module._MARKS)


def test_a_kernel_that_moves_nothing_is_known() -> None:
    assert all(packing.identity for packing in learn(dict, loaded_form()).values())


def doubled(parameters):
    return {name: p * 2 for name, p in parameters.items()}


def rounded(parameters):
    return {name: p.to(torch.float8_e5m2).to(p.dtype) for name, p in parameters.items()}


def narrow(parameters):
    return {name: p.to(torch.float16) for name, p in parameters.items()}


def mixed(parameters):
    return {name: p.roll(1, 0) for name, p in parameters.items()}


def mixed_between(parameters):
    w13, w2 = parameters["w13"].clone(), parameters["w2"]
    w13[:, 0], w2[:, :, 0] = w2[:, :, 0].clone(), w13[:, 0].clone()
    return {"w13": w13, "w2": w2}


def each_otherwise(parameters):
    return {name: torch.stack([p.roll(e, -1) for e, p in enumerate(q)]) for name, q in parameters.items()}


def dropped(parameters):
    return {name: p[:, :-1].contiguous() for name, p in parameters.items()}


def twice(parameters):
    return {name: torch.cat([p, p], 1) for name, p in parameters.items()}


def overwritten(parameters):
    return {name: p.index_copy(1, torch.tensor([0]), p[:, 1:2]) for name, p in parameters.items()}


def gaps(parameters):
    return {name: p.transpose(1, 2) for name, p in parameters.items()}


def fewer(parameters):
    return {"w2": parameters["w2"]}


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (doubled, "computes"), (rounded, "once"), (narrow, "as torch.float16"), (mixed, "different experts"),
        (mixed_between, "different experts"), (each_otherwise, "otherwise for each"), (dropped, "once"),
        (twice, "once"), (overwritten, "once"), (gaps, "gaps"), (fewer, "other parameters"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_more_than_move_elements_is_refused(kernel, why: str) -> None:
    with pytest.raises(NotMoved, match=why):
        learn(kernel, loaded_form())


def test_what_marks_cannot_show_is_refused() -> None:
    with pytest.raises(NotMoved, match="no marks"):
        learn(dict, {"scale": torch.zeros(3, 4, dtype=torch.int32)})
    with pytest.raises(NotMoved, match="axis of experts"):
        learn(dict, {"scale": torch.zeros(3)})
    with pytest.raises(NotMoved, match="more than"):
        learn(dict, {"scale": torch.zeros(70000, 1)})


def test_slabs_are_the_places_of_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_SLAB", 24)
    box = Box(0, (5, 3, 4), 7, (100, 1, 10), 0, (12, 4, 1))
    wanted = np.lib.stride_tricks.as_strided(np.arange(600)[7:], box.shape, [8 * step for step in box.live_strides])
    found = list(slabs(box))
    assert [part for part, _ in found] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert np.array_equal(np.concatenate([places for _, places in found]), wanted)


# ------------------------------------------------------------ a model with such experts

LAYOUT = Layout(
    (
        *(
            TensorSpec(f"expert{e}.{part}", dtype, (HIDDEN, 2 * WIDE) if part == "down" else (2 * WIDE, HIDDEN))
            for e, dtype in enumerate(("BF16", "BF16", "BF16"))
            for part in ("down", "gate", "up")
        ),
        TensorSpec("norm", "BF16", (8,)),
    )
)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in process(loaded_form("cpu")).items():
            self.register_parameter(name, torch.nn.Parameter(parameter, requires_grad=False))


class Model(torch.nn.Module):
    """One layer of experts, of which this rank of two has half, and a norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts, self.rank = Experts(), rank
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                continue
            expert, half = int(name[6]), slice(self.rank * WIDE, (self.rank + 1) * WIDE)
            if name.endswith("down"):
                self.experts.w2.data[expert].copy_(weight[:, half])
            else:
                rows = slice(0, WIDE) if name.endswith("gate") else slice(WIDE, 2 * WIDE)
                self.experts.w13.data[expert][rows].copy_(weight[half])

    def reload(self, weights) -> None:
        """As vLLM's reload: it must get no expert, since it would copy loaded weights over repacked ones."""
        given = list(weights)
        assert [name for name, _ in given] in ([], ["norm"])
        self.load_weights(given)


class Layer(HoldingLayer):
    """See `swarm_vllm.repacked.Repacked`."""

    def __init__(self, module: Experts, kernel=process) -> None:
        self.module, self._kernel = module, kernel
        self.packings, self.why, self.idle = None, "", ()
        try:
            self.packings = learn(self.process, self.loaded_form("meta"))
        except NotMoved as error:
            self.why = f"its kernel {error}"

    def loaded_form(self, device):
        return loaded_form(device)

    def process(self, parameters):
        return self._kernel(dict(parameters))


def held_replica() -> Replica:
    filled = Replica.create(LAYOUT)
    rng = np.random.default_rng(5)
    for block in range(LAYOUT.n_blocks):
        spec = LAYOUT.block(block)
        filled._writable(block)[:] = rng.integers(0, 1 << 16, spec.count)
    filled.rehash()
    return filled


TENSORS = [Tensor((t.name,), t.dtype, t.shape, LAYOUT.offset(t.name)) for t in LAYOUT.tensors]


def rank_of(held: Replica, rank: int, kernel=process) -> tuple[Model, LiveWeights]:
    model = Model(rank)
    source = ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), BLOCK_ELEMENTS)
    weights = LiveWeights(model, TENSORS, source, None, [Layer(model.experts, kernel)])
    assert not any(p.any() for p in model.parameters()), "tracing wrote a weight"
    weights.load(None, model.reload)
    return model, weights


def expected(held: Replica, rank: int):
    """What a fresh load of the replica leaves."""
    plain = Model(rank)
    plain.experts._parameters |= loaded_form("cpu")  # type: ignore[arg-type]
    plain.load_weights(
        (t.name, torch.from_numpy(held.bits(t.name).copy().view(np.int16)).view(torch.bfloat16).reshape(t.shape))
        for t in LAYOUT.tensors
    )
    return process(dict(plain.experts._parameters))


def equal(model: Model, wanted) -> bool:
    return all(
        torch.equal(getattr(model.experts, name).view(torch.int16), made.view(torch.int16))
        for name, made in wanted.items()
    )


def scratch_of(held: Replica) -> tuple[list[Part], int]:
    parts, at = [], 0
    fd = os.memfd_create("scratch")
    for tensor in LAYOUT.tensors:
        parts.append(Part(tensor.name, 0, tensor.elements, at))
        os.pwrite(fd, (~held.bits(tensor.name)).tobytes(), at)
        at += tensor.nbytes
    return parts, fd


def test_experts_in_the_kernels_order_follow_every_patch() -> None:
    held = held_replica()
    ranks = [rank_of(held, rank) for rank in range(2)]
    for rank, (model, weights) in enumerate(ranks):
        assert weights.opaque == {}
        assert equal(model, expected(held, rank))
    for seed in range(3):
        staged = step_of(held, seed, 0.02)
        fd, _ = write_patch(staged, LAYOUT)
        held.scatter(staged)
        parts, memory = scratch_of(held)
        for rank, (model, weights) in enumerate(ranks):
            before = copy.deepcopy(dict(model.experts._parameters))
            weights.stage(map_sealed(os.dup(fd)), f"0.{seed}", frozenset(t.name for t in LAYOUT.tensors))
            assert equal(model, before)  # staging touches nothing
            weights.commit(f"0.{seed}")
            assert equal(model, expected(held, rank))
            weights.rewind.undo()
            assert equal(model, before)
            weights.rewind.redo()
            weights.gather(parts, map_scratch(os.dup(memory)))
        for part in parts:
            found = np.frombuffer(os.pread(memory, part.count * 2, part.at), np.uint16)
            assert np.array_equal(found, held.bits(part.name))
        for _, weights in ranks:
            assert weights.differing(parts, map_scratch(os.dup(memory))) == []
        w13 = ranks[1][0].experts.w13.data.view(torch.int16)
        w13.reshape(-1)[PLACE] ^= 1
        assert ranks[1][1].differing(parts, map_scratch(os.dup(memory))) == ["expert1.gate"]
        w13.reshape(-1)[PLACE] ^= 1
        os.close(memory)
        os.close(fd)


PLACE = int(learn(process, loaded_form())["w13"].live(np.array([2 * WIDE * HIDDEN + 5]))[0])
"""Where element 5 of the second expert's gate is, on a rank."""


def test_a_kernel_whose_order_is_not_known_is_loaded_through_its_own_code() -> None:
    held = held_replica()

    def doubling(parameters):
        return {name: made * 2 for name, made in process(parameters).items()}

    model, weights = rank_of(held, 0, doubling)
    assert weights.opaque == dict.fromkeys(
        (t.name for t in LAYOUT.tensors if t.name != "norm"),
        "its kernel computes its w13, or mixes those of different experts",
    )
    names = sorted(weights.opaque)
    weights.remember(names)
    first = copy.deepcopy(dict(model.experts._parameters))
    weights.load(names, model.reload, OtherSource(ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), 1 << 20)))
    assert weights.unmoved(names) == []
    assert not equal(model, first)
    weights.load(names, model.reload)
    assert weights.changed(names) == []
    assert equal(model, first)


def test_a_packing_of_large_units_has_wide_places() -> None:
    packing = Packing(4, 1 << 31, np.array([3, 2, 1, 0], np.int64))
    assert packing.live(np.array([0, 5])).tolist() == [3, (1 << 31) + 2]
