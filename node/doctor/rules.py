"""The table of all rules: each judges the facts, and gives one line. Pure."""

from collections.abc import Callable
from typing import Final

from node.doctor import machine_rules, swarm_rules
from node.doctor.facts import Facts
from node.doctor.lines import Line

__all__ = ["RULES", "examine", "useful"]

RULES: Final[dict[str, Callable[[Facts], Line]]] = {
    "ticket": swarm_rules.ticket,
    "seed": swarm_rules.seed,
    "clock": swarm_rules.clock,
    "address": swarm_rules.address,
    "rate from the seed": swarm_rules.seed_rate,
    "neighbour": swarm_rules.neighbour,
    "UDP": swarm_rules.udp,
    "model": machine_rules.model,
    "disk": machine_rules.disk,
    "memory": machine_rules.memory,
    "limits": machine_rules.limits,
    "container": machine_rules.container,
    "GPU": machine_rules.gpu,
    "engine": machine_rules.engine,
    "engines": machine_rules.engines,
}
"""In the order in which they are shown: what a stranger meets first comes first."""


def examine(facts: Facts) -> dict[str, Line]:
    """One line for each rule."""
    return {name: rule(facts) for name, rule in RULES.items()}


def useful(lines: dict[str, Line]) -> bool:
    """Whether nothing stops this machine from being useful."""
    return not any(line.verdict == "stops" for line in lines.values())
