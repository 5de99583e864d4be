"""The HTTP vocabulary: limits, request heads, requests, responses, and errors as OpenAI's clients read
them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import msgspec

from node.http.memory_budget import MOST_BYTES, MemoryBudget

__all__ = [
    "DEFAULT_LIMITS",
    "RETRY",
    "Check",
    "CutShort",
    "Handler",
    "HttpLimits",
    "Request",
    "RequestHead",
    "RequestRefused",
    "Response",
    "Send",
    "Streaming",
    "error_body",
    "failure",
    "json_response",
    "refusal",
]

RETRY: Final = (("Retry-After", "1"),)
"""The header of an answer to a client that should try again after a second."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client, and all clients together, may cost."""

    head_bytes: int = 16 << 10
    """Request line and headers."""
    body_bytes: int = 8 << 20
    """More than a prompt of the largest number of tokens takes as JSON numbers."""
    bodies_bytes: int = MOST_BYTES
    """Of the bodies of all clients that are held at a time; at least `body_bytes`."""
    connections: int = 2048
    """Connections of clients that are no strangers. The next ones get 429 and are closed."""
    idle_s: float = 75.0
    """A connection that is kept open waits this long for its next request."""
    head_s: float = 10.0
    """A request's head must be complete this long after its first byte; a connection's first one, after its opening."""
    body_s: float = 60.0
    """A body must be complete after this time."""
    grace_s: float = 10.0
    """From this time on a body must have come at `body_rate`; otherwise it only occupies memory that others wait
    for."""
    body_rate: float = 32 << 10
    """Bytes per second: a quarter of a megabit, below the uplink of any place where people work."""
    write_s: float = 30.0
    """A client may keep the writes of one answer waiting for this long in all, plus the time that the answer takes at
    `write_rate`. A slower client is disconnected."""
    write_rate: float = 128 << 10
    """Bytes per second."""


DEFAULT_LIMITS: Final = HttpLimits()


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request whose body has not been read."""

    method: str
    path: str
    query: str
    """What follows the question mark; empty: nothing."""
    headers: Mapping[str, str]
    """By lower-case name; of equal names the last one."""
    length: int
    """Bytes of the body, as announced."""


class Request:
    """A complete request. Its body counts against `bodies`, which all clients share, until `release_body`."""

    def __init__(self, head: RequestHead, body: bytes | bytearray, bodies: MemoryBudget) -> None:
        self.method, self.path, self.query, self.headers = head.method, head.path, head.query, head.headers
        self.body = body
        self._length, self._bodies = head.length, bodies
        self.until_sent = ExitStack()
        """Closed when the answer is sent or the client is gone: returns the memory that the answer holds."""
        self.note: Callable[[bytes], None] = lambda note: None
        """Called before a part of the answer is sent, with what another process needs to go on after that part."""
        self.before: Sequence[bytes] | None = None
        """The notes of what the client has, from a process that ended while it answered; None: none did."""
        self.on_release: Callable[[], None] = lambda: None
        """Called when the body is released, once."""

    def release_body(self) -> None:
        """The body is not needed any more. Safe to call twice."""
        self.body = b""
        self._bodies.give_back(self._length)
        self._length = 0
        on_release, self.on_release = self.on_release, lambda: None
        on_release()


Send = Callable[[bytes], Awaitable[None]]
"""Sends a part of an answer. Cancels its caller when the client is gone."""
Streaming = Callable[[Send], Awaitable[None]]
"""Sends a body in parts."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. `body`: complete, or in parts."""

    status: int
    body: bytes | Streaming
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = field(default=())


Handler = Callable[[Request], Awaitable[Response]]
Check = Callable[[RequestHead], Response | None]
"""Judges a request by its head alone: None, or the refusal after which its connection is closed."""


class CutShort(Exception):
    """A `Streaming` cannot continue: its connection is closed, so that the client sees that the answer has no end."""


class RequestRefused(Exception):
    """The client's request ends its connection, after this answer."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def refusal(status: int, why: str, headers: tuple[tuple[str, str], ...] = ()) -> RequestRefused:
    """A `RequestRefused` with an error in JSON."""
    return RequestRefused(failure(status, why, headers=headers))


def json_response(value: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """`value` as JSON."""
    return Response(status, msgspec.json.encode(value), headers=headers)


_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def failure(
    status: int,
    why: str,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    param: str | None = None,
) -> Response:
    """An error as OpenAI's clients read it. `param`: the field of the request that it is about."""
    return Response(status, error_body(status, why, code, param), headers=headers)


def error_body(status: int, why: str, code: str | None = None, param: str | None = None) -> bytes:
    """The body of such an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": why, "type": kind, "param": param, "code": code}})
