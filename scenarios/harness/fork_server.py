"""A process that has the product's modules imported, and forks itself for each `python -m MODULE` that it is asked for.

    python -m scenarios.harness.fork_server FD             # for processes of swarm-node
    python -m scenarios.harness.fork_server FD engines     # for their engine workers, which import torch

FD is a Unix socket that keeps packets apart. A request is one JSON object, {"module", "words", "environment", "folder",
"new_session"}, in one packet with four descriptors: standard input, output and error, and the pipe to which the exit
status is written. The answer is the id of the new process. A packet with one descriptor brings the socket of a further
client. The server ends with FD.

A forked process of swarm-node has a socket to the server, too: with its first request, the server starts the one for
engine workers, and passes the socket on to it.
"""

import array
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import subprocess
import sys
from typing import Any, Final

__all__ = ["ENGINES", "MAX_BYTES", "PACKED", "PRELOADED", "main"]

PRELOADED: Final = (
    "node.cli.app", "node.coordinator.coordinator", "node.member.join", "node.member.relay",
    "scenarios.harness.forked_workers",
)  # fmt: skip
"""What the processes import, nearly always."""
ENGINES: Final = ("node.engines.worker", "node.engines.transformers")
"""What engine workers import."""
MAX_BYTES: Final = 1 << 20
"""Of one request."""
PACKED: Final = "i"
"""Format of a process id and of an exit status (`struct`)."""
_PASS_ON: Final = b"client"


class _Server:
    """Serves until its owner's socket ends; in a forked process it returns the request instead."""

    def __init__(self, owner: socket.socket, *, has_workers: bool) -> None:
        """`has_workers`: the forked processes start workers."""
        self._owner, self._has_workers = owner, has_workers
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ, self._read)
        self._workers: socket.socket | None = None
        """To the server of the workers, once it runs."""
        self._status_of: dict[int, tuple[int, int]] = {}
        """By the descriptor of a running process: its id, and the pipe for its exit status."""
        self._request: dict[str, Any] | None = None
        self._ended = False

    def serve(self) -> dict[str, Any] | None:
        """The request of a process that was forked just now, in that process; None: the owner's socket has ended."""
        while not self._ended and self._request is None:
            for key, _ in self._selector.select():
                key.data(key.fileobj)
                if self._request is not None:
                    break
        return self._request

    def _read(self, client: socket.socket) -> None:
        body, fds, *_ = socket.recv_fds(client, MAX_BYTES, 4)
        match fds:
            case [] if client is self._owner:
                self._ended = True
            case []:
                self._forget(client)
            case [further]:
                self._selector.register(socket.socket(fileno=further), selectors.EVENT_READ, self._read)
            case _:
                self._fork(client, json.loads(body), fds)

    def _fork(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.detach()
            self._become([*fds[:3], theirs.detach()], is_leader=request["new_session"])
            self._request = request
            return
        theirs.close()
        for fd in fds[:3]:
            os.close(fd)
        if self._has_workers:
            self._selector.register(ours, selectors.EVENT_READ, self._pass_on)
        else:
            ours.close()
        watched = os.pidfd_open(pid)
        self._status_of[watched] = pid, fds[3]
        self._selector.register(watched, selectors.EVENT_READ, self._tell_status)
        client.send(array.array(PACKED, [pid]))

    def _become(self, kept: list[int], *, is_leader: bool) -> None:
        """Keep nothing of the server but its modules and these descriptors, as 0, 1, 2 and 3."""
        if is_leader:
            os.setsid()
        held = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in kept]  # beyond all that is replaced
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()
        if self._workers is not None:
            self._workers.detach()
        for number, fd in enumerate(held):
            os.dup2(fd, number, inheritable=number < 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))

    def _pass_on(self, client: socket.socket) -> None:
        """A forked process has asked for a worker, or has ended."""
        if client.recv(1, socket.MSG_PEEK):
            if self._workers is None:
                self._workers = _start_server("engines")
            socket.send_fds(self._workers, [_PASS_ON], [client.fileno()])
        self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()

    def _tell_status(self, watched: int) -> None:
        self._selector.unregister(watched)
        os.close(watched)
        pid, pipe = self._status_of.pop(watched)
        _, status = os.waitpid(pid, 0)
        try:
            os.write(pipe, array.array(PACKED, [status]))
        except BrokenPipeError:
            pass  # nobody waits for it any more
        finally:
            os.close(pipe)


def _start_server(*words: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "scenarios.harness.fork_server", str(theirs.fileno()), *words]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    return ours


def main() -> None:
    """Serve; in a forked process, run the module that was asked for."""
    owner, for_engines = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:] == ["engines"]
    for name in ENGINES if for_engines else PRELOADED:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork would have one of them only")
    gc.freeze()
    if (request := _Server(owner, has_workers=not for_engines).serve()) is None:
        return
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:] = request["words"]
    if for_engines:
        os.close(3)
    else:
        importlib.import_module("scenarios.harness.forked_workers").use(socket.socket(fileno=3))
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
