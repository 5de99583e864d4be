"""A policy and its draft model as one map: what is written where, and what a vLLM is told. Needs no vLLM."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from codec import Layout, Replica, write_patch  # noqa: E402
from codec.errors import UsageError  # noqa: E402
from codec.layout import BLOCK_ELEMENTS, FileSpec, TensorSpec  # noqa: E402
from codec.parts import draft_name, extended  # noqa: E402
from node.engines.vllm.compatibility import check_draft, check_files, tensors_of  # noqa: E402
from node.engines.vllm.installed import Installed  # noqa: E402
from node.engines.vllm.invariance import class_of  # noqa: E402
from node.engines.vllm.launch import StartedVllm  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm import drafted  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.messages import Front, Policy, Rank  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.shared import map_sealed  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.sources import ReplicaSource  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.weights import LiveWeights  # noqa: E402
from node.engines.vllm.server import ServerOptions, drafting, flags  # noqa: E402
from node.engines.vllm.speculation import DraftModel, Drafts, count_drafts, method_of  # noqa: E402
from node.verification.classes import ArithmeticClass  # noqa: E402
from scenarios.engines.engine_models import step_of  # noqa: E402

CONFIG = FileSpec("config.json", 2, b"c" * 32)
BASE = Layout((TensorSpec("embed", "BF16", (10, 8)), TensorSpec("up", "BF16", (6, 8))), (CONFIG,))
HEAD = Layout((TensorSpec("fc", "BF16", (8, 16)), TensorSpec("up", "BF16", (4, 8))), (CONFIG,))
LAYOUT = extended(BASE, draft=HEAD)


class Plain(torch.nn.Module):
    """A model whose parameters have the names and shapes of its checkpoint."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        for spec in layout.tensors:
            self.register_parameter(spec.name, torch.nn.Parameter(torch.zeros(spec.shape, dtype=torch.bfloat16)))

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)


@pytest.fixture
def held() -> Replica:
    filled, rng = Replica.create(LAYOUT), np.random.default_rng(0)
    for block in range(LAYOUT.n_blocks):
        filled._writable(block)[:] = rng.integers(0, 1 << 16, LAYOUT.block(block).count)
    filled.rehash()
    return filled


def source_of(held: Replica) -> ReplicaSource:
    return ReplicaSource(map_sealed(os.dup(held.seal_for_readers())), BLOCK_ELEMENTS)


def words(parameter: torch.Tensor) -> np.ndarray:
    return parameter.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def assert_live(policy: Plain, draft: Plain, held: Replica) -> None:
    for spec in BASE.tensors:
        assert np.array_equal(words(getattr(policy, spec.name)), held.bits(spec.name)), spec.name
    for spec in HEAD.tensors:
        assert np.array_equal(words(getattr(draft, spec.name)), held.bits(draft_name(spec.name))), spec.name


def test_a_version_is_written_into_both_models(held: Replica) -> None:
    policy, draft = Plain(BASE), Plain(HEAD)
    both = drafted.both(policy, draft)
    weights = LiveWeights(both, tensors_of(LAYOUT), source_of(held))
    weights.check_apart(drafted.PREFIX)
    assert not weights.opaque
    weights.load(None, both.load_weights)
    assert_live(policy, draft, held)
    staged = step_of(held, 1, 0.3)
    fd, _ = write_patch(staged, LAYOUT)
    held.scatter(staged)
    weights.stage(map_sealed(fd), "1", frozenset(spec.name for spec in LAYOUT.tensors))
    weights.commit("1")
    assert_live(policy, draft, held)


def test_modules_of_the_policy_keep_their_names(held: Replica) -> None:
    policy, draft = torch.nn.Module(), Plain(HEAD)
    policy.add_module("inner", Plain(BASE))
    policy.load_weights = policy.inner.load_weights
    weights = LiveWeights(drafted.both(policy, draft), tensors_of(LAYOUT), source_of(held))
    assert weights.modules["up"] == ("inner",)
    assert weights.modules[draft_name("up")] == ("~draft",)
    assert drafted.both(policy, None) is policy


def test_a_draft_in_the_memory_of_the_policy_is_refused(held: Replica) -> None:
    policy, draft = Plain(BASE), Plain(HEAD)
    policy.up.data = torch.zeros(6, 8, dtype=torch.bfloat16)
    draft.up = torch.nn.Parameter(policy.up.data[:4])
    weights = LiveWeights(drafted.both(policy, draft), tensors_of(LAYOUT), source_of(held))
    with pytest.raises(ValueError, match="the draft's up in the memory of up"):
        weights.check_apart(drafted.PREFIX)


@pytest.mark.parametrize("names", [["a", "~_draft/b"], ["a"], ["~_draft/b", "~_draft/c"], []])
def test_each_loader_gets_its_own_weights(names: list[str]) -> None:
    got: dict[str, list[str]] = {}

    def loader(whose: str):
        return lambda pairs: got.setdefault(whose, []).extend(name for name, _ in pairs)

    drafted.reload([(name, torch.zeros(1)) for name in names], loader("policy"), loader("draft"))
    wanted = {"policy": [n for n in names if n < "~"], "draft": [n[len(drafted.PREFIX) :] for n in names if n > "~"]}
    assert got == {whose: found for whose, found in wanted.items() if found}


def test_weights_of_a_draft_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="no draft model"):
        drafted.reload([("~_draft/b", torch.zeros(1))], list, None)


def test_the_tensors_of_each_model() -> None:
    tensors = tensors_of(LAYOUT)
    assert [tensor.names for tensor in drafted.of_policy(tensors)] == [("embed",), ("up",)]
    assert [tensor.names for tensor in drafted.of_draft(tensors)] == [("fc",), ("up",)]
    assert [tensor.offset for tensor in drafted.of_draft(tensors)] == [tensor.offset for tensor in tensors[2:]]


def test_files_of_the_draft_are_not_looked_for_in_the_policys_folder() -> None:
    front = Front(1, "0.32", 1, {"config.json": CONFIG.hash}, "", None)
    check_files(LAYOUT, front, "vLLM")
    with pytest.raises(UsageError, match="is not the swarm's"):
        check_files(LAYOUT, Front(1, "0.32", 1, {"config.json": b"d" * 32}, "", None), "vLLM")


def test_a_draft_that_cannot_be_written_in_place_is_refused() -> None:
    check_draft({"up": "it is quantized"})
    with pytest.raises(UsageError, match=r"its fc cannot be written in place \(repacked\).*--draft-tokens 0"):
        check_draft({draft_name("fc"): "repacked"})


@pytest.mark.parametrize(
    ("config", "names", "method"),
    [
        ({}, ["model.layers.0.up.weight"], "draft_model"),
        ({"architectures": ["LlamaForCausalLM"]}, ["fc.weight", "layers.0.up.weight"], "eagle"),
        ({}, ["fc.weight", "midlayer.up.weight"], "eagle3"),
        ({}, ["d2t", "model.fc.weight"], "eagle3"),
        ({"model_type": "mimo_mtp"}, ["up.weight"], "mtp"),
        ({"num_nextn_predict_layers": 1}, ["up.weight"], "mtp"),
        ({"num_nextn_predict_layers": 0, "model_type": None}, ["mlp.c_fc.weight"], "draft_model"),
    ],
)
def test_how_a_draft_proposes(config: dict, names: list[str], method: str) -> None:
    assert method_of(config, names) == method


def test_flags_of_a_vllm_with_a_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = DraftModel.of(tmp_path, LAYOUT)
    found = drafting(model, ServerOptions(1, ranks=2, draft_tokens=5))
    assert found[0] == "--speculative-config"
    assert json.loads(found[1]) == {
        "method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2,
    }  # fmt: skip
    more = flags(tmp_path, 8000, tmp_path / "socket", 1, True, model)
    extra = json.loads(more[more.index("--model-loader-extra-config") + 1])
    assert extra == {"socket": str(tmp_path / "socket"), "draft": str(tmp_path)}
    assert drafting(None, ServerOptions(1)) == []


def test_an_old_plugin_refuses_a_draft(tmp_path: Path) -> None:
    started = StartedVllm(Installed(Path("python"), "0.32", True, True, True), tmp_path / "log", ServerOptions(1))
    with pytest.raises(UsageError, match=r"too old for a draft model.*--draft-tokens 0"):
        started.launch(tmp_path, tmp_path / "socket", draft=DraftModel(tmp_path, "eagle"))


METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="policy"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} 1.0e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="policy"} 1.7e+09
vllm:spec_decode_num_drafts_total{engine="1",model_name="policy"} 10.0
"""


def test_the_acceptance_length_is_read_from_vllms_metrics() -> None:
    assert count_drafts(METRICS) == Drafts(50, 100)
    assert count_drafts(METRICS).acceptance == 3.0
    assert count_drafts("vllm:other 3").acceptance is None


@pytest.mark.parametrize("policy", ["continue", "recompute"])
def test_a_vllm_with_a_draft_is_of_a_class_of_its_own(policy: Policy) -> None:
    """The name of the attention is cut to ten characters, which `draft` survives."""
    front = SimpleNamespace(hello=Front(1, "0.32.0+cpu", 1, {}, "", None))
    rank = SimpleNamespace(hello=Rank(1, 0, 1, "cpu-avx512", "e3ac00c4", "bfloat16", "CPU_ATTN"))
    links: Any = front, [rank]
    with_draft, without = (class_of(*links, policy, drafts=drafts) for drafts in (True, False))
    assert with_draft != without
    assert "draft" in ArithmeticClass.named([with_draft], "").attention
    assert "draft" not in without
