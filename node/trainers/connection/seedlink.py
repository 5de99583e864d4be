"""Finds, starts and queries the seed on this host. Synchronous; needs neither trio nor libp2p."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from codec.errors import PeerError, UsageError
from node.host.child import child_environment
from node.host.last_line import last_line
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds, connect
from node.status.schema import SeedReport
from node.trainers.connection.patience import Wait
from node.trainers.errors import PublishFailed, SwarmDown, SwarmTimeout
from node.trainers.file_messages import ANSWER_WITHIN_S, SOCKET_NAME
from node.trainers.messages import AskState, FromSeed, Refusal, State

__all__ = ["ANSWER_WITHIN_S", "SOCKET_NAME", "SeedProcess", "ask_state", "dial", "expect", "home_folder", "speaking"]

STARTED_WITHIN_S: Final = 600.0
"""A seed hashes the base checkpoint before it serves, which takes minutes for the largest models on slow disks."""
STOPPED_WITHIN_S: Final = 20.0
"""How long a seed may take to end after SIGTERM before it is killed."""

T = TypeVar("T", bound=msgspec.Struct)

_LAUNCH: Final = """
import ctypes, os, signal, sys
parent, die_with_it = int(sys.argv.pop(1)), sys.argv.pop(1) == "yes"
if die_with_it:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)
from node.cli import main
main()
"""
"""Runs `swarm-node` in the new process, after asking the kernel to end it with its parent. `preexec_fn` would be unsafe
in a process that has threads."""


def home_folder(home: Path | str | None) -> Path:
    """The seed's SWARM_HOME: `home` if given, else the environment's, else the default of `swarm-node`."""
    if home is None and not os.environ.get("SWARM_HOME"):
        from node.settings.config import default_home

        return default_home()
    return Path(home or os.environ["SWARM_HOME"]).expanduser().absolute()


@contextlib.contextmanager
def speaking(what: str) -> Iterator[None]:
    """Turn the channel's errors into `SwarmDown` and `SwarmTimeout`. `what`: the clause after "while"."""
    try:
        yield
    except ChannelClosed as error:
        raise SwarmDown(f"The seed ended while {what}: {error}.") from error
    except ChannelTimeout as error:
        raise SwarmTimeout(f"The seed did not answer in time while {what}: {error}.") from error
    except PeerError as error:
        raise SwarmDown(
            f"The seed and this trainer speak different protocols ({error}): install the same version of both."
        ) from error


def dial(home: Path) -> Channel:
    """A connection to the seed of `home`. Raises `SwarmDown` when no seed serves it."""
    try:
        return connect(home / SOCKET_NAME, FromSeed)
    except ChannelClosed as error:
        raise SwarmDown(f"No seed serves {home} ({error}). Start one: swarm-node seed --base FOLDER") from error


def expect(channel: Channel, kind: type[T], timeout_s: float = ANSWER_WITHIN_S) -> tuple[T, list[int]]:
    """The next message, which must be a `kind`, and the file descriptors that came with it.

    Raises `UsageError` or `PublishFailed` when the seed refuses, `ChannelTimeout` after `timeout_s`, `ChannelClosed`,
    and `PeerError` for another message.
    """
    message, fds = channel.recv(timeout_s)
    if isinstance(message, kind):
        return message, fds
    close_fds(fds)
    channel.close()
    if isinstance(message, Refusal):
        raise (UsageError if message.usage else PublishFailed)(message.why)
    raise PeerError(f"answer: {type(message).__name__}, not {kind.__name__}")


def ask_state(home: Path, timeout_s: float = ANSWER_WITHIN_S) -> SeedReport:
    """How the seed of `home` and its swarm stand. Raises `SwarmDown`, `SwarmTimeout`."""
    with speaking("it was asked for its state"), dial(home) as channel:
        channel.send(AskState(), timeout_s=timeout_s)
        answer, _ = expect(channel, State, timeout_s)
        return answer.info


class SeedProcess:
    """A seed that this trainer started. It ends with `stop`, at exit, and when the trainer is killed."""

    def __init__(self, home: Path, base: Path) -> None:
        """Start `swarm-node seed --base BASE --home HOME`. Its output goes to `HOME/seed.log`.

        Raises `UsageError` when HOME cannot be written to.
        """
        self._home = home
        self._log = home / "seed.log"
        # The kernel ties the signal to the thread that started the process, so only the main thread may ask for it.
        die_with_parent = "yes" if threading.current_thread() is threading.main_thread() else "no"
        arguments = ["seed", "--base", str(base), "--home", str(home)]
        command = [sys.executable, "-P", "-c", _LAUNCH, str(os.getpid()), die_with_parent, *arguments]
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = open(self._log, "ab")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UsageError(f"{home} cannot be a seed's home ({error.strerror}): choose another folder.") from error
        with log:
            self._log_start = log.tell()
            # A new session, so that Ctrl-C at the trainer does not end the seed before the trainer has closed.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=child_environment(),
            )  # fmt: skip
        atexit.register(self.stop)

    def wait_until_serving(self, timeout_s: float = STARTED_WITHIN_S) -> None:
        """Wait until the seed answers at its socket.

        Raises `UsageError` with the seed's last line of output when it ends, `SwarmTimeout` after `timeout_s`.
        """
        wait = Wait(timeout_s, lambda: f"attach waits for the seed to start; its log is {self._log}")
        shown = False
        while True:
            with contextlib.suppress(SwarmDown):
                ask_state(self._home)
                break
            if (last_words := self.ended()) is not None:
                raise UsageError(f"The seed did not start: {last_words}")
            if wait.over:
                last_words = last_line(self._log, self._log_start) or "it printed nothing"
                self.stop()
                raise SwarmTimeout(
                    f"The seed did not serve within {timeout_s:.0f} s: {last_words} (its log: {self._log})"
                )
            if sys.stderr.isatty():
                if wait.waited_s > 2.0:
                    print(f"\rstarting the seed ... {wait.waited_s:.0f} s", end="", file=sys.stderr, flush=True)
                    shown = True
            else:
                wait.log_if_due()
            time.sleep(0.05)
        if shown:
            print(file=sys.stderr)

    def ended(self) -> str | None:
        """The last line of output of a seed that has ended, and where its log is. None while the process runs."""
        if self._process.poll() is None:
            return None
        printed = last_line(self._log, self._log_start)
        last_words = printed or f"it ended with code {self._process.returncode} and printed nothing"
        return f"{last_words} (its log: {self._log})"

    def stop(self) -> None:
        """End the seed with SIGTERM, and after `STOPPED_WITHIN_S` with SIGKILL. Safe to call twice."""
        atexit.unregister(self.stop)
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
