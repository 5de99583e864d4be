"""The driver of one SGLang. Imports neither torch nor SGLang."""

from typing import Literal

from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.launch import Launcher
from node.engines.vllm.links import Listener

__all__ = ["SglangEngine", "SglangPolicy"]

SglangPolicy = Literal["continue", "recompute"]
"""What becomes of running requests at a commit. SGLang cannot let them finish first while others wait."""


class SglangEngine(VllmEngine):
    """See `VllmEngine`: `front` and the plugin's ranks speak the messages that vLLM's plugin speaks.

    Every tensor must be scattered: an SGLang that holds one in another form than the checkpoint's is refused.
    """

    kind = "sglang"
    program = "SGLang"

    def __init__(self, listener: Listener, policy: SglangPolicy = "continue", launcher: Launcher | None = None) -> None:
        super().__init__(listener, policy, launcher)
        if launcher is None:
            self._can = frozenset()
