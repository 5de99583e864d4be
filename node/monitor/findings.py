"""A status in sentences: how the swarm stands, and what is wrong, each with what to do about it."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, UnsetType

from node.settings.units import version_text
from node.status.schema import (
    MemberStatus,
    NodeStatus,
    OwnStatus,
    RelayStatus,
    SeedStatus,
    Status,
    versions_behind,
)
from node.status.work_schema import SUSPICIOUS

__all__ = ["Finding", "findings", "headline"]

MOST: Final = 50
"""More are not read; the page says how many there are."""
WASTE: Final = 0.25
"""Generated samples that are never used, by those used; up to here it is the price of groups that a trainer drops."""
FEW_SAMPLES: Final = 64
"""Samples before `WASTE` is judged."""


class Finding(Struct, frozen=True):
    """One thing that is wrong. `about`: a member's slot, or None. `todo`: what to do, often a command."""

    what: str
    todo: str
    about: int | None = None


def headline(status: Status) -> str:
    """How it stands, in one sentence."""
    if isinstance(status, SeedStatus):
        return _swarm_headline(status)
    own = status.nodes[0] if status.nodes else None
    if own is None or own.slot < 0:
        return "This machine waits to be admitted to the swarm."
    if own.held is None:
        return f"This machine fetches the model: {own.catching_up:.0%} is here."
    if status.head is not None and own.held < status.head:
        return f"This machine holds version {version_text(own.held)}; the newest is {version_text(status.head)}."
    return f"This machine holds version {version_text(own.held)}, the newest."


def _swarm_headline(status: SeedStatus) -> str:
    if status.head is None:
        return "No version is sealed yet."
    if not status.nodes:
        return f"Version {version_text(status.head)} is sealed, and no node has joined yet."
    there = [node for node in status.nodes if node.held is not None and node.held >= status.head]
    if len(status.nodes) == 1:
        who = f"{name_of(status.nodes[0])} has" if there else "No node has"
    else:
        who = f"{len(there)} of {len(status.nodes)} nodes have"
        if len(there) == len(status.nodes):
            who = f"All {len(there)} nodes have"
    text = f"{who} version {version_text(status.head)}"
    step = next((step for step in reversed(status.steps) if step.version == status.head), None)
    if step is None:
        return text + "."
    if len(there) == len(status.nodes):
        took = "" if step.publish_to_all_s is None else f", {_seconds(step.publish_to_all_s)} after its publish"
        return text + took + "."
    return f"{text}; the slowest is {_seconds(step.age_s)} behind."


def findings(status: Status) -> list[Finding]:
    """What is wrong, the worst first."""
    found = list(_of_seed(status) if isinstance(status, SeedStatus) else _of_member(status))
    return found[:MOST]


def _of_seed(status: SeedStatus) -> Iterator[Finding]:
    if not status.nodes:
        yield Finding("No machine has joined.", "swarm-node invite prints a ticket; swarm-node join TICKET uses it.")
    work = status.work
    ready = sum(node.engine is not None for node in status.nodes)
    if work.groups_open and not ready:
        yield Finding(
            f"{work.groups_open} request groups wait, and no node has an engine that is ready.",
            "Look at a node's log, or join one with an engine: swarm-node join TICKET.",
        )
    for session, options in work.unmet.items():
        yield Finding(
            f"{session} asks for {', '.join(options)}, which no node's engine can do.",
            "Leave that option out, or join a node whose engine can (docs/parameters.md).",
        )
    for relay, why in status.relays.items():
        if why:
            yield Finding(f"Nobody reaches this machine through the relay {relay}: {why}.", f"Check the relay {relay}.")
    if status.egress.refused:
        yield Finding(
            f"The egress cap has refused {status.egress.refused} requests, so nodes wait.",
            "Start the seed with a higher --egress-copies.",
        )
    for state in status.saved_states:
        if state.whole and state.held < state.fragments:
            yield Finding(
                f"{state.held} of {state.fragments} fragments of the saved state of step {state.step} are at nodes; "
                f"{state.needed} give it back.",
                "The seed places the others by itself; if it does not, free disk on nodes or join more (--state-gb).",
            )
    yield from _of_members(status)
    if work.samples_used + work.samples_unused >= FEW_SAMPLES and work.samples_unused > WASTE * work.samples_used:
        yield Finding(
            f"{work.samples_unused} samples were generated in vain, {work.samples_used} were used.",
            "swarm-node status --json shows the reasons (work.unused).",
        )


def _of_members(status: SeedStatus) -> Iterator[Finding]:
    for node in status.nodes:
        name = name_of(node)
        if node.standing == "dead":
            yield Finding(f"{name} is silent, and its lease has ended.", "Is that machine running?", node.slot)
        elif node.standing == "soft":
            left = "" if node.lease_s is None else f"; its lease ends in {_seconds(node.lease_s)}"
            yield Finding(f"{name} has not reported lately{left}.", "Is that machine running?", node.slot)
        elif status.head is not None and node.held is not None and versions_behind(node.held, status.head) >= 2:
            behind = versions_behind(node.held, status.head)
            yield Finding(
                f"{name} is {behind} versions behind.",
                f"Look at its log; swarm-node kick {name} removes it.",
                node.slot,
            )
        if node.quarantine is not None:
            yield Finding(
                f"{name} is in quarantine and gets no work: {node.quarantine.why}.",
                f"swarm-node quarantine {name} --release gives it work again.",
                node.slot,
            )
        elif node.evidence is not None and node.evidence.factor >= SUSPICIOUS:
            kind = max(node.evidence.kinds, key=node.evidence.kinds.__getitem__, default="none")
            yield Finding(
                f"Checks hold evidence of {node.evidence.factor:.1e} against {name} ({kind}); at 1.1e+06 it is "
                "quarantined.",
                "Wait: an honest node's evidence falls again. docs/verification.md says what each kind means.",
                node.slot,
            )
        if node.saving:
            yield Finding(
                f"{name} has sent nearly all that it may send today, so nothing is relayed through it.",
                "Join it with a higher --up-gb-day, or wait until midnight UTC.",
                node.slot,
            )
        if node.reached == "circuit":
            yield Finding(
                f"{name} is reached through a relay only, which is slower.",
                "Open its port, and join it with --announce HOST:PORT.",
                node.slot,
            )


def _of_member(status: NodeStatus | RelayStatus) -> Iterator[Finding]:
    if status.message:
        yield Finding(status.message, "")
    own: OwnStatus | None = status.nodes[0] if status.nodes else None
    if own is None:
        return
    if own.slot >= 0 and own.standing not in ("fresh", ""):
        yield Finding("The seed has not answered this machine lately.", "Is the seed running, and is its port open?")
    if own.live_proven is False:
        yield Finding("The engine does not hold the policy's bits.", "Restart this node.")
    if own.asleep is True:
        yield Finding("The engines are asleep, so this node takes no work.", "swarm-node wake starts them again.")
    elif own.engine is None and own.held is not None:
        yield Finding("The engine is not ready yet.", "It may be starting: look at this node's log.")
    if isinstance(own.engine_restarts, int) and own.engine_restarts:
        yield Finding(
            f"The engine's process ended {own.engine_restarts} times and was started again.",
            "Look at this node's log for the reason.",
        )
    for number, engine in enumerate([] if isinstance(own.engines, UnsetType) else own.engines, 1):
        if engine.why:
            yield Finding(f"Engine {number} was given up: {engine.why}", "Mend that, and restart this node.")
    for relay, why in status.relays.items():
        if why:
            yield Finding(f"Nobody reaches this machine through the relay {relay}: {why}.", f"Check the relay {relay}.")


def name_of(node: MemberStatus) -> str:
    """A member's name for people, or the end of its PeerId where it has none."""
    return node.name or node.peer[-8:]


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
