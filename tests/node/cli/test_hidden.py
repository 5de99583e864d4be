"""Secrets stay out of the list of processes and of the environment of child processes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codec.errors import UsageError
from codec.sign import Key
from node.cli.hidden import PLACEHOLDER, hidden_words, restore
from node.settings.config import GatewayConfig
from node.settings.given import api_key, ticket_text
from node.settings.ticket import Ticket

TICKET = str(Ticket(Key(bytes(32)).public, ("/ip4/127.0.0.1/tcp/9",), b"sealed", "loopback"))
_TELLS = """
import json, os, subprocess, sys
from node.cli.hidden import hide
hide()
child = [sys.executable, "-c", "import os; print(dict(os.environ))"]
print(json.dumps({
    "words": sys.argv[1:], "pid": os.getpid(), "shown": open("/proc/self/cmdline").read().split(chr(0)),
    "own": dict(os.environ), "child": subprocess.run(child, capture_output=True, text=True).stdout,
}))
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARM_TICKET", "SWARM_TICKET_FILE", "SWARM_API_KEY", "SWARM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- the process list


@pytest.mark.parametrize("words", [["join", TICKET, "--engine", "none"], ["gateway", "--api-key", "sesame"],
                                   ["gateway", "--api-key=sesame"], ["revoke", f" '{TICKET.upper()}'"]])  # fmt: skip
def test_a_secret_in_the_arguments_is_hidden_from_the_process_list_and_children(words: list[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", _TELLS, *words], stdout=subprocess.PIPE, text=True)
    output = json.loads(process.communicate(timeout=30)[0])
    assert output["words"] == words
    assert output["pid"] == process.pid  # its parent process still knows it by its id
    shown = " ".join(output["shown"])
    assert PLACEHOLDER in shown
    for secret in (TICKET.lower(), "sesame"):
        assert secret not in shown.lower()
        assert secret not in json.dumps(output["own"]).lower()
        assert secret not in output["child"].lower()


def test_the_process_of_join_shows_no_ticket(tmp_path: Path) -> None:
    """The real command: it looks for its seed as usual, and the list of processes shows a placeholder."""
    command = [sys.executable, "-m", "node.cli", "join", TICKET, "--engine", "none", "--listen", "127.0.0.1:0"]
    environment = os.environ | {"SWARM_HOME": str(tmp_path / "home")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 45
        while "starting" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        assert TICKET not in shown
        assert shown[-6:-1] == [PLACEHOLDER, "--engine", "none", "--listen", "127.0.0.1:0"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143


def test_only_secrets_are_hidden() -> None:
    assert hidden_words(["join", TICKET, "--home", "swarm1-of-mine", "--api-key-file", "f"]) == {1: TICKET}
    assert hidden_words(["gateway", "--api-key", ""]) == {}
    assert hidden_words(["demo", "--nodes", "3"]) == {}


def test_without_a_hidden_secret_nothing_is_restored() -> None:
    argv, environment = ["swarm-node", "join"], {"A": "b"}
    assert not restore(argv, environment)
    assert (argv, environment) == (["swarm-node", "join"], {"A": "b"})


# ---------------------------------------------------------------- where a secret comes from


def test_a_ticket_is_read_from_argument_file_or_standard_input(tmp_path: Path) -> None:
    (tmp_path / "ticket").write_text(f"\n {TICKET}\n")
    assert ticket_text(TICKET, None) == TICKET
    assert ticket_text("", tmp_path / "ticket") == TICKET
    assert Ticket.parse(ticket_text("", Path("-"), io.StringIO(f"{TICKET[:40]}\n{TICKET[40:]}\n")))


def test_a_terminal_is_prompted_without_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda prompt, stream: {"Ticket: ": TICKET}[prompt])
    assert ticket_text("", Path("-"), terminal) == TICKET


def test_an_argument_takes_precedence_over_the_variable_which_leaves_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWARM_TICKET", "swarm1variable")
    assert ticket_text("swarm1variable", None) == "swarm1variable"  # the parser puts it there
    assert "SWARM_TICKET" not in os.environ
    monkeypatch.setenv("SWARM_TICKET", "swarm1variable")
    assert ticket_text("swarm1typed", None) == "swarm1typed"
    monkeypatch.setenv("SWARM_TICKET", "swarm1variable")
    assert ticket_text("swarm1variable", Path("-"), io.StringIO("swarm1read")) == "swarm1read"
    assert "SWARM_TICKET" not in os.environ


@pytest.mark.parametrize(("argument", "file", "says"), [
    ("swarm1a", Path("-"), "given twice"), ("", None, "Which swarm"), ("", Path("/nowhere/at/all"), "cannot be read"),
    ("", Path("-"), "No ticket came"),
])  # fmt: skip
def test_an_argument_that_is_no_ticket_is_an_error(argument: str, file: Path | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ticket_text(argument, file, io.StringIO(" \n"))


def test_the_gateways_key_comes_from_a_file_before_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    assert api_key("", file) == "sesame"
    monkeypatch.setenv("SWARM_API_KEY", "other")
    assert api_key("other", file) == "sesame"
    assert "SWARM_API_KEY" not in os.environ
    assert api_key("typed", None) == "typed"
    with pytest.raises(UsageError, match="given twice"):
        api_key("typed", file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        api_key("", file)
    assert GatewayConfig(at="0.0.0.0:8000", api_key_file=file).host == "0.0.0.0"


def test_a_long_file_is_not_read_completely(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 20_000)
    with pytest.raises(UsageError, match="far too long"):
        ticket_text("", tmp_path / "long")
