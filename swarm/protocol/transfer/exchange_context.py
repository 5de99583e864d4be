"""What an exchange needs of the rest of its core."""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.protocol.core.uplink import Uplink
from swarm.protocol.transfer.egress import Egress
from swarm.protocol.transfer.late_joiners import LateJoiners

__all__ = ["ExchangeContext"]


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """Given to an `Exchange` when it is built."""

    rtt_s: Callable[[bytes], float] = lambda peer: 0.0
    """The round trip to a peer, in seconds; 0 while it is not known."""
    uplink: Uplink = field(default_factory=lambda: Uplink(lambda: 0.0))
    late_joiners: LateJoiners | None = None
    """Which peers wait for the others; None: none."""
    entitled: Callable[[int, bytes], bool] = lambda stripe, peer: True
    """Whether the plan attaches this peer to us in this stripe, or to a member that is lost."""
    chooses: Callable[[bytes], bool] = lambda peer: False
    """Whether this peer holds a shard of the model: as a child it gets headers, and the pieces that it asks for."""
    egress_budget: Egress | None = None
    """The budget that pays for all content sent; None: there is none."""
