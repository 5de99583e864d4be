"""What a vLLM or an SGLang can do beyond its launcher's abilities, known once it holds a model."""

from collections.abc import Sequence

import structlog

from node.engines.base import REPLAYS, STREAMS
from node.engines.vllm.adapters import abilities_of
from node.engines.vllm.agreement import check_agreement
from node.engines.vllm.invariance import class_of, is_invariant
from node.engines.vllm.links import PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import Policy

__all__ = ["measured"]

_log = structlog.get_logger(__name__)


def measured(
    front: PluginLink,
    ranks: Sequence[PluginLink],
    policy: Policy,
    engine: str,
    version: str,
    *,
    judges: bool,
    drafts: bool,
) -> set[str]:
    """The abilities of an engine that holds a model: its arithmetic class, what it has room for, and whether it can
    replay what others of the class draw. `engine`: its name in the class. `version`: what it holds, as
    `flights.begin_score` has it. `judges`: it is one that may. `drafts`: it proposes tokens by a draft model.

    Raises `UsageError` for one that draws wrongly by its draft model.
    """
    found = {name for name in [class_of(front, ranks, policy, engine, drafts=drafts)] if name}
    can = abilities_of(front)
    if drafts:
        check_agreement(front, version)
        return found | (can & {STREAMS})
    found |= can
    if judges:
        invariant = is_invariant(front)
        _log.info("measured", invariant=invariant)
        found |= {REPLAYS} if invariant else set()
    return found
