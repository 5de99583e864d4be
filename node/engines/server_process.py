"""The process of an inference server that an engine's driver starts, and its children."""

import http.client
import os
import signal
import socket as sockets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = ["ASK_WITHIN_S", "LOOK_EVERY_S", "ServerProcess", "answers"]

ASK_WITHIN_S: Final = 30.0
"""For one HTTP request on loopback."""
LOOK_EVERY_S: Final = 0.25
"""Between two looks at a port, or at a server that is starting."""
STOP_WITHIN_S: Final = 3.0
"""From SIGTERM to SIGKILL."""
PORT_FREE_WITHIN_S: Final = 10.0
"""For the port to become free: an engine that was killed may still be releasing its memory."""
LOG_READ_BYTES: Final = 1 << 18
"""The end of the log in which the cause of a failed start is looked for."""


class ServerProcess:
    """A server and its children, in this process's group, so that they end with it. It answers at `/health`."""

    program: str = "The server"
    """What the user knows it as."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path) -> None:
        """`env`: its whole environment. `log`: for its output. Raises `UsageError` when the port is taken."""
        self.port, self._log = port, log
        self._wait_until_free()
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it answers, however long it loads. Raises `UsageError` when it ends first."""
        while not answers(self.port):
            if (code := self._process.poll()) is not None:
                raise UsageError(self._why(code))
            time.sleep(LOOK_EVERY_S)

    def _why(self, code: int) -> str:
        """A sentence on why the process ended. `code`: its exit code."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - LOG_READ_BYTES))
            log = file.read().decode(errors="replace")
        if (cause := self.cause_of(log)) is not None:
            return f"{self.program} ended before it served: {cause}."
        return f"{self.program} ended (code {code}) before it served: {self.last_error(log)}"

    def cause_of(self, log: str) -> str | None:
        """The cause that the log names, as a part of a sentence; None: it names none that is known."""
        _ = log  # what a log says depends on the program
        return None

    def last_error(self, log: str) -> str:
        """The last line of the log that looks like an error, and where the log is."""
        lines = [line.strip() for line in log.splitlines() if "Error" in line]
        return f"{lines[-1] if lines else 'it says nothing'} (see {self._log})"

    def stop(self) -> None:
        """End the process: SIGTERM, on which it ends its children, then SIGKILL after `STOP_WITHIN_S`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _wait_until_free(self) -> None:
        """Wait until nothing listens at the port, so that only our server can answer there. Raises `UsageError` when it
        stays taken."""
        give_up_at = time.monotonic() + PORT_FREE_WITHIN_S
        while True:
            with sockets.socket() as sock:
                sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
                try:
                    sock.bind(("127.0.0.1", self.port))
                    return
                except OSError as error:
                    if time.monotonic() > give_up_at:
                        raise UsageError(
                            f"Port {self.port} is taken ({error.strerror}), perhaps by another {self.program}. Choose "
                            "one for the engine's OpenAI endpoint: --engine-port, 0 for any that is free."
                        ) from error
            time.sleep(LOOK_EVERY_S)


def answers(port: int) -> bool:
    """Whether the server at this port of loopback says that it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_WITHIN_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
