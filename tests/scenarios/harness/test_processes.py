"""The process harness: what it waits for, what a failure tells, and that nothing outlives it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scenarios.harness.processes import Processes, ProcessFailed, group_alive, kill, next_line, outputs

SLEEPS = "import time; time.sleep(600)"
LOGS = """
import json, time
for number in (1, 2):
    print(json.dumps({"event": "sealed", "version": number, "timestamp": f"2026-01-01T00:00:0{number}Z"}), flush=True)
time.sleep(600)
"""
LEAVES_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "{SLEEPS}"], stdout=subprocess.DEVNULL)
print("left", child.pid, flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.close()


def test_an_event_of_the_log_is_waited_for(processes: Processes) -> None:
    processes.start_command("a", python(LOGS))
    second = processes.until_event("a", "sealed", version=2)
    assert second - processes.until_event("a", "sealed", version=1) == 1.0
    assert processes.logged_at("a", "sealed", version=3) is None
    with pytest.raises(ProcessFailed, match=r"Waited 0 s, but not: a logs never(.|\n)*--- a \(None\): .*sealed"):
        processes.until_logged("a", "never", within_s=0.1)


def test_an_ended_process_ends_the_wait_and_all_logs_are_shown(processes: Processes) -> None:
    processes.start_command("lives", python(f"print('well', flush=True); {SLEEPS}"))
    processes.until_logged("lives", "well")
    processes.start_command("dies", python("import sys; print('it broke'); sys.exit(3)"))
    with pytest.raises(ProcessFailed) as raised:
        processes.wait("never", lambda: False)
    assert "dies ended with 3" in str(raised.value)
    assert "it broke" in str(raised.value)
    assert "well" in str(raised.value)
    assert processes.wait("of another", lambda: "found", of=["lives"]) == "found"
    assert processes.ends("dies") == 3


def test_signals_pauses_and_kills(processes: Processes) -> None:
    for name in ("asked", "paused", "killed"):
        processes.start_command(name, python(SLEEPS), environment={"NAME": name})
    assert processes.signal("asked") == -15
    paused, killed = processes.running["paused"], processes.running["killed"]
    processes.pause("paused")
    processes.kill("killed")
    assert (paused.poll(), killed.poll(), set(processes.running)) == (None, -9, {"paused"})
    processes.forget("paused")
    assert (paused.poll(), processes.log("paused")) == (-9, "")


def test_a_process_that_does_not_end_is_killed(processes: Processes) -> None:
    deaf = processes.start_command("deaf", python(SLEEPS))
    with pytest.raises(ProcessFailed, match="deaf did not end in 0 s"):
        processes.ends("deaf", 0.1)
    assert deaf.poll() == -9


def test_a_process_that_outlives_its_leader_is_reported_and_killed(processes: Processes) -> None:
    leader = processes.start_command("leader", python(LEAVES_A_CHILD))
    assert processes.ends("leader") == 0
    assert group_alive(leader.pid)
    assert processes.close() == [leader.pid]


def test_lines_of_output() -> None:
    code = f"print('noise'); print('at 127.0.0.1 4001', flush=True); {SLEEPS}"
    process = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert next_line(process, "at") == "127.0.0.1 4001"
        with pytest.raises(ProcessFailed, match="printed nothing for 0 s; expected was a line done"):
            next_line(process, "done", within_s=0.1)
    finally:
        kill(process)
    ended = subprocess.Popen(python("raise SystemExit(4)"), stdout=subprocess.PIPE, text=True)
    ended.wait()
    with pytest.raises(ProcessFailed, match="ended with 4"):
        next_line(ended)


def test_the_outputs_of_commands_that_need_each_other(tmp_path: Path) -> None:
    waits = f"import pathlib\nwhile not pathlib.Path({str(tmp_path / 'there')!r}).exists(): pass\nprint('first')"
    makes = f"import pathlib; pathlib.Path({str(tmp_path / 'there')!r}).touch(); print('second')"
    assert outputs([python(waits), python(makes)], 30.0) == ["first\n", "second\n"]
    with pytest.raises(ProcessFailed, match=r"ended with 1: (.|\n)*it broke"):
        outputs([python("raise ValueError('it broke')"), python(SLEEPS)], 30.0)
