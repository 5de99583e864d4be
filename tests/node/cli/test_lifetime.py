"""A signal cancels the work and waits for it; a second one does not wait. Real signals to real processes."""

import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

from node.cli.lifetime import Interrupted, OnTerm, until_signalled

STUBBORN = """
import sys, trio
from node.cli.app import explain
from node.cli.lifetime import until_signalled

async def work():
    print("working", flush=True)
    try:
        await trio.sleep(60)
    finally:
        with trio.move_on_after(float(sys.argv[1]), shield=True):
            print("unwinding", flush=True)
            await trio.sleep(float(sys.argv[1]))
        print("unwound", flush=True)

try:
    trio.run(until_signalled, work)
except BaseException as error:
    sys.exit(explain(error)[1])
"""


def started(unwind_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(unwind_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_work_and_waits_for_it(number: signal.Signals) -> None:
    process = started(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out.endswith("unwound\n")
    assert "Traceback" not in err
    assert "Stopping" in err


def test_a_second_signal_does_not_wait() -> None:
    process = started(30.0)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "unwinding\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert "unwound" not in out


async def test_the_result_is_returned() -> None:
    async def work(value: int) -> int:
        await trio.lowlevel.checkpoint()
        return value

    assert await until_signalled(partial(work, 7)) == 7


async def test_an_error_propagates() -> None:
    async def work() -> None:
        raise KeyError("ours")

    with pytest.raises(ExceptionGroup) as caught:
        await until_signalled(work)
    assert caught.group_contains(KeyError)


async def test_interrupted_names_the_signal() -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep_forever()

    with pytest.raises(Interrupted, match="SIGTERM"):
        await until_signalled(work)


async def test_on_sigterm_work_may_end_by_itself() -> None:
    asked = trio.Event()

    async def work() -> str:
        signal.raise_signal(signal.SIGTERM)
        await asked.wait()
        return "finished"

    assert await until_signalled(work, OnTerm(asked.set, 20.0)) == "finished"


async def test_work_that_does_not_end_in_time_is_cancelled() -> None:
    asked = trio.Event()

    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep_forever()

    with pytest.raises(Interrupted, match="SIGTERM"):
        await until_signalled(work, OnTerm(asked.set, 0.1))
    assert asked.is_set()


async def test_ctrl_c_asks_for_nothing() -> None:
    asked = trio.Event()

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    with pytest.raises(Interrupted, match="SIGINT"):
        await until_signalled(work, OnTerm(asked.set, 20.0))
    assert not asked.is_set()


SWALLOWS = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "node.coordinator.coordinator":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                print("not ended", flush=True)
            except BaseException:
                print("lost", flush=True)

from node.cli.app import main
sys.meta_path.insert(0, Interrupting())
main()
"""


def test_an_interrupt_while_a_command_imports_is_not_lost() -> None:
    """Python's import system ignores exceptions in its callbacks; a KeyboardInterrupt there would end nothing."""
    words = [sys.executable, "-c", SWALLOWS, "seed", "--base", "nowhere"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, ""), done.stderr
