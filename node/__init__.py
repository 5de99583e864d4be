"""What people run and import: `from node import Swarm` in a trainer, `swarm-node` at a prompt.

The name is loaded when first used, so that importing this package needs neither torch nor trio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codec.errors import SwarmError, UsageError
    from node.engines.base import SamplingParams
    from node.trainers.api import Check, PromptRefused, Publication, RefusedPrompt, Rollout, RolloutGroup, Swarm
    from node.trainers.errors import PublishFailed, RolloutsFailed, SwarmBusy, SwarmDown, SwarmTimeout

__all__ = [
    "Check",
    "PromptRefused",
    "Publication",
    "PublishFailed",
    "RefusedPrompt",
    "Rollout",
    "RolloutGroup",
    "RolloutsFailed",
    "SamplingParams",
    "Swarm",
    "SwarmBusy",
    "SwarmDown",
    "SwarmError",
    "SwarmTimeout",
    "UsageError",
]

_HOME_OF = {
    "Check": "node.trainers.api",
    "PromptRefused": "node.trainers.errors",
    "Publication": "node.trainers.publish.publication",
    "PublishFailed": "node.trainers.errors",
    "RefusedPrompt": "node.trainers.rollouts",
    "Rollout": "node.trainers.rollouts",
    "RolloutGroup": "node.trainers.rollouts",
    "RolloutsFailed": "node.trainers.errors",
    "SamplingParams": "node.engines.base",
    "Swarm": "node.trainers.api",
    "SwarmBusy": "node.trainers.errors",
    "SwarmDown": "node.trainers.errors",
    "SwarmError": "codec.errors",
    "SwarmTimeout": "node.trainers.errors",
    "UsageError": "codec.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'node' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
