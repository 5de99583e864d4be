"""One client's HTTP/1.1 connection over h11: reads requests and writes answers, each within its deadline."""

import math
from typing import Any, Final, Protocol

import h11
import trio

from node.http.messages import CutShort, Handler, HttpLimits, Request, RequestHead, Response, Streaming, refusal

__all__ = ["ClientStream", "HttpConnection"]

LINGER_S: Final = 0.5
LINGER_BYTES: Final = 256 << 10
"""After a refusal the server reads and drops this much, for this long: about what a client sends before it reads the
answer."""
READ_BYTES: Final = 1 << 16
"""What one read of the socket takes at most."""
MAX_HEADERS: Final = 100
"""OpenAI's clients send twenty; parsing many more would take milliseconds per request."""


class PeerSocket(Protocol):
    """The socket below a client's connection."""

    def getpeername(self) -> Any:
        """Its client's address; the host is first."""
        ...


class ClientStream(Protocol):
    """What the server uses of a client's connection: a part of `trio.SocketStream`."""

    @property
    def socket(self) -> PeerSocket: ...

    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...

    async def send_all(self, data: bytes, /) -> None: ...

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


class HttpConnection:
    """Reads a client's requests and answers them, one after another."""

    def __init__(self, stream: ClientStream, limits: HttpLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._sent_bytes, self._writing_s = 0, 0.0
        """Of the answer that is being sent: its bytes so far, and how long the client kept their writes waiting."""
        self._without_body = False
        """The last request was HEAD: its answer is a head, too."""

    async def next_head(self, *, known: bool) -> RequestHead | None:
        """The head of the next request. None: the client is done, or sent nothing in time.

        `known`: the client has had an answer before. Raises `RequestRefused`.
        """
        if self._h11.our_state is h11.MUST_CLOSE or self._h11.their_state is h11.MUST_CLOSE:
            return None
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        began = bool(self._h11.trailing_data[0])
        wait_s = self._limits.idle_s if known else min(self._limits.idle_s, self._limits.head_s)
        with trio.move_on_after(self._limits.head_s if began else wait_s) as scope:
            self._check_lines()
            while (event := self._next_event()) is h11.NEED_DATA:
                await self._receive()
                self._check_lines()
                if known and not began:
                    scope.deadline = trio.current_time() + self._limits.head_s
                began = True
            self._without_body = isinstance(event, h11.Request) and event.method == b"HEAD"
            return self._parse_head(event) if isinstance(event, h11.Request) else None
        if not began:
            return None
        raise refusal(408, "The request did not come to its end in time.")

    def _check_lines(self) -> None:
        """Raises `RequestRefused` for more than `MAX_HEADERS` headers, before they are parsed."""
        data, _ = self._h11.trailing_data
        end = data.find(b"\r\n\r\n")
        if data.count(b"\n", 0, len(data) if end < 0 else end) > MAX_HEADERS:
            raise refusal(431, f"A request may have {MAX_HEADERS} headers at most.")

    def _parse_head(self, event: h11.Request) -> RequestHead:
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        target = event.target.decode("ascii", "replace")
        path, _, query = target.partition("?")
        if "transfer-encoding" in headers:
            raise refusal(411, "Content-Length, please: bodies of unknown length are not read.")
        head = RequestHead(event.method.decode("ascii"), path, query, headers, int(headers.get("content-length", 0)))
        if head.length > self._limits.body_bytes:
            raise refusal(413, f"A request may have {self._limits.body_bytes} bytes at most.")
        return head

    def _next_event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise refusal(error.error_status_hint, f"This is not HTTP as it should be: {error}.") from error

    async def _receive(self) -> None:
        """Read more of what the client sends."""
        if self._h11.they_are_waiting_for_100_continue:  # its head was accepted, or nothing more would be read
            await self._write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        self._h11.receive_data(bytes(await self._stream.receive_some(READ_BYTES)))

    async def read_body(self, length: int) -> bytearray:
        """The body of the request whose head was read last, `length` bytes. Raises `RequestRefused` when it is too
        slow."""
        body, received, limits = bytearray(length), 0, self._limits
        began = trio.current_time()
        with trio.move_on_after(limits.body_s) as scope:
            while not isinstance(event := self._next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    body[received : received + len(event.data)] = event.data
                    received += len(event.data)
                elif event is h11.NEED_DATA:
                    scope.deadline = began + min(limits.body_s, limits.grace_s + received / limits.body_rate)
                    await self._receive()
            return body
        raise refusal(408, "The request did not come to its end in time.")

    async def call_handler(self, handler: Handler, request: Request) -> Response | None:
        """The handler's answer; None, and the handler is cancelled, when the client disconnects first."""
        answer: Response | None = None

        async def watch_client(scope: trio.CancelScope) -> None:
            if self._h11.trailing_data[0]:
                return  # it has sent further requests already: reading on at each would hold ever more of them
            data = await self._receive_or_nothing()
            if not data:
                scope.cancel()
            else:  # the beginning of its next request, which has to wait
                self._h11.receive_data(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_client, nursery.cancel_scope)
            answer = await handler(request)
            nursery.cancel_scope.cancel()
        return answer

    async def send_response(self, response: Response, *, last: bool = False) -> bool:
        """Send an answer; `last`: and close the connection then. False: the connection cannot be used any more."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        self._sent_bytes, self._writing_s = 0, 0.0
        headers = [("Content-Type", response.content_type), *response.headers]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        if last or self._h11.their_state is not h11.DONE:  # the rest of the request will not be read
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
        """Send the last answer of this connection, and read on for a moment: data that arrives at a closed socket makes
        the system reset the connection, and the client would lose the answer."""
        try:
            await self.send_response(response, last=True)
            with trio.move_on_after(LINGER_S):
                await self._stream.send_eof()
                dropped = 0
                while dropped < LINGER_BYTES and (data := await self._receive_or_nothing()):
                    dropped += len(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass

    async def _send_stream(self, body: Streaming) -> bool:
        """Send a body in parts. False: the connection cannot be used any more.

        All parts are written under one scope, whose deadline is set for each: a scope of its own for each would cost
        more than the write.
        """
        broken = sending = False
        async with trio.open_nursery() as nursery:
            scope = nursery.cancel_scope

            async def watch_client() -> None:
                nonlocal broken
                data = await self._receive_or_nothing()
                broken = True  # also if data came: it is dropped, so this connection can have no further request
                if not data:
                    scope.cancel()

            async def send(part: bytes) -> None:
                nonlocal sending
                sending = True
                try:
                    await self._send_before(scope, self._h11.send(h11.Data(data=part)) or b"")
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                sending = False

            nursery.start_soon(watch_client)
            try:
                await body(send)
            except CutShort:
                broken = True
            scope.cancel()
        return not broken and not sending

    async def _receive_or_nothing(self) -> bytes:
        """What the client sends next; empty when it has disconnected."""
        try:
            return bytes(await self._stream.receive_some(READ_BYTES))
        except trio.BrokenResourceError:
            return b""

    async def _write(self, data: bytes | None) -> None:
        """Send `data`. Raises `trio.TooSlowError` when the client has kept this answer's writes waiting too long."""
        if not data:
            return
        with trio.CancelScope() as scope:
            await self._send_before(scope, data)
        if scope.cancelled_caught:
            raise trio.TooSlowError

    async def _send_before(self, scope: trio.CancelScope, data: bytes) -> None:
        """Send `data` in a block of `scope`, which is cancelled when the client has kept this answer's writes waiting
        too long."""
        self._sent_bytes += len(data)
        allowed_s = self._limits.write_s + self._sent_bytes / self._limits.write_rate
        began = trio.current_time()
        scope.deadline = began + max(0.0, allowed_s - self._writing_s)
        await self._stream.send_all(data)
        scope.deadline = math.inf
        self._writing_s += trio.current_time() - began
