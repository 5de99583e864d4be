"""Weights and saved state back from the nodes, on a machine that has nothing but the swarm's key.

    key, address of a node --> Sources --> weights: a checkpoint folder
                                      '--> state: fragments -> decrypted file

Everything that was fetched stays in a folder beside the output until that is written, so an attempt that is interrupted
goes on where it ended.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import trio

from codec.errors import PeerError, SwarmError, UsageError
from codec.sign import Key
from node.saved.coding import join_file
from node.saved.fetching import TooFew, fetch_newest
from node.saved.record import StateRecord
from node.saved.sources import Sources
from node.saved.weights import FetchedWeights, fetch_weights
from swarm.runtime.threads import in_thread
from swarm.store.disk import Disk
from swarm.transport.dialer import DialRules
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import TransportRules

__all__ = ["FetchedState", "Tell", "Wanted", "fetch_from_nodes"]

Tell = Callable[[str, int, int], None]
"""`tell(what, done, total)`: bytes of "weights" or "state"."""
_LISTEN: Final = ("/ip4/127.0.0.1/tcp/0",)
"""A transport listens; nobody has to reach this machine."""


_DIAL: Final = DialRules(backoff_first_s=0.0, backoff_most_s=0.0)
"""No pause after a failure: the address that failed may be one that a liar named, and the next one the right one."""


class FetchedState(NamedTuple):
    """What was written. `newest`: serial and step of the newest state that a node has part of."""

    record: StateRecord
    newest: StateRecord


class Wanted(NamedTuple):
    """What to fetch. `weights`: the checkpoint folder to make; `state`: the file to make; None: not that."""

    weights: Path | None
    state: Path | None


async def fetch_from_nodes(
    key: Key, addresses: tuple[str, ...], wanted: Wanted, tell: Tell = lambda what, done, total: None
) -> tuple[FetchedWeights | None, FetchedState | None]:
    """Fetch what is `wanted` from the node at one of these addresses (multiaddr text) and those that it names.

    `key`: the swarm's secret key. Raises `UsageError` when something exists already, or cannot be written or fetched,
    and `Unreachable` when no node answers.
    """
    for path in (wanted.weights, wanted.state):
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already. Remove it, or choose another name.")
    transport = Libp2pTransport(Key.generate(), _LISTEN, rules=TransportRules(dial=_DIAL))
    weights: FetchedWeights | None = None
    state: FetchedState | None = None
    error: BaseException | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(transport.serve, _accept_nothing)
        try:
            async with Sources.found(transport, key, addresses) as sources:
                sources.require()
                if wanted.state is not None:
                    state = await _fetch_state(sources, key, wanted.state, tell)
                if wanted.weights is not None:
                    weights = await _fetch_weights(sources, key, wanted.weights, tell)
        except* SwarmError as errors:  # raised below, alone and not in a group
            error = _first(errors)
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return weights, state


def _first(errors: BaseExceptionGroup) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def _accept_nothing(peer: bytes, lane: object, stream: object) -> None:
    """Nodes open no streams to this machine."""


async def _fetch_weights(sources: Sources, key: Key, out: Path, tell: Tell) -> FetchedWeights:
    folder = _folder_beside(out)
    found = await fetch_weights(sources, key.public, folder, out, lambda done, total: tell("weights", done, total))
    await in_thread(Disk().remove, folder)
    return found


async def _fetch_state(sources: Sources, key: Key, out: Path, tell: Tell) -> FetchedState:
    """Fetch the newest state that the sources give whole. One that only liars had is given up for the one before."""
    folder = _folder_beside(out)
    try:
        fetched = await fetch_newest(sources, key.public, folder, lambda done, total: tell("state", done, total))
    except TooFew as error:
        raise UsageError(f"{error} Run it again, and name more nodes with --node: what has come is kept.") from error
    if fetched is None:
        raise UsageError(
            f"The {len(sources.nodes)} nodes that answer do not have enough of a saved state. Name others with --node; "
            "and look whether the trainer has saved one (Swarm.save_state)."
        )
    found = fetched.found

    def go_on(done: int, size: int) -> None:
        trio.from_thread.check_cancelled()  # by Ctrl-C

    try:
        await in_thread(join_file, fetched.fragments, found.record, key, out, go_on)
    except PeerError as error:
        raise UsageError(f"What was fetched does not decrypt ({error}). Remove {folder}, and run it again.") from error
    await in_thread(Disk().remove, folder)
    return FetchedState(found.record, found.newest)


def _folder_beside(out: Path) -> Path:
    """Where what is fetched for `out` is put until `out` is written."""
    folder = out.with_name(f".{out.name}.fetching")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"Cannot write {folder}: {error.strerror}.") from error
    return folder
