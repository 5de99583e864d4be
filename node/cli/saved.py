"""Commands for saved states: save-state; and what rescue does with nodes instead of a home."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from codec.errors import UsageError
from node.cli.report import TRAIN, AsJson, offer, print_json
from node.settings.config import default_home

if TYPE_CHECKING:
    from node.saved.rescue import FetchedState
    from node.saved.weights import FetchedWeights

__all__ = ["register", "rescue_from_nodes"]


def save_state(file: Path, /, *, step: int = 0, home: Path | None = None, as_json: AsJson = False) -> None:
    """Save a file of the trainer, its optimizer's state for example, encrypted on the swarm's nodes. Waits until it is.

    It outlives this machine: half of the nodes that take a fragment of it may be lost. It replaces the state before
    it once it is whole. Only SWARM_HOME/authority.key opens it: keep a copy of that file elsewhere. swarm-node rescue
    brings it back.

    Parameters
    ----------
    file
        The file to save. It must not change meanwhile.
    step
        The trainer's own count, for people.
    home
        The seed's SWARM_HOME.
    """
    from node.cli.asking import connect_to_seed
    from node.settings.units import size_text
    from node.status.progress import ProgressLine
    from node.trainers.save_state import save_state as save

    folder = (home or default_home()).expanduser().absolute()
    connect_to_seed(folder).close()
    saving = save(folder, file, step)
    with ProgressLine(f"Saving {file.name}") as progress:
        while not saving.over:
            progress.label = f"Saving {file.name}, {saving.stage}"
            progress.update(saving.done, saving.total or None)
            time.sleep(0.05)
    saving.wait()
    assert saving.fragments is not None
    needed, total = saving.fragments
    if as_json:
        print_json({
            "step": step, "serial": saving.serial, "bytes": saving.size, "needed": needed, "fragments": total,
            "nodes": list(saving.nodes), "seconds": saving.seconds,
        })  # fmt: skip
    else:
        print(
            f"{file}, {size_text(saving.size)}, is saved in {total} fragments, each at a node; any {needed} of them "
            f"give it back. It took {saving.seconds:.1f} s."
        )
        if saving.nodes:
            some = "".join(f" --node {each}" for each in saving.nodes[:3])
            print(f"On a new machine: swarm-node rescue FOLDER --state FILE --key authority.key{some}")


def rescue_from_nodes(
    out: Path | None, state: Path | None, key: Path | None, nodes: tuple[str, ...], *, as_json: bool
) -> None:
    """Fetch weights, a saved state or both from the nodes at these addresses and those that they name."""
    import trio

    from swarm.transport.left_out import leave_out

    leave_out()
    from node.saved.rescue import Wanted, fetch_from_nodes
    from node.settings import keyfile
    from node.settings.addresses import address
    from node.settings.logs import configure
    from node.status.progress import ProgressLine

    configure("error")  # what goes wrong is what the command says
    if key is None:
        raise UsageError("Give the swarm's key with --key: the copy of authority.key that you have kept.")
    addresses = tuple(address(text) for text in nodes)
    if any(text.endswith("/tcp/0") for text in addresses):
        raise UsageError("--node: give the port at which the node listens, not 0.")
    opened = keyfile.load(key.expanduser())

    with ProgressLine("Looking for nodes") as progress:

        def tell(what: str, done: int, total: int) -> None:
            progress.label, progress.unit = f"Fetching the {what}", "MB"
            progress.update(done / 1e6, total / 1e6)

        wanted = Wanted(_absolute(out), _absolute(state))
        weights, saved = trio.run(fetch_from_nodes, opened, addresses, wanted, tell)
    if as_json:
        print_json({"swarm": _peer_id(opened.public)} | _weights_json(weights, out) | _state_json(saved, state))
    else:
        _print(weights, out, saved, state)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _peer_id(key: bytes) -> str:
    from swarm.transport.identity import peer_id

    return peer_id(key)


def _weights_json(weights: "FetchedWeights | None", out: Path | None) -> dict[str, Any]:
    if weights is None:
        return {}
    return {
        "version": list(weights.version), "root": weights.root.hex(), "bytes": weights.nbytes, "folder": str(out),
    }  # fmt: skip


def _state_json(saved: "FetchedState | None", state: Path | None) -> dict[str, Any]:
    if saved is None:
        return {}
    record, newest = saved
    return {
        "state": {
            "step": record.step, "serial": record.serial, "bytes": record.size, "newest": newest.serial,
            "file": str(state),
        },
    }  # fmt: skip


def _print(
    weights: "FetchedWeights | None", out: Path | None, saved: "FetchedState | None", state: Path | None
) -> None:
    from node.settings.units import size_text, version_text

    if weights is not None:
        version, size = version_text(weights.version), size_text(weights.nbytes)
        print(f"{out}: version {version}, {size}, every block proven.")
    if saved is not None:
        print(f"{state}: the state of step {saved.record.step}, {size_text(saved.record.size)}, every byte proven.")
        if saved.newest.serial > saved.record.serial:
            print(
                f"That of step {saved.newest.step} is newer: it was not placed whole, or too few of its nodes answer."
            )


def register(app: App) -> None:
    offer(
        app, save_state, TRAIN, "swarm-node save-state runs/optimizer.pt", "swarm-node save-state state.pt --step 1700"
    )
