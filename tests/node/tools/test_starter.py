"""What `demo --keep --only-files` leaves, without torch and without a swarm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from codec import Checkpoint
from codec.errors import UsageError
from node.cli.app import run
from node.gateway.text import Text
from node.settings.config import DemoConfig
from node.tools.starter import STEPS, write_starter
from node.tools.talking_model import says

HOUSE = Path(__file__).parents[3]


def test_only_files_makes_a_model_steps_and_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "talk"
    assert run(["demo", "--keep", str(folder), "--only-files", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(folder)}
    model = Checkpoint.open(folder / "model")
    for number in range(1, STEPS + 1):
        assert Checkpoint.open(folder / "steps" / f"step_{number}").layout == model.layout
    assert sys.executable in (folder / "two_boxes.sh").read_text()
    assert not (folder / "run").exists()


def test_the_script_starts_this_program_whatever_is_in_its_folder_or_installed(tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    write_starter(folder)
    (folder / "node.py").write_text("raise SystemExit('a file of the user')")
    script = folder / "two_boxes.sh"
    head = script.read_text().partition("trap ")[0]
    script.write_text(head + 'swarm_node --version\necho "$PYTHONPATH"\n')
    ran = subprocess.run(["sh", script], env={"PYTHONPATH": "/other"}, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1] == f"{HOUSE}:/other"


def test_the_tokenizer_has_every_word_that_the_model_says(tmp_path: Path) -> None:
    write_starter(tmp_path / "talk")
    files = {path.name: path.read_bytes() for path in (tmp_path / "talk" / "model").iterdir()}
    text = Text(files)
    for step in (0, 7, 99):
        ids = text.encode(says(step))
        assert 0 not in ids, "an unknown word"
        assert text.decode((), ids) == says(step)
    assert text.stop_tokens == (1,)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        write_starter(tmp_path)
    with pytest.raises(UsageError, match="is not empty"):
        write_starter(tmp_path / "mine")


def test_keep_without_a_value_still_means_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "--keep", "--only-files"]) == 0
    assert (tmp_path / "swarm-demo" / "model").is_dir()
    assert DemoConfig(keep=Path("true")).keep == tmp_path / "swarm-demo"
    with pytest.raises(UsageError, match="--keep FOLDER"):
        DemoConfig(only_files=True)
