"""How the swarm stands, from what its seed says: `Swarm.state`, and who holds a publication."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.trainers.publication import Publication
from node.trainers.seedlink import ANSWER_WITHIN_S, ask_state

__all__ = ["held_share", "standing"]


def held_share(home: Path, publication: Publication, within_s: float) -> float:
    """The share of live nodes that hold `publication`, verified, or something newer. No nodes: nobody holds it.

    Raises `SwarmDown`, and `SwarmTimeout` when the seed does not say `within_s`.
    """
    wanted = [publication.epoch, publication.version]
    nodes = ask_state(home, min(within_s, ANSWER_WITHIN_S))["swarm"].get("nodes", [])
    held = [node["held"] for node in nodes if node.get("held") is not None]
    return sum(list(version) >= wanted for version in held) / len(nodes) if nodes else 0.0


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
