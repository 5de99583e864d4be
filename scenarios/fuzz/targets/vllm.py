"""The vLLM plugin's channel and front, and the driver's end of the channel, with stubs instead of vLLM.

Each message goes through the real framing of both ends. The front handles the driver's messages, and a driver's link
those of the plugin.
"""

import asyncio
import importlib
import logging
import random
import sys
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import numpy as np

from codec.errors import PeerError
from node.engines.vllm import links
from node.engines.vllm.plugin.swarm_vllm.messages import FromDriver, FromPlugin
from node.ipc.framing import FrameReader
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.local import frame, local_kinds
from scenarios.fuzz.target import FOREVER, Target, World

__all__ = ["VllmTarget"]

_PLUGIN: Final = Path(links.__file__).parent / "plugin"


def _stub(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


class _Any:
    """A stub class that accepts any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    DELTA = FINAL_ONLY = None


class _Platform:
    @staticmethod
    def is_cpu() -> bool:
        return True


def _loaded() -> tuple[Any, Any]:
    """Import the plugin's channel and front modules with stubs of the modules of vLLM."""
    stubs = {
        "vllm": _stub("vllm", SamplingParams=_Any, __version__="0"),
        "vllm.distributed": _stub("vllm.distributed"),
        "vllm.distributed.weight_transfer": _stub("vllm.distributed.weight_transfer"),
        "vllm.distributed.weight_transfer.base": _stub("b", WeightTransferInitRequest=_Any),
        "vllm.lora": _stub("vllm.lora"),
        "vllm.lora.request": _stub("vllm.lora.request", LoRARequest=_Any),
        "vllm.platforms": _stub("vllm.platforms", current_platform=_Platform),
        "vllm.sampling_params": _stub(
            "vllm.sampling_params", RequestOutputKind=_Any, SamplingParams=_Any, StructuredOutputsParams=_Any
        ),
        "swarm_vllm.scores": _stub(
            "swarm_vllm.scores",
            scoring=lambda message, **more: message,
            read=lambda logprobs, ids: (-1.0,) * len(ids),
            read_margins=lambda logprobs, ids: (0.0,) * len(ids),
            of_prompt=lambda count: {},
        ),
        "swarm_vllm.draws": _stub("swarm_vllm.draws", NOISE="swarm_noise"),
        "swarm_vllm.replays": _stub("swarm_vllm.replays", REPLAY="swarm_replay", margin_of=lambda rank: 0.0),
        "swarm_vllm.structured": _stub("swarm_vllm.structured", BEGUN="swarm_begun"),
        "swarm_vllm.rewind": _stub("swarm_vllm.rewind", LABEL="-1", PREVIOUS="swarm_previous"),
    }
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    sys.path.insert(0, str(_PLUGIN))
    try:
        return importlib.import_module("swarm_vllm.channel"), importlib.import_module("swarm_vllm.front")
    finally:
        sys.path.remove(str(_PLUGIN))
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Client:
    """Replaces vLLM's engine client."""

    def __init__(self) -> None:
        self.engine_core = self

    async def init_weight_transfer_engine(self, request: Any) -> None:
        return

    async def call_utility_async(self, name: str, *arguments: Any) -> dict[str, Any]:
        return {"error": "", "touched": False, "pause_s": 0.0, "loaded_s": 0.0}

    async def generate(self, prompt: Any, sampling: Any, name: str, lora_request: Any = None) -> Any:
        class Logprob:
            logprob, rank = -0.5, 0

        span = _Any(version="0.3", start=0, end=1)
        output = _Any(
            token_ids=[5], logprobs=[{5: Logprob}], finish_reason="stop", weight_versions=[span],
            routed_experts=np.array([[[0, 1]]], np.uint16),
        )  # fmt: skip
        yield _Any(outputs=[output], prompt_logprobs=None)


class _World(World):
    def __init__(self) -> None:
        channel, front = _loaded()
        self._channel, self._closed = channel, channel.Closed
        self._front = front.SwarmFront(None)
        self._loop = asyncio.new_event_loop()
        self._answers: list[Any] = []

    def give(self, kind: Kind, data: bytes) -> str:
        driver = kind.name.startswith("driver/")
        plugin_end = self._channel.Channel(_NoSocket(), self._union(driver))
        plugin_end._bytes += frame(data)
        try:
            plugin_end._next()
        except self._closed as error:
            return f"closed: {error}"
        frames = FrameReader(FromDriver if driver else FromPlugin)
        frames.feed(frame(data), (), 0)
        try:
            found = frames.next_message()
        except PeerError as error:
            return str(error)
        assert found is not None
        return self._ask_front(found[0]) if driver else self._deliver_to_driver(found[0])

    def _union(self, driver: bool) -> Any:
        messages = sys.modules.get("swarm_vllm.messages")
        assert messages is not None
        return messages.FromDriver if driver else messages.FromPlugin

    def _ask_front(self, message: Any) -> str:
        """Give a driver's message to the front, which must answer."""
        messages = sys.modules["swarm_vllm.messages"]
        theirs = getattr(messages, type(message).__name__)(*(getattr(message, f) for f in message.__struct_fields__))
        answers: list[Any] = []

        class Sink:
            def send(self, answer: Any) -> None:
                answers.append(answer)

        self._front._closed = None
        self._loop.run_until_complete(self._front._answer_driver(Sink(), _Client(), theirs))
        assert answers, "the driver gets no answer"
        return " ".join(type(answer).__name__ for answer in answers[-2:])

    def _deliver_to_driver(self, message: Any) -> str:
        """Give a plugin's message to a driver's link that waits for the answer to its first request."""
        link = links.PluginLink.__new__(links.PluginLink)
        link._asked, link._on_progress = {1: Future()}, {1: lambda counts: None}
        if type(message).__name__ in ("Front", "Rank", "Loader"):
            return "a greeting"
        link._deliver(message)
        return "an answer" if not link._asked else "not asked for"

    def close(self) -> None:
        self._loop.close()


class _NoSocket:
    """Replaces the socket; the test puts bytes directly into the channel."""


class VllmTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "vllm"
    about: ClassVar[str] = "the vLLM plugin's channel and front, and the driver's end"
    slow_s: ClassVar[float] = 0.5
    """A message on a local socket may have 32 MiB."""
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        logging.getLogger("swarm_vllm.front").setLevel(logging.CRITICAL)
        self.kinds = [
            Kind(f"{side}/{kind.name}", kind.fields, kind.make, kind.enclose, kind.encode)
            for side, union in (("driver", FromDriver), ("plugin", FromPlugin))
            for kind in local_kinds(union)
        ]

    def world(self, rng: random.Random) -> World:
        return _World()

    def types(self) -> dict[str, Any]:
        found = {f"driver/{cls.__name__}": cls for cls in get_args(FromDriver)}
        return found | {f"plugin/{cls.__name__}": cls for cls in get_args(FromPlugin)}
