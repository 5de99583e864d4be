"""Adapters in the transformers engine: peft's arithmetic, updates between two steps, proofs, and what is refused."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from codec import Checkpoint, Replica
from codec.adapter import AdapterSlots
from codec.errors import PeerError, UsageError
from codec.parts import Part, extended, part_root
from node.engines.adapters import GivenAdapter, scaling_of, slot_root
from node.engines.base import EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.interface import SharedReplica
from node.engines.judgement import Claim
from node.engines.transformers import TransformersEngine
from scenarios.engines.adapter_models import MadeAdapter, make_adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [Prompt((3, 4, 5), 0), Prompt((6, 7), 1)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Setting:
    def __init__(self, folder: Path, files: Path, **more: Any) -> None:
        checkpoint = Checkpoint.open(folder)
        for name, data in checkpoint.files.items():
            (files / name).write_bytes(data)
        self.folder = folder
        self.replica = Replica.from_checkpoint(checkpoint)
        self.layout = self.replica.layout
        self.slots = AdapterSlots.reserve(self.layout, 3, 8)
        self.engine = TransformersEngine(threads=1, device="cpu", **more)
        fd = self.replica.seal_for_readers()
        self.engine.attach_replica(SharedReplica(self.replica, fd, files, self.slots))
        self.engine.reload_replica((0, 1), self.replica.root)

    def make(self, name: str, **more: Any) -> MadeAdapter:
        settings: dict[str, Any] = {"targets": ALL, "rank": 4} | more
        return make_adapter(self.layout, self.slots, name, **settings)

    def set(self, adapter: MadeAdapter, slot: int, version: int) -> bytes:
        with adapter.given(slot, (0, version)) as given:
            root = self.engine.stage_adapter(given)
        self.engine.switch_adapter(slot)
        return root

    def greedy(self, adapter: str = "") -> list[tuple[int, ...]]:
        return [found.token_ids for found in self.engine.generate(PROMPTS, GREEDY, adapter)]


@pytest.fixture
def setting(untied_folder: Path, tmp_path: Path) -> Setting:
    return Setting(untied_folder, tmp_path)


@pytest.fixture
def halves(untied_folder: Path, tmp_path: Path) -> Setting:
    return Setting(untied_folder, tmp_path, arithmetic="bfloat16")


def peft_logits(setting: Setting, adapter: MadeAdapter, ids: torch.Tensor, folder: Path, dtype: torch.dtype) -> Any:
    """What peft computes for the same base and adapter, both loaded from folders, with matrices in this dtype."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=dtype)
    model = PeftModel.from_pretrained(base, str(adapter.save(folder)), autocast_adapter_dtype=False)
    with torch.inference_mode():
        return model.eval()(input_ids=ids, use_cache=False).logits


def engine_logits(setting: Setting, name: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), setting.engine._using(name) as model:
        return model(input_ids=ids, use_cache=False).logits


IDS = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"targets": ("q_proj", "down_proj"), "rank": 2, "alpha": 3.0},
        {"ranks": {"v_proj": 7, "up_proj": 1}, "use_rslora": True},
        {"alpha_pattern": {"q_proj": 5.0, "layers.1.mlp.up_proj": 1.0}},
    ],
    ids=["all", "some", "ranks", "alphas"],
)
def test_the_logits_are_pefts_bit_for_bit(setting: Setting, tmp_path: Path, more: dict[str, Any]) -> None:
    adapter = setting.make("a", **more)
    assert setting.set(adapter, 0, 2) == adapter.root(0)
    wanted = peft_logits(setting, adapter, IDS, tmp_path / "peft", torch.float32)
    assert torch.equal(engine_logits(setting, "a", IDS), wanted)
    assert not torch.equal(engine_logits(setting, "", IDS), wanted)


def test_they_are_pefts_in_bfloat16_too(halves: Setting, tmp_path: Path) -> None:
    adapter = halves.make("a", alpha=5.0)
    assert halves.set(adapter, 1, 2) == adapter.root(1)
    wanted = peft_logits(halves, adapter, IDS, tmp_path / "peft", torch.bfloat16)
    assert torch.equal(engine_logits(halves, "a", IDS), wanted)


def test_the_root_is_that_of_the_slot_in_the_swarms_layout(setting: Setting) -> None:
    adapter = setting.make("a")
    layout = extended(setting.layout, setting.slots)
    hashes = np.zeros((layout.n_blocks, 32), np.uint8)
    for block in range(layout.n_blocks):
        spec = layout.block(block)
        if spec.name == "~adapter/01/config":
            data = adapter.config.to_bytes()[spec.start : spec.start + spec.count]
        elif spec.name == "~adapter/01/weights":
            data = adapter.weights[spec.start : spec.start + spec.count].tobytes()
        else:
            continue
        hashes[block] = np.frombuffer(blake3(data).digest(), np.uint8)
    assert adapter.root(1) == part_root(layout, hashes, Part.adapter(1))
    assert adapter.root(1) != adapter.root(0)


def test_adapters_of_other_ranks_and_modules_are_served_side_by_side(setting: Setting) -> None:
    base = setting.greedy()
    first, second = setting.make("a"), setting.make("b", targets=("q_proj", "up_proj"), rank=8, seed=1)
    setting.set(first, 0, 2)
    alone = setting.greedy("a")
    setting.set(second, 1, 3)
    assert setting.greedy("a") == alone != base
    assert setting.greedy("b") not in (alone, base)
    assert setting.greedy() == base


def test_updates_are_exact_and_their_bits_proven(setting: Setting, untied_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    adapters = [
        setting.make("a"),
        setting.make("b", rank=2, targets=ALL[:3], seed=1),
        setting.make("c", rank=8, seed=2),
    ]
    for slot, adapter in enumerate(adapters):
        setting.set(adapter, slot, 2 + slot)
    for version in range(5, 25):
        slot = version % 3
        adapters[slot] = adapters[slot].step(version, 0.3)
        assert setting.set(adapters[slot], slot, version) == adapters[slot].root(slot)
    for slot, adapter in enumerate(adapters):
        assert setting.engine.adapter_root(slot) == adapter.root(slot)
        fresh = Setting(untied_folder, tmp_path / "fresh")
        fresh.set(adapter, 2 - slot, 9)
        assert torch.equal(engine_logits(setting, adapter.name, IDS), engine_logits(fresh, adapter.name, IDS))


def test_a_running_sequence_goes_on_with_the_new_bits(setting: Setting) -> None:
    engine, adapter = setting.engine, setting.make("a")
    setting.set(adapter, 0, 2)
    engine.begin(1, PROMPTS, GREEDY, "a")
    engine.begin(2, PROMPTS, GREEDY)
    engine.begin(3, PROMPTS[:1], GREEDY, "a")
    for _ in range(3):
        engine.step()
    changed = adapter.step(1, 1.0)
    setting.set(changed, 0, 5)
    ended: dict[int, Any] = {}
    while len(ended) < 3:
        ended |= dict(engine.step())
    for completion in (*ended[1], *ended[3]):
        assert [(s.version, s.start, s.end) for s in completion.spans] == [((0, 2), 0, 3), ((0, 5), 3, 8)]
    assert [found.token_ids for found in ended[2]] == setting.greedy()
    assert {span.version for found in ended[2] for span in found.spans} == {(0, 1)}
    # the later tokens are those that the new version draws after the earlier ones
    for prompt, completion in zip(PROMPTS, ended[1], strict=True):
        text = (*prompt.token_ids, *completion.token_ids[:3])
        (rest,) = engine.generate([Prompt(text, prompt.stream)], SamplingParams(5, temperature=0.0), "a")
        assert rest.token_ids == completion.token_ids[3:]


def test_spans_name_the_newer_one_of_base_and_adapter(setting: Setting) -> None:
    setting.set(setting.make("a"), 0, 4)
    (found, _) = setting.engine.generate(PROMPTS, GREEDY, "a")
    assert {span.version for span in found.spans} == {(0, 4)}
    setting.engine.stage([])
    setting.engine.commit((0, 6), setting.replica.root)
    (found, _) = setting.engine.generate(PROMPTS, GREEDY, "a")
    assert {span.version for span in found.spans} == {(0, 6)} == {setting.engine.version_of("a")}


def test_scores_margins_and_replays_are_the_adapters(setting: Setting) -> None:
    engine = setting.engine
    setting.set(setting.make("a"), 0, 2)
    setting.set(setting.make("b", seed=3), 1, 3)
    sampling = SamplingParams(6, seed=3, options=SamplingOptions(portable=True))
    drawn = engine.generate(PROMPTS, sampling, "a")
    for prompt, found in zip(PROMPTS, drawn, strict=True):
        scores = engine.score(prompt.token_ids, found.token_ids, sampling, "a")
        np.testing.assert_allclose(scores, found.logprobs, atol=1e-4)
        assert not np.allclose(engine.score(prompt.token_ids, found.token_ids, sampling, "b"), scores, atol=1e-3)
        claims = [
            Claim(prompt.token_ids, found.token_ids, sampling, prompt.stream, replay=True, adapter=name)
            for name in ("a", "b", "")
        ]
        ours, theirs, base = engine.judge(claims)
        assert ours.scores == found.logprobs
        assert not any(ours.margins)
        assert ours.version == (0, 2)
        assert any(theirs.margins)
        assert theirs.version == (0, 3)
        assert base.scores != found.logprobs
        assert base.version == (0, 1)
        (judged,) = engine.judge([replace_claim(claims[0], replay=False, previous=True)])
        assert judged.previous == ()
        assert not any(judged.margins)


def replace_claim(claim: Claim, **more: Any) -> Claim:
    import msgspec

    return msgspec.structs.replace(claim, **more)


def test_bits_that_are_not_the_roots_are_never_served(setting: Setting) -> None:
    adapter = setting.make("a")
    setting.set(adapter, 0, 2)
    before = setting.greedy("a")
    with adapter.step(1, 1.0).memory() as fd:
        wrong = GivenAdapter(0, adapter.config, fd, (0, 3), adapter.root(0))
        with pytest.raises(EngineError, match="not those of version"):
            setting.engine.stage_adapter(wrong)
    with pytest.raises(EngineError, match="no adapter is staged"):
        setting.engine.switch_adapter(0)
    assert setting.greedy("a") == before
    assert setting.engine.version_of("a") == (0, 2)


def test_a_live_bit_that_changed_is_found(setting: Setting) -> None:
    adapter = setting.make("a")
    setting.set(adapter, 0, 2)
    live = setting.engine._adapters
    assert live is not None
    layer = next(iter(live.at(0).layers.values()))
    layer.b.view(torch.int32)[0, 0] ^= 1 << 20
    assert setting.engine.adapter_root(0) != adapter.root(0)
    layer.b.view(torch.int32)[0, 0] ^= 1 << 20
    assert setting.engine.adapter_root(0) == adapter.root(0)


def test_a_dropped_adapter_is_gone_and_its_sequences_fail(setting: Setting) -> None:
    engine, base = setting.engine, setting.greedy()
    setting.set(setting.make("a"), 0, 2)
    engine.begin(1, PROMPTS, GREEDY, "a")
    engine.begin(2, PROMPTS, GREEDY)
    engine.step()
    engine.drop_adapter(0)
    ended = dict(engine.step())
    assert isinstance(ended[1], EngineError)
    assert "removed" in str(ended[1])
    while 2 not in ended:
        ended |= dict(engine.step())
    assert [found.token_ids for found in ended[2]] == base
    for call in (lambda: setting.greedy("a"), lambda: engine.adapter_root(0), lambda: engine.version_of("a")):
        with pytest.raises(EngineError):
            call()
    engine.drop_adapter(0)
    assert setting.greedy() == base


def test_another_adapter_in_the_same_slot_ends_the_first_ones_sequences(setting: Setting) -> None:
    engine = setting.engine
    setting.set(setting.make("a"), 0, 2)
    engine.begin(1, PROMPTS, GREEDY, "a")
    engine.step()
    setting.set(setting.make("z", seed=7), 0, 3)
    assert isinstance(dict(engine.step())[1], EngineError)
    assert engine.version_of("z") == (0, 3)


@pytest.mark.parametrize(
    ("peft", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"init_lora_weights": "pissa"}, "changing the base"),
        ({"alpha_pattern": {"^q.*": 3.0}}, "alpha_pattern"),
    ],
)
def test_what_is_not_plain_lora_is_refused_with_a_sentence(setting: Setting, peft: dict[str, Any], words: str) -> None:
    adapter = setting.make("a", **peft)
    with adapter.given(0, (0, 2)) as given, pytest.raises(UsageError, match=words):
        setting.engine.stage_adapter(given)


def test_modules_that_transformers_does_not_have_are_refused(setting: Setting) -> None:
    model = setting.engine._loaded()
    model.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    with setting.make("a").given(0, (0, 2)) as given, pytest.raises(UsageError, match="target_modules"):
        setting.engine.stage_adapter(given)


def test_memory_that_could_change_and_other_bases_are_refused(setting: Setting) -> None:
    adapter = setting.make("a")
    fd = os.memfd_create("open")
    os.write(fd, adapter.weights.tobytes())
    with pytest.raises(PeerError, match="could change"):
        setting.engine.stage_adapter(GivenAdapter(0, adapter.config, fd, (0, 2), adapter.root(0)))
    os.close(fd)
    other = replace(adapter.config, base=b"x" * 32)
    root = slot_root(0, other.to_bytes(), adapter.weights)
    with adapter.memory() as fd, pytest.raises(PeerError, match="another model"):
        setting.engine.stage_adapter(GivenAdapter(0, other, fd, (0, 2), root))


def test_scalings_are_pefts(setting: Setting) -> None:
    config = setting.make("a", rank=4, alpha=6.0, alpha_pattern={"q_proj": 8.0}).config
    assert scaling_of(config, "model.layers.0.self_attn.q_proj", 4) == 2.0
    assert scaling_of(config, "model.layers.0.self_attn.xq_proj", 4) == 1.5
    rooted = replace(config, peft={"use_rslora": True})
    assert scaling_of(rooted, "model.layers.0.self_attn.q_proj", 4) == 3.0
