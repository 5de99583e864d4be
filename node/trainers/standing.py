"""The swarm's state as its seed reports it: `Swarm.state`, which nodes hold a publication, why no rollouts come."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import SwarmError
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, ask_state
from node.trainers.publish.publication import Holders, Publication

__all__ = ["holders", "standing", "why_no_group"]

EXPLAIN_WITHIN_S: Final = 5.0
"""How long an error that a timeout has caused may wait for the seed to name the cause."""


def holders(home: Path, publication: Publication, within_s: float) -> Holders:
    """Which of the live nodes hold `publication`, verified, or a newer version.

    Raises `SwarmDown`, and `SwarmTimeout` when the seed does not answer within `within_s`.
    """
    wanted = [publication.epoch, publication.version]
    nodes = ask_state(home, min(within_s, ANSWER_WITHIN_S))["swarm"].get("nodes", [])
    lacking = [node for node in nodes if node.get("held") is None or list(node["held"]) < wanted]
    return Holders(len(nodes), tuple(f"{_named(node)} at {_version(node.get('held'))}" for node in lacking))


def why_no_group(home: Path, session: str) -> str:
    """Why no rollouts of `session` come, as far as the seed of `home` knows, in a sentence or two. Never raises."""
    try:
        return _why_no_group(ask_state(home, EXPLAIN_WITHIN_S), session)
    except SwarmError as error:
        return str(error)


def _why_no_group(status: dict[str, Any], session: str) -> str:
    nodes = status["swarm"].get("nodes", [])
    if not nodes:
        return "No node is connected to the seed: swarm-node invite prints a ticket, with which they join."
    with_engine = [node for node in nodes if node.get("engine") is not None]
    if not with_engine:
        return f"None of the {len(nodes)} nodes has an engine that is ready: see swarm-node status."
    able = [node for node in with_engine if node.get("quarantine") is None]
    if not able:
        why = "; ".join(f"{_named(node)}: {node['quarantine'].get('why', '')}" for node in with_engine[:3])
        return f"Every node that has an engine is in quarantine ({why}): see swarm-node quarantine."
    if unmet := status["work"].get("unmet", {}).get(session):
        return (
            f"No node's engine can do these sampling options: {', '.join(unmet)}. Leave them out, or start a node "
            "whose engine can: one of this release; for exact, transformers, or vLLM on a GPU with "
            "VLLM_BATCH_INVARIANT=1."
        )
    speed = sum(node.get("tokens_s", 0.0) for node in able)
    refused = status["work"].get("refused", {})
    text = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
    return (
        f"{len(able)} nodes generate samples, at {speed:.0f} tokens/s together"
        + (f"; refused so far: {text}" if refused else "")
        + ". They may be too slow for this deadline, or still have an older version."
    )


def _named(node: dict[str, Any]) -> str:
    return node.get("name") or node.get("peer", "a node")[-8:]


def _version(held: Any) -> str:
    return "no version" if held is None else "version " + ".".join(map(str, held))


def standing(status: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Swarm.state` that the seed knows. `status`: the seed's own, with `swarm` and `work`."""
    swarm, work = status["swarm"], status["work"]
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
    """One node. `lag_versions`: sealed versions that it lacks, of those that the seed remembers. `lag_s`: seconds since
    the publish of the oldest of them began."""
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
    """Seconds until every node should hold the newest version: what the last ones took for each byte, times its bytes,
    less the time since it was published. 0: every node holds it. None: no version has reached every node yet."""
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
    """What the seed sent. `sent_bytes`: since it started. `step_bytes`: at its sockets since the newest publish began.
    `budget_bytes`: what these should stay under, 1.03 times the delta plus 64 KiB. `payload`: the bytes that
    `--egress-copies` caps, by kind."""
    last = steps[-1] if steps else None
    return {
        "sent_bytes": swarm.get("sent_bytes", 0),
        "step_bytes": 0 if last is None else last["trainer_sent_bytes"],
        "budget_bytes": 0 if last is None else int(1.03 * last["delta_bytes"]) + (64 << 10),
        "payload": swarm.get("egress", {}),
    }
