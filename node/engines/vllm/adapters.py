"""The adapters of one vLLM: prepared on every rank, proven, and switched to between two steps.

No file is written. Every rank gets the slot's weights as sealed memory, writes them by vLLM's own functions at an index
that no step reads, and reads them back. The memory cannot change any more, so its hash is the hash of the live bits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from codec import Layout
from codec.adapter import AdapterConfig, AdapterSlots
from codec.errors import UsageError
from node.engines.adapters import GivenAdapter, check_features, factors_of, map_weights, slot_root
from node.engines.base import (
    ADAPTERS,
    IMAGES,
    JUDGES_ADAPTERS,
    PROMPT_LOGPROBS,
    ROUTES,
    STREAMS,
    STRUCTURES,
    TOP_LOGPROBS,
    EngineError,
    Version,
)
from node.engines.vllm.invariance import is_invariant
from node.engines.vllm.links import PluginLink, wait
from node.engines.vllm.plugin.swarm_vllm.adapter_messages import (
    Adapted,
    AdapterLayer,
    DropAdapter,
    PrepareAdapter,
    ProveAdapter,
    SwitchAdapter,
)
from node.engines.vllm.plugin.swarm_vllm.messages import Changed, Front, Policy

if TYPE_CHECKING:
    from node.engines.vllm.attached import Attached

__all__ = ["VllmAdapters", "abilities_of", "adapter_flags", "version_name"]

PREPARE_WITHIN_S: Final = 290.0
SWITCH_WITHIN_S: Final = 290.0
"""With the policy `drain`, a switch waits until the adapter's running requests are done."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""

_log = structlog.get_logger(__name__)


def adapter_flags(base: Layout, slots: AdapterSlots) -> tuple[str, ...]:
    """vLLM's flags for room for a swarm's adapters: its slots, one in which a next version is prepared, and one that
    stays zeros (see the plugin's `lora`)."""
    rank = next((rank for rank in RANKS if rank >= slots.rank), RANKS[-1])
    flags = ("--enable-lora", "--max-loras", str(slots.count + 2), "--max-lora-rank", str(rank))
    return (*flags, "--lora-target-modules", *_targets(base))


def _targets(base: Layout) -> list[str]:
    """The last names of the linear layers that adapters may change."""
    matrices = [tensor.name for tensor in base.tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    found = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}
    return sorted(name for name in found if "embed" not in name and name not in ("wte", "wpe", "lm_head"))


def version_name(version: Version) -> str:
    """The version as vLLM's requests name it."""
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True)
class _Adapter:
    """One version. `weights`: its slot's, mapped. `layers`: as the ranks got them."""

    slot: int
    config: AdapterConfig
    version: Version
    weights: NDArray[np.uint16]
    layers: tuple[AdapterLayer, ...]

    @property
    def number(self) -> int:
        """Its id in vLLM, which knows no 0."""
        return self.slot + 1

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """The modules and their ranks: adapters of one shape run the same kernels."""
        return tuple((layer.module, layer.rank) for layer in self.layers)


class VllmAdapters:
    """`stage` may be called from another thread than the other methods."""

    def __init__(self) -> None:
        self._staged: _Adapter | None = None
        self._served: dict[int, _Adapter] = {}
        self._alike: dict[tuple[tuple[str, int], ...], bool] = {}
        """By shape: whether vLLM rounds a row alike in any batch; see `when_measured`."""

    def clear(self, front: PluginLink) -> None:
        """Forget all adapters, of this driver or of one before it."""
        self._staged, self._served = None, {}
        if room_of(front):
            front.get(lambda n: DropAdapter(n, 0), Changed, SWITCH_WITHIN_S)

    def stage(self, attached: "Attached", given: GivenAdapter) -> bytes:
        """See `Engine.stage_adapter`."""
        self._staged = None
        if not room_of(attached.front):
            raise UsageError(_no_room(attached))
        check_features(given.config)
        weights = map_weights(given.fd)
        factors = factors_of(given.config, attached.layout, weights)
        layers = tuple(AdapterLayer(f.module, len(f.a), f.a.shape[1], len(f.b), f.scaling) for f in factors)
        adapter = _Adapter(given.slot, given.config, given.version, weights, layers)
        name, version = given.name, version_name(given.version)
        asked = [
            rank.ask(lambda n: PrepareAdapter(n, adapter.number, name, version, layers), [given.fd])
            for rank in attached.ranks
        ]
        answers = [wait(answer, Adapted, PREPARE_WITHIN_S) for answer in asked]
        for answer in answers:
            if answer.refusal:
                raise UsageError(answer.refusal)
        root = slot_root(given.slot, given.config.to_bytes(), weights)
        if (wrong := _wrong(layers, answers)) or root != given.root:
            what = f"of {wrong}" if wrong else "given"
            raise EngineError(f"the adapter {name}: the bits {what} are not those of version {version}")
        self._staged = adapter
        return root

    def switch(self, front: PluginLink, slot: int, policy: Policy) -> float:
        """See `Engine.switch_adapter`."""
        adapter, self._staged = self._staged, None
        if adapter is None or adapter.slot != slot:
            raise EngineError(f"no adapter is staged for slot {slot}")
        before = self._served.get(slot)
        renamed = before is not None and before.config.name != adapter.config.name
        number, version = adapter.number, version_name(adapter.version)
        took = front.get(lambda n: SwitchAdapter(n, number, version, policy, renamed), Changed, SWITCH_WITHIN_S)
        self._served[slot] = adapter
        _log.info("adapter", name=adapter.config.name, version=version, pause_ms=round(1e3 * took.pause_s, 2))
        return took.pause_s

    def drop(self, front: PluginLink, slot: int) -> None:
        """See `Engine.drop_adapter`."""
        if (adapter := self._served.pop(slot, None)) is not None:
            number = adapter.number
            front.get(lambda n: DropAdapter(n, number), Changed, SWITCH_WITHIN_S)

    def root(self, attached: "Attached", slot: int) -> bytes:
        """See `Engine.adapter_root`."""
        if (adapter := self._served.get(slot)) is None:
            raise EngineError(f"slot {slot} has no adapter")
        number = adapter.number
        asked = [rank.ask(lambda n: ProveAdapter(n, number)) for rank in attached.ranks]
        answers = [wait(answer, Adapted, PREPARE_WITHIN_S) for answer in asked]
        if _wrong(adapter.layers, answers):
            return bytes(32)
        return slot_root(slot, adapter.config.to_bytes(), adapter.weights)

    def named(self, name: str) -> tuple[int, Version]:
        """(id in vLLM, version) of the adapter. Raises `EngineError` for an unknown one."""
        for adapter in list(self._served.values()):
            if adapter.config.name == name:
                return adapter.number, adapter.version
        raise EngineError(f"this engine does not hold the adapter {name}")

    def when_measured(self, front: PluginLink, name: str, then: Callable[[bool], None]) -> None:
        """Call `then` with whether a row's bits do not depend on its batch with this adapter.

        It is measured once for each shape of adapter, in a thread, before `then` is called there.
        """
        number, _ = self.named(name)
        shape = self._served[number - 1].shape
        if shape in self._alike:
            then(self._alike[shape])
            return

        def measure() -> None:
            try:
                self._alike[shape] = is_invariant(front, number)
            except (
                EngineError
            ) as error:  # the adapter was dropped, or a version fell into it: the next claim tries again
                _log.warning("not_measured", adapter=name, why=str(error))
            then(self._alike.get(shape, False))

        threading.Thread(target=measure, name="measure", daemon=True).start()


def room_of(front: PluginLink) -> int:
    """How many adapters this vLLM can serve at a time."""
    return front.hello.adapters if isinstance(front.hello, Front) else 0


def _wrong(layers: tuple[AdapterLayer, ...], answers: list[Adapted]) -> str:
    """A module of which some live bits differ, or are on no rank; empty: there is none."""
    for answer in answers:
        if answer.differing:
            return answer.differing[0]
    for layer in layers:
        for side, elements in (("a", layer.rank * layer.inputs), ("b", layer.outputs * layer.rank)):
            if sum(answer.covered.get(f"{layer.module}.{side}", 0) for answer in answers) < elements:
                return layer.module
    return ""


def _no_room(attached: "Attached") -> str:
    slots = attached.shared.slots
    flags = " ".join(adapter_flags(attached.layout, slots)) if slots is not None else "--enable-lora"
    return (
        f"This vLLM has no room for adapters. Install the plugin of this release (docs/vllm.md), and start vLLM with "
        f"{flags}, or have the node start it."
    )


def abilities_of(front: PluginLink) -> frozenset[str]:
    """The abilities that a vLLM has by what its API server said first, in the message `Front`."""
    can_have = {
        ADAPTERS: room_of(front),
        JUDGES_ADAPTERS: room_of(front),
        ROUTES: getattr(front.hello, "experts", 0),
        STREAMS: getattr(front.hello, "tells", False),
        TOP_LOGPROBS: getattr(front.hello, "tops", False),
        STRUCTURES: getattr(front.hello, "structures", False),
        PROMPT_LOGPROBS: getattr(front.hello, "prompts", False),
        IMAGES: getattr(front.hello, "images", False),
    }
    return frozenset(ability for ability, can in can_have.items() if can)
