"""How the swarm stands, from what its seed says: `Swarm.state`, who holds a publication, and why no rollouts come."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import SwarmError
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, ask_state
from node.trainers.publish.publication import Holders, Publication

__all__ = ["holders", "standing", "why_no_group"]

EXPLAIN_WITHIN_S: Final = 5.0
"""An error that is late anyway may wait so long for its cause."""


def holders(home: Path, publication: Publication, within_s: float) -> Holders:
    """Which of the live nodes hold `publication`, verified, or something newer.

    Raises `SwarmDown`, and `SwarmTimeout` when the seed does not say `within_s`.
    """
    wanted = [publication.epoch, publication.version]
    nodes = ask_state(home, min(within_s, ANSWER_WITHIN_S))["swarm"].get("nodes", [])
    lacking = [node for node in nodes if node.get("held") is None or list(node["held"]) < wanted]
    return Holders(len(nodes), tuple(f"{_named(node)} at {_version(node.get('held'))}" for node in lacking))


def why_no_group(home: Path, session: str) -> str:
    """Why no rollouts of `session` come, as far as the seed of `home` knows; never raises."""
    try:
        return _why_no_group(ask_state(home, EXPLAIN_WITHIN_S), session)
    except SwarmError as error:
        return str(error)


def _why_no_group(said: dict[str, Any], session: str) -> str:
    nodes = said["swarm"].get("nodes", [])
    if not nodes:
        return "No node is connected to the seed: swarm-node invite prints a ticket, with which they join."
    drawing = [node for node in nodes if node.get("engine") is not None]
    if not drawing:
        return f"None of the {len(nodes)} nodes has an engine that is ready: see swarm-node status."
    able = [node for node in drawing if node.get("quarantine") is None]
    if not able:
        why = "; ".join(f"{_named(node)}: {node['quarantine'].get('why', '')}" for node in drawing[:3])
        return f"Every node that has an engine is in quarantine ({why}): see swarm-node quarantine."
    if unmet := said["work"].get("unmet", {}).get(session):
        return (
            f"No node's engine can do these sampling options: {', '.join(unmet)}. Leave them out, or start a node "
            "whose engine can: one of this release, and for exact one of transformers, or vLLM on a GPU with "
            "VLLM_BATCH_INVARIANT=1."
        )
    speed = sum(node.get("tokens_s", 0.0) for node in able)
    refused = said["work"].get("refused", {})
    text = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
    return (
        f"{len(able)} nodes draw samples, at {speed:.0f} tokens/s together"
        + (f"; refused so far: {text}" if refused else "")
        + ". They may be too slow for this deadline, or still have an older version."
    )


def _named(node: dict[str, Any]) -> str:
    return node.get("name") or node.get("peer", "a node")[-8:]


def _version(held: Any) -> str:
    return "no version" if held is None else "version " + ".".join(map(str, held))


def standing(said: dict[str, Any]) -> dict[str, Any]:
    """`said`: the seed's own state, as `swarm` and `work`. Those, and what a trainer looks at first."""
    swarm, work = said["swarm"], said["work"]
    steps: list[dict[str, Any]] = swarm.get("steps", [])
    nodes = [_node(node, swarm, steps, work) for node in swarm.get("nodes", [])]
    return {
        "sealed": _sealed(swarm, steps),
        "nodes": nodes,
        "tokens_s": work.get("tokens_per_s", 0.0),
        "refused": work.get("refused", {}),
        "expected_arrival_s": _expected_arrival_s(steps),
        "egress": _egress(swarm, steps),
        "swarm": swarm,
        "work": work,
    }


def _sealed(swarm: dict[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = steps[-1] if steps else {}
    return {
        "version": tuple(swarm.get("head", ())),
        "root": swarm.get("root"),
        "age_s": last.get("age_s"),
        "held": last.get("held", 0),
        "waiting": last.get("waiting", 0),
    }


def _node(
    node: dict[str, Any], swarm: dict[str, Any], steps: Sequence[dict[str, Any]], work: dict[str, Any]
) -> dict[str, Any]:
    """`lag_versions`: sealed versions that it lacks, as far as they are remembered; `lag_s`: for how long already."""
    held = node.get("held")
    lacking = [step for step in steps if held is None or step["version"] > list(held)]
    return {
        "name": node.get("name", ""),
        "version": None if held is None else tuple(held),
        "engine": None if node.get("engine") is None else tuple(node["engine"]),
        "lag_versions": len(lacking),
        "lag_s": lacking[0].get("age_s") if lacking else 0.0,
        "standing": node.get("standing"),
        "tokens_s": node.get("tokens_s", 0.0),
        "accepted": node.get("accepted", 0),
        "refused": node.get("refused", {}),
    }


def _expected_arrival_s(steps: Sequence[dict[str, Any]]) -> float | None:
    """Seconds until the newest version should be with everybody: as long as the last ones took for each byte, less what
    has passed. 0: it is; None: no version was with everybody yet, so there is nothing to go by."""
    if not steps:
        return None
    last = steps[-1]
    if last.get("publish_to_all_s") is not None:
        return 0.0
    known = [step for step in steps if step.get("publish_to_all_s") and step["delta_bytes"]][-8:]
    if not known:
        return None
    seconds_a_byte = sum(step["publish_to_all_s"] for step in known) / sum(step["delta_bytes"] for step in known)
    return max(0.0, seconds_a_byte * last["delta_bytes"] - last["age_s"])


def _egress(swarm: dict[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the newest version: bytes at the trainer's sockets since its publish began, and what they should stay under:
    one copy of the delta, 3 % and 64 KiB (`budget_bytes`). `payload`: what `--egress-copies` caps, counted by kind."""
    last = steps[-1] if steps else None
    return {
        "sent_bytes": swarm.get("sent_bytes", 0),
        "step_bytes": 0 if last is None else last["trainer_sent_bytes"],
        "budget_bytes": 0 if last is None else int(1.03 * last["delta_bytes"]) + (64 << 10),
        "payload": swarm.get("egress", {}),
    }
