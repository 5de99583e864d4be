"""Sessions of several turns at real vLLMs: what their caches find through the gateway, and by one engine's own server.

`python -m scenarios.bench.sessions --real` runs it. In one run, the same number of sessions, turns and tokens goes
first to the server of one node's vLLM, then to the gateway of a swarm of all of them. Each prompt is all the text so
far and some new tokens. The counter is vLLM's own: `vllm:prefix_cache_hits_total`, tokens of prompts that were found.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from scenarios.engines.vllm_swarm import MODEL, ask, served

__all__ = ["Reused", "Talk", "measure_real"]

HITS: Final = re.compile(rb"^vllm:prefix_cache_hits_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
SESSIONS_WITHIN_S: Final = 1200.0
LONGEST: Final = 2048


@dataclass(frozen=True, slots=True)
class Talk:
    """`sessions` sessions of `turns` turns, `at_once` at a time. `first`, `further`: tokens that the client adds to the
    first prompt, and to each later one. `answer`: tokens of each completion. `tool_s`: mean seconds between a
    completion and the next turn."""

    sessions: int = 48
    at_once: int = 24
    turns: int = 5
    first: int = 600
    further: int = 80
    answer: int = 64
    tool_s: float = 0.5

    @property
    def repeated(self) -> int:
        """Tokens of all prompts that the turn before had in its prompt or its completion."""
        texts = (self.first + turn * (self.further + self.answer) for turn in range(self.turns - 1))
        return self.sessions * sum(text + self.answer for text in texts)


@dataclass(frozen=True, slots=True)
class Reused:
    """Tokens of prompts that vLLM found in its cache: `alone`, and by all nodes together through the `gateway`. Of
    `repeated` tokens it could have found."""

    alone: float
    gateway: float
    repeated: int

    @property
    def share(self) -> float:
        """What the swarm's engines found, by what one of them found alone."""
        return self.gateway / self.alone


def measure_real(folder: Path, talk: Talk, nodes: int) -> Reused:
    """Run the sessions at one engine alone, then through the gateway of `nodes` nodes."""
    from scenarios.engines.engine_models import make_qwen3

    base = make_qwen3(folder / "base")
    with served(folder / "swarm", base, nodes, (f"--max-model-len={LONGEST}",)) as found:
        alone = trio.run(_found, talk, found.engines[0], found.engines[:1], 0)
        gateway = trio.run(_found, talk, found.gateway, found.engines, 1)
    return Reused(alone, gateway, talk.repeated)


async def _found(talk: Talk, port: int, engines: tuple[int, ...], texts: int) -> float:
    """Tokens that the caches of `engines` found while the sessions ran at `port`. `texts`: other texts for each run."""
    before = sum([await _hits(engine) for engine in engines])
    places = trio.Semaphore(talk.at_once)
    with trio.fail_after(SESSIONS_WITHIN_S):
        async with trio.open_nursery() as nursery:
            for number in range(talk.sessions):
                await places.acquire()
                nursery.start_soon(_converse, talk, port, texts, number, places)
    return sum([await _hits(engine) for engine in engines]) - before


async def _converse(talk: Talk, port: int, texts: int, number: int, places: trio.Semaphore) -> None:
    chance = random.Random(f"{texts}/{number}")
    text = _new(chance, talk.first)
    for _ in range(talk.turns):
        body: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": talk.answer, "ignore_eos": True}
        session = f"{texts}-{number}"
        answer = await ask(port, "POST", "/v1/completions", body | {"return_token_ids": True}, session)
        tokens = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["token_ids"]
        if len(tokens) != talk.answer:
            raise ValueError(f"an answer has {len(tokens)} tokens of {talk.answer}")
        text = [*text, *tokens, *_new(chance, talk.further)]
        await trio.sleep(chance.expovariate(1.0 / talk.tool_s))
    places.release()


def _new(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, 300) for _ in range(count)]


async def _hits(port: int) -> float:
    found = HITS.search(await ask(port, "GET", "/metrics"))
    if found is None:
        raise ValueError("the engine's metrics have no prefix_cache_hits_total")
    return float(found[1])
