from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.engines.base import EngineError, Prompt, SamplingParams
from node.engines.transformers import TransformersEngine

ROOT = b"r" * 32
SAMPLING = SamplingParams(max_tokens=6, seed=3)
PROMPTS = [Prompt((1, 2, 3), 0), Prompt((4, 5, 6), 1), Prompt((7, 8), 2), Prompt((1, 2, 3), 3)]


def checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """The folder's bf16 bits, shaped, by name."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).view(torch.int16).numpy().view(np.uint16) for name in file.keys()}  # noqa: SIM118


def layout_of(bits: dict[str, np.ndarray], **more: Any) -> Layout:
    return Layout(tuple(TensorSpec(name, "BF16", bits[name].shape, **more) for name in sorted(bits)))


def hashes_of(bits: dict[str, np.ndarray], layout: Layout) -> np.ndarray:
    """The expected `live_hashes`; small tensors only, one block each."""
    return np.stack([np.frombuffer(blake3(bits[t.name].tobytes()).digest(), np.uint8) for t in layout.tensors])


def changed(bits: dict[str, np.ndarray], seed: int = 0, share: float = 0.05, small: bool = True):
    """(changes, the bits after them). `small`: each value becomes a neighbouring one; else any bit pattern."""
    rng, patch, new = np.random.default_rng(seed), [], {}
    for name, old in bits.items():
        flat = old.reshape(-1).copy()
        at = np.flatnonzero(rng.random(flat.size) < share).astype(np.int64)
        flat[at] = flat[at] ^ 1 if small else rng.integers(0, 1 << 16, len(at)).astype(np.uint16)
        patch.append((name, at, flat[at]))
        new[name] = flat.reshape(old.shape)
    return patch, new


def engine_on(folder: Path, arithmetic: Any = "auto") -> TransformersEngine:
    engine = TransformersEngine(threads=1, device="cpu", arithmetic=arithmetic)
    engine.load(folder)
    engine.attach(layout_of(checkpoint(folder)), (0, 0), ROOT)
    return engine


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", ["tied_folder", "untied_folder"])
def test_commit_equals_a_fresh_engine(folder, arithmetic, request, tmp_path):
    base = request.getfixturevalue(folder)
    bits = checkpoint(base)
    engine = engine_on(base, arithmetic)
    layout = layout_of(bits)
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(bits, layout))
    before = engine.generate(PROMPTS, SAMPLING)
    for v in range(1, 4):
        patch, bits = changed(bits, seed=v)
        engine.stage(iter(patch))
        assert engine.generate(PROMPTS, SAMPLING)[0].spans[0].version == (0, v - 1)  # staging changes nothing yet
        assert engine.commit((0, v), bytes([v]) * 32) > 0
        np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(bits, layout))
    assert (engine.version, engine.root) == ((0, 3), b"\x03" * 32)

    fresh = engine_on(base, arithmetic)
    fresh.reload(lambda name: bits[name], (0, 3), b"\x03" * 32)
    after = engine.generate(PROMPTS, SAMPLING)
    assert after == fresh.generate(PROMPTS, SAMPLING)
    assert [c.logprobs for c in after] != [c.logprobs for c in before]


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_any_bit_pattern_survives(tied_folder, arithmetic):
    bits = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder, arithmetic), layout_of(bits)
    patch, bits = changed(bits, share=0.9, small=False)  # NaN payloads, -0, denormals, infinities among them
    engine.stage(patch)
    engine.commit((0, 1), ROOT)
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(bits, layout))


def test_staging_replaces_and_is_idempotent(tied_folder):
    bits = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder), layout_of(bits)
    dropped, _ = changed(bits, seed=1)
    patch, new = changed(bits, seed=2)
    engine.stage(dropped)
    for v in (1, 2):
        engine.stage(patch)
        engine.commit((0, v), ROOT)
        np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(new, layout))


def test_staging_in_another_thread_does_not_change_generation(tied_folder):
    bits = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder), layout_of(bits)
    quiet = engine.generate(PROMPTS, SAMPLING)
    patch, new = changed(bits, share=0.5)
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(engine.stage, patch * 20)  # twenty times the same bits: long enough to overlap
        busy = [engine.generate(PROMPTS, SAMPLING) for _ in range(5)]
        staging.result()
    assert busy == [quiet] * 5
    engine.commit((0, 1), ROOT)
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(new, layout))


def test_a_commit_without_bits_takes_the_name(tied_folder):
    engine = engine_on(tied_folder)
    engine.commit((1, 7), ROOT)
    assert engine.generate(PROMPTS[:1], SAMPLING)[0].spans[0].version == (1, 7)


@pytest.mark.parametrize(
    ("name", "indices", "bits"),
    [
        ("model.nothing", [0], [1]),
        ("model.norm.weight", [32], [1]),
        ("model.norm.weight", [-1], [1]),
        ("model.norm.weight", [3, 2], [1, 1]),
        ("model.norm.weight", [2, 2], [1, 1]),
        ("model.norm.weight", [1, 2], [1]),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_change_nothing(tied_folder, name, indices, bits):
    base = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder), layout_of(base)
    good, _ = changed(base)
    with pytest.raises(ValueError, match="patch"):
        engine.stage([*good, (name, np.array(indices, np.int64), np.array(bits, np.uint16))])
    with pytest.raises(ValueError, match="uint32"):
        engine.stage([("model.norm.weight", np.array([0]), np.array([1], np.uint32))])
    engine.commit((0, 1), ROOT)
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(base, layout))


def test_a_failed_commit_poisons_until_reload(tied_folder):
    bits = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder), layout_of(bits)
    patch, new = changed(bits)
    engine.stage(patch)
    engine._staged.insert(3, Broken())  # ty: ignore
    with pytest.raises(RuntimeError, match="device lost"):
        engine.commit((0, 1), ROOT)
    assert engine.poisoned is not None
    assert engine.version == (0, 0)
    assert not np.array_equal(engine.live_hashes(layout), hashes_of(bits, layout))  # it is a mix of two versions
    for call in (
        lambda: engine.generate(PROMPTS, SAMPLING),
        lambda: engine.stage(patch),
        lambda: engine.commit((0, 1), ROOT),
    ):
        with pytest.raises(EngineError, match="poisoned"):
            call()
    engine.reload(lambda name: new[name].reshape(-1), (0, 1), ROOT)
    assert engine.poisoned is None
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(new, layout))
    engine.generate(PROMPTS, SAMPLING)


class Broken:
    def write(self) -> None:
        raise RuntimeError("device lost")


def test_a_failed_reload_stays_poisoned(tied_folder):
    engine = engine_on(tied_folder)
    with pytest.raises(ValueError, match="elements"):
        engine.reload(lambda name: np.zeros(3, np.uint16), (0, 1), ROOT)
    with pytest.raises(EngineError, match="reload"):
        engine.generate(PROMPTS, SAMPLING)


def test_rows_do_not_depend_on_their_batch(tied_folder):
    engine = engine_on(tied_folder)
    sampling = SamplingParams(max_tokens=12, seed=9, stop_tokens=(0, 1, 2))
    prompts = [Prompt((5, 6, i % 30), i) for i in range(40)] + [Prompt((5, 6), 40)]
    together = engine.generate(prompts, sampling)
    assert [engine.generate([p], sampling)[0].token_ids for p in prompts] == [c.token_ids for c in together]
    assert [c.token_ids for c in engine.generate(prompts[::-1], sampling)] == [c.token_ids for c in together][::-1]
    assert {c.finish_reason for c in together} == {"stop", "length"}
    for c in together:
        assert (c.finish_reason == "stop") == (c.token_ids[-1] in (0, 1, 2))
        assert not set(c.token_ids[:-1]) & {0, 1, 2}
        assert len(c.token_ids) == len(c.logprobs) == c.spans[0].end <= 12


def test_logprobs_are_those_of_a_plain_forward(tied_folder):
    engine = engine_on(tied_folder)
    sampling = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
    completion = engine.generate([Prompt((3, 9, 27))], sampling)[0]
    with torch.no_grad():
        logits = engine._loaded()(input_ids=torch.tensor([(3, 9, 27, *completion.token_ids)])).logits[0, 2:-1]
    wanted = torch.log_softmax(logits / 0.7, -1)[range(8), completion.token_ids]
    torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=0)


def test_an_engine_that_is_not_loaded_or_attached_refuses(tied_folder):
    engine = TransformersEngine(threads=1, device="cpu")
    with pytest.raises(EngineError, match="loaded"):
        engine.generate(PROMPTS, SAMPLING)
    engine.load(tied_folder)
    with pytest.raises(EngineError, match="attached"):
        engine.stage([])
    with pytest.raises(ValueError, match="token id"):
        engine.generate([Prompt((40,))], SAMPLING)


def test_folders_without_a_model_are_refused(tied_folder, tmp_path):
    engine = TransformersEngine(threads=1, device="cpu")
    with pytest.raises(UsageError, match=r"config\.json"):
        engine.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing_known"}')
    with pytest.raises(UsageError, match="cannot be loaded"):
        engine.load(tmp_path)
    config = (tied_folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="cannot be loaded"):  # no weights
        engine.load(tmp_path)
    weights = (tied_folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(UsageError, match="cannot be loaded"):  # cut short
        engine.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 40', '"vocab_size": 41'))
    with pytest.raises(UsageError, match="cannot be loaded"):  # other shapes
        engine.load(tmp_path)


def test_layouts_of_another_model_are_refused(tied_folder, untied_folder):
    tied = checkpoint(tied_folder)
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(tied_folder)
    with pytest.raises(UsageError, match="lacks"):
        engine.attach(layout_of({name: bits for name, bits in tied.items() if "norm" not in name}))
    with pytest.raises(UsageError, match="lacks"):
        engine.attach(layout_of(tied | {"model.more": np.zeros(3, np.uint16)}))
    with pytest.raises(UsageError, match=r"\(3,\)"):
        engine.attach(layout_of(tied | {"model.norm.weight": np.zeros(3, np.uint16)}))
    with pytest.raises(UsageError, match="I16"):
        engine.attach(Layout(tuple(TensorSpec(n, "I16", tied[n].shape) for n in sorted(tied))))
    aliases = {"model.embed_tokens.weight": ("lm_head.weight",)}
    tied_layout = Layout(tuple(TensorSpec(n, "BF16", tied[n].shape, aliases.get(n, ())) for n in sorted(tied)))
    engine.attach(tied_layout)
    engine.load(untied_folder)
    with pytest.raises(UsageError, match="ties"):
        engine.attach(tied_layout)


def test_tensors_stored_apart_are_untied_in_a_model_that_ties_them(tied_folder, untied_folder):
    """`from_pretrained` does the same where both are stored and differ, whatever the config says."""
    bits = checkpoint(untied_folder)
    engine, layout = TransformersEngine(threads=1, device="cpu"), layout_of(bits)
    engine.load(tied_folder, weights=False)
    engine.attach(layout)
    engine.reload(lambda name: bits[name], (0, 0), b"")
    np.testing.assert_array_equal(engine.live_hashes(layout), hashes_of(bits, layout))
    prompts, sampling = [Prompt((1, 2, 3), stream=i) for i in range(4)], SamplingParams(max_tokens=8)
    wanted = engine_on(untied_folder).generate(prompts, sampling)
    assert [c.logprobs for c in engine.generate(prompts, sampling)] == [c.logprobs for c in wanted]


def test_arithmetic_on_live_parameters_is_found(tied_folder):
    bits = checkpoint(tied_folder)
    engine, layout = engine_on(tied_folder), layout_of(bits)
    with torch.no_grad():
        engine._loaded().get_parameter("model.norm.weight").mul_(1.0001)
    wrong = (engine.live_hashes(layout) != hashes_of(bits, layout)).any(1)
    assert [t.name for t, w in zip(layout.tensors, wrong, strict=True) if w] == ["model.norm.weight"]
