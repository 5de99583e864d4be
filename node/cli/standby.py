"""Commands for when the seed fails: standby, takeover, council-id, rescue."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli.report import LEND, TRAIN, AsJson, offer, print_json
from node.settings import keyfile
from node.settings.config import default_home
from node.settings.council import COUNCIL_KEY
from node.settings.standby_config import StandbyConfig
from swarm.transport.left_out import leave_out

__all__ = ["register"]

_WITHIN_S: Final = 60.0


async def standby(ticket: str = "", /, *, config: Annotated[StandbyConfig | None, Parameter(name="*")] = None) -> None:
    """Follow the seed, and take over when it fails, until interrupted.

    Three machines form a council: the seed and two standbys. What the seed acknowledges is on two of them before it
    does, so nothing is lost with a machine. This machine needs a copy of the swarm's key.

    Parameters
    ----------
    ticket
        What swarm-node invite printed; - reads it from standard input.
    """
    from node.settings.given import ticket_text
    from node.settings.ticket import Ticket

    config = config or StandbyConfig()
    parsed = Ticket.parse(ticket_text(ticket, config.ticket_file))
    leave_out()
    from node.cli.lifetime import owner_only, until_signalled
    from node.member.standby import run

    owner_only()
    await until_signalled(partial(run, parsed, config))


def takeover(*, home: Path | None = None, as_json: AsJson = False) -> None:
    """Make the standby of this machine the seed, and wait until it is.

    If a seed leads, it stops first and hands over. If it has failed, this does nothing that would not happen by itself.

    Parameters
    ----------
    home
        The standby's SWARM_HOME.
    """
    from node.member.standby import REQUEST_FILE
    from node.status.query import ask
    from node.status.schema import SeedStatus
    from swarm.transport.base import Unreachable

    folder = (home or default_home()).expanduser().absolute()
    if isinstance(ask(folder), SeedStatus):
        raise UsageError("This machine leads the swarm already.")
    began = time.monotonic()
    (folder / REQUEST_FILE).touch(mode=0o600)
    while time.monotonic() - began < _WITHIN_S:
        time.sleep(0.2)
        try:
            if isinstance(ask(folder), SeedStatus):
                break
        except Unreachable:
            continue
    else:
        raise UsageError(
            f"This machine has not taken over within {_WITHIN_S:.0f} s: a majority of the council must be up and reach "
            "it. It goes on trying."
        )
    seconds = time.monotonic() - began
    if as_json:
        print_json({"seconds": seconds})
    else:
        print(f"This machine leads the swarm, after {seconds:.1f} s.")


def council_id(*, home: Path | None = None, as_json: AsJson = False) -> None:
    """Print this machine's id for --council, and make its key for that if it has none.

    Parameters
    ----------
    home
        SWARM_HOME of the seed or standby that runs here.
    """
    from swarm.transport.identity import peer_id

    folder = (home or default_home()).expanduser().absolute()
    id_ = peer_id(keyfile.load_or_make(folder / COUNCIL_KEY).public)
    if as_json:
        print_json({"council_id": id_})
    else:
        print(id_)


def rescue(
    out: Path | None = None,
    /,
    *,
    swarm: str = "",
    version: int | None = None,
    home: Path | None = None,
    node: tuple[str, ...] = (),
    key: Path | None = None,
    state: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Write the swarm's weights to a checkpoint folder that Hugging Face libraries load; and the trainer's saved state.

    For the case that the seed and its disk are lost: any node with a replica has the weights, bit for bit. Each block
    is proven by the root that the seed signed. The node may go on running meanwhile, or have ended.

    On a node's machine they come from its home. On a new machine, give a node's address (--node) and the swarm's key
    (--key): they then come from that node and those that it names, and with --state also the state that the trainer
    saved last (Swarm.save_state, or save-state). A command that was interrupted goes on where it ended.

    Parameters
    ----------
    out
        The folder to make; with --state it may be left out.
    swarm
        The PeerId of the swarm; without it, the one of which this home has the newest version.
    version
        Write this version; without it, the newest that this home proves.
    home
        The node's SWARM_HOME.
    node
        Where a node listens, as HOST:PORT; repeat for more. save-state and StateSaving.nodes name some; each node's log
        begins with its own.
    key
        With --node: the copy of the seed's authority.key that you have kept.
    state
        With --node: the file to write the saved state to.
    """
    if node or key is not None or state is not None:
        from node.cli.saved import rescue_from_nodes

        if not node:
            raise UsageError("Give the address of a node with --node: what --key and --state ask for comes from nodes.")
        if swarm or version is not None:
            raise UsageError("--node does not go with --swarm and --version: nodes give what they hold now.")
        if out is None and state is None:
            raise UsageError("Give the folder to make, or the file of the saved state (--state), or both.")
        rescue_from_nodes(out, state, key, node, as_json=as_json)
        return
    if out is None:
        raise UsageError("Give the folder to make: swarm-node rescue FOLDER")
    from codec.errors import PeerError
    from node.host.rescue import rescue as write
    from node.settings.units import size_text, version_text
    from swarm.transport.identity import peer_id, peer_key

    try:
        wanted = peer_key(swarm) if swarm else None
    except PeerError as error:
        raise UsageError(f"--swarm: {swarm[:80]!r} is no PeerId; swarm-node status shows the swarm's.") from error
    done = write((home or default_home()).expanduser().absolute(), out, swarm=wanted, version=version)
    if as_json:
        print_json({
            "swarm": peer_id(done.swarm), "version": list(done.version), "root": done.root.hex(),
            "bytes": done.nbytes, "newest": list(done.newest), "folder": str(out),
        })  # fmt: skip
        return
    print(f"{out}: version {version_text(done.version)}, {size_text(done.nbytes)}, every block proven.")
    if done.newest > done.version and version is None:
        print(f"Version {version_text(done.newest)} is newer: another node may have it.")


def register(app: App) -> None:
    offer(
        app,
        standby,
        TRAIN,
        "swarm-node standby swarm1... --key authority.key --council ID@10.0.0.1:4100 --council ID@10.0.0.2:4100 ...",
    )
    offer(app, takeover, TRAIN, "swarm-node takeover")
    offer(app, council_id, TRAIN, "swarm-node council-id")
    offer(
        app,
        rescue,
        LEND,
        "swarm-node rescue ~/rescued",
        "swarm-node rescue ~/rescued --home /data/swarm --version 120",
        "swarm-node rescue ~/rescued --state optimizer.pt --key authority.key --node 10.0.0.7:4001",
    )
