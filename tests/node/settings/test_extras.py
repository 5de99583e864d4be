"""The command that an error names adds the packages, however swarm-node was installed."""

import shlex
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from node.settings import extras
from node.settings.extras import how_to_get, lacking


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "install.sh").touch()
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    return tmp_path


def test_in_the_environment_of_make_the_command_is_make(clone: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "prefix", str(clone / ".venv"))
    assert shlex.split(how_to_get("torch")) == ["make", "-C", str(clone), "install", "EXTRAS=torch"]
    monkeypatch.chdir(clone)
    assert how_to_get("torch") == "make install EXTRAS=torch"


def test_in_another_environment_pip_installs_from_the_clone(clone: Path):
    assert shlex.split(how_to_get("torch")) == [sys.executable, "-m", "pip", "install", "-e", f"{clone}[torch]"]


def test_without_a_clone_pip_installs_what_the_extra_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    words = shlex.split(how_to_get("gateway"))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert [word.split(">=")[0] for word in words[4:]] == ["h11", "jinja2", "tokenizers"]
    assert all(
        any(line.replace(" ", "").startswith(word) for line in requires("swarm-node") or []) for word in words[4:]
    )


def test_missing_modules_are_found_without_importing():
    assert lacking(("json", "no_such_package")) == ["no_such_package"]


def test_error_texts_name_existing_extras_and_no_package_index():
    root = Path(__file__).parents[3]
    known = {line.split("extra ==")[1].strip(" '\"") for line in requires("swarm-node") or [] if "extra ==" in line}
    sources = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in sources.split():
        if name.startswith("tests/"):
            continue
        text = (root / name).read_text()
        assert "pip install 'swarm-node" not in text, name
        for asked in text.split('how_to_get("')[1:] + text.split("how_to_get('")[1:]:
            assert asked.replace("'", '"').split('"')[0] in known, name
