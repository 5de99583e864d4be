"""The front's side of judgements: scores and margins at any time, replays, and rewinds for scores under the version
before."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from . import scores
from .labels import of_request, spans_of
from .messages import Judge, Judged
from .replays import margin_of
from .requests import MIN_LOGPROB, adapting, replaying
from .rewind import LABEL, PREVIOUS

__all__ = ["Judging", "RewindFailed"]

GATHER_S = 1.0
"""Seconds that a claim waits for others while sequences run, so that they are paused at most once a second."""
GATHER_IDLE_S = 0.02
"""The same while none of the driver's sequences runs."""
TRIES = 10
"""Rewinds that are tried while another thread reads the live weights."""

_log = logging.getLogger("vllm.swarm")
"""vLLM's log shows the loggers below `vllm`."""


class RewindFailed(Exception):
    """The engine core stopped in a rewind."""


class Judging:
    """The judgements of one front. `busy()`: whether sequences of the driver run."""

    def __init__(self, busy: Callable[[], bool], name: Callable[[], str]) -> None:
        """`name()`: a new name for a request."""
        self._busy, self._name = busy, name
        self._waiting = 0
        self._rewinds: asyncio.Task[None] | None = None
        """Rewinds while requests wait for it."""
        self._call: asyncio.Task[None] | None = None
        """The last rewind."""

    async def judge(self, client: Any, message: Judge) -> Judged:
        """Raises `RewindFailed` when the core has stopped, `ValueError` or `RuntimeError` when nothing was judged."""
        if message.replay:
            return await self._replay(client, message)
        sampling = scores.scoring(message)
        found, version = await self._read(client, message, sampling)
        given = scores.read(found, message.token_ids)
        margins = () if message.noise is None else scores.read_margins(found, message.token_ids)
        wanted = message.previous and not message.adapter  # the version before an adapter's is not known
        previous = await self._previous(client, message, version) if wanted else ()
        return Judged(message.number, version, given, previous, margins)

    async def _replay(self, client: Any, message: Judge) -> Judged:
        """The log-probabilities and margins of the tokens from `start` on, as they would have been drawn."""
        logprobs: list[float] = []
        margins: list[float] = []
        delta = None
        prompt = {"prompt_token_ids": list(message.prompt)}
        asked = adapting(message.adapter)
        async for output in client.generate(prompt, replaying(message), self._name(), lora_request=asked):
            delta = output.outputs[0]
            for by_token, token in zip(delta.logprobs or (), delta.token_ids, strict=True):
                logprobs.append(min(0.0, max(MIN_LOGPROB, by_token[token].logprob)))
                margins.append(margin_of(by_token[token].rank))
        assert delta is not None
        spans = spans_of(delta.weight_versions, message.adapter)
        if delta.finish_reason == "abort" or len(spans) != 1:
            raise RuntimeError("the engine was stopped, or became another version, in a replay")
        told = tuple(margins) if message.portable else ()
        return Judged(message.number, spans[0][0], tuple(logprobs), (), told)

    async def _read(self, client: Any, message: Judge, sampling: Any) -> tuple[Any, str]:
        """(vLLM's log-probabilities of the text, the version that gave them)."""
        last = None
        ids = [*message.prompt, *message.token_ids]
        asked = adapting(message.adapter)
        async for output in client.generate({"prompt_token_ids": ids}, sampling, self._name(), lora_request=asked):
            last = output
        assert last is not None
        if last.outputs[0].finish_reason == "abort":
            raise RuntimeError("the engine was stopped")
        (span,) = last.outputs[0].weight_versions
        return last.prompt_logprobs, of_request(span.version, message.adapter)

    async def _previous(self, client: Any, message: Judge, version: str) -> tuple[float, ...]:
        """The scores under the version before `version`; empty where they are not available."""
        sampling = scores.scoring(message, **{PREVIOUS: True})
        self._waiting += 1
        reading = asyncio.ensure_future(self._read(client, message, sampling))
        if self._rewinds is None or self._rewinds.done():
            self._call = None
            self._rewinds = asyncio.ensure_future(self._rewind_while_waiting(client))
        try:
            await asyncio.wait([reading, self._rewinds], return_when=asyncio.FIRST_COMPLETED)
            if self._call is not None:  # a request that was aborted is told before the reason is
                await self._call
            if self._rewinds.done():
                self._rewinds.result()
            found, label = await reading
        except RuntimeError:  # no commit to undo, or no room beside what runs
            return ()
        finally:
            self._waiting -= 1
            reading.cancel()
        return scores.read(found, message.token_ids) if label == version + LABEL else ()

    async def _rewind_while_waiting(self, client: Any) -> None:
        """Rewind until no request waits. Raises `RewindFailed` when the core stopped."""
        tries = 0
        while self._waiting:
            await asyncio.sleep(GATHER_S if self._busy() else GATHER_IDLE_S)
            self._call = asyncio.ensure_future(_rewind(client, tries >= TRIES))
            await self._call
            tries += 1


async def _rewind(client: Any, last: bool) -> None:
    result = await client.engine_core.call_utility_async("swarm_previous", last)
    if result["error"]:
        if result["touched"]:
            raise RewindFailed(result["error"])
        _log.info("no scores under the version before: %s", result["error"])
    elif result["pause_s"]:
        _log.info("scored under the version before: no step for %.1f ms", 1000 * result["pause_s"])
