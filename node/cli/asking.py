"""How a command asks the seed of this machine, and finds the member that a person named."""

from pathlib import Path
from typing import TYPE_CHECKING

from codec.errors import PeerError, UsageError

if TYPE_CHECKING:
    from node.ipc.channel import Channel
    from node.status.schema import SeedStatus

__all__ = ["connect_to_seed", "member_named"]


def connect_to_seed(home: Path) -> "Channel":
    """A connection to the seed of `home`. Raises `Unreachable`, which has its own exit code, when none runs."""
    from node.trainers.connection.seedlink import dial
    from node.trainers.errors import SwarmDown
    from swarm.transport.base import Unreachable

    try:
        return dial(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error


def member_named(text: str, swarm: "SeedStatus", *, others: bool) -> bytes:
    """The public key of the one member whose name is `text`, or whose PeerId is or ends with `text`.

    `others`: machines that are no members now are meant too, by the PeerIds that their tickets list or by any whole
    PeerId. Raises `UsageError`.
    """
    from swarm.transport.identity import peer_key

    members = {node.peer: node.name for node in swarm.nodes}
    peers = [*members, *(peer for ticket in swarm.tickets for peer in ticket.peers)] if others else list(members)
    found = {peer for peer, name in members.items() if text == name}
    found |= {peer for peer in peers if peer.endswith(text) and len(text) >= 4}
    if len(found) == 1:
        return peer_key(found.pop())
    if found:
        raise UsageError(
            f"{text!r} matches {len(found)} nodes: give the end of the PeerId that swarm-node status --json shows."
        )
    if others:
        try:
            return peer_key(text)
        except PeerError:
            pass
    raise UsageError(
        f"No node {text!r} is in the swarm. swarm-node status lists the nodes, and with --json their PeerIds."
    )
