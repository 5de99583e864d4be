"""A client that sends many requests before it reads an answer."""

import trio
import trio.testing

from node.http.connection import READ_BYTES, HttpConnection
from node.http.memory_budget import MemoryBudget
from node.http.messages import HttpLimits, Request, Response

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_little_is_read_ahead_of_the_request_that_is_answered(autojump_clock):
    client, server = trio.testing.memory_stream_pair()
    connection = HttpConnection(server, HttpLimits())  # pyright: ignore[reportArgumentType]

    async def handler(request: Request) -> Response:
        await trio.sleep(0.1)  # as an answer that comes from elsewhere
        return Response(200, b"{}")

    await client.send_all(REQUEST * 20 * (READ_BYTES // len(REQUEST)))
    for _ in range(10):
        head = await connection.next_head(known=True)
        assert head is not None
        request = Request(head, b"", MemoryBudget())
        request.body = await connection.read_body(head.length)
        response = await connection.call_handler(handler, request)
        assert response is not None
        assert await connection.send_response(response)
        assert len(connection._h11.trailing_data[0]) <= READ_BYTES
