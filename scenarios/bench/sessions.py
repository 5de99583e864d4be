"""Measures how much of a session's text its next turn finds in a node's prefix cache, against one engine alone.

    python -m scenarios.bench.sessions                      # three loads, under a minute
    python -m scenarios.bench.sessions --load 0.9 --json
    python -m scenarios.bench.sessions --real --nodes 2     # real vLLMs, by their own counters: some minutes

Each session is a conversation of several turns with a tool between them: a turn's prompt is all the text so far and
some new tokens, and turns of one session have one affinity, as the gateway gives them one for `X-Session-Id`. The
ledger and each node's worker are the product's, under a virtual clock. Modelled are the engines' time, and a prefix
cache as vLLM has one: whole blocks of 16 tokens, the least recently used ones dropped.

`reuse`: tokens of prompts that the node had in its cache, as a share of those that one engine alone finds: the same
sessions at one node with the places and the cache of all together. `real_sessions` measures it at real vLLMs.
"""

import argparse
import json
import random
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from node.engines.base import Completion, Prompt, SamplingParams
from node.engines.host import Counts
from node.ledger.binding import Binding
from node.ledger.packing import pack_tokens, unpack_tokens
from node.ledger.settings import Settings
from node.ledger.state import Group
from scenarios.bench.real_sessions import Talk, measure_real
from scenarios.rl.ledger_sim import Kind, LedgerSim, Member, virtually
from scenarios.sim.virtual.engine import STOP

__all__ = ["Load", "Measured", "PrefixCache", "main", "measure"]

BLOCK: Final = 16
"""Tokens of a block: vLLM's default."""
SAMPLING: Final = SamplingParams(max_tokens=256, stop_tokens=(STOP,))


@dataclass(frozen=True, slots=True)
class Load:
    """`nodes` nodes of `rows` sequences each. `share`: sessions at a time, as a share of all places. `sessions`: in
    all, of `turns` turns. `first`, `further`: tokens that the client adds to the first prompt, and to each later one.
    `tool_s`: mean seconds between a completion and the next turn. `cached`: tokens that one node's cache holds."""

    share: float = 0.7
    nodes: int = 4
    rows: int = 16
    sessions: int = 256
    turns: int = 5
    first: int = 600
    further: int = 80
    tool_s: float = 1.0
    cached: int = 64_000


@dataclass(frozen=True, slots=True)
class Measured:
    """`reuse`: see the module. `hits`: turns after the first that came to the node of the turn before, as a share.
    `turn_s`: mean seconds from a turn's offer to its completion; `alone_s`: at one engine alone."""

    share: float
    reuse: float
    hits: float
    turn_s: float
    alone_s: float


class PrefixCache:
    """Whole blocks of token ids by their whole prefix, the least recently used ones dropped."""

    def __init__(self, tokens: int) -> None:
        self._most = max(1, tokens // BLOCK)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def find(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens are in the cache."""
        found = 0
        for key in _keys(token_ids):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += BLOCK
        return found

    def add(self, token_ids: Sequence[int]) -> None:
        """These tokens' keys and values were computed."""
        for key in _keys(token_ids):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _keys(token_ids: Sequence[int]) -> list[int]:
    keys, prefix = [], 0
    for at in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        prefix = hash((prefix, *token_ids[at : at + BLOCK]))
        keys.append(prefix)
    return keys


class _Run:
    """One run of all sessions over some nodes."""

    def __init__(self, load: Load, nodes: int, rows: int, cached: int) -> None:
        self.load, self.nodes, self.rows, self.cached = load, nodes, rows, cached
        self.reused = 0
        """Tokens of prompts that were in the cache."""
        self.hits = self.turns = 0
        self.waited_s = 0.0
        self._done: dict[bytes, trio.Event] = {}
        self._groups: dict[bytes, Group] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._sim = LedgerSim(nursery, Settings(check_share=0.0))
            self._session = self._sim.service.open("volatile/bench", Binding(1, SAMPLING))
            nursery.start_soon(self._sim.service.run)
            for _ in range(self.nodes):
                kind = Kind(rows=self.rows, mean=120, tokens_s=40.0)
                self._cache(await self._sim.hire(kind))
            nursery.start_soon(self._take_groups)
            places = trio.Semaphore(max(1, round(self.load.share * self.load.nodes * self.load.rows)))
            async with trio.open_nursery() as sessions:
                for number in range(self.load.sessions):
                    await places.acquire()
                    sessions.start_soon(self._converse, number, places)
            nursery.cancel_scope.cancel()

    def _cache(self, member: Member) -> None:
        """Give a node's engine a prefix cache."""
        cache, generate = PrefixCache(self.cached), member.engine.generate

        async def cached(
            prompts: Sequence[Prompt], sampling: SamplingParams, counts: Counts | None = None, adapter: str = ""
        ) -> tuple[list[Completion], float]:
            for prompt in prompts:
                self.reused += cache.find(prompt.token_ids)
                cache.add(prompt.token_ids)
            completions, seconds = await generate(prompts, sampling, counts, adapter)
            for prompt, completion in zip(prompts, completions, strict=True):
                cache.add((*prompt.token_ids, *completion.token_ids))
            return completions, seconds

        member.engine.generate = cached  # type: ignore[method-assign]

    async def _take_groups(self) -> None:
        while True:
            news = self._session.news
            while self._session.groups:
                group = self._session.groups.popleft()
                self._groups[group.id] = group
                self._sim.service.taken(group.id)
                self._done[group.id].set()
            await news.wait()

    async def _converse(self, number: int, places: trio.Semaphore) -> None:
        chance = random.Random(number)
        text: tuple[int, ...] = tuple(chance.randrange(3, 30_000) for _ in range(self.load.first))
        before: bytes | None = None
        for turn in range(self.load.turns):
            name, began = (number << 16 | turn).to_bytes(16, "little"), trio.current_time()
            self._done[name] = trio.Event()
            self._sim.service.offer(self._session, name, pack_tokens(text), affinity=number.to_bytes(8, "little"))
            await self._done[name].wait()
            del self._done[name]
            (done,) = self._groups.pop(name).done.values()
            self.waited_s += trio.current_time() - began
            if before is not None:
                self.turns += 1
                self.hits += done.node == before
            before = done.node
            new = tuple(chance.randrange(3, 30_000) for _ in range(self.load.further))
            text = (*text, *unpack_tokens(done.rollout.token_ids), *new)
            await trio.sleep(chance.expovariate(1.0 / self.load.tool_s))
        places.release()


def measure(load: Load) -> Measured:
    """Run the sessions over the swarm's nodes, and at one engine alone."""
    swarm = _Run(load, load.nodes, load.rows, load.cached)
    alone = _Run(load, 1, load.nodes * load.rows, load.nodes * load.cached)
    for run in (swarm, alone):
        virtually(run.run)
    count = load.sessions * load.turns
    return Measured(
        load.share,
        swarm.reused / alone.reused,
        swarm.hits / swarm.turns,
        swarm.waited_s / count,
        alone.waited_s / count,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser("sessions", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--load", type=float, nargs="*", default=[0.5, 0.9, 1.2], help="sessions by places")
    arguments.add_argument("--nodes", type=int, default=4)
    arguments.add_argument("--sessions", type=int, default=256)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--real", action="store_true", help="real vLLMs behind a gateway, by their own counters")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args(words)
    if options.real:
        _measure_real(Talk(turns=options.turns), options.nodes, as_json=options.json)
        return
    found: list[dict[str, Any]] = []
    for share in options.load:
        load = Load(share, nodes=options.nodes, sessions=options.sessions, turns=options.turns)
        found.append(asdict(measure(load)))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print("load   reuse   same node   turn s   alone s")
    for row in found:
        shares = f"{row['share']:4.1f}  {row['reuse']:6.1%}  {row['hits']:10.1%}"
        print(f"{shares}  {row['turn_s']:7.2f}  {row['alone_s']:8.2f}")


def _measure_real(talk: Talk, nodes: int, *, as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = measure_real(Path(folder), talk, nodes)
    if as_json:
        print(json.dumps(asdict(found) | {"share": found.share}))
        return
    print(f"one engine alone found {found.alone:.0f} of {found.repeated} repeated tokens")
    print(f"{nodes} nodes behind the gateway found {found.gateway:.0f}: {found.share:.1%} of that")


if __name__ == "__main__":
    main()
