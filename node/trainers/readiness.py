"""Which nodes are ready to generate, and what is missing until enough of them are.

A node asks for work only while its engine is loaded and the engine's bits are proven, and it names their version. So a
node is ready when its engine has proven the newest sealed version and nothing keeps work from it. `readiness` is pure;
`wait_ready` asks the seed again and again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.settings.units import size_text, version_text
from node.status.schema import MemberStatus, SeedReport, versions_behind
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, ask_state
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["NodeReadiness", "NodeState", "Readiness", "readiness", "wait_ready"]

LOOK_EVERY_S: Final = 0.5
"""Interval between two questions to the seed."""
MOST_NAMED: Final = 4
"""Nodes of one state that a sentence names; it counts the others."""


class NodeState(StrEnum):
    """How far a node is.

    `READY`: its engine has proven a version that counts. `JOINING`: it holds no version yet. `COPYING`: it fetches the
    model. `PROVING`: it holds the model and has no proven engine: the engine is being loaded, or it was joined without
    one, as a relay is. `BEHIND`: its engine has an older version. `SILENT`: it misses heartbeats, or its lease is over.
    `REFUSED`: it is in quarantine.
    """

    READY = "ready"
    JOINING = "joining"
    COPYING = "copying"
    PROVING = "proving"
    BEHIND = "behind"
    SILENT = "silent"
    REFUSED = "refused"


_CLAUSES: Final = {
    NodeState.JOINING: "joining",
    NodeState.COPYING: "copying the model",
    NodeState.PROVING: "loading and proving an engine, or without one",
    NodeState.BEHIND: "at an older version",
    NodeState.SILENT: "silent",
    NodeState.REFUSED: "refused",
}
"""What follows "2 are" in the sentence, in its order."""


@dataclass(frozen=True, slots=True)
class NodeReadiness:
    """One node. `name`: as it was started, else the end of its PeerId. `state`: how far it is. `why`: what keeps it
    from being ready, in a few words; empty where `state` says all. `tokens_per_second`: measured by the ledger, or by
    the node's self-test."""

    name: str
    state: NodeState
    why: str = ""
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """How ready the swarm is. `nodes`: its members, in the order of their slots."""

    nodes: tuple[NodeReadiness, ...] = ()

    def count(self, state: NodeState = NodeState.READY) -> int:
        """How many nodes are in `state`."""
        return sum(node.state is state for node in self.nodes)

    @property
    def tokens_per_second(self) -> float:
        """Of the ready nodes together."""
        return sum(node.tokens_per_second for node in self.nodes if node.state is NodeState.READY)

    def missing(self, nodes: int = 0, tokens_per_second: float = 0.0) -> str:
        """What is missing until `nodes` nodes are ready that make `tokens_per_second` together, in two sentences.
        Empty: nothing is missing."""
        ready, speed = self.count(), self.tokens_per_second
        short = [f"{ready} of {nodes} nodes are ready"] if ready < nodes else []
        if speed < tokens_per_second:
            makers = f"{ready} ready node{'s' * (ready != 1)} make{'s' * (ready == 1)}"
            short.append(f"{makers} {speed:.0f} of {tokens_per_second:.0f} tokens/s")
        if not short:
            return ""
        if not self.nodes:
            others = "No node is connected to the seed: swarm-node invite prints a ticket, with which they join."
        else:
            found = [text for state in _CLAUSES if (text := self._clause(state))]
            others = f"Of the others {'; '.join(found)}." if found else "No other node is connected to the seed."
        return f"{' and '.join(short)}. {others}"

    def _clause(self, state: NodeState) -> str:
        found = [node for node in self.nodes if node.state is state]
        if not found:
            return ""
        named = ", ".join(f"{node.name}: {node.why}" if node.why else node.name for node in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return f"{len(found)} {'is' if len(found) == 1 else 'are'} {_CLAUSES[state]} ({named}{more})"


def readiness(report: SeedReport, max_lag: int = 0) -> Readiness:
    """How far each member is by the seed's `report`. `max_lag`: how many versions older than the newest sealed one the
    engine of a ready node may be."""
    swarm = report.swarm
    return Readiness(tuple(_of(node, swarm.head or (0, 0), swarm.model_bytes, max_lag) for node in swarm.nodes))


def _of(node: MemberStatus, head: tuple[int, int], model_bytes: int, max_lag: int) -> NodeReadiness:
    state, why = NodeState.READY, ""
    if node.quarantine is not None:
        state, why = NodeState.REFUSED, node.quarantine.why
    elif node.standing in ("soft", "dead"):
        state = NodeState.SILENT
    elif node.catching_up < 1.0:
        state, why = NodeState.COPYING, f"{size_text((1.0 - node.catching_up) * model_bytes)} to go"
    elif node.held is None:
        state = NodeState.JOINING
    elif node.engine is None:
        state = NodeState.PROVING
    elif node.engine < head and (node.engine[0] != head[0] or versions_behind(node.engine, head) > max_lag):
        state, why = NodeState.BEHIND, f"version {version_text(node.engine)} of {version_text(head)}"
    return NodeReadiness(node.name or node.peer[-8:] or "a node", state, why, node.tokens_s)


def wait_ready(
    home: Path,
    nodes: int | None,
    tokens_per_second: float | None,
    timeout_s: float,
    max_lag: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Readiness:
    """See `Swarm.wait_ready`. `tell(sentence)`: called with what is missing whenever that changes; without it a warning
    is logged at growing intervals."""
    least, speed = _wanted(nodes, tokens_per_second)
    missing = "The seed has not answered yet."
    wait = Wait(timeout_s, lambda: f"wait_ready: {missing}")
    told = ""
    while True:
        try:
            left_s = max(LOOK_EVERY_S, wait.deadline - time.monotonic())
            found = readiness(ask_state(home, min(ANSWER_WITHIN_S, left_s)), max_lag)
            missing = found.missing(least, speed)
            if not missing:
                return found
        except (SwarmDown, SwarmTimeout) as error:  # a seed that is restarted finds its nodes again
            if wait.over and isinstance(error, SwarmDown):
                raise
            missing = str(error)
        if wait.over:
            raise SwarmTimeout(f"The swarm was not ready within {timeout_s:.0f} s: {missing}")
        if tell is None:
            wait.log_if_due()
        elif missing != told:
            told = missing
            tell(missing)
        time.sleep(min(LOOK_EVERY_S, max(0.0, wait.deadline - time.monotonic())))


def _wanted(nodes: int | None, tokens_per_second: float | None) -> tuple[int, float]:
    """The number of nodes and their speed to wait for. Raises `UsageError` when one is out of range."""
    if nodes is None:
        nodes = 1  # of a swarm without a ready node, no speed is known
    if nodes < 1:
        raise UsageError("wait_ready: nodes is at least 1.")
    speed = 0.0 if tokens_per_second is None else tokens_per_second
    if not 0.0 <= speed < float("inf"):
        raise UsageError("wait_ready: tokens_per_second is a number of at least 0.")
    return nodes, speed
