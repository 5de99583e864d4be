"""The completion scripts complete every command, and bash does what they say."""

import shutil
import subprocess
from pathlib import Path

import pytest

from node.cli.app import app, run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_a_flag_of_it_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    commands = [name for name in app if not name.startswith("-")]
    assert len(commands) > 15
    for command in commands:
        assert command in script
    assert "ticket-file" in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [("swarm-node re", {"relay", "revoke"}), ("swarm-node join --up-g", {"--up-gb-day"})],
)
def test_bash_completes(line: str, found: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    words = line.split()
    ask = (
        f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; "
        f"COMP_POINT={len(line)}; $(complete -p swarm-node | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    assert found <= {word.strip() for word in done.stdout.splitlines()}, done
