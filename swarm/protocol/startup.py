"""What an authority or a member is started with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.wire import WantBlob, WantBlock
from swarm.protocol.transfer.egress import Egress

__all__ = ["Boot", "Budget", "Saved", "SavedReplica", "Site"]


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of the authority's process, and its clock."""

    number: int
    """The number of this boot, durable before the authority is built. See `boots`."""
    clock: Callable[[float], float]
    """Turns local time into authority time, in seconds."""
    latest: Callable[[float], int] = lambda now: MAX_BOOT
    """At a local time, the highest boot number of a rival that is believed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The records that earlier boots left on disk."""

    head: bytes
    """Sealed manifest of the newest sealed version."""
    grants: Sequence[bytes] = ()
    """Records that `Persist` left under `grant/`, less the empty ones. Those leases have not aged meanwhile."""
    tickets: Sequence[bytes] = ()
    """Those under `ticket/`."""
    bars: Sequence[bytes] = ()
    """Those under `bar/` and `kick/`, less the empty ones."""
    succession: bytes = b""
    """The sealed document that names the key which replaces this one. With it, every peer that comes is sent that
    document, no new member is admitted, and a rival with our key does not make us stop."""


@dataclass(frozen=True, slots=True)
class SavedReplica:
    """What an earlier run of a member left."""

    held: bytes | None = None
    """Sealed manifest of the version that the replica is proven to be; None: catch up from nothing."""
    layout_hash: bytes | None = None
    """The layout that the replica has."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the authority may send."""

    egress: Egress
    cost_bytes: Callable[[WantBlob | WantBlock], int] = lambda want: 0
    """What an answer to a request would take of it."""


@dataclass(frozen=True, slots=True)
class Site:
    """The trainer's addresses, region and uplink."""

    addrs: tuple[str, ...] = ()
    """The addresses at which members reach it, as multiaddr text; empty: those that it listens on."""
    region: str = ""
    """Its region, named as members name theirs (`--region`)."""
    up_mbit: float = 0.0
    """What its uplink carries, in Mbit/s, so that late joiners get what other children leave of it; 0: not known."""
    shards: int = 0
    """Over how many ranks it deals the experts of the model, so that members can hold shards; 0: over none."""
    formats: tuple[str, ...] = ()
    """The formats that it computes of the model, so that members can hold one of them."""
