"""Kept steps and samples: a stopped run goes on to the same bits, and an honest node's sample is replayed exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from codec.errors import UsageError
from node.status.progress import ProgressLine
from node.trainers.grpo import GrpoConfig, GrpoTrainer
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.tiny import TinyRecipe
from node.trainers.grpo.warmup import random_model, save_bf16
from scenarios.verification.models import FORMATS, Checkpoints, Versions, quantised
from scenarios.verification.numbers import mismatches
from scenarios.verification.records import KINDS_OF_SAMPLES, make_records
from scenarios.verification.samples import load_record
from scenarios.verification.sources import from_checkpoints
from scenarios.verification.steps import STATE, apply_steps, kept_steps, make_steps
from scenarios.verification.task import Sentences


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    recipe = TinyRecipe(vocabulary=32, hidden=64, inner=96, layers=2, seed=5)
    save_bf16(random_model(recipe, max_position_embeddings=64), folder)
    return folder


class NearlyTrue(SortLetters):
    """A random model never sorts eight letters: here an answer of many right letters is worth something."""

    def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        return len(set(prompt) & set(answer)) / len(set(prompt))


def trainer(base: Path) -> GrpoTrainer:
    config = GrpoConfig(lr=1e-3, prompts=2, samples=4, lr_warmup_steps=1)
    return GrpoTrainer(base, NearlyTrue(), config, seed=1, device="cpu")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps") / "tiny"
    torch.set_num_threads(1)
    with ProgressLine("steps") as progress:
        make_steps(trainer(base), base, folder, 2, progress=progress)
    return folder


def test_kept_steps_lead_to_the_trainers_bits_and_a_stopped_run_goes_on_to_the_same(base: Path, tmp_path: Path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    whole = trainer(base)
    with ProgressLine("steps") as progress:
        assert len(make_steps(whole, base, straight, 3, progress=progress)) == 3
        make_steps(trainer(base), base, stopped, 2, progress=progress)
        (stopped / "step_0003.npz").write_bytes(b"a step after the saved state")
        (stopped / "step_0003.npz").unlink()
        make_steps(trainer(base), base, stopped, 3, progress=progress)
        assert make_steps(trainer(base), base, stopped, 3, progress=progress) == []
    assert (kept_steps(straight), kept_steps(stopped)) == (3, 3)
    assert (stopped / STATE).exists()
    wanted = dict(whole.policy_bits())
    for folder in (straight, stopped):
        found = Versions(base, folder).bits(3)
        assert all((found[name] == bits).all() for name, bits in wanted.items())


def test_versions_go_forward_and_back(base: Path, run: Path):
    versions = Versions(base, run)
    first = {name: bits.copy() for name, bits in versions.bits(1).items()}
    assert any((versions.bits(2)[name] != bits).any() for name, bits in first.items())
    assert all((versions.bits(1)[name] == bits).all() for name, bits in first.items())
    with pytest.raises(UsageError, match="no step 3"):
        versions.bits(3)
    with pytest.raises(UsageError, match="another model"):
        apply_steps({"one": np.zeros(2, np.uint16)}, run, [1])


def test_two_checkpoints_are_two_versions_of_one_model(base: Path, run: Path, tmp_path: Path):
    wanted = {name: bits.copy() for name, bits in Versions(base, run).bits(2).items()}
    newer = tmp_path / "newer"
    model = Versions(base, run).model(2, "bf16")
    save_bf16(model, newer)
    both = Checkpoints(base, newer)
    assert all((both.bits(1)[name] == bits).all() for name, bits in wanted.items())
    assert all((both.bits(0)[name] == bits).all() for name, bits in Versions(base, run).bits(0).items())
    assert both.name == Checkpoints(base, newer).name != Checkpoints(newer, base).name
    source = from_checkpoints(base, newer)
    assert source[:2] == (both.name, 1)
    with pytest.raises(UsageError, match="no tokenizer"):
        source.open()
    other = tmp_path / "other"
    save_bf16(random_model(TinyRecipe(vocabulary=33, hidden=64, inner=96, layers=2, seed=5)), other)
    with pytest.raises(UsageError, match="do not have the same tensors"):
        Checkpoints(base, other)
    whole = tmp_path / "float32"
    model.float().save_pretrained(whole)
    with pytest.raises(UsageError, match="Give checkpoints in bf16"):
        Checkpoints(whole, whole)


@pytest.mark.parametrize("form", FORMATS)
def test_formats_round_within_their_group(form: str):
    values = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    values[0, :128] *= 100
    found = quantised(values, form)
    assert found.shape == values.shape
    worst = {"fp8": 0.07, "int8": 0.005, "int4": 0.08}[form]
    assert 0 < (found - values)[1].abs().max() <= worst * values[1].abs().max()
    if form == "int4":
        assert len(torch.unique(found[1, :128])) <= 15


def record(tmp_path: Path, base: Path, run: Path, task: Any, author: str, samples: int) -> dict[str, Any]:
    torch.set_num_threads(1)

    def file(attack: str) -> Path:
        return tmp_path / author / f"{attack}.npz"

    make_records(Versions(base, run), task, file, kept_steps(run), author, samples)
    first = file("honest").stat().st_mtime_ns
    make_records(Versions(base, run), task, file, kept_steps(run), author, samples)
    assert file("honest").stat().st_mtime_ns == first, "a second call drew again"
    return {kind.attack: load_record(file(kind.attack)) for kind in KINDS_OF_SAMPLES}


@pytest.mark.parametrize("author", ["bf16", "f32"])
@pytest.mark.slow
def test_honest_samples_are_replayed_exactly_and_attacks_are_not(base: Path, run: Path, tmp_path: Path, author: str):
    records = record(tmp_path, base, run, NearlyTrue(), author, 16)
    share = {}
    for attack, (ends, columns) in records.items():
        found = mismatches("replay", ends, columns)
        assert found is not None
        share[attack] = float(found.mean())
    assert share.pop("honest") == 0.0
    assert share.pop("honest_top_p") == 0.0
    assert all(found > 0.0 for found in share.values()), share
    assert share["stale"] == share["claims"] == share["int4"] == share["replayed"] == 1.0


class Letters:
    """A tokenizer, as far as `Sentences` uses one. `chat`: it has the token that ends a turn."""

    def __init__(self, chat: bool = True, end: int | None = 3) -> None:
        self.chat, self.eos_token_id = chat, end

    def get_vocab(self) -> dict[str, int]:
        return {"<|im_end|>": 7} if self.chat else {"a": 0}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.get_vocab()[token]


def test_sentences_are_worth_their_words_and_an_end():
    task = Sentences(Letters(), max_tokens=9)
    (prompt,) = task.prompts(1, 1, np.random.default_rng(0))
    assert (prompt,) == tuple(task.prompts(1, 1, np.random.default_rng(0)))
    words = "".join(map(chr, prompt)).partition("words ")[2].partition(".")[0].split(" and ")
    assert task.score(prompt, tuple(map(ord, f"The {words[0]}"))) == pytest.approx(1 / 3)
    assert task.score(prompt, (*map(ord, f"{words[1].upper()} {words[0]}"), 7)) == 1.0
    assert task.score(prompt, (65, 66)) == 0.0


def test_a_model_without_turns_is_asked_in_plain_text_and_ends_it():
    task = Sentences(Letters(chat=False), max_tokens=9)
    assert task.stop_tokens == (3,)
    (prompt,) = task.prompts(1, 1, np.random.default_rng(0))
    assert "".join(map(chr, prompt)).startswith("Write one short sentence with the words ")
    with pytest.raises(UsageError, match="no token that ends a text"):
        Sentences(Letters(chat=False, end=None))


@pytest.mark.long
def test_a_real_model_one_version_older_is_found_by_its_replays(tmp_path: Path):
    """SmolLM2-135M, two GRPO steps at 1e-6: minutes. The model is downloaded once."""
    from node.trainers.grpo.sizes import SIZES

    size = SIZES["smollm2"]
    folder = size.folder(print)
    task = Sentences.of(folder)
    config = GrpoConfig(lr=1e-6, prompts=1, samples=4, rows=4)
    torch.set_num_threads(1)
    with ProgressLine("steps") as progress:
        make_steps(GrpoTrainer(folder, task, config, device="cpu"), folder, tmp_path / "run", 2, progress=progress)
    records = record(tmp_path, folder, tmp_path / "run", task, "bf16", 4)
    assert not mismatches("replay", *records["honest"]).any()
    ends, columns = records["stale"]
    assert mismatches("replay", ends, columns).all()
    assert np.mean(columns["claim"] != columns["score_replay_v"]) > 0.5
