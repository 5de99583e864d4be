"""Sends an answer as a stream of events while its samples are drawn.

What waits for a client is bounded by the tokens of its samples, which count against the budget of work in flight; a
client that reads too slowly is disconnected by the HTTP server, and its work is withdrawn.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import trio
from msgspec.structs import replace

from codec.errors import PeerError
from node.engines.base import Version
from node.engines.top_logprobs import PAIR
from node.gateway.answers import InvalidSample, event
from node.gateway.followed_sample import FollowedSample, Piece
from node.gateway.parsed_request import ParsedRequest
from node.gateway.progress import NOTHING, Began, Ended, Past, Sent, drawn_of, note_of, sent_piece
from node.gateway.request_tracker import Impossible, NoNodes, Overloaded, RequestTracker
from node.gateway.text import Text
from node.gateway.token_events import ChoiceEvents, TokenEvents
from node.gateway.wanted_version import NotServed
from node.http.memory_budget import BudgetFull, MemoryBudget, MemoryShare
from node.http.messages import Send

__all__ = ["KEEP_ALIVE_S", "FollowedAnswer"]

KEEP_ALIVE_S: Final = 10.0
"""A stream that waits for its tokens sends a comment this often, so that proxies do not close it."""
TOKEN_BYTES: Final = 8
"""Memory of a token that was drawn, with its log-probability."""
AT_ONCE: Final = 256
"""More new tokens than these are encoded in a thread: they take milliseconds."""


class FollowedAnswer:
    """The answer to one request."""

    def __init__(
        self,
        parsed: ParsedRequest,
        text: Text,
        tracker: RequestTracker,
        writers: trio.CapacityLimiter,
        held: MemoryShare,
        encoded: MemoryBudget,
        *,
        name: str,
        chat: bool,
        within_s: float,
        head: Callable[[], Version],
        use: Callable[[int], None],
        note: Callable[[bytes], None],
        past: Past,
    ) -> None:
        """`writers`: of the threads that encode much text. `held`: grows by the memory of the tokens. `encoded`: of all
        answers that are being encoded, or are encoded and being sent. `name`: the model's. `within_s`: for all
        samples. `head()`: the newest version. `use(tokens)`: the client has used so many. `note(note)`: called before a
        part is sent; see `Request`. `past`: what the client has."""
        began = past.began or Began(os.urandom(16).hex(), int(time.time()), parsed.sampling.seed)
        parsed = replace(parsed, sampling=replace(parsed.sampling, seed=began.seed))
        self._note, self._past = note, past
        self._entries: list[Began | Sent | Ended] = [] if past.began else [began]
        """Of the note of the next part."""
        self._parsed, self._tracker, self._writers, self._held = parsed, tracker, writers, held
        self._encoded = encoded
        self._within_s, self._head, self._use = within_s, head, use
        self._events = TokenEvents(name, began.answer_id, parsed, text, chat=chat, created=began.created)
        self._samples = [self._sample(text, prompt) for prompt in parsed.prompts for _ in range(parsed.n)]
        self._sending = trio.Lock()
        self._sent_at = trio.current_time()

    def _sample(self, text: Text, prompt: Sequence[int]) -> FollowedSample:
        options = self._parsed.sampling.extra
        stop = partial(text.stop_text, prompt, options.stop_texts, special=options.special, least=options.min_tokens)
        return FollowedSample(self._parsed.sampling, stop if options.stop_texts else None, self._grow)

    def _grow(self, tokens: int) -> None:
        self._hold(tokens)
        self._use(tokens)

    def _hold(self, tokens: int) -> None:
        """So many more tokens are kept."""
        top_bytes = PAIR.itemsize * self._parsed.sampling.extra.top_logprobs
        self._held.resize(self._held.count + (TOKEN_BYTES + top_bytes) * tokens)

    async def send_events(self, send: Send) -> None:
        """Send all events. An error is sent as an event, too, because the head of the answer was sent before."""
        if self._past.ended:
            return
        await self._restore()
        errors: list[str] = []

        async def follow(i: int, scope: trio.CancelScope) -> None:
            try:
                await self._follow(i, send)
            except* (Impossible, NoNodes, Overloaded, PeerError, InvalidSample, NotServed, BudgetFull) as group:
                errors.append(str(group.exceptions[0]) or "Too many answers are held for clients at the moment.")
                scope.cancel()

        with trio.move_on_after(self._within_s) as deadline:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_alive, send)
                async with trio.open_nursery() as samples:
                    for i in self._unfinished():
                        samples.start_soon(follow, i, samples.cancel_scope)
                nursery.cancel_scope.cancel()
        if deadline.cancelled_caught:
            errors.append("No node finished this in time.")
        self._entries.append(Ended())
        self._note(note_of(self._entries))
        if errors:
            await send(event({"error": {"message": errors[0], "type": "server_error", "code": 503}}))
        else:
            await send(self._events.end())

    def _unfinished(self) -> list[int]:
        """The samples whose end the client does not have."""
        return [i for i, sample in enumerate(self._samples) if sample.ending is None]

    async def _restore(self) -> None:
        """Take what the client has."""
        tokens = self._past.tokens
        self._hold(tokens)
        if tokens > AT_ONCE:
            await trio.to_thread.run_sync(self._replay, limiter=self._writers)
        else:
            self._replay()

    def _replay(self) -> None:
        self._events.begun = self._events.begun or bool(self._past.sent)
        for sent in self._past.sent:
            if sent.choice >= len(self._samples):
                raise InvalidSample("The notes of this stream are of another request.")
            piece = self._samples[sent.choice].restore(*drawn_of(sent), sent.versions, sent.ending)
            self._events.choices[sent.choice].parts(piece)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            left_s = self._sent_at + KEEP_ALIVE_S - trio.current_time()
            if left_s <= 0.0:
                async with self._sending:
                    self._note(NOTHING)
                    await self._send(send, b": waiting\n\n")
            else:
                await trio.sleep(left_s)

    async def _send(self, send: Send, data: bytes) -> None:
        await send(data)
        self._sent_at = trio.current_time()

    async def _follow(self, i: int, send: Send) -> None:
        """Have sample `i` drawn, and send its events."""
        sample, parsed = self._samples[i], self._parsed
        prompt = parsed.prompts[i // parsed.n]
        ask = partial(self._tracker.ask_followed, images=parsed.images, again=parsed.again)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, prompt, sample, parsed.affinity, parsed.wanted)
            while True:
                news = sample.news
                async with self._sending:
                    if await self._send_piece(i, sample, send):
                        return
                await news.wait()

    async def _send_piece(self, number: int, sample: FollowedSample, send: Send) -> bool:
        """Send what is new of sample `number`. Whether that was its end."""
        choice = self._events.choices[number]
        piece = sample.since(choice.sent)
        least = self._parsed.stream_interval if choice.sent else 1
        if piece.ending is None and len(piece.tokens) < least:
            return False
        if piece.ending is not None and self._parsed.wanted is not None:
            self._parsed.wanted.check_tokens((version for version, _ in piece.versions), self._head())
        async with self._encoded.share(choice.cost(piece)) as encoded:
            kinds = "" if piece.ending is None else self._tracker.kinds_of([piece.ending.node])
            data = self._events.encode(await self._parts(choice, piece), kinds)
            encoded.resize(2 * len(data))  # and its copy with the length of the chunk before it
            self._note(note_of([*self._entries, sent_piece(number, piece)]))
            await self._send(send, data)
            self._entries.clear()
        return piece.ending is not None

    async def _parts(self, choice: ChoiceEvents, piece: Piece) -> list[dict[str, Any]]:
        own: Sequence[int] = ()
        if piece.ending is not None:
            versions = [version for version, _ in piece.versions]
            owns = self._tracker.own_versions(self._parsed.sampling.extra.adapter, versions)
            starts = [0, *(end for _, end in piece.versions)]
            own = [value for k, value in enumerate(owns) for _ in range(starts[k + 1] - starts[k])]
        if len(piece.tokens) <= AT_ONCE:
            return choice.parts(piece, own)
        return await trio.to_thread.run_sync(choice.parts, piece, own, limiter=self._writers)
