"""What people run and import: `from node import Swarm` in a trainer, `swarm-node` at a prompt.

The names below are the public API; `docs/trainers.md` is its guide. Each is loaded when it is first used, so that
importing this package needs neither torch nor trio.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codec.errors import SwarmError, UsageError
    from node.engines.base import SamplingParams
    from node.trainers.api import Swarm
    from node.trainers.errors import (
        PromptRefused,
        PublishFailed,
        RolloutsFailed,
        SwarmBusy,
        SwarmDown,
        SwarmTimeout,
    )
    from node.trainers.importance import effective_share, importance_weights, log_ratios_by_version
    from node.trainers.prompts import PromptSpec
    from node.trainers.publish.publication import Publication
    from node.trainers.readiness import NodeReadiness, NodeState, Readiness
    from node.trainers.rollout_group import Check, RefusedPrompt, Rollout, RolloutGroup
    from node.trainers.rollout_stream import RolloutStream
    from node.trainers.routes import padded_routes, replayed_routes
    from node.trainers.save_state import StateSaving

__all__ = [
    "Check",
    "NodeReadiness",
    "NodeState",
    "PromptRefused",
    "PromptSpec",
    "Publication",
    "PublishFailed",
    "Readiness",
    "RefusedPrompt",
    "Rollout",
    "RolloutGroup",
    "RolloutStream",
    "RolloutsFailed",
    "SamplingParams",
    "StateSaving",
    "Swarm",
    "SwarmBusy",
    "SwarmDown",
    "SwarmError",
    "SwarmTimeout",
    "UsageError",
    "effective_share",
    "importance_weights",
    "log_ratios_by_version",
    "padded_routes",
    "replayed_routes",
]

_MODULE_OF = {
    "Check": "node.trainers.rollout_group",
    "NodeReadiness": "node.trainers.readiness",
    "NodeState": "node.trainers.readiness",
    "PromptRefused": "node.trainers.errors",
    "PromptSpec": "node.trainers.prompts",
    "Publication": "node.trainers.publish.publication",
    "PublishFailed": "node.trainers.errors",
    "Readiness": "node.trainers.readiness",
    "RefusedPrompt": "node.trainers.rollout_group",
    "Rollout": "node.trainers.rollout_group",
    "RolloutGroup": "node.trainers.rollout_group",
    "RolloutStream": "node.trainers.rollout_stream",
    "RolloutsFailed": "node.trainers.errors",
    "SamplingParams": "node.engines.base",
    "StateSaving": "node.trainers.save_state",
    "Swarm": "node.trainers.api",
    "SwarmBusy": "node.trainers.errors",
    "SwarmDown": "node.trainers.errors",
    "SwarmError": "codec.errors",
    "SwarmTimeout": "node.trainers.errors",
    "UsageError": "codec.errors",
    "effective_share": "node.trainers.importance",
    "importance_weights": "node.trainers.importance",
    "log_ratios_by_version": "node.trainers.importance",
    "padded_routes": "node.trainers.routes",
    "replayed_routes": "node.trainers.routes",
}


def _check_packages() -> None:
    """Raise `ImportError` where a file beside the user's script hides one of the packages that belong to this one."""
    for name in ("codec", "swarm"):
        found = find_spec(name)
        place = None if found is None else found.origin
        if place is None or Path(place).parents[1] != Path(__file__).parents[1]:
            raise ImportError(
                f"swarm-node's package {name!r} is hidden by {place or f'a folder {name}'}, which Python finds first: "
                "rename that file or folder. node, swarm and codec are names of swarm-node's packages."
            )


_check_packages()

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports a name that is not among them

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'node' has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)

    def __dir__():
        return sorted({*globals(), *_MODULE_OF})
