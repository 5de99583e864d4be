"""The command line as a user sees it: what is printed to which stream, and the exit code."""

import errno
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import trio
from rich.console import Console

from codec.errors import PeerError, SwarmError, UsageError
from codec.sign import Key
from node.cli.app import app, explain, run
from node.settings import keyfile
from node.settings.contact import Contact
from node.settings.ticket import Ticket
from node.status.schema import NodeStatus, OwnStatus
from node.tools.prices import price_list
from node.tools.shapes import shape_names
from swarm.protocol.core.documents import open_capability
from swarm.transport.base import Unreachable
from swarm.transport.identity import peer_id

COMMANDS = (
    *(
        "delta",
        "apply",
        "keygen",
        "seed",
        "invite",
        "kick",
        "revoke",
        "publish",
        "join",
        "relay",
        "standby",
        "takeover",
        "council-id",
        "rescue",
        "keep",
        "kept",
        "doctor",
        "status",
        "demo",
    ),
    *("config show", "config init", "config schema", "version"),
)
TICKET = str(Ticket(Key(bytes(32)).public, ("/ip4/203.0.113.7/tcp/4001",), b"sealed", "wan"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace a module that would start a swarm process by one of plain functions."""

    def put(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), last, module, raising=False)

    return put


def texts(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out, captured.err


# ---------------------------------------------------------------- help and usage


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out, _ = texts(capsys)
    assert all(f"│ {command.split()[0]} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "version"])
def test_each_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    out, _ = texts(capsys)
    assert f"Examples:\n\n  swarm-node {command}" in out


def test_help_texts_are_paragraphs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of a command and of a flag is a docstring, whose lines are broken for the code."""
    monkeypatch.setattr(app, "console", Console(width=1000))
    assert run(["join", "--help"]) == 0
    out, _ = texts(capsys)
    assert "Without it planning assumes 100, and sending is not limited. [env var: SWARM_UP_MBIT]" in out
    assert run(["revoke", "--help"]) == 0
    assert "no machine can join with it. A revoked machine is removed too" in texts(capsys)[0]


def test_help_is_fast() -> None:
    """Measured in CPU seconds, the best of three, because other tests may be running."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "node.cli", "--help"], capture_output=True, timeout=30, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime

    assert min(cpu_s() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("words", "error_text"),
    [
        (["jion", TICKET], 'Did you mean "join"'),
        (["join"], "TICKET"),
        (["join", TICKET, "--enigne", "none"], "Did you mean --engine"),
        (["join", TICKET, "--engine", "tgi"], "tgi"),
        (["join", TICKET, "--up-mbit", "fast"], "--up-mbit"),
        (["join", TICKET, "--up-mbit", "-5"], "--up-mbit"),
        (["join", "swarm2" + TICKET[6:]], "version 2"),
        (["relay", TICKET[:-5]], "cut off"),
        (["seed"], "--base"),
        (["delta", "one"], "NEW"),
        (["delta", "none/a", "none/b", "--nodes", "0"], "--nodes"),
        (["delta", "none/a", "none/b"], "none/a"),
        (["delta", "--shapes", "qwen9"], "kimi-k2"),
        (["delta", "none/a", "none/b", "--shapes", "qwen3-8b"], "leave out OLD"),
        (["delta", "none/a", "none/b", "--density", "0.01"], "--shapes"),
        (["delta", "none/a", "none/b", "--shards", "4"], "--shapes"),
        (["delta", "--shapes", "qwen3-8b", "--shards", "1"], "from 2 to"),
        (["delta", "--shapes", "qwen3-8b", "--provider", "acme"], "runpod"),
        (["delta", "--shapes", "qwen3-8b", "--trainer-egress-usd-gb", "0.09"], "--egress-usd-gb"),
        (["invite"], "swarm-node keygen"),
        (["config", "show", "apply"], "seed, join"),
        (["demo", "--nodes", "1"], "--nodes"),
    ],
)
def test_a_usage_error_is_exit_code_2_and_a_sentence(
    words: list[str], error_text: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    out, err = texts(capsys)
    assert out == ""
    assert error_text in " ".join(err.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version", "--json"]) == 0
    number = json.loads(texts(capsys)[0])["swarm-node"]
    assert run(["--version"]) == 0
    assert texts(capsys)[0].strip() == number


# ---------------------------------------------------------------- keys and tickets


def test_keygen_then_invite(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keygen"]) == 0
    out, err = texts(capsys)
    key = keyfile.load(home / keyfile.AUTHORITY_KEY)
    assert out.strip() == peer_id(key.public)
    assert str(home) in err
    assert run(["keygen"]) == 2
    assert "never overwritten" in texts(capsys)[1]

    assert run(["invite"]) == 2
    assert "swarm-node seed" in texts(capsys)[1]
    Contact(key.public, ("/ip4/203.0.113.7/tcp/4001",), "lan").write(home)
    assert run(["invite", "--expires", "2h", "--nodes", "3", "--quota-gb", "1.5"]) == 0
    out, err = texts(capsys)
    ticket = Ticket.parse(out)
    assert (ticket.authority, ticket.addrs, ticket.preset) == (key.public, ("/ip4/203.0.113.7/tcp/4001",), "lan")
    capability = open_capability(ticket.capability, key.public)
    assert (capability.nodes, capability.quota_bytes) == (3, 1_500_000_000)
    assert capability.expires == pytest.approx(time.time() + 7200, abs=60)
    assert "For 3 machines" in err
    assert "--announce" in err  # an address of the documentation's range is not public

    assert run(["invite", "--announce", "box.example:31001", "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert Ticket.parse(report["ticket"]).addrs == ("/dns/box.example/tcp/31001",)


def test_invite_with_another_swarms_key(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    Contact(bytes(32), ("/ip4/203.0.113.7/tcp/4001",), "lan").write(home)
    other = tmp_path / "other.key"
    keyfile.write(other, Key.generate())
    assert run(["invite", "--key", str(other)]) == 2
    assert "another key" in texts(capsys)[1]


# ---------------------------------------------------------------- settings


def test_flags_take_precedence_over_the_environment_and_that_over_the_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., None]
) -> None:
    seen = []

    async def relay(ticket: Ticket, config: Any) -> None:
        await trio.lowlevel.checkpoint()
        seen.append((ticket, config))

    stand_in("node.member.relay", run=relay)
    (tmp_path / "swarm.toml").write_text('up_mbit = 1\ndown_mbit = 1\nregion = "eu"\n[relay]\nname = "box"\n')
    monkeypatch.setenv("SWARM_UP_MBIT", "2")
    monkeypatch.setenv("SWARM_DOWN_MBIT", "2")
    assert run(["relay", TICKET, "--up-mbit", "3", "--listen", "4001", "--listen", "box.example:2"]) == 0
    ((ticket, config),) = seen
    assert str(ticket) == TICKET
    assert (config.up_mbit, config.down_mbit, config.region, config.name) == (3.0, 2.0, "eu", "box")
    assert config.listen == ("/ip4/0.0.0.0/tcp/4001", "/dns/box.example/tcp/2")
    assert config.home == home


def test_config_show(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SWARM_REGION", "eu")
    assert run(["config", "show", "join"]) == 0
    lines = [line.split() for line in texts(capsys)[0].splitlines()]
    assert ["region", "eu", "SWARM_REGION"] in lines
    assert ["engine", "transformers", "default"] in lines
    assert run(["config", "show", "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert report["commands"]["seed"]["region"] == {"value": "eu", "source": "SWARM_REGION"}


def test_an_engine_that_is_not_installed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("node.settings.extras.find_spec", lambda name: None)
    assert run(["join", TICKET]) == 2
    assert re.search(r"EXTRAS=torch|\[torch\]", texts(capsys)[1])


# ---------------------------------------------------------------- running things


@pytest.mark.parametrize(("roots", "engines", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_demo_fails_when_one_bit_differs(
    roots: bool, engines: bool, code: int, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    async def demo(config: Any, *, live: bool) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        assert not live
        return {"roots_equal": roots, "engines_equal": engines, "nodes": config.nodes}

    stand_in("node.tools.demo", run=demo, render=lambda report: f"nodes: {report['nodes']}")
    assert run(["demo", "--nodes", "3", "--json"]) == code
    assert json.loads(texts(capsys)[0])["nodes"] == 3
    assert run(["demo", "--nodes", "3"]) == code
    assert texts(capsys)[0] == "nodes: 3\n"


def test_status_without_a_process_is_exit_code_3(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 3
    assert "No swarm process answers" in texts(capsys)[1]


@pytest.mark.parametrize(("proven", "code"), [(True, 0), (False, 1), (None, 2)])
def test_engines_prove_their_bits_on_demand(
    proven: bool | None, code: int, home: Path, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(folder: Path, *, prove: bool) -> NodeStatus:
        assert (folder, prove) == (home, True)
        return NodeStatus(nodes=[OwnStatus(slot=0, name="box", peer="x", live_proven=proven)])

    stand_in("node.status.query", ask=ask)
    assert run(["status", "--prove"]) == code
    words = {
        True: "every bit that the engines here hold is the policy's",
        False: "do NOT hold",
        None: "No engine is ready",
    }
    assert words[proven] in "".join(texts(capsys)).replace("\n", " ")
    assert run(["status", "--prove", "--json"]) == code
    assert proven is None or json.loads(texts(capsys)[0])["nodes"][0]["live_proven"] is proven


def test_a_usage_error_in_a_nursery_is_one_sentence(
    home: Path, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def relay(ticket: Ticket, config: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise UsageError("Port 4001 is in use. Choose another with --listen.")

    stand_in("node.member.relay", run=relay)
    assert run(["relay", TICKET]) == 2
    assert texts(capsys)[1] == "swarm-node: Port 4001 is in use. Choose another with --listen.\n"


def test_a_bug_is_one_line_without_debug(
    home: Path, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def relay(ticket: Ticket, config: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise KeyError("slot")

    stand_in("node.member.relay", run=relay)
    assert run(["relay", TICKET]) == 1
    text = "unexpected KeyError: 'slot'. This is a bug; run the command with --debug for the traceback."
    assert texts(capsys)[1] == f"swarm-node: {text}\n"
    assert run(["relay", TICKET, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("Do this."), 2, "Do this."),
        (Unreachable("No answer."), 3, "No answer."),
        (PeerError("chunk: bad"), 1, "chunk: bad"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device", "/data"), 1, "No room left on the disk /data"),
        (PermissionError(errno.EACCES, "Permission denied", "/data"), 1, "Not allowed to use /data"),
        (BaseExceptionGroup("", [ExceptionGroup("", [Unreachable("Far.")]), SwarmError("x")]), 3, "Far."),
        (BaseExceptionGroup("", [KeyboardInterrupt(), KeyError("x")]), 130, ""),
        (ExceptionGroup("", [SwarmError("x"), UsageError("Do this.")]), 2, "Do this."),
        (ValueError(), 1, "unexpected ValueError. This is a bug"),
    ],
)
def test_the_text_and_exit_code_of_each_error(error: BaseException, code: int, text: str) -> None:
    shown, exit_code = explain(error)
    assert exit_code == code
    assert shown.startswith(text)
    assert bool(shown) == bool(text)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m node.cli config show --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "{"
    assert done.stderr == ""


SLEEPY = """
import sys, types, trio
module = types.ModuleType("node.member.relay")
async def run(ticket, config):
    print("up", flush=True)
    await trio.sleep(60)
module.run = run
import node
sys.modules["node.member.relay"] = module
from node.cli.app import run as command
sys.exit(command(sys.argv[1:]))
"""


def test_sigint_is_a_clean_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPY, "relay", TICKET], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "Stopping; once more to stop at once.\n"


# ---------------------------------------------------------------- real checkpoints, real files


def checkpoint(folder: Path, words: np.ndarray) -> Path:
    """A Hugging Face folder of one bf16 tensor with these bits."""
    folder.mkdir()
    entry = {"dtype": "BF16", "shape": [len(words)], "data_offsets": [0, 2 * len(words)]}
    header = json.dumps({"model.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + words.tobytes())
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions of a model: 1 % of 40,000 elements differ by a bit."""
    rng = np.random.default_rng(7)
    old = rng.standard_normal(40_000).astype(np.float32).view(np.uint32)
    old = (old >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.choice(len(old), 400, replace=False)] ^= 1
    return checkpoint(tmp_path / "step_1", old), checkpoint(tmp_path / "step_2", new)


def test_delta_then_apply(steps: tuple[Path, Path], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = map(str, steps)
    assert run(["delta", old, new, "--up-mbit", "100", "--nodes", "8", "--out", "step.delta", "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert (report["changed"], report["elements"], report["exact"]) == (400, 40_000, True)
    assert report["star_full_s"] == pytest.approx(8 * 80_000 * 8 / 100e6)

    assert run(["apply", old, "step.delta", "again"]) == 0
    assert (Path("again") / "model.safetensors").read_bytes()[-80_000:] == (
        Path(new) / "model.safetensors"
    ).read_bytes()[-80_000:]
    texts(capsys)

    assert run(["apply", old, "step.delta", "again"]) == 2
    assert "again" in texts(capsys)[1]
    assert run(["apply", new, "step.delta", "third"]) == 2
    assert "another version" in texts(capsys)[1]
    assert not Path("third").exists()


def test_delta_says_dollars_when_told_prices(
    steps: tuple[Path, Path], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, steps)
    told = ["--nodes", "8", "--egress-usd-gb", "0.01", "--trainer-egress-usd-gb", "0.09"]
    assert run(["delta", old, new, *told, "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert report["usd"]["star_full"] == pytest.approx(8 * 80_000 / 1e9 * 0.09)
    assert report["usd"]["swarm"] == pytest.approx(report["delta_bytes"] / 1e9 * (0.09 + 7 * 0.01))
    assert run(["delta", old, new, "--provider", "aws"]) == 0
    assert "of traffic" in texts(capsys)[0]
    assert run(["delta", old, new]) == 0
    assert "of traffic" not in texts(capsys)[0]


@pytest.mark.slow
def test_delta_reckons_from_shapes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["delta", "--shapes", "qwen3-1.7b", "--nodes", "4", "--up-mbit", "100", "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert report["star_full_s"] == pytest.approx(4 * 3_441_149_952 * 8 / 100e6)
    assert report["memory_bytes"]["node"] > 3_441_149_952
    assert report["shards"] is None
    assert report["shares"] == {}
    assert run(["delta", "--shapes", "qwen3-1.7b", "--shards", "4", "--json"]) == 0
    report = json.loads(texts(capsys)[0])
    assert set(report["shares"]) == {"tensor"}  # it has no experts
    assert report["shares"]["tensor"]["delta_bytes"] < report["delta_bytes"]
    assert run(["delta", "--shapes", "qwen3-1.7b", "--density", "0.02", "--provider", "vast"]) == 0
    out, _ = texts(capsys)
    assert "(2 %), as given" in out
    assert "host memory" in out


def test_the_help_of_delta_names_all_shapes_and_providers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "console", Console(width=1000))
    assert run(["delta", "--help"]) == 0
    out, _ = texts(capsys)
    assert all(name in out for name in (*shape_names(), *price_list().providers))


def test_a_damaged_delta_file_writes_nothing(
    steps: tuple[Path, Path], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, steps)
    assert run(["delta", old, new, "--out", "step.delta"]) == 0
    assert "400 of 40,000 elements" in texts(capsys)[0]
    whole = Path("step.delta").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], whole[:600] + bytes([whole[600] ^ 1]) + whole[601:], b""):
        Path("step.delta").write_bytes(damaged)
        assert run(["apply", old, "step.delta", "out"]) == 2
        assert "step.delta" in texts(capsys)[1]
        assert not Path("out").exists()


def test_delta_of_a_checkpoint_and_itself_says_that_nothing_differs(
    steps: tuple[Path, Path], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = str(steps[0])
    assert run(["delta", same, same]) == 0
    text = texts(capsys)[0]
    assert "0 of 40,000 elements: both are the same, bit for bit" in text
    assert "bits a change" not in text
    assert "GB of weights" not in text
    assert run(["delta", same, same, "--json"]) == 0
    assert json.loads(texts(capsys)[0])["exact"] is True


@pytest.mark.parametrize("command", sorted(name for name in app if not name.startswith("-")))
def test_help_reads_well_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    text = texts(capsys)[0]
    assert max(map(len, text.partition("Examples:")[0].splitlines())) <= 80
    assert "default: ()" not in text
    assert 'default: ""' not in text
    assert "',)" not in text


@pytest.mark.slow
@pytest.mark.long
def test_nothing_compiles_in_silence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "node.cli", "delta", "--shapes", "qwen3-1.7b", "--nodes", "4"]
    environment = os.environ | {"SWARM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "(once on this machine, the coder is compiled first)" in done.stderr
