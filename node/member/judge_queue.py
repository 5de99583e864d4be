"""Has this node's engine judge other nodes' samples, so that the ledger can compare what they claim."""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from codec.errors import PeerError
from node.engines.base import MIN_LOGPROB, Prompt
from node.engines.host import EngineFailed, EngineLost
from node.engines.judgement import Claim
from node.ledger.messages import JudgeAnswer, JudgeRequest, encode
from node.ledger.packing import pack_floats, unpack_tokens
from node.member.engine_client import EngineClient
from node.member.held_version import HeldVersion
from node.settings.event_log import EventLog

__all__ = ["JudgeQueue"]

MOST: Final = 8
"""Samples that are judged, and as many that wait. One more is not answered, and the ledger asks another node after a
while; it has no more than a few open requests of one node."""

_log = EventLog(__name__)


class JudgeQueue:
    """`send(body)` hands a `Work` body to the ledger and may lose it."""

    def __init__(self, engine: EngineClient, held: HeldVersion, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._engine, self._held, self._send = engine, held, send
        self._put, self._get = trio.open_memory_channel[JudgeRequest](MOST)
        self._room = trio.Semaphore(MOST)

    def ask(self, request: JudgeRequest) -> None:
        """Judge this sample. Raises `PeerError` for a request without tokens, or with an impossible stream."""
        tokens = len(request.token_ids) // 4
        if (len(request.prompt) | len(request.token_ids)) % 4 or not request.start < request.end <= tokens:
            raise PeerError("judge request: no tokens to judge")
        try:
            Prompt(unpack_tokens(request.prompt), request.stream)
            _claim(request)
        except ValueError as error:
            raise PeerError(f"judge request: {error}") from error
        try:
            self._put.send_nowait(request)
        except trio.WouldBlock:
            _log.warning("not_judged", why=f"{MOST} samples wait already")

    async def run(self) -> None:
        """Runs until cancelled. Requests overlap, so that the engine can judge several in one pause."""
        async with trio.open_nursery() as nursery:
            async for request in self._get:
                await self._room.acquire()
                nursery.start_soon(self._answer, request)

    async def _answer(self, request: JudgeRequest) -> None:
        try:
            await self._send(encode(await self._judge(request)))
        finally:
            self._room.release()

    async def _judge(self, request: JudgeRequest) -> JudgeAnswer:
        await self._engine.wait_ready()
        asked, adapter = (request.epoch, request.version), request.sampling.extra.adapter
        if self._held.has(asked, adapter):
            try:
                found = await self._engine.judge(_claim(request))
            except (EngineLost, EngineFailed, ValueError) as error:
                _log.warning("not_judged", why=str(error))
            else:
                parts = [_packed(values) for values in (found.scores, found.previous, found.margins)]
                version = asked if found.version <= asked else found.version  # named by what last changed its bits
                return JudgeAnswer(request.check, *version, *parts)
        return JudgeAnswer(request.check, *self._held.version, b"")


def _claim(request: JudgeRequest) -> Claim:
    tokens = unpack_tokens(request.token_ids)[: request.end]
    return Claim(
        unpack_tokens(request.prompt),
        tokens,
        request.sampling.with_options(adapter=""),
        request.stream,
        request.previous,
        request.start,
        request.replay,
        request.sampling.extra.adapter,
    )


def _packed(values: tuple[float, ...]) -> bytes:
    """A token that cannot be drawn has a log-probability of minus infinity; the ledger takes finite numbers only."""
    return pack_floats([max(value, MIN_LOGPROB) for value in values])
