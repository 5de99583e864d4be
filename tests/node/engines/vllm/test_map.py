"""Where checkpoint elements are live in a model that packs and splits them, found by its own loader. Needs no vLLM."""

import os
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codec import Layout, Replica, write_patch  # noqa: E402
from codec.layout import BLOCK_ELEMENTS, TensorSpec  # noqa: E402
from node.engines.vllm.classes import Classes  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.boxes import Box  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.messages import Part, Tensor  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.shared import Unsealed, map_scratch, map_sealed  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.sources import OtherSource, ReplicaSource  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.weights import LiveWeights, NotStaged  # noqa: E402
from scenarios.engines.engine_models import step_of  # noqa: E402

LAYOUT = Layout(
    (
        TensorSpec("embed", "BF16", (10, 8), ("head",)),
        *(TensorSpec(f"expert{e}.{part}", "BF16", (4, 8)) for e in range(3) for part in ("gate", "up")),
        TensorSpec("gate", "BF16", (6, 8)),
        TensorSpec("out", "BF16", (8, 12)),
        TensorSpec("scale", "F32", (8,)),
        TensorSpec("twisted", "BF16", (4, 4)),
        TensorSpec("up", "BF16", (6, 8)),
    )
)


class Packed(torch.nn.Module):
    """A rank's part of a model, packed and split as vLLM does it.

    Gate and up are one tensor, also for all experts; `out` is split by columns; rows are padded; one weight is bf16 in
    the engine and fp32 in the checkpoint; one is transposed by its loader.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        bf16 = torch.bfloat16
        self.embed = torch.nn.Parameter(torch.zeros(16 // world, 8, dtype=bf16))
        self.gate_up = torch.nn.Parameter(torch.zeros(12 // world, 8, dtype=bf16))
        self.experts = torch.nn.Parameter(torch.zeros(3, 8 // world, 8, dtype=bf16))
        self.out = torch.nn.Parameter(torch.zeros(8, 12 // world, dtype=bf16))
        self.scale = torch.nn.Parameter(torch.zeros(8, dtype=bf16))
        self.twisted = torch.nn.Parameter(torch.zeros(4, 4, dtype=bf16))

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name.startswith("expert"):
                self._expert(int(name[6]), name.endswith("up"), weight)
            else:
                getattr(self, "_" + name)(weight)

    def _expert(self, expert: int, up: bool, weight) -> None:
        rows = 4 // self.world
        part = weight.narrow(0, self.rank * rows, rows)
        self.experts.data[expert].narrow(0, rows if up else 0, rows).copy_(part)

    def _embed(self, weight) -> None:
        rows = 16 // self.world
        part = weight[self.rank * rows : (self.rank + 1) * rows]
        self.embed.data[: len(part)].copy_(part)
        self.embed.data[len(part) :].fill_(0)

    def _head(self, weight) -> None:
        raise KeyError("head")

    def _half(self, weight, which: int) -> None:
        rows = 6 // self.world
        part = weight.narrow(0, self.rank * rows, rows)
        self.gate_up.data.narrow(0, which * rows, rows).copy_(part)

    def _gate(self, weight) -> None:
        self._half(weight, 0)

    def _up(self, weight) -> None:
        self._half(weight, 1)

    def _out(self, weight) -> None:
        columns = 12 // self.world
        self.out.data.copy_(weight.narrow(1, self.rank * columns, columns))

    def _scale(self, weight) -> None:
        self.scale.data.copy_(weight)

    def _twisted(self, weight) -> None:
        self.twisted.data.copy_(weight.t().contiguous() * 2)


def replica(seed: int = 0) -> Replica:
    filled = Replica.create(LAYOUT)
    rng = np.random.default_rng(seed)
    for block in range(LAYOUT.n_blocks):
        spec = LAYOUT.block(block)
        filled._writable(block)[:] = rng.integers(0, 1 << 16, spec.count)
    filled.rehash()
    return filled


def ranks_of(held: Replica, world: int) -> list[tuple[Packed, LiveWeights]]:
    tensors = [Tensor((t.name, *t.aliases), t.dtype, t.shape, LAYOUT.offset(t.name)) for t in LAYOUT.tensors]
    out = []
    for rank in range(world):
        model = Packed(rank, world)
        source = ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), BLOCK_ELEMENTS)
        weights = LiveWeights(model, tensors, source)
        assert not any(p.any() for p in model.parameters()), "tracing wrote a weight"
        weights.load(None, model.load_weights)
        out.append((model, weights))
    return out


def scratch(parts: list[Part], held: Replica) -> int:
    fd = os.memfd_create("scratch")
    os.ftruncate(fd, sum(part.count * 2 for part in parts))
    for part in parts:
        os.pwrite(fd, (~held.bits(part.name)[part.start : part.start + part.count]).tobytes(), part.at)
    return fd


EXPERTS = tuple(f"expert{e}.{part}" for e in range(3) for part in ("gate", "up"))
SCATTERED = ("embed", "gate", "out", "up", *EXPERTS)
PARTS = [Part("embed", 0, 80, 0), Part("gate", 0, 48, 160), Part("out", 0, 96, 256), Part("up", 8, 40, 448)]
PARTS += [Part(name, 0, 32, 528 + 64 * i) for i, name in enumerate(EXPERTS)]


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_together_hold_every_element_and_follow_every_patch(world: int) -> None:
    held = replica()
    ranks = ranks_of(held, world)
    for _, weights in ranks:
        assert set(weights.opaque) == {"scale", "twisted"}
    for name in SCATTERED:
        assert sum(weights.covered[name] for _, weights in ranks) == LAYOUT.tensor(name).elements
    for seed in range(3):
        staged = step_of(held, seed, 0.2)
        fd, _ = write_patch(staged, LAYOUT)
        held.scatter(staged)
        before = [[p.clone() for p in model.parameters()] for model, _ in ranks]
        for _, weights in ranks:
            weights.stage(map_sealed(os.dup(fd)), f"0.{seed}", frozenset(SCATTERED))
        for (model, _), kept in zip(ranks, before, strict=True):  # staging touches nothing
            assert all(
                torch.equal(a.view(torch.int16), b.view(torch.int16))
                for a, b in zip(model.parameters(), kept, strict=True)
            )
        os.close(fd)
        for _, weights in ranks:
            with pytest.raises(NotStaged):
                weights.commit("0.99")
            weights.commit(f"0.{seed}")
        memory = scratch(PARTS, held)
        for _, weights in ranks:
            weights.gather(PARTS, map_scratch(os.dup(memory)))
        for part in PARTS:
            found = np.frombuffer(os.pread(memory, part.count * 2, part.at), np.uint16)
            assert np.array_equal(found, held.bits(part.name)[part.start : part.start + part.count])
        for _, weights in ranks:
            assert weights.differing(PARTS, map_scratch(os.dup(memory))) == []
        os.close(memory)


def test_a_copy_that_differs_on_one_rank_is_found() -> None:
    held = replica()
    ranks = ranks_of(held, 2)
    memory = scratch(PARTS, held)
    for _, weights in ranks:
        weights.gather(PARTS, map_scratch(os.dup(memory)))
    ranks[1][0].out.data.view(torch.int16)[3, 2] ^= 1
    assert [weights.differing(PARTS, map_scratch(os.dup(memory))) for _, weights in ranks] == [[], ["out"]]
    ranks[0][1].remember(["scale"])
    assert ranks[0][1].changed(["scale"]) == []
    ranks[0][0].scale.data.view(torch.int16)[1] ^= 1
    assert ranks[0][1].changed(["scale"]) == ["scale"]
    os.close(memory)


class Helper:
    """An object like a kernel or a quantization method, which is not a module."""

    def __init__(self, twin: Any) -> None:
        self.kernel = Space(twin=twin)


class Beside(torch.nn.Module):
    """A model with one derived tensor: of `gate`, in a helper of the module above it.

    The view of `up` shares its storage, and the table and the number are not derived from weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.above = torch.nn.Module()
        for name in ("gate", "up"):
            layer = torch.nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
            setattr(self.above if name == "gate" else self, name, layer)
        self.seen = torch.nn.Parameter(self.up.weight.data.t(), requires_grad=False)
        self.turns = torch.nn.Module()
        self.turns.register_buffer("table", torch.ones(16))
        self.scale = torch.tensor(2.0)
        self.above.helper = Helper(torch.zeros(8, 6, dtype=torch.bfloat16))  # type: ignore[assignment]

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            layer = self.above.gate if name == "gate" else self.up
            layer.weight.data.copy_(weight)

    def reload(self, weights) -> None:
        """As in vLLM, loading derives the tensor again."""
        self.load_weights(weights)
        self.above.helper = Helper(self.above.gate.weight.data.t().contiguous())  # type: ignore[assignment]


def test_tensors_derived_from_weights_are_found_and_must_follow() -> None:
    held = replica()
    tensors = [Tensor((t.name,), t.dtype, t.shape, LAYOUT.offset(t.name)) for t in LAYOUT.tensors]
    source = ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), BLOCK_ELEMENTS)
    model = Beside()
    weights = LiveWeights(model, [t for t in tensors if t.names[0] in ("gate", "up")], source)
    assert weights.opaque == {"gate": "above.helper.kernel.twin is derived from it"}
    weights.load(["gate"], model.reload)
    weights.remember(["gate"])
    first = model.above.helper.kernel.twin.clone()
    assert weights.unmoved(["gate"]) == ["above.helper.kernel.twin", "gate"]
    weights.load(["gate"], model.reload, OtherSource(source))
    assert (weights.unmoved(["gate"]), weights.changed(["gate"])) == ([], ["gate"])
    weights.load(["gate"], model.reload)
    assert weights.changed(["gate"]) == []
    assert torch.equal(model.above.helper.kernel.twin.view(torch.int16), first.view(torch.int16))
    # a reload that does not derive the tensor again
    weights.load(["gate"], model.load_weights, OtherSource(source))
    assert weights.unmoved(["gate"]) == ["above.helper.kernel.twin"]


@given(st.data())
def test_a_box_maps_like_numpy_does(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    high, wide = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
    pad = data.draw(st.integers(0, 3))
    box = Box(0, (high, wide), pad, (wide + pad, 1), top * columns + left, (columns, 1))
    checkpoint = np.arange(rows * columns)
    live = np.full(pad + high * (wide + pad), -1)
    chosen = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
    which, places = box.map(chosen.astype(np.int64))
    live[places] = checkpoint[chosen][which]
    inside = {(r, c) for r in range(top, top + high) for c in range(left, left + wide)}
    for r in range(high):
        for c in range(wide):
            at = (top + r) * columns + left + c
            assert live[pad + r * (wide + pad) + c] == (at if at in chosen else -1)
    assert places.size == sum(divmod(int(i), columns) in inside for i in chosen)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    part = box.rows(columns, start * columns, (stop - start) * columns)
    shared = range(max(top, start), min(top + high, stop))
    assert (part is None) == (not len(shared))
    if part is not None:
        assert part.elements == len(shared) * wide
        assert part.offset == shared[0] * columns + left
        assert part.live_offset == pad + (shared[0] - top) * (wide + pad)


def test_memory_that_a_receiver_could_write_is_refused(tmp_path) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(loose, b"x" * 64)
    with pytest.raises(Unsealed, match="seals"):
        map_sealed(loose)
    file = tmp_path / "replica"
    file.write_bytes(b"x" * 64)
    with pytest.raises(Unsealed, match="can write"):
        map_sealed(os.open(file, os.O_RDWR))
    assert map_sealed(os.open(file, os.O_RDONLY)).size == 64
    held = replica()
    sealed = map_sealed(os.dup(held.seal_for_readers()))
    with pytest.raises(ValueError, match="read-only"):
        sealed[0] = 1


def test_modules_are_loaded_whole() -> None:
    modules = {"q": frozenset({"qkv"}), "k": frozenset({"qkv"}), "g": frozenset({"mlp"}), "n": frozenset({"norm"})}
    classes = Classes.of({"q": "repacked"}, modules)
    assert set(classes.loaded) == {"q", "k"}
    assert classes.to_load({"k", "n"}) == ("k", "q")
    assert classes.to_load({"g", "n"}) == ()
