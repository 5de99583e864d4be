"""A gateway whose only node has a real engine: a random Qwen3 of 60,000 parameters with 31 letters as tokens."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio
from gateway_kit import END, LETTERS, ROOT, UNKNOWN, base_files, gateway
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from codec.routes import RouteShape
from node.engines.base import Prompt, SamplingParams
from node.engines.host import Commitment, EngineFailed
from node.engines.judgement import Claim, Judgement
from node.engines.room import NO_ROOM_TOLD
from node.engines.transformers import TransformersEngine
from node.gateway.parameters import ENDPOINTS

__all__ = [
    "BOS",
    "END",
    "LETTERS",
    "SHAPE",
    "LocalEngine",
    "Reply",
    "asking",
    "files",
    "make_engine",
    "make_experts",
    "make_writer",
    "tokens_of",
    "writer_files",
    "writer_tokens",
]

SHAPE = RouteShape(2, 3, 8)
"""Of the engine's routes."""
BOS = UNKNOWN
"""The token that this tokenizer puts first when special tokens are wanted."""
TEMPLATE = (
    "{% if tools %}tools {{ tools | length }}\n{% endif %}{% if documents %}{{ documents[0].text }}\n{% endif %}"
    "{% if reasoning_effort %}think {{ reasoning_effort }}\n{% endif %}{% if thinking %}thinking\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def files() -> dict[str, bytes]:
    found = base_files()
    tokenizer = Tokenizer.from_str(found["tokenizer.json"].decode())
    tokenizer.post_processor = processors.TemplateProcessing("<unk> $A", special_tokens=[("<unk>", BOS)])
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    return found | {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


def tokens_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def make_engine(folder: Path) -> TransformersEngine:
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model

    recipe = TinyRecipe(vocabulary=UNKNOWN + 1, hidden=32, inner=64, layers=2, seed=1)
    more = {"max_position_embeddings": 128, "initializer_range": 0.3}
    random_model(recipe, tied=False, **more).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(files()["tokenizer.json"])
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(folder)
    return engine


def make_experts(folder: Path) -> TransformersEngine:
    """As `make_engine`, with a mixture of experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=UNKNOWN + 1, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=3, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(files()["tokenizer.json"])
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(folder)
    return engine


def writer_files() -> dict[str, bytes]:
    """A base whose tokenizer has a token for each byte, and whose chat template reads tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "config.json": json.dumps({"max_position_embeddings": 1024}).encode(),
    }


def writer_tokens(text: str) -> list[int]:
    """The tokens of a text by the tokenizer of `writer_files`."""
    return Tokenizer.from_str(writer_files()["tokenizer.json"].decode()).encode(text).ids


def make_writer(folder: Path) -> TransformersEngine:
    """As `make_engine`, with a token for each byte, so that it can write JSON."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model

    recipe = TinyRecipe(vocabulary=257, hidden=32, inner=64, layers=2, seed=1)
    random_model(recipe, tied=False, max_position_embeddings=1024, initializer_range=0.3).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(writer_files()["tokenizer.json"])
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(folder)
    return engine


class LocalEngine:
    """An `EngineClient` around an engine in this process.

    Several calls of `generate` run at once, as in a node: each step of the engine is a step of all.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.version, self.root = (0, 0), ROOT
        self.ready, self.preemptible, self.continuous_batching, self.scores = True, True, False, True
        self.room = NO_ROOM_TOLD
        self.abilities, self.kind = engine.abilities, engine.kind
        self.adapters: dict[str, tuple[int, int]] = {}
        self.drawn = 0
        """Tokens generated so far, of all samples."""
        self.prompts: list[tuple[tuple[int, ...], SamplingParams]] = []
        """Of all samples, in the order in which they came."""
        self._flight = 0
        self._done: dict[int, Any] = {}

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_up = wait_ready

    def lacks(self, version: tuple[int, int]) -> bool:
        return self.version < version

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Any = None,
        adapter: str = "",
        draws: Any = None,
    ) -> Any:
        self.prompts += [(prompt.token_ids, sampling) for prompt in prompts]
        self._flight += 1
        flight = self._flight
        try:
            self.engine.begin(flight, prompts, sampling)
        except ValueError as error:
            raise EngineFailed(str(error), poisoned=False) from error
        try:
            while flight not in self._done:
                await trio.lowlevel.checkpoint()
                if flight not in self._done:
                    self._done |= dict(self.engine.step())
                for row, drawn in () if draws is None else self.engine.new_tokens(flight):
                    draws(row, drawn)
            completions = self._done.pop(flight)
        finally:
            self.engine.cancel(flight)
        self.drawn += sum(len(completion.token_ids) for completion in completions)
        return completions, 0.01

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> Any:
        return self.engine.score(prompt, token_ids, sampling), self.version

    async def judge(self, claim: Claim) -> Judgement:
        (found,) = self.engine.judge([claim])
        if isinstance(found, Exception):
            raise EngineFailed(str(found), poisoned=False) from found
        return found

    async def stage(self, patch_fd: int, version: Any) -> float:
        raise AssertionError

    async def commit(self, version: Any, root: bytes) -> Commitment:
        raise AssertionError


@dataclass
class Reply:
    """An answer of any endpoint."""

    status: int
    body: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def param(self) -> str | None:
        return self.body["error"]["param"]

    @property
    def why(self) -> str:
        return self.body["error"]["message"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        assert self.status == 200, self.body
        return self.body["choices"]

    @property
    def tokens(self) -> list[int]:
        return self.choices[0]["token_ids"]

    @property
    def text(self) -> str:
        (choice, *_) = self.choices
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def finish(self) -> str:
        return self.choices[0]["finish_reason"]

    @property
    def prompt(self) -> list[int]:
        return self.choices[0].get("prompt_token_ids") or self.body["prompt_token_ids"]

    @property
    def logprobs(self) -> Any:
        found = self.choices[0]["logprobs"]
        return found and (found.get("token_logprobs") or [entry["logprob"] for entry in found["content"]])


class Asker:
    """Asks every endpoint the same: 12 greedy tokens after "hello", unless a field says otherwise."""

    def __init__(self, url: str, client: httpx.AsyncClient, engine: LocalEngine, swarm: Any) -> None:
        self.url, self._client = url.removesuffix("/v1"), client
        self.engine, self.swarm = engine, swarm

    def text(self, token: int) -> str:
        """The text of a token, by the tokenizer of `files`."""
        return Tokenizer.from_str(files()["tokenizer.json"].decode()).decode([token], skip_special_tokens=False)

    async def __call__(self, endpoint: str, **fields: Any) -> Reply:
        where = "generate" if endpoint in ("generate", "sampling_params") else endpoint
        fields = {"temperature": 0, "max_tokens": 12} | fields if endpoint != "generate" else fields
        if "max_completion_tokens" in fields:
            del fields["max_tokens"]
        if endpoint == "completions":
            body = {"prompt": "hello"} | fields
        elif endpoint == "chat":
            body = {"messages": [{"role": "user", "content": "hello"}]} | fields
        elif endpoint == "sampling_params":
            body = {"token_ids": tokens_of("hello"), "sampling_params": fields}
        else:
            sampling = {"temperature": 0, "max_tokens": 12}
            body = {"token_ids": tokens_of("hello"), "sampling_params": sampling} | fields
        answer = await self._client.post(self.url + ENDPOINTS[where], json=body)
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            return Reply(answer.status_code, {}, [json.loads(line) for line in lines])
        return Reply(answer.status_code, answer.json())


@contextlib.asynccontextmanager
async def asking(
    folder: Path,
    engine: TransformersEngine,
    *,
    abilities: frozenset[str] | None = None,
    shape: bool = True,
    base: dict[str, bytes] | None = None,
    **config: Any,
) -> AsyncIterator[Asker]:
    """`abilities`: those that the engine names instead of its own. `shape`: whether the seed knows of its experts.
    `base`: the checkpoint's small files."""
    async with (
        gateway(folder, files() if base is None else base, **config) as (swarm, url),
        httpx.AsyncClient(timeout=60) as client,
    ):
        local = LocalEngine(engine)
        swarm.ledger.route_shape = SHAPE if shape else None
        if abilities is not None:
            local.abilities = abilities
        await swarm.add(1, engine=local)
        yield Asker(url, client, local, swarm)
