"""A gateway over a real ledger and real node workers, with engines that take little time; HTTP over loopback."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from codec.sign import Key
from node.engines.base import (
    ABILITIES,
    JUDGES,
    PROMPT_LOGPROBS,
    STRUCTURES,
    TOP_LOGPROBS,
    Completion,
    DrawnTokens,
    Span,
)
from node.engines.host import Commitment, EngineFailed
from node.engines.room import NO_ROOM_TOLD
from node.engines.texts import StopText
from node.gateway import Gateway
from node.ledger.book import Book
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.member.pace import Pace
from node.member.worker import NodeWorker
from node.settings.config import GatewayConfig
from node.status.schema import LedgerNode

ROOT = b"\7" * 32
LETTERS = "abcdefghijklmnopqrstuvwxyz :\n"
END = len(LETTERS)
UNKNOWN = END + 1
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def base_files() -> dict[str, bytes]:
    """Return the files of a base checkpoint beside its weights. The tokenizer has one token per letter."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<end>": END, "<unk>": UNKNOWN}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<unk>"])
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}).encode(),
        "config.json": json.dumps({"max_position_embeddings": 128}).encode(),
    }


class EchoEngine:
    """Generates the prompt backwards and stops, after `seconds`. Records what it generated, so that a test can find
    lost samples. Of `SamplingOptions` it implements stop texts only."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.version, self.root = (0, 0), ROOT
        self.ready, self.preemptible, self.continuous_batching, self.scores = True, True, False, False
        self.room = NO_ROOM_TOLD
        self.abilities, self.kind = ABILITIES - {JUDGES, STRUCTURES, TOP_LOGPROBS, PROMPT_LOGPROBS}, "echo"
        self.adapters: dict[str, tuple[int, int]] = {}
        self.drawn: list[tuple[int, ...]] = []
        self.tokens = 0
        self._tokenizer = Tokenizer.from_str(base_files()["tokenizer.json"].decode())

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_up = wait_ready

    def lacks(self, version: tuple[int, int]) -> bool:
        return self.version < version

    async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
        if any(token > UNKNOWN for prompt in prompts for token in prompt.token_ids):
            raise EngineFailed(f"prompt: a token id outside 0 to {UNKNOWN}", poisoned=False)
        await trio.sleep(self.seconds)
        completions = []
        for prompt in prompts:
            ids = (*reversed(prompt.token_ids), END)
            reason = "stop" if len(ids) <= sampling.max_tokens and END in sampling.stop_tokens else "length"
            if reason == "length":
                ids = (ids[:-1] * sampling.max_tokens)[: sampling.max_tokens]
            stop = StopText(self._tokenizer, prompt.token_ids, sampling.extra.stop_texts)
            for count, token in enumerate(ids, 1):
                if stop.add(token):
                    ids, reason = ids[:count], "stop"
                    break
            self.tokens += len(ids)
            completions.append(Completion(ids, (-0.25,) * len(ids), reason, (Span(self.version, 0, len(ids)),)))
            self.drawn.append(prompt.token_ids)
        return completions, self.seconds

    async def score(self, prompt, token_ids, sampling, adapter=""):
        raise AssertionError

    async def judge(self, claim):
        raise AssertionError

    async def stage(self, patch_fd, version):
        return 0.0

    async def commit(self, version, root):
        self.version, self.root = version, root
        return Commitment(0.0)


class SpellingEngine(EchoEngine):
    """Continues the alphabet after the last letter of the prompt, a letter every `seconds`, and tells each one."""

    logprob = -0.25
    """Of each letter. Two equal samples of many tokens that were not certain count as copies."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__(seconds)
        self.continuous_batching = True
        self.asked: list[tuple[int, ...]] = []
        """The prompts, in the order in which they came."""
        self.told = 0
        """Letters that were told."""
        self.drawn_versions: list[tuple[int, int]] = []
        """The version of each completion."""

    async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
        (prompt,) = prompts
        self.asked.append(prompt.token_ids)
        ids: list[int] = []
        stop = StopText(self._tokenizer, prompt.token_ids, sampling.extra.stop_texts)
        reason = "length"
        while len(ids) < sampling.max_tokens and reason == "length":
            await trio.sleep(self.seconds)
            ids.append(self.next_letter(prompt.token_ids, ids))
            if stop.add(ids[-1]) or ids[-1] in sampling.stop_tokens:
                reason = "stop"
            elif draws is not None and len(ids) < sampling.max_tokens:
                draws(0, DrawnTokens(len(ids) - 1, (ids[-1],), (self.logprob,), self.version))
                self.told += 1
        return [self.completion(ids, reason)], self.seconds * len(ids)

    def next_letter(self, prompt, ids):
        return ((ids or prompt)[-1] + 1) % 26

    def completion(self, ids, reason):
        self.drawn_versions.append(self.version)
        return Completion(tuple(ids), (self.logprob,) * len(ids), reason, (Span(self.version, 0, len(ids)),))


class Swarm:
    """A ledger, a gateway, and nodes that come and go."""

    def __init__(self, folder: Path, nursery: trio.Nursery, **settings: Any) -> None:
        self.nursery = nursery
        self.book = Book(folder / "ledger.sqlite")
        ledger = self.book.restore(Settings(**settings), Head(0, 0, ROOT), trio.current_time())
        self.ledger = ledger
        self.service = LedgerService(ledger, self.book, self._to_node)
        self.workers: dict[bytes, NodeWorker] = {}
        self.engines: dict[bytes, Any] = {}
        self.lives: dict[bytes, trio.CancelScope] = {}
        self.leased: Counter[bytes] = Counter()

    async def _to_node(self, node: bytes, body: bytes) -> None:
        if node in self.workers:
            self.workers[node].hear(body)

    async def add(self, i: int, seconds: float = 0.01, engine: Any = None, **pace: Any) -> Any:
        """Add a node with this engine (None: an `EchoEngine`). Returns the engine."""
        key = Key(bytes([i]) * 32)

        async def send(body: bytes) -> None:
            if key.public in self.workers:  # a killed node sends nothing more
                self.service.hear(key.public, body)

        engine = self.engines[key.public] = EchoEngine(seconds) if engine is None else engine
        worker = NodeWorker(key, engine, send, Pace(**({"self_test_tokens": 0} | pace)))
        self.workers[key.public] = worker
        scope = self.lives[key.public] = trio.CancelScope()

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await worker.run(task_status=task_status)

        await self.nursery.start(live)
        await until(lambda: self.service.status().nodes.get(key.public.hex(), LedgerNode()).capacity)
        return engine

    def kill(self, i: int, *, known: bool = True) -> None:
        """Kill a node. `known`: the ledger learns that its membership ended; otherwise its work leases expire."""
        node = Key(bytes([i]) * 32).public
        del self.workers[node]
        self.lives[node].cancel()
        if known:
            self.service.member_lost(node)


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - the condition signals no event
            await trio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, files: dict[str, bytes] | None = None, settings: Any = None, keys: Path | None = None, **config: Any
):
    """Run a gateway while the block runs. Yields (swarm, URL)."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(folder, nursery, **(settings or {}))
        await nursery.start(swarm.service.run)
        found = base_files() if files is None else files
        settled = GatewayConfig(at="127.0.0.1:0", **config)
        completions = Gateway(swarm.service, lambda: found, lambda: swarm.service.head, settled, keys=keys)
        url = await nursery.start(completions.run)
        yield swarm, url
        nursery.cancel_scope.cancel()
    swarm.book.close()


async def with_client(url: str, use: Callable[[AsyncOpenAI], Awaitable[Any]], **options: Any) -> Any:
    """Run `use` with the unmodified OpenAI client, in a thread with its own event loop."""

    async def main() -> Any:
        async with AsyncOpenAI(base_url=url, **({"api_key": "none", "max_retries": 0, "timeout": 30.0} | options)) as c:
            return await use(c)

    return await trio.to_thread.run_sync(lambda: asyncio.run(main()), abandon_on_cancel=True)


async def raw(url: str, data: bytes, *, close: bool = False, within_s: float = 5.0) -> bytes:
    """Send these bytes. Returns the answer, until the gateway closes the connection or sends nothing for a moment."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    answer_bytes = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(data)
            if close:
                await stream.send_eof()
            with trio.move_on_after(within_s):
                async for part in stream:
                    answer_bytes += part
                    if b"\r\n\r\n" in answer_bytes and answer_bytes.endswith(b"}"):
                        break
    return answer_bytes


def base_folder(folder: Path) -> Path:
    """A random Qwen3 of some 100,000 parameters that reads and writes letters."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    recipe = TinyRecipe(vocabulary=UNKNOWN + 1, hidden=64, inner=128, layers=2, seed=1)
    more = {"max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": None}
    save_bf16(random_model(recipe, tied=False, **more), folder)
    for name, data in base_files().items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    return folder
