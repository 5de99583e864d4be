"""Asking the seed that runs on this machine; and whom of its members a person means."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from codec.errors import PeerError, UsageError

if TYPE_CHECKING:
    from node.ipc.channel import Channel

__all__ = ["member_named", "seed_of"]


def seed_of(home: Path) -> "Channel":
    """A connection to the seed of `home`; `Unreachable`, which has an exit code of its own, when none serves it."""
    from node.trainers.connection.seedlink import dial
    from node.trainers.errors import SwarmDown
    from swarm.transport.base import Unreachable

    try:
        return dial(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error


def member_named(text: str, swarm: dict[str, Any], *, others: bool) -> bytes:
    """The public key of the one member that is meant by its name, its PeerId or the end of that. `swarm`: as the seed
    says. `others`: a whole PeerId may also be of one that is no member now. Raises `UsageError`."""
    from swarm.transport.identity import peer_key

    peers = {node["peer"]: node.get("name", "") for node in swarm.get("nodes", [])}
    known = [*peers, *(peer for ticket in swarm.get("tickets", []) for peer in ticket["peers"])]
    found = {peer for peer in peers if text == peers[peer]}
    found |= {peer for peer in (known if others else peers) if peer.endswith(text) and len(text) >= 4}
    if len(found) == 1:
        return peer_key(found.pop())
    if found:
        raise UsageError(
            f"{len(found)} nodes are meant by {text!r}: give the end of the PeerId that swarm-node status shows."
        )
    if others:
        try:
            return peer_key(text)
        except PeerError:
            pass
    raise UsageError(f"No node {text!r} is in the swarm. swarm-node status lists them; --json with PeerIds.")
