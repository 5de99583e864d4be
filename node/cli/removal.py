"""Commands that show somebody out: kick, revoke.

Both speak to the seed of this machine. Where none runs they write into its home what it will read at its next start.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from codec.errors import PeerError, UsageError
from node.cli.asking import member_named, seed_of
from node.cli.report import TRAIN, AsJson, offer, print_json
from node.settings.config import default_home

if TYPE_CHECKING:
    from node.ipc.channel import Channel
    from node.trainers.messages import Evict, Evicted

__all__ = ["register"]

_TICKET = "swarm1"


def kick(node: str, /, *, home: Path | None = None, as_json: AsJson = False) -> None:
    """End a node's lease now. It gets nothing more, and may not come in again for ten minutes.

    To keep it out for good, revoke it. The seed need not run: it does so at its next start.

    Parameters
    ----------
    node
        Its name, or its PeerId or the end of it, as in swarm-node status.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.messages import Evict

    folder = (home or default_home()).expanduser().absolute()
    peer = member_named(node, _standing(folder), others=False)
    went = _ask(folder, Evict(peer=peer))
    _report(went, f"{node} is out.", f"{node} had left already.", as_json=as_json)


def revoke(
    ticket_or_node: str = "",
    /,
    *,
    undo: bool = False,
    home: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Take back a ticket, or one machine's right to come in, for good: over restarts of the seed too.

    Whoever came in by the ticket is put out at once and nobody comes in by it any more; a machine comes in by no
    ticket. Without either: show the tickets that were used, and by whom. The seed need not run.

    Parameters
    ----------
    ticket_or_node
        A ticket, as swarm-node invite printed it, or its id; or a node's name, or its PeerId or the end of it.
    undo
        Take the revocation back.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.messages import Evict

    folder = (home or default_home()).expanduser().absolute()
    swarm = _standing(folder)
    if not ticket_or_node:
        if undo:
            raise UsageError("--undo: of what? swarm-node revoke lists tickets and machines.")
        _show(swarm, as_json=as_json)
        return
    ticket = _ticket_named(ticket_or_node, swarm)
    if ticket is not None:
        went = _ask(folder, Evict(ticket=ticket, undo=undo))
        what = "The ticket"
    else:
        peer = member_named(ticket_or_node, swarm, others=True)
        went = _ask(folder, Evict(peer=peer, for_good=True, undo=undo))
        what = ticket_or_node
    did = "may be used again" if undo and ticket else "may come in again" if undo else "is revoked"
    _report(went, f"{what} {did}.", f"{what}: nothing to change.", as_json=as_json)


def _standing(home: Path) -> dict[str, Any]:
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import AskState, State

    channel = _seed(home)
    if channel is None:
        from node.coordinator import offline

        return offline.standing(home)
    with speaking("it was asked who is there"), channel:
        channel.send(AskState())
        return expect(channel, State)[0].info["swarm"]


def _ask(home: Path, word: "Evict") -> "Evicted":
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import Evicted

    channel = _seed(home)
    if channel is None:
        from node.coordinator import offline

        return offline.put_out(home, word)
    with speaking("it was asked to put somebody out"), channel:
        channel.send(word)
        return expect(channel, Evicted)[0]


def _seed(home: Path) -> "Channel | None":
    """A connection to the seed of `home`; None where no seed runs but one has."""
    from swarm.transport.base import Unreachable

    try:
        return seed_of(home)
    except Unreachable:
        if not (home / "contact.json").exists():
            raise
        return None


def _ticket_named(text: str, swarm: dict[str, Any]) -> bytes | None:
    """The id of the ticket that is meant; None when it is no ticket. Raises `UsageError` for another swarm's."""
    ids = {ticket["id"] for ticket in swarm.get("tickets", [])}
    if text in ids:
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
        raise UsageError("This ticket was not signed by the swarm that it names: nobody comes in by it.") from error
    if peer_id(ticket.authority) != swarm.get("swarm"):
        raise UsageError("This ticket is of another swarm than the seed of this home: give that seed's (--home).")
    return capability.id


def _report(went: "Evicted", done: str, nothing: str, *, as_json: bool) -> None:
    from swarm.transport.identity import peer_id

    out = [peer_id(peer) for peer in went.peers]
    if as_json:
        print_json({"changed": went.changed, "put_out": out})
        return
    print(done if went.changed or out else nothing)
    for peer in out:
        print(f"  put out: {peer}")


def _show(swarm: dict[str, Any], *, as_json: bool) -> None:
    tickets, barred = swarm.get("tickets", []), swarm.get("barred", [])
    if as_json:
        print_json({"tickets": tickets, "barred": barred})
        return
    if not tickets and not barred:
        print("No ticket has been used, and no machine is revoked.")
    for ticket in tickets:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(ticket["expires"])) if ticket["expires"] else "?"
        quota = f" of {ticket['quota_bytes'] / 1e9:g}" if ticket["quota_bytes"] else ""
        limit = f" of {ticket['nodes_ever']}" if ticket["nodes_ever"] else ""
        state = "revoked" if ticket["revoked"] else f"until {until}"
        print(
            f"{ticket['id']}  {state}, {ticket['here']} of {ticket['nodes'] or '?'} now, {ticket['ever']}{limit} ever, "
            f"{ticket['fetched_bytes'] / 1e9:.3g}{quota} GB fetched"
        )
        for peer in ticket["peers"]:
            print(f"  {peer}")
    for peer in barred:
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
