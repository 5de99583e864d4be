import msgspec
import numpy as np
import pytest

from codec.checkpoint import Checkpoint
from node.trainers.grpo import __main__ as program
from node.trainers.grpo import sizes
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.trainer import GrpoConfig


@pytest.fixture
def small_tiny(base, monkeypatch):
    """`tiny` replaced by a model that needs no warm-up."""
    config = GrpoConfig(lr=1e-3, prompts=2, samples=4)
    monkeypatch.setitem(sizes.SIZES, "tiny", sizes.Size(lambda progress: base, lambda folder: SortLetters(3), config))


def test_json_and_snapshots(small_tiny, base, tmp_path, capsys):
    folder = tmp_path / "kept"
    code = program.main(["--steps", "3", "--json", "--snapshots", str(folder), "--snapshots-from", "2"])
    rows = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"reward", "density", "loss", "grad_norm", "seconds", "sample_s", "pause_s", "changed"} <= set(rows[0])
    assert sorted(path.name for path in folder.iterdir()) == ["v0002", "v0003"]
    before, after = Checkpoint.open(folder / "v0002"), Checkpoint.open(folder / "v0003")
    changed = sum(int((before.bits(name) != after.bits(name)).sum()) for name in before.names)
    assert changed == rows[2]["changed"]
    assert before.layout.hash == Checkpoint.open(base).layout.hash


def test_each_step_prints_a_line(small_tiny, capsys):
    assert program.main(["--steps", "2", "--lr", "1e-5", "--seed", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for word in ("reward", "density", "loss", " s "):
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (["--size", "huge"], "take one of"),
        (["--steps", "-1"], "negative"),
        (["--threads", "0"], "at least 1"),
        (["--lr", "x"], "--lr"),
        (["--what"], "--what"),
    ],
)
def test_a_user_error_is_one_sentence(small_tiny, capsys, arguments, error_text):
    assert program.main(arguments) == 2
    captured = capsys.readouterr()
    assert error_text in captured.err + captured.out
    assert "Traceback" not in captured.err + captured.out


def test_smollm2_names_the_packages_that_it_lacks(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    monkeypatch.setattr("node.settings.extras.find_spec", lambda name: None)
    assert program.main(["--size", "smollm2"]) == 2
    assert "smollm2 needs gguf and accelerate: " in capsys.readouterr().err
    assert list(tmp_path.rglob("config.json")) == []


def test_continue_text_scores_shared_tokens():
    from node.trainers.grpo.small import ContinueText

    task = ContinueText(np.array([[1, 2, 7, 7], [3, 4, 8, 9]]))
    assert sorted(task.prompts(1, 2, np.random.default_rng(0))) == [(1, 2), (3, 4)]
    assert task.score((1, 2), (7, 7)) == 1.0
    assert task.score((1, 2), (7, 8)) == 0.5
    assert task.score((3, 4), (9, 9)) == 0.5
    assert task.score((3, 4), (1, 2)) == 0.0


def test_small_is_made_from_the_standard_library(tmp_path):
    from node.trainers.grpo.small import ContinueText, SmallRecipe, make_small

    recipe = SmallRecipe(
        vocabulary=300, hidden=32, inner=64, layers=1, heads=2, kv_heads=1, text_characters=60_000, steps=2, rows=2
    )
    recipe = msgspec.structs.replace(recipe, width=8, windows=16)
    lines: list[str] = []
    make_small(tmp_path, recipe, lines.append)
    assert lines[-1].startswith("pre-training small: step 2 of 2")
    layout = Checkpoint.open(tmp_path).layout
    assert layout.tensor("lm_head.weight").shape == (300, 32)
    task = ContinueText.of(tmp_path)
    assert task.max_tokens == 4
    assert len(task.prompts(1, 3, np.random.default_rng(0))) == 3


def test_cached_folders_appear_complete_or_not_at_all(tmp_path, monkeypatch):
    from node.trainers.grpo.cache import cached_folder
    from node.trainers.grpo.tiny import TinyRecipe

    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    made = []

    def make(folder):
        made.append(folder)
        (folder / "config.json").write_text("{}")
        if len(made) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("thing", TinyRecipe(), make)
    assert list((tmp_path / "models").iterdir()) == []
    place = cached_folder("thing", TinyRecipe(), make)
    assert [path.name for path in place.iterdir()] == ["config.json"]
    assert cached_folder("thing", TinyRecipe(), make) == place
    assert len(made) == 2
    assert cached_folder("thing", TinyRecipe(seed=1), make) != place
    assert len(list((tmp_path / "models").iterdir())) == 2


def test_of_two_processes_that_make_a_folder_the_first_wins(tmp_path, monkeypatch):
    from node.trainers.grpo.cache import cached_folder
    from node.trainers.grpo.tiny import TinyRecipe

    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))

    def make(folder):
        if not any(path.name.startswith("thing-") for path in folder.parent.iterdir()):
            cached_folder("thing", TinyRecipe(), lambda other: (other / "first").touch())
        (folder / "second").touch()

    place = cached_folder("thing", TinyRecipe(), make)
    assert [path.name for path in place.iterdir()] == ["first"]
    assert len(list((tmp_path / "models").iterdir())) == 1
