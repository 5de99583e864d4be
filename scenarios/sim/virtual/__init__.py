"""A network of simulated hosts under a virtual clock; `scenarios.sim.simulator` puts a swarm on it."""

from scenarios.sim.virtual.cpu import Costs, Cpu
from scenarios.sim.virtual.flow import Link, Paths
from scenarios.sim.virtual.network import VirtualNetwork
from scenarios.sim.virtual.node import LAYOUT, Faults, Node, Published, facts, root_of

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
