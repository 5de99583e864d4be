"""What needs no vLLM of its adapters: names of versions, gates, flags, and sentences about a vLLM without room."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from codec import Layout, TensorSpec
from codec.adapter import AdapterSlots
from codec.errors import UsageError
from node.engines.base import EngineError
from node.engines.vllm.adapters import VllmAdapters, adapter_flags
from node.engines.vllm.causes import cause_of
from node.engines.vllm.flights import _version
from node.engines.vllm.plugin.swarm_vllm.gates import Gates
from node.engines.vllm.plugin.swarm_vllm.labels import all_of, of_request, spans_of

BASE = Layout(
    (
        TensorSpec("model.embed_tokens.weight", "BF16", (64, 32)),
        TensorSpec("model.layers.0.mlp.up_proj.weight", "BF16", (96, 32)),
        TensorSpec("model.layers.0.norm.weight", "BF16", (32,)),
        TensorSpec("model.layers.0.self_attn.q_proj.weight", "BF16", (32, 32)),
    )
)


@dataclass
class Span:
    version: str
    start: int
    end: int


def test_a_request_gets_the_versions_of_the_base_and_of_its_adapter() -> None:
    name = all_of("0.7", {3: "0.9", 1: "0.5"})
    assert name == "0.7|1:0.5|3:0.9"
    assert of_request(name, 0) == "0.7"
    assert of_request(name, 1) == "0.7/0.5"
    assert of_request(name, 3) == "0.7/0.9"
    assert of_request("0.7", 0) == all_of("0.7", {}) == "0.7"
    with pytest.raises(ValueError, match="adapter 2"):
        of_request(name, 2)


def test_spans_that_differ_in_other_adapters_are_one() -> None:
    names = [all_of("0.7", versions) for versions in ({1: "0.5"}, {1: "0.5", 2: "0.8"}, {1: "0.9", 2: "0.8"})]
    spans = [Span(name, 4 * i, 4 * i + 4) for i, name in enumerate(names)]
    assert spans_of(spans, 0) == (("0.7", 0, 12),)
    assert spans_of(spans, 1) == (("0.7/0.5", 0, 8), ("0.7/0.9", 8, 12))
    assert spans_of(spans[1:], 2) == (("0.7/0.8", 4, 12),)
    assert spans_of(None, 0) == ()


def test_a_spans_version_is_the_newer_one() -> None:
    assert _version("0.7") == (0, 7)
    assert _version("0.7/0.5") == (0, 7)
    assert _version("0.7/1.2") == (1, 2)
    for text in ("default", "0.7/", "0.7|1:0.5", "0.7-previous"):
        with pytest.raises(EngineError):
            _version(text)


def test_a_gate_lets_running_requests_end_and_holds_new_ones_back() -> None:
    async def run() -> list[str]:
        gates, events = Gates(), []

        async def request(adapter: int, name: str, seconds: float) -> None:
            async with gates.request(adapter):
                events.append(f"{name} begins")
                await asyncio.sleep(seconds)
                events.append(f"{name} ends")

        async def switch() -> None:
            async with gates.drained(1, drain=True):
                events.append("switch")

        first = asyncio.ensure_future(request(1, "first", 0.05))
        await asyncio.sleep(0.01)
        switching = asyncio.ensure_future(switch())
        await asyncio.sleep(0.01)
        later = [request(1, "second", 0.0), request(2, "other", 0.0), request(0, "base", 0.0)]
        await asyncio.gather(first, switching, *later)
        return events

    events = asyncio.run(run())
    assert events.index("other ends") < events.index("first ends") < events.index("switch")
    assert events.index("base ends") < events.index("switch") < events.index("second begins")


def test_without_drain_a_switch_waits_for_nobody() -> None:
    async def run() -> bool:
        gates = Gates()
        async with gates.request(1), gates.drained(1, drain=False):
            return True

    assert asyncio.run(run())


def test_the_flags_give_room_for_the_slots_and_one_more() -> None:
    flags = adapter_flags(BASE, AdapterSlots.reserve(BASE, 8, 12))
    assert flags == (
        *("--enable-lora", "--max-loras", "9", "--max-lora-rank", "16", "--lora-target-modules", "q_proj", "up_proj"),
    )
    assert adapter_flags(BASE, AdapterSlots.reserve(BASE, 1, 1024))[4] == "512", "vLLM takes no more"


def test_nothing_is_switched_that_was_not_staged() -> None:
    adapters = VllmAdapters()
    with pytest.raises(EngineError, match="no adapter is staged for slot 3"):
        adapters.switch(cast(Any, None), 3, "continue")
    with pytest.raises(EngineError, match="slot 3 has no adapter"):
        adapters.root(cast(Any, None), 3)
    with pytest.raises(EngineError, match="does not hold the adapter x"):
        adapters.named("x")


def test_a_vllm_without_room_names_the_flags() -> None:
    @dataclass
    class Attached:
        front: Any
        shared: Any
        layout: Layout = BASE

    @dataclass
    class Shared:
        slots: AdapterSlots | None

    class Front:
        hello = None

    attached = Attached(Front(), Shared(AdapterSlots.reserve(BASE, 2, 8)))
    with pytest.raises(UsageError, match="--max-loras 3 --max-lora-rank 8 --lora-target-modules q_proj up_proj"):
        VllmAdapters().stage(cast(Any, attached), cast(Any, None))


def test_a_vllm_that_ends_because_of_adapters_says_what_to_change() -> None:
    assert "--engine transformers" in str(cause_of("ValueError: FooForCausalLM does not support LoRA yet."))
    why = (
        "ValueError: LoRA target module model.layers.0.mlp.gate (Gate) matched the deployment configuration but could "
    )
    assert "model.layers.0.mlp.gate" in str(cause_of(why + "not be wrapped by any LoRA layer implementation."))
