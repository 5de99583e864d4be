"""The gateway: the bytes of a connection go through HTTP, JSON and the tokenizer to a swarm that answers at once.

Every input must be answered or the connection closed; a status of 500 is a bug.
"""

import json
import os
import random
import time
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import numpy as np
import trio
import trio.testing

import node.gateway.app as app_module
from node.engines.base import DrawnTokens
from node.engines.prompt_scores import pack_scores
from node.engines.top_logprobs import pack_top
from node.gateway.admission import Admission
from node.gateway.app import App
from node.gateway.clients import Clients
from node.gateway.followed_sample import FollowedSample
from node.gateway.text import Text
from node.http import HttpLimits, HttpServer
from node.ledger.assignment.pool import check_offer
from node.ledger.messages import Rollout, VersionSpan
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.state import AcceptedRollout, Group
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.http_kinds import BODIES, KEY, body_kinds, head_kind
from scenarios.fuzz.target import FOREVER, Broken, Target, World

__all__ = ["GatewayTarget", "GatewayWorld", "Patient"]

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz :\n"
_TEMPLATE: Final = (
    "{{ tools }}{{ documents }}{{ reasoning_effort }}{{ k }}{{ add_generation_prompt }}"
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}\n{% endfor %}"
)
_MAX_ANSWER: Final = 4 << 20


def _files() -> dict[str, bytes]:
    """Return the small files of a base checkpoint, with a tokenizer of one token per letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(_LETTERS)}
    vocabulary |= {"<end>": len(_LETTERS), "<unk>": len(_LETTERS) + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<unk>", "<image>"])
    config = {"max_position_embeddings": 128, "vision_config": {}, "image_token_id": len(_LETTERS) + 2}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": _TEMPLATE}).encode(),
        "config.json": json.dumps(config).encode(),
    }


class _Requests:
    """Replaces the request tracker. It answers at once with three tokens, the last of which ends the text."""

    most = 1024

    def check(self, samples: int, *, again: bool = False) -> None:
        return

    async def wait_for_nodes(self) -> None:
        return

    async def check_abilities(self, sampling: Any) -> None:
        return

    def kinds(self, groups: Any) -> str:
        return ""

    def kinds_of(self, nodes: Any) -> str:
        return ""

    def own_versions(self, adapter: str, versions: Any) -> tuple[int, ...]:
        return ()

    async def ask_followed(
        self,
        prompt: tuple[int, ...],
        sample: FollowedSample,
        affinity: bytes = b"",
        wanted: Any = None,
        *,
        images: Any = (),
        again: bool = False,
    ) -> None:
        _, sampling = sample.begin_group(lambda: None)
        group = await self.ask(prompt, 1, sampling)
        top = group.done[0].rollout.top
        sample.hear(0, 1, DrawnTokens(0, (1,), (-0.5,), (0, 1), top[: len(top) // 3]))
        sample.finish(group.done[0].rollout, bytes(32))

    async def ask(
        self,
        prompt: tuple[int, ...],
        n: int,
        sampling: Any,
        affinity: bytes = b"",
        wanted: Any = None,
        *,
        images: Any = (),
        again: bool = False,
    ) -> Group:
        packed = pack_tokens(prompt)
        check_offer(packed, n, sampling)
        group = Group(os.urandom(16), "s", 0, packed, n, sampling)
        tokens = pack_tokens((1, 2, len(_LETTERS)))
        spans = (VersionSpan(0, 1, bytes(32), 3),)
        likeliest = np.ones((3, sampling.extra.top_logprobs))
        top = pack_top(likeliest.astype(np.uint32), -likeliest)
        places, k = len(prompt) - 1, sampling.extra.prompt_logprobs
        tokens_of, others = np.ones((places, k or 0), np.uint32), -np.ones((places, k or 0))
        scores = b"" if k is None else pack_scores(np.ones(places, np.uint32), -np.ones(places), tokens_of, others)
        for sample in range(n):
            logprobs = pack_floats((-0.5,) * 3)
            rollout = Rollout(1, 1, sample, bytes(32), tokens, logprobs, "stop", spans, top=top, prompt_scores=scores)
            group.done[sample] = AcceptedRollout(bytes(32), 1, 1, (0, 1), rollout, b"")
        return group


class _LocalPeer:
    """A socket whose other end is on this machine."""

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)


class _Script:
    """A connection that sends the given bytes in a few parts and then hangs up."""

    def __init__(self, data: bytes, parts: int) -> None:
        size = -(-len(data) // parts) or 1
        self._parts = [data[i : i + size] for i in range(0, len(data), size)]
        self.said = bytearray()
        self.socket = _LocalPeer()

    async def receive_some(self, most: int | None = None) -> bytes:
        return self._parts.pop(0) if self._parts else b""

    async def send_all(self, data: bytes) -> None:
        self.said += data

    async def send_eof(self) -> None:
        return

    async def aclose(self) -> None:
        return


class Patient(_Script):
    """A connection that waits for an answer before it hangs up."""

    async def receive_some(self, most: int | None = None) -> bytes:
        if not self._parts and not self.said:
            await trio.sleep(3600)
        return await super().receive_some(most)


class GatewayWorld(World):
    """Connections to a gateway, each with an `App` of its own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._text = Text(_files())
        self._own = app_module.trio
        self._threads: Any = None
        proxy = SimpleNamespace(**{name: getattr(trio, name) for name in dir(trio) if not name.startswith("_")})
        proxy.to_thread = SimpleNamespace(run_sync=self._here)
        app_module.trio = proxy  # type: ignore[assignment]

    async def _here(self, function: Any, *arguments: Any, **_: Any) -> Any:
        """Run the function in place instead of in a worker thread."""
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            self.off_loop_s += time.thread_time() - began

    def turn(self, rng: random.Random) -> None:
        self._rng = rng

    def give(self, kind: Kind, data: bytes) -> str:
        patient = self._rng.randrange(4) > 0
        stream = (Patient if patient else _Script)(data, self._rng.choice((1, 1, 2, 7)))
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(self._converse, stream, clock=clock)
        return self.outcome(stream, data)

    def outcome(self, stream: _Script, data: bytes) -> str:
        """What was answered to `data`, in a few words. Raises `Broken`."""
        answer = bytes(stream.said)
        if len(answer) > _MAX_ANSWER:
            raise Broken(f"an answer of {len(answer)} bytes")
        status = answer[9:12].decode("ascii", "replace")
        if status == "500":
            raise Broken(f"the gateway answered 500 to {data[:300]!r}")
        return f"{status or 'hung up'} {answer.partition(b'message')[2][:60]!r}"

    def app(self, admission: Admission) -> App:
        """A gateway whose swarm answers at once."""
        return App("policy", self._text, _Requests(), lambda: (0, 1), admission=admission)  # type: ignore[arg-type]

    async def _converse(self, stream: Any) -> None:
        admission = Admission(Clients(None, KEY))
        await HttpServer(self.app(admission), HttpLimits(), admission.check).serve_connection(stream)

    def close(self) -> None:
        app_module.trio = self._own


class GatewayTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "gateway"
    about: ClassVar[str] = "HTTP requests: heads, line by line, and every field of the JSON bodies"
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        self.kinds = [*body_kinds(), head_kind()]

    def world(self, rng: random.Random) -> World:
        return GatewayWorld(rng)

    def types(self) -> dict[str, Any]:
        return {f"POST {path}": cls for cls, (path, _) in BODIES.items()}
