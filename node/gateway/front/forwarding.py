"""One request on its way to its answer: it is sent to the seed, and to the next seed if that one ends first.

The next seed gets the request with the notes of the parts that the client has. It goes on after those, or it begins
anew if the client has nothing yet. An answer that comes in parts without notes cannot go on.
"""

import math
from typing import Final

import trio

from node.gateway.front.messages import WINDOW_BYTES, Answer, Ask, End, Part
from node.gateway.front.seed_link import SeedLink
from node.gateway.front.seeds import Seeds
from node.http.memory_budget import MemoryBudget, MemoryShare
from node.http.messages import CutShort, Request, Response, Send, error_body

__all__ = ["Forwarding", "SeedLost"]

QUIET_S: Final = 15.0
"""A stream whose seed is away sends a comment this often; a seed that is there sends its own every 10 s."""
NOTE_BYTES: Final = 64
"""Memory of a note besides its bytes."""
MOST_NOTES: Final = 16 << 20
"""Memory of the notes of one request, which the next seed gets in one frame."""
_EVENTS: Final = "text/event-stream"
_TOO_LATE: Final = "The seed has not finished this in time."
_Found = Answer | Part | End


class SeedLost(Exception):
    """The seed ended, and the request cannot go on. The message is for the client."""


class Forwarding:
    """One request."""

    def __init__(
        self, request: Request, seeds: Seeds, notes: MemoryBudget, *, keep: bool, away_s: float, within_s: float
    ) -> None:
        """`notes`: of all requests. `keep`: ask another seed when one ends. `away_s`: how long the request waits for
        another seed; `within_s`: for all of its answer."""
        self._request, self._seeds, self._away_s = request, seeds, away_s
        self._body = request.body = bytes(request.body)
        self._keep = keep
        self._deadline = trio.current_time() + within_s
        self._notes: list[bytes] = []
        self._noted = MemoryShare(notes)
        self._notes_budget = notes
        self._asked = False
        self._link: SeedLink | None = None
        self._number, self._unconfirmed = 0, 0
        self._found: trio.MemoryReceiveChannel[_Found] | None = None
        self._wait_until = trio.current_time() + away_s
        self._is_stream = False
        request.until_sent.callback(self._close)

    def _close(self) -> None:
        self._noted.resize(0)
        if self._link is not None:
            self._link.forget(self._number)
        self._link = self._found = None

    async def answer(self) -> Response:
        """The head of the answer; its parts are then sent by the response's body. Raises `SeedLost`."""
        try:
            with trio.fail_at(self._deadline):
                found = await self._next()
        except trio.TooSlowError:
            raise SeedLost(_TOO_LATE) from None
        if not isinstance(found, Answer):
            raise SeedLost("The seed answered without a beginning. Ask again.")
        if found.body is not None:
            return Response(found.status, found.body, found.content_type, tuple(found.headers))
        self._is_stream = found.content_type.startswith(_EVENTS)
        return Response(found.status, self._send_parts, found.content_type, tuple(found.headers))

    # ------------------------------------------------------------ parts

    async def _send_parts(self, send: Send) -> None:
        try:
            while await self._send_until_quiet(send):
                if trio.current_time() >= self._deadline:
                    raise SeedLost(_TOO_LATE)
                if self._is_stream:
                    await send(b": waiting\n\n")
        except SeedLost as error:
            if not self._is_stream:
                raise CutShort from error
            await send(_event(error_body(503, str(error), "seed_away")))

    async def _send_until_quiet(self, send: Send) -> bool:
        """Send what comes, until nothing has come for a while. False: the answer is at its end.

        One scope for all that comes: a scope for each part, of which each token is one, would cost more than the rest.
        """
        with trio.CancelScope() as quiet:
            while True:
                quiet.deadline = min(trio.current_time() + QUIET_S, self._deadline)
                found = await self._next()
                quiet.deadline = math.inf
                if not await self._send_found(found, send):
                    return False
        return True

    async def _send_found(self, found: _Found, send: Send) -> bool:
        """Send what came. False: it was the end."""
        match found:
            case Part():
                return await self._send_part(found, send)
            case End(whole=True):
                return False
            case Answer(body=None):  # of another seed, to a request whose answer has begun
                return True
            case Answer() if self._is_stream:  # its refusal
                await send(_event(found.body or b""))
                return False
            case _:
                raise CutShort

    async def _send_part(self, part: Part, send: Send) -> bool:
        """Send a part, and those that came with it. False: they were the last ones."""
        data, following = [part.data], None
        self._note(part)
        while self._found is not None:
            try:
                following = self._found.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                break
            if not isinstance(following, Part):
                break
            self._note(following)
            data.append(following.data)
            following = None
        sent = b"".join(data)
        await send(sent)
        self._confirm(len(sent))
        if isinstance(following, End) and not following.whole:
            raise CutShort
        return following is None

    def _note(self, part: Part) -> None:
        if part.note is None:
            self._keep = False
        elif part.note and self._keep:
            self._notes.append(part.note)
            self._noted.resize(self._noted.count + NOTE_BYTES + len(part.note))
        if self._noted.count > MOST_NOTES or self._notes_budget.held > self._notes_budget.most:
            self._keep = False
        if not self._keep:
            self._notes.clear()
            self._noted.resize(0)

    def _confirm(self, count: int) -> None:
        self._unconfirmed += count
        if self._link is not None and self._unconfirmed >= WINDOW_BYTES // 4:
            self._link.delivered(self._number, self._unconfirmed)
            self._unconfirmed = 0

    # ------------------------------------------------------------ seeds

    async def _next(self) -> _Found:
        """The next message about this request; the caller sets a deadline. Raises `SeedLost`."""
        while True:
            if self._found is None:
                await self._ask()
                continue
            try:
                return await self._found.receive()
            except trio.EndOfChannel:
                self._found = self._link = None
                self._wait_until = trio.current_time() + self._away_s
                if not self._keep:
                    raise SeedLost("The seed ended while it answered this. Ask again.") from None

    def _taken(self) -> None:
        """The body has left the seed's memory."""
        if not self._keep:
            self._body = b""
            self._request.release_body()

    async def _ask(self) -> None:
        """Send the request to the present seed, or to the next one. Raises `SeedLost`."""
        try:
            with trio.fail_at(min(self._wait_until, self._deadline)):
                link = await self._seeds.wait()
        except trio.TooSlowError:
            raise SeedLost(f"The seed ended, and is not back after {self._away_s:.0f} s. Ask again later.") from None
        request = self._request
        before = list(self._notes) if self._asked else None
        self._number, self._found = link.ask(
            lambda number: Ask(
                number, request.method, request.path, request.query, dict(request.headers), self._body, before
            ),
            self._taken,
        )
        self._link, self._unconfirmed, self._asked = link, 0, True


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
