"""The lines of docs/quickstart.md, run as they stand there: two machines are two folders and homes on loopback."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from pty_kit import InTerminal

from node.host.port import free_port

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
STAYS: Final = ("swarm-node seed", "swarm-node join", "swarm-node gateway")
"""Lines that run until they are interrupted."""
UNTIL: Final = {"seed": "The seed is up", "join": "Ready: generating with version 0", "gateway": "Serving policy"}
"""What they say when the next line can be typed."""


class Block(NamedTuple):
    """A block of code: the machine it is typed on, its language, its text."""

    machine: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    machine = "trainer"
    for heading, language, text in re.findall(r"^## ([^\n]+)$|^```(\w+)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        if heading:
            machine = "rollout" if "rollout machine" in heading else "trainer"
        else:
            yield Block(machine, language, text.strip())


def test_the_lines_of_the_page_work(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("trainer", "rollout")}
    commands = tmp_path / "bin"
    for folder in (*folders.values(), commands):
        folder.mkdir()
    for name, words in (("swarm-node", "-m node.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    seed, gateway = free_port(), free_port()
    root = str(PAGE.parents[1])
    terminals: dict[str, InTerminal] = {}
    answers = []

    def environment(machine: str, line: str) -> dict[str, str]:
        """Where the lines would use all interfaces and fixed ports, loopback and free ones. Nothing else is changed."""
        variables = {
            "SWARM_HOME": str(folders[machine] / "home"), "OPENAI_BASE_URL": f"http://127.0.0.1:{gateway}/v1",
            "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": root,
        }  # fmt: skip
        if line.startswith(("swarm-node seed", "swarm-node join")):
            variables["SWARM_LISTEN"] = f"127.0.0.1:{seed if 'seed' in line else 0}"
        if line.startswith("swarm-node gateway"):
            variables["SWARM_AT"] = f"127.0.0.1:{gateway}"
        return variables

    try:
        for block in blocks():
            folder = folders[block.machine]
            text = block.text.replace("203.0.113.7:4001", f"127.0.0.1:{seed}")
            text = text.replace("127.0.0.1:8000", f"127.0.0.1:{gateway}")
            if text.startswith("scp ticket"):
                shutil.copy(folders["trainer"] / "ticket", folders["rollout"])
            elif text.startswith(STAYS):
                command = ("sh", "-c", f"cd {folder} && exec {text}")
                terminal = InTerminal(command=command, environment=environment(block.machine, text))
                name = text.split()[1]
                terminals[name] = terminal
                terminal.until(UNTIL[name], 180.0)
            else:
                command = (sys.executable, "-c", text) if block.language == "python" else ("sh", "-c", text)
                ended = subprocess.run(
                    command, cwd=folder, env=os.environ | environment(block.machine, text), capture_output=True,
                    text=True, timeout=180, check=False,
                )  # fmt: skip
                assert ended.returncode == 0, (text, ended)
                if "ask.py" in text or block.language == "python":
                    answers.append(ended.stdout.strip())
        assert answers == ["Hello, I am version 0.", "Hello, I am version 1.", "Hello, I am version 1."]
        terminals["seed"].until(r"Version 1 \(step 1\) is sealed")
        for name in ("join", "gateway", "seed"):
            terminals[name].press("\x03")
            assert terminals[name].ends() == 130
            assert "Traceback" not in terminals[name].text
        assert "box left: it was stopped" in terminals["seed"].text
    finally:
        for terminal in terminals.values():
            terminal.__exit__(None, None, None)


@pytest.mark.long
def test_the_script_that_plays_two_machines_works(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "node.cli", "demo", "--keep", str(tmp_path / "talk"), "--only-files"]
    subprocess.run(made, check=True, capture_output=True)
    ended = subprocess.run(
        ["sh", tmp_path / "talk" / "two_boxes.sh"], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(PAGE.parents[1])},
    )  # fmt: skip
    assert ended.returncode == 0, ended
    assert re.findall(r"I am version \d", ended.stdout) == [f"I am version {step}" for step in range(4)]
    assert ended.stdout.splitlines()[-1].startswith("Done.")
