"""HTTP/1.1 on trio over h11, for a few JSON endpoints: everything that a client sends is bounded, and so is its time.

A connection is one task. While a request is being answered the client is listened to, so that one that hangs up is
noticed and its work withdrawn. Not for files, uploads or the open internet without a proxy in front.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import h11
import msgspec
import trio

__all__ = ["Handler", "Limits", "Request", "Response", "Say", "Streaming", "failure", "json_response", "serve"]

LINGER_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may cost."""

    head_bytes: int = 32 << 10
    """Request line and headers."""
    body_bytes: int = 8 << 20
    """A prompt of the largest number of tokens, written as JSON numbers, and then some."""
    connections: int = 2048
    """The next are told to come back later, and closed; from twice as many on without a word."""
    idle_s: float = 75.0
    """A kept connection waits this long for its next request."""
    head_s: float = 10.0
    """From its first byte a request's head must be here by then,"""
    body_s: float = 60.0
    """and its body by then."""
    write_s: float = 30.0
    """A client that takes nothing of its answer for so long is gone."""


@dataclass(frozen=True, slots=True)
class Request:
    """`headers`: by lower-case name, the last of equal ones."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Say = Callable[[bytes], Awaitable[None]]
"""Sends a part of an answer; whoever calls is cancelled when the client is gone."""
Streaming = Callable[[Say], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Response:
    """`body`: at once, or as it comes."""

    status: int
    body: bytes | Streaming
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = field(default=())


Handler = Callable[[Request], Awaitable[Response]]


class _Bad(Exception):
    """What the client did ends its connection, after this answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.response = failure(status, why)


def json_response(value: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """`value` as JSON."""
    return Response(status, msgspec.json.encode(value), headers=headers)


_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def failure(status: int, why: str, code: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """An error as OpenAI's clients read it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return json_response({"error": {"message": why, "type": kind, "param": None, "code": code}}, status, headers)


async def serve(
    handler: Handler,
    host: str,
    port: int,
    limits: Limits = Limits(),
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; `started` with the port. Raises `OSError` when the address cannot be had."""
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=512)
    bound: int = listeners[0].socket.getsockname()[1]
    served = _Server(handler, limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, served.converse, listeners)
        task_status.started(bound)


class _Server:
    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._open = 0

    async def converse(self, stream: trio.SocketStream) -> None:
        """One connection; where the errors of its client end."""
        self._open += 1
        late = self._open > self._limits.connections
        connection = _Connection(stream, self._limits)
        try:
            if self._open > 2 * self._limits.connections:
                return
            while (request := await connection.next_request()) is not None:
                if late:
                    raise _Bad(429, "Too many connections. Try again in a moment.")
                response = await connection.unless_gone(self._handler, request)
                if response is None or not await connection.send(response):
                    return
        except _Bad as bad:
            await connection.refuse(bad.response)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, h11.ProtocolError):
            pass
        finally:
            self._open -= 1
            with trio.move_on_after(1.0) as scope:
                scope.shield = True
                await stream.aclose()


class _Connection:
    def __init__(self, stream: trio.SocketStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._began = False
        """A byte of the next request is here."""

    async def next_request(self) -> Request | None:
        """None: the client is done. Raises `_Bad`."""
        if self._h11.our_state is h11.MUST_CLOSE or self._h11.their_state is h11.MUST_CLOSE:
            return None
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        self._began = bool(self._h11.trailing_data[0])
        with trio.move_on_after(self._limits.head_s if self._began else self._limits.idle_s) as self._head_scope:
            event = await self._next_event()
            if not isinstance(event, h11.Request):
                return None
            body = await self._body(event)
            target = event.target.decode("ascii", "replace")
            headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
            return Request(event.method.decode("ascii"), target.partition("?")[0], headers, body)
        if not self._began:
            return None
        raise _Bad(408, "The request did not come to its end in time.")

    async def _next_event(self) -> object:
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                raise _Bad(error.error_status_hint, f"This is not HTTP as it should be: {error}.") from error
            if event is not h11.NEED_DATA:
                return event
            if self._h11.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._write(self._h11.send(go_on))
            data = await self._stream.receive_some(1 << 16)
            if data and not self._began:
                self._began = True
                self._head_scope.deadline = trio.current_time() + self._limits.head_s
            self._h11.receive_data(bytes(data))

    async def _body(self, head: h11.Request) -> bytes:
        self._head_scope.deadline = trio.current_time() + self._limits.body_s
        announced = next((int(value) for name, value in head.headers if name == b"content-length"), 0)
        parts: list[bytes] = []
        received = 0
        while True:
            if max(received, announced) > self._limits.body_bytes:
                raise _Bad(413, f"A request may have {self._limits.body_bytes} bytes at most.")
            event = await self._next_event()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                received += len(event.data)
            else:
                return b"".join(parts)

    async def unless_gone(self, handler: Handler, request: Request) -> Response | None:
        """The handler's answer; None when the client hung up before it came."""
        answer: Response | None = None

        async def listen(scope: trio.CancelScope) -> None:
            data = await self._heard()
            if not data:
                scope.cancel()
            else:  # the beginning of its next request, which has to wait
                self._h11.receive_data(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, nursery.cancel_scope)
            answer = await handler(request)
            nursery.cancel_scope.cancel()
        return answer

    async def send(self, response: Response) -> bool:
        """False: nothing more can be said on this connection."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        headers = [("Content-Type", response.content_type), *response.headers]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        if self._h11.their_state is not h11.DONE:  # we shall not read the rest
            headers.append(("Connection", "close"))
        head = self._h11.send(h11.Response(status_code=response.status, headers=headers)) or b""
        if isinstance(response.body, bytes):
            await self._write(head + (self._h11.send(h11.Data(data=response.body)) or b""))
        else:
            await self._write(head)
            if not await self._send_stream(response.body):
                return False
        await self._write(self._h11.send(h11.EndOfMessage()))
        return self._h11.our_state is h11.DONE

    async def refuse(self, response: Response) -> None:
        """The last answer on this connection. Listens for a moment more: closing on what a client still says would
        take the answer from it, too."""
        try:
            await self.send(response)
            with trio.move_on_after(LINGER_S):
                await self._stream.send_eof()
                while await self._heard():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass

    async def _send_stream(self, body: Streaming) -> bool:
        """False: the client hung up."""
        gone = False
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal gone
                said = await self._heard()
                gone = True  # also if it talks: nothing is kept of that, so this connection has had its last request
                if not said:
                    nursery.cancel_scope.cancel()

            async def say(part: bytes) -> None:
                nonlocal gone
                try:
                    await self._write(self._h11.send(h11.Data(data=part)))
                except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                    gone = True
                    nursery.cancel_scope.cancel()
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(listen)
            await body(say)
            nursery.cancel_scope.cancel()
        return not gone

    async def _heard(self) -> bytes:
        """What the client says; nothing when it hung up."""
        try:
            return bytes(await self._stream.receive_some(1 << 16))
        except trio.BrokenResourceError:
            return b""

    async def _write(self, data: bytes | None) -> None:
        if not data:
            return
        with trio.fail_after(self._limits.write_s):
            await self._stream.send_all(data)
