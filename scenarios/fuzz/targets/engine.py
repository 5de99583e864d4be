"""The engine's socket at the node: `EngineHost` with an engine that sends anything.

Meanwhile the node requests completions, scores, proofs, commits, judgements and an adapter.
"""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import msgspec
import trio
import trio.testing

from codec.adapter import AdapterConfig, AdapterModule
from codec.errors import PeerError, SwarmError
from node.engines.base import Prompt
from node.engines.host import EngineHost, EngineSpec
from node.engines.judgement import Claim
from node.engines.messages import FromEngine
from node.engines.replica_ref import ReplicaRef
from node.ipc.channel import ChannelClosed
from node.ledger.packing import pack_floats, pack_tokens
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.local import ScriptedChannel, frame, local_kinds
from scenarios.fuzz.inputs.samples import sample_of
from scenarios.fuzz.inputs.scene import LAYOUT
from scenarios.fuzz.inputs.work import SAMPLING
from scenarios.fuzz.target import FOREVER, Target, World

__all__ = ["EngineTarget"]

_ROOT: Final = bytes(32)
_ADAPTER: Final = AdapterConfig("a", LAYOUT.hash, 4, 8.0, (AdapterModule("w", 4),))
_REQUEST_NUMBERS: Final = {
    "Completions": 2, "Progress": 2, "Drawn": 2, "Scores": 3, "Done": 5, "Proof": 6, "Judged": 7, "Failed": 2,
    "Ready": 0, "AdapterProof": 9,
}  # fmt: skip
"""By message, the number of the request that it answers. 1 is the attachment; `_World._ask` sends the others in this
order."""


class _World(World):
    def fitting(self, cls: type, value: Any) -> Any:
        """Make `value` an answer to a request of the node."""
        if cls.__name__ == "Completions":
            completion = {
                "token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop",
                "spans": [{"version": [0, 3], "start": 0, "end": 1}], "routes": b"", "prompt_routes": b"", "top": b"",
                "prompt_scores": b"",
            }  # fmt: skip
            return value | {"number": 2, "completions": [completion]}
        if cls.__name__ == "Drawn":
            drawn = {"start": 0, "token_ids": [5], "logprobs": [-0.5], "version": [0, 3], "top": b""}
            return value | {"number": 2, "rows": [[0, drawn]]}
        return value | {"number": _REQUEST_NUMBERS[cls.__name__]} if "number" in value else value

    def give(self, kind: Kind, data: bytes) -> str:
        ready = {**sample_of(_OF["Ready"]), "carries": True, "scores": True, "joins": True}
        proof = {**sample_of(_OF["Proof"]), "number": 1, "root": _ROOT}
        frames = [frame(msgspec.msgpack.encode(message)) for message in (ready, proof)]
        if kind.name == "Ready":
            frames[0] = frame(data)
        elif kind.name == "Proof" and self.turned % 2:
            frames[1] = frame(data)
        else:
            frames.append(frame(data))
        channel = ScriptedChannel(FromEngine, frames)
        self.outcome: list[str] = []
        try:
            trio.run(self._live, channel, clock=trio.testing.MockClock(autojump_threshold=0))
        finally:
            channel.close()
        return " ".join(sorted(self.outcome))

    turned = 0

    def turn(self, rng: random.Random) -> None:
        self.turned += 1

    async def _live(self, channel: Any) -> None:
        async def source() -> ReplicaRef:
            return ReplicaRef(LAYOUT, 0, Path("/"), (0, 3), _ROOT)

        host = EngineHost(EngineSpec(Path("/dev/null"), ("true",), Path("/dev/null")), source)
        try:
            with trio.move_on_after(7200):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._ask, host, nursery.cancel_scope)
                    try:
                        await host._serve_engine(channel)
                    except (ChannelClosed, PeerError) as error:  # `run` handles these too
                        self.outcome.append(str(error))
                    nursery.cancel_scope.cancel()
        finally:
            host._adapters.close()  # as `run` does

    async def _ask(self, host: EngineHost, scope: trio.CancelScope) -> None:
        await host.wait_ready()
        calls: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            (
                "generate",
                lambda: host.generate([Prompt((1, 2))], SAMPLING, lambda counts: None, draws=lambda i, drawn: None),
            ),
            ("score", lambda: host.score((1, 2), (3,), SAMPLING)),
            ("stage", lambda: host.stage(0, (0, 4))),
            ("commit", lambda: host.commit((0, 4), _ROOT)),
            ("prove", host.prove),
            ("judge", lambda: host.judge(Claim((1, 2), (3,), SAMPLING, 7, previous=True))),
            ("prove_adapter", lambda: host.prove_adapter(1)),
            ("set_adapter", lambda: host.set_adapter(1, _ADAPTER, 0, (0, 3), _ROOT)),
        ]
        async with trio.open_nursery() as nursery:
            for name, call in calls:
                nursery.start_soon(self._one, name, call)

    async def _one(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            found = await call()
        except SwarmError as error:
            self.outcome.append(f"{name}: {type(error).__name__}")
            return
        self.outcome.append(f"{name}: done")
        if name == "generate":
            for completion in found[0]:  # as when a rollout is made
                pack_tokens(completion.token_ids)
                pack_floats(completion.logprobs)
        elif name == "score":
            pack_floats(found[0])


_OF: Final = {cls.__name__: cls for cls in get_args(FromEngine)}


class EngineTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "engine"
    about: ClassVar[str] = "the engine's socket at a node"
    slow_s: ClassVar[float] = 0.5
    """A message on a local socket may have 32 MiB."""
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        completions = {**_sample("Completions"), "completions": [_completion()]}
        self.kinds = local_kinds(FromEngine, {_OF["Completions"]: completions})

    def world(self, rng: random.Random) -> World:
        return _World()

    def types(self) -> dict[str, Any]:
        return dict(_OF)


def _sample(name: str) -> dict[str, Any]:
    return sample_of(_OF[name])


def _completion() -> dict[str, Any]:
    spans = [{"version": [0, 3], "start": 0, "end": 1}]
    completion = {"token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop", "spans": spans}
    return completion | {"routes": b"", "prompt_routes": b"", "top": b"", "prompt_scores": b""}
