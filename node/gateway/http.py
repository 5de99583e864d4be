"""HTTP/1.1 on trio over h11, for a few JSON endpoints: everything that a client sends is bounded, and so is its time.

A connection is one task. A request's head is judged before anything else of it is read: what the `check` refuses is
answered and closed, so a client without the key costs a head and no more. A body is read only into room that its
announced length was given. While a request is being answered the client is listened to, so that one that hangs up is
noticed and its work withdrawn. Not for files, uploads or the open internet without a proxy in front.
"""

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import h11
import msgspec
import trio

from node.gateway.bodies import Bodies, Full
from node.gateway.strangers import Place, Strangers, address_of
from swarm.guard import Source, guarded

__all__ = [
    "Check",
    "CutShort",
    "Handler",
    "Head",
    "Limits",
    "Request",
    "Response",
    "Say",
    "Streaming",
    "failure",
    "json_response",
    "serve",
]

LINGER_S: Final = 0.5
LINGER_BYTES: Final = 256 << 10
"""After a refusal so much is read and thrown away, for so long: about what a client has sent before it hears it."""
READ_BYTES: Final = 1 << 16
MAX_HEADERS: Final = 100
"""OpenAI's clients send twenty; parsing more would cost milliseconds each."""
RETRY: Final = (("Retry-After", "1"),)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may cost."""

    head_bytes: int = 16 << 10
    """Request line and headers."""
    body_bytes: int = 8 << 20
    """A prompt of the largest number of tokens, written as JSON numbers, and then some."""
    connections: int = 2048
    """Of clients that are known. The next are told to come back later, and closed."""
    idle_s: float = 75.0
    """A kept connection waits this long for its next request."""
    head_s: float = 10.0
    """From its first byte a request's head must be here by then; a connection's first one, from its beginning."""
    body_s: float = 60.0
    """The body must be here by then,"""
    grace_s: float = 10.0
    """and after this time have come at `body_rate` so far, or it only holds room that others wait for."""
    body_rate: float = 32 << 10
    """Bytes a second: a quarter of a megabit, below any uplink that people work over."""
    write_s: float = 30.0
    """A client may keep the writes of one answer waiting for this long in all,"""
    write_rate: float = 128 << 10
    """and for one second more for each so many bytes of the answer. A slower client is disconnected."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request of which the body has not been read. `headers`: by lower-case name, the last of equal ones.
    `length`: bytes of the body, as announced."""

    method: str
    path: str
    headers: Mapping[str, str]
    length: int


class Request:
    """A whole request. Its body counts against all clients' until `let_go`."""

    def __init__(self, head: Head, body: bytes | bytearray, bodies: Bodies) -> None:
        self.method, self.path, self.headers = head.method, head.path, head.headers
        self.body = body
        self._length, self._bodies = head.length, bodies
        self.until_sent = ExitStack()
        """Closed when the answer was sent, or the client is gone: gives back what the answer holds."""

    def let_go(self) -> None:
        """The body is not needed any more. Safe to call twice."""
        self.body = b""
        self._bodies.give_back(self._length)
        self._length = 0


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
Check = Callable[[Head], Response | None]
"""Judges a head alone: None, or the refusal with which its connection ends."""


class CutShort(Exception):
    """A `Streaming` cannot go on: its connection is closed, so that the client sees that the answer has no end."""


class _Refused(Exception):
    """What the client did ends its connection, after this answer."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def _bad(status: int, why: str, headers: tuple[tuple[str, str], ...] = ()) -> _Refused:
    return _Refused(failure(status, why, headers=headers))


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


def failure(
    status: int,
    why: str,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    param: str | None = None,
) -> Response:
    """An error as OpenAI's clients read it. `param`: the field of the request that it is about."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return json_response({"error": {"message": why, "type": kind, "param": param, "code": code}}, status, headers)


def _admit(head: Head) -> Response | None:
    return None


async def serve(
    handler: Handler,
    host: str,
    port: int,
    limits: Limits = Limits(),
    check: Check = _admit,
    *,
    listening: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; `started` with the port. Raises `OSError` when the address is not available.

    `listening`: sockets that listen there already, which are closed at the end.
    """
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in listening]
    if not listeners:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=512)
    bound: int = listeners[0].socket.getsockname()[1]
    served = _Server(handler, limits, check)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, served.converse, listeners)
        task_status.started(bound)


class _Server:
    def __init__(self, handler: Handler, limits: Limits, check: Check) -> None:
        self._handler = handler
        self._limits = limits
        self._check = check
        self._strangers = Strangers()
        self._bodies = Bodies(max(limits.body_bytes, Bodies().most))
        self._known = 0

    async def converse(self, stream: trio.SocketStream) -> None:
        """One connection; where the errors of its client, and what it finds of ours, end."""
        address = _address(stream)
        place = None
        try:
            with guarded(Source.HTTP, address):
                place = await self._strangers.enter(address)
                if place is not None:
                    with place.scope:
                        await self._serve(_Connection(stream, self._limits), place)
        finally:
            if place is not None:
                self._strangers.leave(place)
            with trio.move_on_after(1.0) as scope:
                scope.shield = True
                await stream.aclose()

    async def _serve(self, connection: "_Connection", place: Place) -> None:
        met = False
        try:
            while (head := await connection.next_head(known=met)) is not None:
                if (refusal := self._check(head)) is not None:
                    raise _Refused(refusal)
                if not met:
                    self._strangers.known(place)
                    self._known, met = self._known + 1, True
                    if self._known > self._limits.connections:
                        raise _bad(429, "Too many connections. Try again in a moment.", RETRY)
                if not await self._answer(connection, head):
                    return
        except _Refused as refused:
            await connection.refuse(refused.response)
        finally:
            self._known -= met

    async def _answer(self, connection: "_Connection", head: Head) -> bool:
        """False: nothing more can be said on this connection."""
        try:
            await self._bodies.reserve(head.length)
        except Full:
            raise _bad(429, "Too much is being sent at the moment. Try again.", RETRY) from None
        request = Request(head, b"", self._bodies)
        try:
            request.body = await connection.body(head.length)
            response = await connection.unless_gone(self._handler, request)
            request.let_go()
            return response is not None and await connection.send(response)
        finally:
            request.let_go()
            request.until_sent.close()


def _address(stream: trio.SocketStream) -> str:
    try:
        return address_of(stream.socket.getpeername()[0])
    except OSError:  # it has reset the connection already
        return ""


class _Connection:
    def __init__(self, stream: trio.SocketStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._scope = trio.CancelScope()
        self._sent_bytes, self._writing_s = 0, 0.0
        """Of the answer that is being sent: its bytes so far, and how long the client kept their writes waiting."""
        self._without_body = False
        """The last request was HEAD: its answer is a head, too."""

    async def next_head(self, *, known: bool) -> Head | None:
        """None: the client is done. `known`: it has had an answer before. Raises `_Refused`."""
        if self._h11.our_state is h11.MUST_CLOSE or self._h11.their_state is h11.MUST_CLOSE:
            return None
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        began = bool(self._h11.trailing_data[0])
        wait_s = self._limits.idle_s if known else min(self._limits.idle_s, self._limits.head_s)
        with trio.move_on_after(self._limits.head_s if began else wait_s) as scope:
            self._check_lines()
            while (event := self._event()) is h11.NEED_DATA:
                await self._receive()
                self._check_lines()
                if known and not began:
                    scope.deadline = trio.current_time() + self._limits.head_s
                began = True
            self._without_body = isinstance(event, h11.Request) and event.method == b"HEAD"
            return self._head(event) if isinstance(event, h11.Request) else None
        if not began:
            return None
        raise _bad(408, "The request did not come to its end in time.")

    def _check_lines(self) -> None:
        """Raises `_Refused` for more headers than are worth parsing."""
        data, _ = self._h11.trailing_data
        end = data.find(b"\r\n\r\n")
        if data.count(b"\n", 0, len(data) if end < 0 else end) > MAX_HEADERS:
            raise _bad(431, f"A request may have {MAX_HEADERS} headers at most.")

    def _head(self, event: h11.Request) -> Head:
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        target = event.target.decode("ascii", "replace")
        if "transfer-encoding" in headers:
            raise _bad(411, "Content-Length, please: bodies of unknown length are not read.")
        head = Head(
            event.method.decode("ascii"), target.partition("?")[0], headers, int(headers.get("content-length", 0))
        )
        if head.length > self._limits.body_bytes:
            raise _bad(413, f"A request may have {self._limits.body_bytes} bytes at most.")
        return head

    def _event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise _bad(error.error_status_hint, f"This is not HTTP as it should be: {error}.") from error

    async def _receive(self) -> None:
        """More of what the client says."""
        if self._h11.they_are_waiting_for_100_continue:  # its head was accepted, or this would not be asked for
            await self._write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        self._h11.receive_data(bytes(await self._stream.receive_some(READ_BYTES)))

    async def body(self, length: int) -> bytearray:
        """The body of the request whose head was read last. Raises `_Refused`."""
        body, received, limits = bytearray(length), 0, self._limits
        began = trio.current_time()
        with trio.move_on_after(limits.body_s) as scope:
            while not isinstance(event := self._event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    body[received : received + len(event.data)] = event.data
                    received += len(event.data)
                elif event is h11.NEED_DATA:
                    scope.deadline = began + min(limits.body_s, limits.grace_s + received / limits.body_rate)
                    await self._receive()
            return body
        raise _bad(408, "The request did not come to its end in time.")

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

    async def send(self, response: Response, *, last: bool = False) -> bool:
        """False: nothing more can be said on this connection. `last`: and nothing will be."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        self._sent_bytes, self._writing_s = 0, 0.0
        headers = [("Content-Type", response.content_type), *response.headers]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        if last or self._h11.their_state is not h11.DONE:  # we shall not read the rest
            headers.append(("Connection", "close"))
        head = self._h11.send(h11.Response(status_code=response.status, headers=headers)) or b""
        if isinstance(response.body, bytes):
            body = None if self._without_body else self._h11.send(h11.Data(data=response.body))
            await self._write(head + (body or b""))
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
            await self.send(response, last=True)
            with trio.move_on_after(LINGER_S):
                await self._stream.send_eof()
                heard = 0
                while heard < LINGER_BYTES and (said := await self._heard()):
                    heard += len(said)
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
            try:
                await body(say)
            except CutShort:
                gone = True
            nursery.cancel_scope.cancel()
        return not gone

    async def _heard(self) -> bytes:
        """What the client says; nothing when it hung up."""
        try:
            return bytes(await self._stream.receive_some(READ_BYTES))
        except trio.BrokenResourceError:
            return b""

    async def _write(self, data: bytes | None) -> None:
        if not data:
            return
        self._sent_bytes += len(data)
        allowed_s = self._limits.write_s + self._sent_bytes / self._limits.write_rate
        began = trio.current_time()
        with trio.fail_after(max(0.0, allowed_s - self._writing_s)):
            await self._stream.send_all(data)
        self._writing_s += trio.current_time() - began
