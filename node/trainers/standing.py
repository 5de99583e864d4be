"""The swarm's state as its seed reports it: `Swarm.state`, which nodes hold a publication, why no rollouts come."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import SwarmError
from node.settings.units import version_text
from node.status.schema import MemberStatus, SeedReport, SeedStatus, Step, to_plain
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, ask_state
from node.trainers.publish.publication import Holders, Publication

__all__ = ["holders", "standing", "why_no_group"]

EXPLAIN_WITHIN_S: Final = 5.0
"""The longest that a late error waits for its cause."""


def holders(home: Path, publication: Publication, within_s: float) -> Holders:
    """Which of the live nodes hold `publication`, verified, or a newer version.

    Raises `SwarmDown`, and `SwarmTimeout` when the seed does not answer within `within_s` seconds.
    """
    wanted = (publication.epoch, publication.version)
    nodes = ask_state(home, min(within_s, ANSWER_WITHIN_S)).swarm.nodes
    lacking = [node for node in nodes if node.held is None or node.held < wanted]
    return Holders(len(nodes), tuple(f"{_named(node)} at {_held(node)}" for node in lacking))


def why_no_group(home: Path, session: str) -> str:
    """Why no rollouts of `session` come, as far as the seed of `home` knows, in a sentence or two. Never raises."""
    try:
        return _why_no_group(ask_state(home, EXPLAIN_WITHIN_S), session)
    except SwarmError as error:
        return str(error)


def _why_no_group(report: SeedReport, session: str) -> str:
    nodes = report.swarm.nodes
    if not nodes:
        return "No node is connected to the seed: swarm-node invite prints a ticket, with which they join."
    generating = [node for node in nodes if node.engine is not None]
    if not generating:
        return f"None of the {len(nodes)} nodes has an engine that is ready: see swarm-node status."
    able = [node for node in generating if node.quarantine is None]
    if not able:
        why = "; ".join(
            f"{_named(node)}: {node.quarantine.why}" for node in generating[:3] if node.quarantine is not None
        )
        return f"Every node that has an engine is in quarantine ({why}): see swarm-node quarantine."
    unmet = report.work.unmet.get(session, [])
    if missing := [name.removeprefix("reward:") for name in unmet if name.startswith("reward:")]:
        have = ", ".join(report.work.rewards.functions) or "none"
        return (
            f"No node has the reward {missing[0]!r} (rewards that nodes have: {have}): start one with "
            f"--reward {missing[0].partition('@')[0]}=MODULE:FUNCTION."
        )
    if unmet:
        return (
            f"No node's engine can do these sampling options: {', '.join(unmet)}. Leave them out, or start a node "
            "whose engine can: one of this release; for exact, transformers, or vLLM on a GPU with "
            "VLLM_BATCH_INVARIANT=1."
        )
    disputed = report.work.rewards.disputed
    doubt = f" Nodes disagreed about {disputed} rewards: see the seed's log." if disputed else ""
    speed = sum(node.tokens_s for node in able)
    text = ", ".join(f"{count} {reason}" for reason, count in sorted(report.work.refused.items()))
    return (
        f"{len(able)} nodes generate samples, at {speed:.0f} tokens/s together"
        + (f"; refused so far: {text}" if text else "")
        + ". They may be too slow for this deadline, or still have an older version."
        + doubt
    )


def _named(node: MemberStatus) -> str:
    return node.name or node.peer[-8:] or "a node"


def _held(node: MemberStatus) -> str:
    return "no version" if node.held is None else f"version {version_text(node.held)}"


def standing(report: SeedReport) -> dict[str, Any]:
    """The seed's own report (`swarm` and `work`), and what a trainer looks at first; plain values."""
    swarm, work = report.swarm, report.work
    return {
        "sealed": _sealed(swarm),
        "nodes": [_node(node, swarm.steps) for node in swarm.nodes],
        "tokens_s": work.tokens_per_s,
        "refused": work.refused,
        "expected_arrival_s": _expected_arrival_s(swarm.steps),
        "egress": _egress(swarm),
        "swarm": to_plain(swarm),
        "work": to_plain(work),
    }


def _sealed(swarm: SeedStatus) -> dict[str, Any]:
    last = swarm.steps[-1] if swarm.steps else None
    return {
        "version": swarm.head or (),
        "root": swarm.root,
        "age_s": None if last is None else last.age_s,
        "held": 0 if last is None else last.held,
        "waiting": 0 if last is None else last.waiting,
    }


def _node(node: MemberStatus, steps: Sequence[Step]) -> dict[str, Any]:
    """`lag_versions`: remembered versions that the node lacks; `lag_s`: since the first of them was published."""
    lacking = [step for step in steps if node.held is None or step.version > node.held]
    return {
        "name": node.name,
        "version": node.held,
        "engine": node.engine,
        "lag_versions": len(lacking),
        "lag_s": lacking[0].age_s if lacking else 0.0,
        "standing": node.standing,
        "tokens_s": node.tokens_s,
        "accepted": node.accepted,
        "refused": node.refused,
    }


def _expected_arrival_s(steps: Sequence[Step]) -> float | None:
    """Seconds until every member should hold the newest version: the last versions' time by byte, less its age.

    0: they hold it. None: no version has reached every member yet, so there is no time to go by.
    """
    if not steps:
        return None
    last = steps[-1]
    if last.publish_to_all_s is not None:
        return 0.0
    known = [(step.publish_to_all_s, step.delta_bytes) for step in steps if step.publish_to_all_s and step.delta_bytes]
    if not known:
        return None
    seconds, sizes = zip(*known[-8:], strict=True)
    return max(0.0, sum(seconds) / sum(sizes) * last.delta_bytes - last.age_s)


def _egress(swarm: SeedStatus) -> dict[str, Any]:
    """Of the newest version: bytes at the trainer's sockets since its publish began, and what they should stay under:
    one copy of the delta, 3 % and 64 KiB (`budget_bytes`). `payload`: what `--egress-copies` caps, counted by kind."""
    last = swarm.steps[-1] if swarm.steps else None
    return {
        "sent_bytes": swarm.sent_bytes,
        "step_bytes": 0 if last is None else last.trainer_sent_bytes,
        "budget_bytes": 0 if last is None else int(1.03 * last.delta_bytes) + (64 << 10),
        "payload": to_plain(swarm.egress),
    }
