"""What a driver knows of its vLLM: its connections, its map, and the patch that is staged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from codec import Layout
from codec.layout import BLOCK_ELEMENTS
from node.engines.base import EngineError, Version
from node.engines.interface import SharedReplica
from node.engines.room import NO_ROOM_TOLD, Room
from node.engines.vllm.compatibility import tensors_of
from node.engines.vllm.links import PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import Did, Front, Model

__all__ = ["FILL_WITHIN_S", "MAP_WITHIN_S", "Attached", "Staged", "give_weights"]

MAP_WITHIN_S: Final = 600.0
"""A mixture of experts has tens of thousands of tensors, and each takes some milliseconds."""
FILL_WITHIN_S: Final = 1500.0
"""For vLLM to load all weights."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Attached:
    """A vLLM with every rank's map. `modules`: those that each tensor feeds. `opaque`: why a tensor has no map.

    `devices`: the kinds of device that its weights are on.
    """

    front: PluginLink
    ranks: tuple[PluginLink, ...]
    shared: SharedReplica
    modules: dict[str, frozenset[str]]
    opaque: dict[str, str]
    devices: frozenset[str]

    @property
    def layout(self) -> Layout:
        return self.shared.layout

    @property
    def room(self) -> Room:
        """How much it generates at a time; nothing is known of one whose plugin is older."""
        hello = self.front.hello
        return Room(hello.sequences, hello.tokens) if isinstance(hello, Front) else NO_ROOM_TOLD

    def unreadable(self, loaded: Mapping[str, str], program: str) -> str:
        """Why the weights cannot be read back; empty: they can. `loaded`: why tensors cannot be written in place, by
        name. `program`: what the user knows the engine as."""
        if loaded:
            name = min(loaded)
            return f"{program} keeps {name} in another form ({loaded[name]}), from which its bits cannot be read back"
        if self.devices != {"cpu"}:
            device = "+".join(sorted(self.devices)) or "unknown, because the plugin in vLLM's environment is older"
            return f"its weights are on a device ({device}) from which reading them back has not been proven"
        return ""


@dataclass(frozen=True, slots=True)
class Staged:
    """A patch that every rank has made ready. `hashes`: all blocks after it. `touched`: the blocks that it changes."""

    version: Version
    hashes: NDArray[np.uint8]
    touched: tuple[int, ...]
    to_load: tuple[str, ...]


def give_weights(link: PluginLink, layout: Layout, fd: int) -> None:
    """Give a worker process its first weights. `fd`: the replica's, which stays ours."""
    try:
        link.get(lambda n: Model(n, tensors_of(layout), BLOCK_ELEMENTS), Did, FILL_WITHIN_S, [fd])
    except EngineError as error:
        _log.warning("first_load", why=str(error))
    finally:
        link.retire()
