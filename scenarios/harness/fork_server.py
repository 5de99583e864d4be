"""A process that has the product's modules imported, and forks itself for each `python -m MODULE` that it is asked for.

    python -m scenarios.harness.fork_server FD

FD is a Unix socket. A request is one JSON object, {"module", "words", "environment", "folder", "new_session"}, in one
packet with four descriptors: standard input, output and error, and the pipe to which the exit status is written. The
answer is the id of the new process. The server ends with its socket.
"""

import array
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from typing import Any, Final

__all__ = ["MAX_BYTES", "PACKED", "PRELOADED", "main"]

PRELOADED: Final = ("node.cli.app", "node.coordinator.coordinator", "node.member.join", "node.member.relay")
"""What the processes import, nearly always."""
MAX_BYTES: Final = 1 << 20
"""Of one request."""
PACKED: Final = "i"
"""Format of a process id and of an exit status (`struct`)."""


class _Server:
    """Serves until its socket ends; in a forked process it returns the request instead."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._status_of: dict[int, tuple[int, int]] = {}
        """By the descriptor of a running process: its id, and the pipe for its exit status."""

    def serve(self) -> dict[str, Any] | None:
        """The request of a process that was forked just now, in that process; None: the socket has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._requests:
                    self._ended(key.fd)
                    continue
                body, fds, *_ = socket.recv_fds(self._requests, MAX_BYTES, 4)
                if not body:
                    return None
                if (request := self._forked(json.loads(body), fds)) is not None:
                    return request

    def _forked(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        pid = os.fork()
        if pid == 0:
            self._become(fds[:3], is_leader=request["new_session"])
            return request
        for fd in fds[:3]:
            os.close(fd)
        watched = os.pidfd_open(pid)
        self._status_of[watched] = pid, fds[3]
        self._selector.register(watched, selectors.EVENT_READ)
        self._requests.send(array.array(PACKED, [pid]))
        return None

    def _become(self, standard: list[int], *, is_leader: bool) -> None:
        """Keep nothing of the server but its modules."""
        if is_leader:
            os.setsid()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        self._selector.close()
        self._requests.detach()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))

    def _ended(self, watched: int) -> None:
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


def main() -> None:
    """Serve; in a forked process, run the module that was asked for."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork would have one of them only")
    gc.freeze()
    if (request := _Server(requests).serve()) is None:
        return
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:] = request["words"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
