"""Starts `python -m MODULE` by a fork of a process that has the product's modules imported.

A process of swarm-node imports for 1.8 s of a processor before it begins (libp2p alone for 1), and the heavy tests
start some thousand. A forked process has an id, a session, an environment and arguments of its own. It differs from one
that was executed in what `/proc/PID/cmdline` shows, in `sys.orig_argv`, and in the memory that it shares.
"""

import array
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from scenarios.harness.fork_server import PACKED

__all__ = ["FORKED", "ForkServer", "Forked", "can_be_forked", "start"]

FORKED: Final = ("node.cli", "scenarios.faults.small_node", "scenarios.faults.trainer")
"""Modules of which processes are forked."""
OPTIONS: Final = {"env", "stdin", "stdout", "stderr", "start_new_session"}
"""Options of `subprocess.Popen` that a fork has too."""
READ_EARLY: Final = (
    "GLIBC_TUNABLES", "HF_", "HOME", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON",
    "SWARM_CACHE", "TMPDIR", "TOKENIZERS_", "TRANSFORMERS_", "XDG_CACHE_HOME",
)  # fmt: skip
"""How the names of variables begin that the interpreter reads, or a module while it is imported. Where one of them
differs, a process is executed."""
_ENVIRONMENT: Final = os.environ | {"OMP_NUM_THREADS": "1"}
"""Of the process that is forked: what this one had when it imported this module."""
_ITEM_BYTES: Final = array.array(PACKED).itemsize


def start(command: Sequence[Any], **options: Any) -> "subprocess.Popen[Any] | Forked":
    """What `subprocess.Popen` does, by a fork where that makes no difference to the process."""
    match [str(word) for word in command]:
        case [sys.executable, "-m", module, *words] if module in FORKED and can_be_forked(options):
            return Forked(_server(os.getpid()), module, words, **options)
    return subprocess.Popen(command, **options)


def can_be_forked(options: Mapping[str, Any]) -> bool:
    """Whether a fork can do what `subprocess.Popen` would with these options."""
    return (
        options.keys() <= OPTIONS
        and options.get("stderr") != subprocess.STDOUT
        and _read_early(options.get("env") or os.environ) == _read_early(_ENVIRONMENT)
    )


class Forked:
    """A process that was forked; what it has of `subprocess.Popen` means the same."""

    def __init__(self, server: "ForkServer", module: str, words: Sequence[str], **options: Any) -> None:
        """`options`: those of `OPTIONS`. Raises `RuntimeError` when the server has ended."""
        self.args = [sys.executable, "-m", module, *words]
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._turn = threading.Lock()
        self._readers: list[_Reader] | None = None
        request = {
            "module": module,
            "words": words,
            "environment": dict(options.get("env") or os.environ),
            "folder": os.getcwd(),
            "new_session": bool(options.get("start_new_session")),
        }
        with contextlib.ExitStack() as theirs:

            def pipe(its: int) -> tuple[int, int]:
                """A pipe whose end `its` (0: that to read from) the process gets: (its, ours)."""
                ends = os.pipe()
                theirs.callback(os.close, ends[its])
                return ends[its], ends[1 - its]

            def standard(number: int, name: str) -> int:
                given = options.get(name)
                if given == subprocess.PIPE:
                    its, ours = pipe(min(number, 1))
                    setattr(self, name, open(ours, "rb" if number else "wb"))  # noqa: SIM115
                    return its
                if given == subprocess.DEVNULL:
                    return theirs.enter_context(open(os.devnull, "r+b")).fileno()
                return number if given is None else given if isinstance(given, int) else given.fileno()

            fds = [standard(number, name) for number, name in enumerate(("stdin", "stdout", "stderr"))]
            status, self._status = pipe(1)
            self.pid = server.fork(request, [*fds, status])

    def fileno(self) -> int:
        """A descriptor that can be read once the process has ended, until `wait` or `poll` has said so."""
        return self._status

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; its exit code. Raises `TimeoutExpired` after `timeout` seconds."""
        with self._turn:
            if self.returncode is None:
                poll = select.poll()  # of a descriptor of any size
                poll.register(self._status, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                status = os.read(self._status, _ITEM_BYTES)
                os.close(self._status)
                self.returncode = os.waitstatus_to_exitcode(array.array(PACKED, status)[0])
            return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """End its input and read what it prints until it ends; (standard output, standard error). Raises as `wait`, and
        may be called again then."""
        if self._readers is None:
            if self.stdin is not None:
                self.stdin.close()
            self._readers = [_Reader(self.stdout), _Reader(self.stderr)]
        self.wait(timeout)
        out, error = (reader.content() for reader in self._readers)
        return out, error

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Reader:
    """Reads a file to its end in a thread."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file, self._content = file, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def content(self) -> bytes:
        self._thread.join()
        return self._content

    def _read(self) -> None:
        if self._file is not None:
            with self._file:
                self._content = self._file.read()


class ForkServer:
    """A client of `scenarios.harness.fork_server`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._turn = threading.Lock()

    def fork(self, request: Mapping[str, Any], fds: list[int]) -> int:
        """The id of the new process. Raises `RuntimeError` when the server has ended."""
        with self._turn:
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
                answer = self._requests.recv(_ITEM_BYTES)
            except ConnectionError:
                answer = b""
        if not answer:
            raise RuntimeError("the process that is forked has ended: its standard error says why")
        return array.array(PACKED, answer)[0]


@functools.cache
def _server(of: int) -> ForkServer:
    """The server of this process, which ends with it: a process that is forked from it has another one."""
    del of
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "scenarios.harness.fork_server", str(theirs.fileno())],
            env=_ENVIRONMENT, pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return ForkServer(ours)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}
