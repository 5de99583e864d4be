"""A gateway that answers as a test says, and notes what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, dict[str, str]]
"""Status, JSON and headers."""


def drawn(tokens: list[int], version: tuple[int, int] = (0, 1)) -> Answer:
    """A sample of these tokens."""
    choice = {
        "text": "x", "token_ids": tokens, "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
        "versions": [list(version)] * len(tokens), "finish_reason": "stop",
    }  # fmt: skip
    return 200, {"choices": [choice]}, {}


def refused(status: int, why: str, retry_after: str = "0") -> Answer:
    return status, {"error": {"message": why}}, {"Retry-After": retry_after}


class ScriptedGateway(ThreadingHTTPServer):
    """Answers each request by `answer(body)`."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        """The bodies, in order."""
        self.keys: list[str | None] = []
        """The Authorization header of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedGateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        status, found, headers = self.server.answer(body)
        content = json.dumps(found).encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def gateway(*answers: Answer) -> Iterator[ScriptedGateway]:
    """A gateway that gives these answers in turn, and the last one from then on."""
    left = list(answers)
    with ScriptedGateway(lambda _: left.pop(0) if len(left) > 1 else left[0]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
