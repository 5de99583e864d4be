"""A network of simulated hosts under a virtual clock; `scenarios.simulator` puts a swarm on it."""

from scenarios.virtual.cpu import Costs, Cpu
from scenarios.virtual.links import Link, Paths
from scenarios.virtual.network import VirtualNetwork
from scenarios.virtual.node import LAYOUT, Faults, Node, Published, facts, root_of

__all__ = [
    "LAYOUT",
    "Costs",
    "Cpu",
    "Faults",
    "Link",
    "Node",
    "Paths",
    "Published",
    "VirtualNetwork",
    "facts",
    "root_of",
]
