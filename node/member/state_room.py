"""What a member gives to saved states, by its settings."""

from typing import TYPE_CHECKING

from node.settings.config import JoinConfig, MemberConfig
from swarm.protocol.member import Peer

if TYPE_CHECKING:
    from node.host.state_room import StateRoom

__all__ = ["room_of"]


def room_of(config: MemberConfig, core: Peer) -> "StateRoom | None":
    """None for a relay, and with `--state-gb 0`."""
    if not isinstance(config, JoinConfig) or not config.state_gb or config.replica == "none":
        return None
    from node.host.state_room import StateRoom  # a relay needs none of what it imports

    return StateRoom(int(config.state_gb * 1e9), lambda: core.state.roster)
