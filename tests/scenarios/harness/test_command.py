"""What ends a scenario ends the processes that it started."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scenarios.harness.processes import group_alive, kill, next_line

SCENARIO = """
import sys, time, trio
from pathlib import Path
from scenarios.harness.command import run_as_program
from scenarios.harness.swarm import swarm_in

def main():
    with swarm_in(Path(sys.argv[1])) as swarm:
        child = swarm.start_command("sleeps", [sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        wait()

def wait():
    WAIT

run_as_program(main)
"""


@pytest.mark.parametrize("wait", ["time.sleep(600)", "trio.run(trio.sleep, 600)"])
def test_sigterm_ends_its_processes(tmp_path: Path, wait: str) -> None:
    command = [sys.executable, "-c", SCENARIO.replace("WAIT", wait), str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        child = int(next_line(process, "child"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGINT
        assert not group_alive(child)
    finally:
        kill(process)
