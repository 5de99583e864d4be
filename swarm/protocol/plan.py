"""The roster: who stands where in each of the K trees, and the planner that decides it.

One tree of fan-out f takes f times the best possible time, because its leaves' uplinks idle. K trees whose interior
nodes differ use every uplink (SplitStream, SOSP 2003; Mutualcast, MMSP 2005). Stripe k's interior nodes are dealt so
that each stripe has about the same uplink; inside a stripe a node gets children in proportion to its uplink; the
authority sends a stripe to one peer only, its *head*, so that each chunk leaves the trainer once.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from codec.errors import PeerError
from codec.sign import Key, open_sealed

__all__ = ["AUTHORITY", "Member", "Roster", "open_roster", "plan", "seal_roster"]

AUTHORITY = -1
"""The parent of a head."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
MAX_MEMBERS = 16384
_DOMAIN = b"swarm-node roster 1"


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One slot's holder, as the planner and the neighbours need to know it."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    peer: Key32
    addrs: Addresses
    dialable: bool
    name: Annotated[str, msgspec.Meta(max_length=64)]
    region: Annotated[str, msgspec.Meta(max_length=64)]
    up_mbit: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    leaf: bool
    """No interior place: newly joined, past soft expiry, or with nothing to give (`--up-mbit 0`)."""


class Roster(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed plan. `parents[k][i]` is the slot that `members[i]` hangs on in stripe k, or `AUTHORITY`."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    serial: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    authority: Addresses
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    parents: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(max_length=64)]

    @property
    def stripes(self) -> int:
        return len(self.parents)

    def member(self, slot: int) -> Member | None:
        return next((m for m in self.members if m.slot == slot), None)

    def index_of(self, slot: int) -> int | None:
        return next((i for i, m in enumerate(self.members) if m.slot == slot), None)

    def parent(self, stripe: int, slot: int) -> int | None:
        """The slot that `slot` hangs on (or `AUTHORITY`); None when it is not in the roster."""
        index = self.index_of(slot)
        return None if index is None else self.parents[stripe][index]

    def children(self, stripe: int, slot: int) -> list[int]:
        return [m.slot for m, p in zip(self.members, self.parents[stripe], strict=True) if p == slot]

    def ancestors(self, stripe: int, slot: int) -> list[int]:
        """From the parent up to the head; the authority is not among them."""
        parent_of = {m.slot: p for m, p in zip(self.members, self.parents[stripe], strict=True)}
        line: list[int] = []
        at = parent_of.get(slot, AUTHORITY)
        while at != AUTHORITY and len(line) <= len(self.members):
            line.append(at)
            at = parent_of.get(at, AUTHORITY)
        return line

    def backups(self, stripe: int, slot: int) -> list[int]:
        """Whom to hang on when the parent is gone, best first: ancestors, then others that do not hang on us.

        Rotated by our own slot, so that the orphans of one parent spread over its uncles.
        """
        own_parent = self.parent(stripe, slot)
        below = self._below(stripe, slot)
        interior = {p for p in self.parents[stripe] if p != AUTHORITY}
        line = [a for a in self.ancestors(stripe, slot) if a != own_parent]
        others = [m.slot for m in self.members if m.slot not in below and m.slot not in line and m.slot != own_parent]
        others.sort(key=lambda s: (s not in interior, s))
        turn = slot % len(others) if others else 0
        return line + others[turn:] + others[:turn]

    def _below(self, stripe: int, slot: int) -> set[int]:
        kids: dict[int, list[int]] = {}
        for member, parent in zip(self.members, self.parents[stripe], strict=True):
            kids.setdefault(parent, []).append(member.slot)
        below = {slot}
        frontier = [slot]
        while frontier:
            for child in kids.get(frontier.pop(), ()):
                if child not in below:
                    below.add(child)
                    frontier.append(child)
        return below


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Roster)


def seal_roster(roster: Roster, key: Key) -> bytes:
    return key.seal(_DOMAIN, _encoder.encode(roster))


def open_roster(sealed: bytes, swarm: bytes) -> Roster:
    """Verify, decode, and check that it is a plan: slots differ, every tree reaches every member."""
    try:
        roster = _decoder.decode(open_sealed(swarm, _DOMAIN, sealed))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PeerError(f"roster: {error}") from error
    if roster.swarm != swarm:
        raise PeerError("roster: of another swarm")
    slots = [m.slot for m in roster.members]
    if len(set(slots)) != len(slots) or len({m.peer for m in roster.members}) != len(slots):
        raise PeerError("roster: a slot or a peer stands in it twice")
    for stripe, parents in enumerate(roster.parents):
        if len(parents) != len(slots) or not _reaches_all(slots, parents):
            raise PeerError(f"roster: stripe {stripe} is not a tree")
    return roster


def _reaches_all(slots: Sequence[int], parents: Sequence[int]) -> bool:
    kids: dict[int, list[int]] = {}
    for slot, parent in zip(slots, parents, strict=True):
        kids.setdefault(parent, []).append(slot)
    seen = 0
    frontier = [AUTHORITY]
    while frontier:
        children = kids.get(frontier.pop(), [])
        seen += len(children)
        frontier += children
    return seen == len(slots)


def plan(members: Iterable[Member], stripes: int) -> tuple[tuple[int, ...], ...]:
    """`Roster.parents` for these members: K trees, interior nodes differing as far as the number of peers allows.

    Deterministic: depends on nothing but the members (never on their order). When nobody has uplink to give, everybody
    hangs on the authority.
    """
    ordered = sorted(members, key=lambda m: m.slot)
    relays = [m for m in ordered if not m.leaf and m.up_mbit > 0]
    if not relays:
        return tuple(tuple(AUTHORITY for _ in ordered) for _ in range(stripes))
    interior = _deal_interior(relays, stripes)
    return tuple(_tree(ordered, interior[k], shift=k) for k in range(stripes))


def _deal_interior(relays: list[Member], stripes: int) -> list[list[Member]]:
    """Interior nodes of each stripe, so that the stripes' uplinks come out about equal.

    With fewer relays than stripes a relay heads several, the more the larger its uplink (largest quotient, d'Hondt);
    with more, each goes to the stripe that has least so far (longest processing time first).
    """
    by_uplink = sorted(relays, key=lambda m: (-m.up_mbit, m.slot))
    if len(relays) <= stripes:
        taken = dict.fromkeys((m.slot for m in relays), 0)
        dealt: list[list[Member]] = []
        for _ in range(stripes):
            best = max(by_uplink, key=lambda m: (m.up_mbit / (taken[m.slot] + 1), -m.slot))
            taken[best.slot] += 1
            dealt.append([best])
        return dealt
    dealt = [[] for _ in range(stripes)]
    weight = [0.0] * stripes
    for member in by_uplink:
        k = min(range(stripes), key=lambda i: (weight[i], i))
        dealt[k].append(member)
        weight[k] += member.up_mbit
    return dealt


def _tree(ordered: list[Member], interior: list[Member], shift: int) -> tuple[int, ...]:
    """One stripe: a breadth-first tree whose interior nodes take children in proportion to their uplinks."""
    head, *rest = interior
    total = sum(m.up_mbit for m in interior)
    wanted = len(ordered) - 1
    quota = {m.slot: max(1, round(wanted * m.up_mbit / total)) for m in interior}
    inside = {m.slot for m in interior}
    leaves = [m.slot for m in ordered if m.slot not in inside]
    turn = shift % len(leaves) if leaves else 0
    waiting = [m.slot for m in rest] + leaves[turn:] + leaves[:turn]
    parent_of = {head.slot: AUTHORITY}
    givers = [head.slot]
    at = 0
    for slot in waiting:
        while quota[givers[at]] == 0 and at + 1 < len(givers):
            at += 1
        parent_of[slot] = givers[at]
        quota[givers[at]] = max(0, quota[givers[at]] - 1)
        if slot in inside:
            givers.append(slot)
    return tuple(parent_of[m.slot] for m in ordered)
