"""An HTTP/1.1 server on trio for a few JSON endpoints, which bounds what each client and all clients together may cost.

Each connection is one task. The server judges a request by its head before it reads anything else: what `check` refuses
is answered and closed, so that a client without the key costs one head. It reads a body only after the budget of all
bodies has room for the announced length. While a request is being answered it listens to the client, so that the work
of a client that disconnects is withdrawn. It is not for files, uploads, or the open internet without a proxy in front.

Hypercorn's trio worker (0.18) cannot replace it: the worker sends each part of an answer in a shielded cancel scope
without a deadline, so that neither its configuration nor the application can disconnect a client that stops reading,
and it bounds connections neither in all nor per client address. It also sends `100 Continue` and reads up to ten chunks
of 64 KiB per connection before the application has judged the head, and closes an early refusal without reading on, so
that the client's own data may destroy the answer.
"""

import socket
from collections.abc import Sequence

import trio

from node.http.connection import ClientStream, HttpConnection
from node.http.memory_budget import BudgetFull, MemoryBudget
from node.http.messages import (
    DEFAULT_LIMITS,
    RETRY,
    Check,
    Handler,
    HttpLimits,
    Request,
    RequestHead,
    RequestRefused,
    Response,
    refusal,
)
from node.http.strangers import StrangerPlace, Strangers, address_of
from swarm.guard import Source, guarded

__all__ = ["HttpServer", "serve"]


def _admit(head: RequestHead) -> Response | None:
    return None


async def serve(
    handler: Handler,
    host: str,
    port: int,
    limits: HttpLimits = DEFAULT_LIMITS,
    check: Check = _admit,
    *,
    listening: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; `started` with the port. Raises `OSError` when the address is not available.

    `listening`: sockets that listen there already; they are closed at the end.
    """
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in listening]
    if not listeners:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=512)
    bound: int = listeners[0].socket.getsockname()[1]
    server = HttpServer(handler, limits, check)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, server.serve_connection, listeners)
        task_status.started(bound)


class HttpServer:
    """What all connections share: the places of strangers, the budget of bodies, the number of known clients."""

    def __init__(self, handler: Handler, limits: HttpLimits, check: Check) -> None:
        self._handler = handler
        self._limits = limits
        self._check = check
        self._strangers = Strangers()
        self._bodies = MemoryBudget(max(limits.body_bytes, limits.bodies_bytes))
        self._known = 0
        """Connections of clients that are no strangers."""

    async def serve_connection(self, stream: ClientStream) -> None:
        """Serve one connection. Errors that its client causes, or that are bugs of ours, end here."""
        address = _address(stream)
        place = None
        try:
            with guarded(Source.HTTP, address):
                place = await self._strangers.enter(address)
                if place is not None:
                    with place.scope:
                        await self._serve_requests(HttpConnection(stream, self._limits), place)
        finally:
            if place is not None:
                self._strangers.leave(place)
            with trio.move_on_after(1.0) as scope:
                scope.shield = True
                await stream.aclose()

    async def _serve_requests(self, connection: HttpConnection, place: StrangerPlace) -> None:
        known = False
        try:
            while (head := await connection.next_head(known=known)) is not None:
                if (response := self._check(head)) is not None:
                    raise RequestRefused(response)
                if not known:
                    self._strangers.known(place)
                    self._known, known = self._known + 1, True
                    if self._known > self._limits.connections:
                        raise refusal(429, "Too many connections. Try again in a moment.", RETRY)
                if not await self._answer(connection, head):
                    return
        except RequestRefused as refused:
            await connection.refuse(refused.response)
        finally:
            self._known -= known

    async def _answer(self, connection: HttpConnection, head: RequestHead) -> bool:
        """Answer one request. False: the connection cannot be used for another."""
        try:
            await self._bodies.reserve(head.length)
        except BudgetFull:
            raise refusal(429, "Too much is being sent at the moment. Try again.", RETRY) from None
        request = Request(head, b"", self._bodies)
        try:
            request.body = await connection.read_body(head.length)
            response = await connection.call_handler(self._handler, request)
            request.release_body()
            return response is not None and await connection.send_response(response)
        finally:
            request.release_body()
            request.until_sent.close()


def _address(stream: ClientStream) -> str:
    try:
        return address_of(stream.socket.getpeername()[0])
    except OSError:  # it has reset the connection already
        return ""
