"""An OpenAI-compatible endpoint in front of the swarm: a request is a work lease like any other.

client --HTTP--> http --> app --> wanted (understood) --> counter --> ledger --> nodes
client <-------- http <-- answers <---------------------- counter <-- accepted, durable
"""

from node.gateway.gateway import Gateway

__all__ = ["Gateway"]
