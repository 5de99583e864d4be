"""Processes that are forked instead of executed are like those that `subprocess.Popen` starts."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scenarios.harness import forked
from scenarios.harness.forked import Forked
from scenarios.harness.processes import group_alive, kill
from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in, swarm_on

NODE = [sys.executable, "-m", "node.cli"]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
WITHIN_S = 60.0


@pytest.fixture(params=[forked.start, subprocess.Popen], ids=["forked", "executed"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    started = []

    def noted(command: list[str], **options: Any) -> Any:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(request.param(command, **{"env": environment} | options))
        assert isinstance(started[-1], Forked) == (request.param is forked.start)
        return started[-1]

    yield noted
    for process in started:
        kill(process)


def test_it_prints_and_ends_with_a_code(start: Callable[..., Any]) -> None:
    asked = start([*NODE, "--help"], **PIPES)
    out, error = asked.communicate(timeout=WITHIN_S)
    assert (asked.returncode, error) == (0, b"")
    assert b"swarm-node" in out
    refused = start([*NODE, "nothing-of-ours"], **PIPES)
    out, error = refused.communicate(timeout=WITHIN_S)
    assert (refused.returncode, out) == (2, b"")
    assert b"nothing-of-ours" in error
    assert (refused.poll(), refused.wait(0)) == (2, 2)


def test_it_has_its_own_environment_folder_and_session(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["seed", "--raw-mb", "1", "--preset", "loopback", "--listen", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SWARM_HOME": "home"}
    with (tmp_path / "log").open("ab") as log:
        seed = start([*NODE, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
    while not (tmp_path / "home" / "status.sock").exists():
        assert seed.poll() is None, (tmp_path / "log").read_text()
    assert os.getsid(seed.pid) == os.getpgid(seed.pid) == seed.pid
    with pytest.raises(subprocess.TimeoutExpired):
        seed.wait(0.01)
    assert sorted(os.readlink(f"/proc/{seed.pid}/fd/{number}") for number in (1, 2)) == [str(tmp_path / "log")] * 2
    seed.terminate()
    assert seed.wait(WITHIN_S) in (143, -signal.SIGTERM)
    assert not group_alive(seed.pid)
    seed.send_signal(signal.SIGKILL)  # the process has ended: nobody is sent anything


def test_a_killed_one_has_the_signal_as_its_code(start: Callable[..., Any]) -> None:
    process = start([*NODE, "join", "-"], stdin=subprocess.PIPE, **PIPES)
    process.kill()
    assert process.wait(WITHIN_S) == -signal.SIGKILL


def test_it_reads_what_is_written_to_it(start: Callable[..., Any]) -> None:
    process = start([*NODE, "join", "-"], stdin=subprocess.PIPE, **PIPES)
    process.stdin.write(b"no ticket\n")
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 2
    assert b"ticket" in error


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([sys.executable, "-c", "pass"], {}),
        ([*NODE, "--help"], {"text": True}),
        ([*NODE, "--help"], {"stderr": subprocess.STDOUT}),
        ([*NODE, "--help"], {"env": {"PATH": os.environ["PATH"]}}),
        ([*NODE, "--help"], {"env": os.environ | {"OMP_NUM_THREADS": "3"}}),
    ],
)
def test_what_a_fork_could_not_do_is_executed(command: list[str], options: dict[str, Any]) -> None:
    process = forked.start(command, stdout=subprocess.DEVNULL, **options)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(WITHIN_S) == 0


def test_variables_that_libraries_set_later_make_no_difference(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
    process = start([*NODE, "--help"], **PIPES)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0


def test_processes_of_a_swarm_are_forked(tmp_path: Path) -> None:
    with swarm_on(tmp_path, None, 0, ("--raw-mb", "1")) as swarm:  # type: ignore[arg-type]
        assert isinstance(swarm.running["seed"], Forked)
        assert swarm.json("seed", "status")["swarm"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_engine_workers_are_forked_and_end_with_their_node(tmp_path: Path) -> None:
    from scenarios.engines.engine_models import make_qwen3

    base = make_qwen3(tmp_path / "base", hidden=64, layers=2, wide=128)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket()
        node = swarm.start("node", "join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        until_ready(swarm)
        (worker,) = workers()
        os.kill(worker, signal.SIGKILL)
        swarm.wait("the node has another worker", lambda: workers() - {worker})
        until_ready(swarm)
        (worker,) = workers()
        node.kill()
        swarm.wait("the worker ends with its node", lambda: not group_alive(worker), of=())


def until_ready(swarm: Swarm) -> None:
    swarm.until("seed", lambda state: any(node["capacity"] for node in state["work"]["nodes"].values()))


def workers() -> set[int]:
    """Processes that the server of engine workers, which is a child of this process's own server, has forked."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])

    def is_server_of_workers(process: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process}/cmdline").read_bytes().endswith(b"\0engines\0")
        return False

    return {
        process
        for process, parent in parents.items()
        if is_server_of_workers(process)
        and is_server_of_workers(parent)
        and parents.get(parents.get(parent, 0)) == os.getpid()
    }
