"""Scores other nodes' samples on this node's engine, one at a time, so that the ledger can compare."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec.errors import PeerError
from node.engines.host import EngineFailed, EngineLost
from node.ledger.messages import Ask, WorkAnswer, encode
from node.ledger.packing import pack_floats, unpack_tokens
from node.member.engine_client import EngineClient
from node.member.held_version import HeldVersion
from node.settings.event_log import EventLog

__all__ = ["Scorer"]

ASKS_HELD: Final = 8
"""Samples that wait to be scored; the oldest is dropped for one more, and the ledger asks another node."""

_log = EventLog(__name__)


class Scorer:
    """`send(body)` hands a `Work` body to the ledger and may lose it."""

    def __init__(self, engine: EngineClient, held: HeldVersion, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._engine, self._held, self._send = engine, held, send
        self._asks: deque[Ask] = deque(maxlen=ASKS_HELD)
        self._news = trio.Event()

    def ask(self, ask: Ask) -> None:
        """Score this sample when its turn comes. Raises `PeerError` for a request without tokens."""
        tokens = len(ask.token_ids) // 4
        if not ask.prompt or (len(ask.prompt) | len(ask.token_ids)) % 4 or not ask.start < ask.end <= tokens:
            raise PeerError("ask: no tokens to score")
        self._asks.append(ask)
        self._news.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            if not self._asks:
                self._news = trio.Event()
                await self._news.wait()
            await self._engine.wait_ready()
            ask = self._asks.popleft()
            if (answer := await self._answer(ask)) is not None:
                await self._send(encode(answer))

    async def _answer(self, ask: Ask) -> WorkAnswer | None:
        """None: the engine does not have the adapter; the ledger asks another node after a while."""
        asked, adapter, logprobs = (ask.epoch, ask.version), ask.sampling.extra.adapter, ()
        if adapter and adapter not in self._engine.adapters:
            return None
        version = asked if self._held.has(asked, adapter) else self._held.version
        if version == asked and self._engine.scores:
            tokens, sampling = unpack_tokens(ask.token_ids)[: ask.end], ask.sampling.with_options(adapter="")
            try:
                logprobs, _ = await self._engine.score(unpack_tokens(ask.prompt), tokens, sampling, adapter)
                version = asked if self._held.has(asked, adapter) else self._held.version  # a commit may have come
            except (EngineLost, EngineFailed) as error:
                _log.warning("not_scored", why=str(error))
        return WorkAnswer(ask.check, *version, pack_floats(logprobs[ask.start :]))
