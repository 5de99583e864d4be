"""Commands that remove members: kick, revoke.

Both ask the seed of this machine. If it does not run, they write to its home what it reads at its next start.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cyclopts import App

from codec.errors import PeerError, UsageError
from node.cli.asking import connect_to_seed, member_named
from node.cli.report import TRAIN, AsJson, offer, print_json
from node.settings.config import default_home

if TYPE_CHECKING:
    from node.ipc.channel import Channel
    from node.status.schema import SeedStatus
    from node.trainers.messages import Evict, Evicted

__all__ = ["register"]

_TICKET: Final = "swarm1"
"""How a ticket begins."""


def kick(node: str, /, *, home: Path | None = None, as_json: AsJson = False) -> None:
    """End a node's lease now. The node gets nothing more, and may not join again for ten minutes.

    To keep it out for good, use revoke. If the seed does not run, this takes effect at its next start.

    Parameters
    ----------
    node
        The node's name, its PeerId, or the end of its PeerId, as in swarm-node status.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.messages import Evict

    folder = (home or default_home()).expanduser().absolute()
    peer = member_named(node, _swarm_status(folder), others=False)
    done = _evict(folder, Evict(peer=peer))
    _report(done, f"{node} was removed.", f"{node} had left already.", as_json=as_json)


def revoke(
    ticket_or_node: str = "",
    /,
    *,
    undo: bool = False,
    home: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a ticket, or one machine's right to join, for good; this outlasts restarts of the seed.

    Nodes that joined with a revoked ticket are removed at once, and no machine can join with it. A revoked machine is
    removed too, and cannot join with any ticket. Without an argument: show the tickets that were used, and by which
    machines. If the seed does not run, this takes effect at its next start.

    Parameters
    ----------
    ticket_or_node
        A ticket, as swarm-node invite printed it, or its id; or a node's name, its PeerId, or the end of its PeerId.
    undo
        Undo the revocation.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.messages import Evict

    folder = (home or default_home()).expanduser().absolute()
    swarm = _swarm_status(folder)
    if not ticket_or_node:
        if undo:
            raise UsageError("--undo needs a ticket or a machine. swarm-node revoke lists them.")
        _show_tickets(swarm, as_json=as_json)
        return
    ticket = _ticket_named(ticket_or_node, swarm)
    if ticket is not None:
        done = _evict(folder, Evict(ticket=ticket, undo=undo))
        subject = "The ticket"
    else:
        peer = member_named(ticket_or_node, swarm, others=True)
        done = _evict(folder, Evict(peer=peer, for_good=True, undo=undo))
        subject = ticket_or_node
    outcome = "may be used again" if undo and ticket else "may join again" if undo else "is revoked"
    _report(done, f"{subject} {outcome}.", f"{subject}: nothing to change.", as_json=as_json)


def _swarm_status(home: Path) -> "SeedStatus":
    """The status of the seed of `home`, or what its home has of it."""
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import AskState, State

    channel = _connect(home)
    if channel is None:
        from node.coordinator import offline

        return offline.status(home)
    with speaking("it was asked for its members"), channel:
        channel.send(AskState())
        return expect(channel, State)[0].info.swarm


def _evict(home: Path, request: "Evict") -> "Evicted":
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import Evicted

    channel = _connect(home)
    if channel is None:
        from node.coordinator import offline

        return offline.evict(home, request)
    with speaking("it was asked to remove a member or a ticket"), channel:
        channel.send(request)
        return expect(channel, Evicted)[0]


def _connect(home: Path) -> "Channel | None":
    """A connection to the seed of `home`; None where none runs but one has run. Raises `Unreachable`."""
    from swarm.transport.base import Unreachable

    try:
        return connect_to_seed(home)
    except Unreachable:
        if not (home / "contact.json").exists():
            raise
        return None


def _ticket_named(text: str, swarm: "SeedStatus") -> bytes | None:
    """The id of the ticket that `text` is or names; None when it is no ticket. Raises `UsageError` for another
    swarm's."""
    if text in {ticket.id for ticket in swarm.tickets}:
        return bytes.fromhex(text)
    if not "".join(text.split()).lower().startswith(_TICKET):
        return None
    from node.settings.ticket import Ticket
    from swarm.protocol.core.documents import open_capability
    from swarm.transport.identity import peer_id

    ticket = Ticket.parse(text)
    try:
        capability = open_capability(ticket.capability, ticket.authority)
    except PeerError as error:
        raise UsageError(
            "This ticket was not signed by the swarm that it names: no machine can join with it."
        ) from error
    if peer_id(ticket.authority) != swarm.swarm:
        raise UsageError(
            "This ticket belongs to another swarm than the seed of this home: give that seed's home (--home)."
        )
    return capability.id


def _report(done: "Evicted", changed: str, unchanged: str, *, as_json: bool) -> None:
    from swarm.transport.identity import peer_id

    removed = [peer_id(peer) for peer in done.peers]
    if as_json:
        print_json({"changed": done.changed, "put_out": removed})
        return
    print(changed if done.changed or removed else unchanged)
    for peer in removed:
        print(f"  removed: {peer}")


def _show_tickets(swarm: "SeedStatus", *, as_json: bool) -> None:
    if as_json:
        from node.status.schema import to_plain

        print_json({"tickets": [to_plain(ticket) for ticket in swarm.tickets], "barred": swarm.barred})
        return
    if not swarm.tickets and not swarm.barred:
        print("No ticket has been used, and no machine is revoked.")
    for ticket in swarm.tickets:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(ticket.expires)) if ticket.expires else "?"
        quota = f" of {ticket.quota_bytes / 1e9:g}" if ticket.quota_bytes else ""
        limit = f" of {ticket.nodes_ever}" if ticket.nodes_ever else ""
        validity = "revoked" if ticket.revoked else f"until {until}"
        print(
            f"{ticket.id}  {validity}, {ticket.here} of {ticket.nodes or '?'} now, {ticket.ever}{limit} ever, "
            f"{ticket.fetched_bytes / 1e9:.3g}{quota} GB fetched"
        )
        for peer in ticket.peers:
            print(f"  {peer}")
    for peer in swarm.barred:
        print(f"{peer}  revoked")


def register(app: App) -> None:
    offer(app, kick, TRAIN, "swarm-node kick box-7", "swarm-node kick 12D3KooW... --json")
    offer(
        app,
        revoke,
        TRAIN,
        "swarm-node revoke",
        "swarm-node revoke swarm1...",
        "swarm-node revoke box-7",
        "swarm-node revoke 12D3KooW... --undo --json",
    )
