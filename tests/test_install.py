"""The wheel in fresh environments of every Python that is here: all modules import, and the light commands answer.

Needs a package index, since pip fetches the dependencies.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

HOUSE: Final = Path(__file__).parents[1]
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
NEEDS_AN_EXTRA: Final = (
    "torch", "transformers", "h11", "jinja2", "tokenizers", "safetensors", "peft", "trl", "verl", "ray", "httpx",
    "anyio", "monarch",
)  # fmt: skip
"""Modules that come with an extra: a module of ours that needs one may fail to be imported without it."""

IMPORT_ALL: Final = """
import importlib, pkgutil
for name in ("codec", "swarm", "node"):
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if "__main__" in found.name or ".plugin." in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            print(found.name, (error.name or "?").split(".")[0])
"""


def pythons() -> dict[str, str]:
    """The interpreters that are here, by version; pyenv's too."""
    found = {}
    for version in VERSIONS:
        places = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        path = str(places[-1]) if places else shutil.which(f"python{version}")
        if (
            path
            and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0
        ):
            found[version] = path
    return found or {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SWARM_HOME")}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("version", pythons())
def test_the_wheel_works_in_a_fresh_environment(version: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=HOUSE, capture_output=True, text=True, check=True).stdout
    for name in kept.split("\0"):
        if name and (HOUSE / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HOUSE / name, source / name)
    run(pythons()[version], "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, command = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "swarm-node"
    run(python, "-m", "pip", "-q", "wheel", "--no-deps", "-w", tmp_path / "dist", source, cwd=tmp_path)
    run(python, "-m", "pip", "-q", "install", *(tmp_path / "dist").glob("*.whl"), cwd=tmp_path)
    failed = [line.split() for line in run(python, "-c", IMPORT_ALL, cwd=tmp_path).splitlines()]
    assert [line for line in failed if line[1] not in NEEDS_AN_EXTRA] == []
    assert run(command, "version", cwd=tmp_path).strip()
    assert "On the trainer's machine" in run(command, "--help", cwd=tmp_path)
    assert "complete" in run(command, "completion", "bash", cwd=tmp_path)
    run(command, "keygen", "--out", "key", cwd=tmp_path)
    run(command, "demo", "--keep", "talk", "--only-files", cwd=tmp_path)
    assert "exact" in run(command, "delta", "talk/model", "talk/steps/step_1", cwd=tmp_path)
