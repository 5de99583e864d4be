"""What people run and import: `from node import Swarm` in a trainer, `swarm-node` at a prompt.

The name is loaded when first used, so that importing this package needs neither torch nor trio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.engines.base import SamplingParams
    from node.trainers.api import Check, PromptRefused, RefusedPrompt, Swarm

__all__ = ["Check", "PromptRefused", "RefusedPrompt", "SamplingParams", "Swarm"]

_HOME_OF = {
    "Check": "node.trainers.api",
    "PromptRefused": "node.trainers.errors",
    "RefusedPrompt": "node.trainers.rollouts",
    "SamplingParams": "node.engines.base",
    "Swarm": "node.trainers.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'node' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
