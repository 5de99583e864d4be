"""The roster: the members and their parents in each of the K trees; and the signed changes from one roster to the next.

A roster of 10,000 members is a megabyte, and members come or go every few seconds. So a *change* is sent: the members
that left, the new and altered members, the edges that moved, and the hash of the resulting roster. Only changes are
signed. Since a change names the hash, any member can give a newcomer the whole roster, which the newcomer verifies
without trusting that member (`whole`, `open_whole`). So the authority need not send it to every newcomer.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from codec.errors import PeerError
from codec.sign import Key, open_sealed
from codec.unpack import unpack
from swarm.protocol.core.reach import Scope

__all__ = [
    "AUTHORITY",
    "Change",
    "Member",
    "Roster",
    "advance",
    "difference",
    "open_change",
    "open_whole",
    "seal_change",
    "whole",
]

AUTHORITY = -1
"""The parent of a root child in `Roster.parents`."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
MAX_MEMBERS = 16384
MAX_STRIPES = 64
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Stamp = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DOMAIN = b"swarm-node roster 2"


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The holder of one slot, as the planner and the neighbours need to know it."""

    slot: Slot
    peer: Key32
    addrs: Addresses
    """Direct addresses that the authority confirmed by dialing back, then relayed ones (circuits); see `reach`."""
    dialable: bool
    """Whether it has a confirmed direct address."""
    name: Annotated[str, msgspec.Meta(max_length=64)]
    region: Annotated[str, msgspec.Meta(max_length=64)]
    up_mbit: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    """The uplink in Mbit/s that plans count on: as others measured it, at most what the member offers."""
    leaf: bool
    """It must not be an interior node: newly joined, past soft expiry, or without uplink to give."""
    scope: Annotated[int, msgspec.Meta(ge=0, le=2)] = Scope.WORLD
    """The scope at which the authority sees it (`reach.Scope`), which limits what it can dial."""


class Roster(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The plan. Members are in order of their slots. `parents[k][i]` is the slot of the parent of `members[i]` in
    stripe k, or `AUTHORITY`."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    serial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    authority: Addresses
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    parents: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(max_length=MAX_STRIPES)]

    @property
    def stripes(self) -> int:
        return len(self.parents)

    @property
    def stamp(self) -> int:
        """(boot, serial) as one number, which a `Hello` names."""
        return self.boot << 32 | self.serial

    # A roster is queried far more often than it changes, so the following are computed once, when first needed.

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of its encoding, which the change that leads to it names."""
        return blake3(_encoder.encode(self)).digest()

    @cached_property
    def _index(self) -> dict[int, int]:
        return {m.slot: i for i, m in enumerate(self.members)}

    @cached_property
    def _by_peer(self) -> dict[bytes, Member]:
        return {m.peer: m for m in self.members}

    @cached_property
    def _children(self) -> dict[tuple[int, int], list[int]]:
        """By stripe and slot: children that were queried before."""
        return {}

    @cached_property
    def _interior(self) -> tuple[list[int], ...]:
        """By stripe: the slots that have children."""
        return tuple(sorted(set(parents) - {AUTHORITY}) for parents in self.parents)

    @cached_property
    def _by_region(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.region, []).append(member.slot)
        return found

    def member(self, slot: int) -> Member | None:
        index = self._index.get(slot)
        return None if index is None else self.members[index]

    def member_of(self, peer: bytes) -> Member | None:
        """The member with this key, if it is in the roster."""
        return self._by_peer.get(peer)

    def index_of(self, slot: int) -> int | None:
        return self._index.get(slot)

    def parent(self, stripe: int, slot: int) -> int | None:
        """The parent of `slot` (or `AUTHORITY`); None if `slot` is not in the roster."""
        index = self._index.get(slot)
        return None if index is None else self.parents[stripe][index]

    def children(self, stripe: int, slot: int) -> list[int]:
        """The children of `slot` in a stripe."""
        found = self._children.get((stripe, slot))
        if found is None:
            parents = self.parents[stripe]
            at, found = -1, []
            for _ in range(parents.count(slot)):  # most peers query one slot: faster than a table of all
                at = parents.index(slot, at + 1)
                found.append(self.members[at].slot)
            self._children[stripe, slot] = found
        return found

    def root_children(self, stripe: int) -> list[int]:
        """The root children: the children of the authority."""
        return self.children(stripe, AUTHORITY)

    def ancestors(self, stripe: int, slot: int) -> list[int]:
        """The ancestors from the parent up to the root child, without the authority."""
        line: list[int] = []
        at = self.parent(stripe, slot)
        while at is not None and at != AUTHORITY and len(line) <= len(self.members):
            line.append(at)
            at = self.parent(stripe, at)
        return line

    def failover_parents(self, stripe: int, slot: int, among: Iterable[int] | None = None) -> list[int]:
        """The failover parents of `slot`, best first; see `each_failover_parent`. `among`: consider only these
        slots."""
        return list(self.each_failover_parent(stripe, slot, among))

    def each_failover_parent(self, stripe: int, slot: int, among: Iterable[int] | None = None) -> Iterator[int]:
        """Yield the failover parents of `slot`, best first, one by one, since a caller may need only the first.

        First the ancestors above the parent. Then the members that are not below `slot`: the stripe's interior nodes in
        our region, its other interior nodes, the other members of our region, and the rest. Descendants of the lost
        parent come last, because they are orphans too and would attach to one another. The search in each group starts
        after `slot`, so that the orphans of one parent choose different members.
        """
        only = None if among is None else {s for s in among if s in self._index}
        line = self.ancestors(stripe, slot)
        seen = {slot, *line}
        yield from (s for s in line[1:] if only is None or s in only)
        me = self.member(slot)
        near = set(self._by_region.get(me.region, ())) if me is not None and me.region else set[int]()
        interior = [s for s in self._interior[stripe] if only is None or s in only]
        everyone = [m.slot for m in self.members] if only is None else sorted(only)
        orphans: list[int] = []
        for group in (_rotated([s for s in interior if s in near], slot), _rotated(interior, slot),
                      _rotated([s for s in everyone if s in near], slot), _rotated(everyone, slot)):  # fmt: skip
            for other in group:
                if other not in seen:
                    seen.add(other)
                    if line and self._is_below(stripe, other, line[0]):
                        orphans.append(other)
                    elif not self._is_below(stripe, other, slot):
                        yield other
        yield from (other for other in orphans if not self._is_below(stripe, other, slot))

    def is_fed(self, stripe: int, slot: int) -> bool:
        """Whether the path from `slot` upwards leads to the authority."""
        at: int | None = slot
        for _ in range(len(self.members) + 1):
            if at is None or at == AUTHORITY:
                return at is not None
            at = self.parent(stripe, at)
        return False

    def _is_below(self, stripe: int, slot: int, top: int) -> bool:
        """Whether `slot` is `top` or one of its descendants."""
        at: int | None = slot
        for _ in range(len(self.members) + 1):
            if at == top:
                return True
            if at is None or at == AUTHORITY:
                return False
            at = self.parent(stripe, at)
        return False


def _rotated(slots: list[int], after: int) -> list[int]:
    """Sorted slots, rotated to begin with the first one greater than `after`."""
    at = bisect_left(slots, after + 1)
    return slots[at:] + slots[:at]


# ---------------------------------------------------------------- changes


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A change from one roster to the next, signed by the authority."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    serial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    base: Stamp
    """The stamp of the roster that it changes. 0: of none, so that a peer must request the whole new roster."""
    authority: Addresses
    gone: Annotated[tuple[Slot, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    """The new and altered members."""
    moves: Annotated[tuple[tuple[tuple[int, int], ...], ...], msgspec.Meta(max_length=MAX_STRIPES)]
    """By stripe: (slot, its new parent)."""
    digest: Key32
    """The digest of the new roster."""

    @property
    def stamp(self) -> int:
        return self.boot << 32 | self.serial


class _Whole(NamedTuple):
    change: bytes
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_roster_decoder = msgspec.msgpack.Decoder(Roster)
_change_decoder = msgspec.msgpack.Decoder(Change)
_whole_decoder = msgspec.msgpack.Decoder(_Whole)


def difference(old: Roster | None, new: Roster) -> Change:
    """The change from `old` to `new`.

    It only names the new roster if there is no old one, or if the change would be no smaller than the roster.
    """
    named_only = Change(new.swarm, new.boot, new.serial, 0, new.authority, (), (), ((),) * new.stripes, new.digest)
    if old is None or old.boot != new.boot or old.stripes != new.stripes:
        return named_only
    before = {m.slot: m for m in old.members}
    altered = tuple(m for m in new.members if before.get(m.slot) != m)
    gone = tuple(s for s in before if s not in new._index)
    moves = tuple(
        tuple((m.slot, p) for m, p in zip(new.members, parents, strict=True) if old.parent(k, m.slot) != p)
        for k, parents in enumerate(new.parents)
    )
    if 8 * sum(map(len, moves)) + 100 * len(altered) > (100 + 3 * new.stripes) * len(new.members) // 2 + 1000:
        return named_only
    return msgspec.structs.replace(named_only, base=old.stamp, gone=gone, members=altered, moves=moves)


def seal_change(change: Change, key: Key) -> bytes:
    return key.seal(_DOMAIN, _encoder.encode(change))


@lru_cache(maxsize=64)
def open_change(sealed: bytes, swarm: bytes) -> Change:
    """Verify and decode a change. Raises `PeerError`."""
    change = unpack(_change_decoder, open_sealed(swarm, _DOMAIN, sealed), "roster")
    if change.swarm != swarm:
        raise PeerError("roster: belongs to another swarm")
    return change


_ADVANCED: OrderedDict[tuple[bytes, bytes], Roster] = OrderedDict()
"""The last results of `advance`: a change comes over several trees, and to all peers of one process."""


def advance(roster: Roster, sealed: bytes, swarm: bytes) -> Roster:
    """`roster` after a change of it. Raises `PeerError` unless the result is a valid plan with the change's digest."""
    name = roster.digest, sealed
    found = _ADVANCED.get(name)
    if found is None:
        found = _ADVANCED[name] = _changed(roster, open_change(sealed, swarm))
        if len(_ADVANCED) > 8:
            _ADVANCED.popitem(last=False)
    return found


def _changed(roster: Roster, change: Change) -> Roster:
    if change.base != roster.stamp or change.stamp <= roster.stamp or len(change.moves) != roster.stripes:
        raise PeerError("roster: a change of another roster")
    slots = [m.slot for m in roster.members]
    members = list(roster.members)
    rows = [list(parents) for parents in roster.parents]
    for slot in change.gone:
        at = bisect_left(slots, slot)
        if at == len(slots) or slots[at] != slot:
            raise PeerError("roster: a slot is removed that is not there")
        for column in (slots, members, *rows):
            del column[at]
    for member in change.members:
        at = bisect_left(slots, member.slot)
        if at < len(slots) and slots[at] == member.slot:
            members[at] = member
            continue
        slots.insert(at, member.slot)
        members.insert(at, member)
        for row in rows:
            row.insert(at, AUTHORITY)
    for row, moves in zip(rows, change.moves, strict=True):
        for slot, parent in moves:
            at = bisect_left(slots, slot)
            if at == len(slots) or slots[at] != slot:
                raise PeerError("roster: a slot is moved that is not there")
            row[at] = parent
    after = Roster(
        roster.swarm, change.boot, change.serial, change.authority, tuple(members), tuple(tuple(row) for row in rows)
    )
    if after.digest != change.digest:
        raise PeerError("roster: a change does not lead to the roster that it names")
    _check_moved(after, change)
    return after


def _check_moved(roster: Roster, change: Change) -> None:
    """As `_check`, for a roster that was valid before the change: a cycle would have to contain an edge that moved."""
    if len({m.peer for m in roster.members}) != len(roster.members):
        raise PeerError("roster: a peer occurs twice")
    gone = set(change.gone)
    for stripe, (parents, moves) in enumerate(zip(roster.parents, change.moves, strict=True)):
        if gone and not gone.isdisjoint(parents):
            raise PeerError(f"roster: stripe {stripe} has a parent that was removed")
        for slot in {slot for slot, _ in moves}.union(m.slot for m in change.members):
            if not roster.is_fed(stripe, slot):
                raise PeerError(f"roster: stripe {stripe} is not a tree")


def whole(roster: Roster, change: bytes) -> bytes:
    """The encoded roster, for a peer that lacks it. `change`: the sealed change that led to it."""
    return _encoder.encode(_Whole(change, _encoder.encode(roster)))


@lru_cache(maxsize=4)
def open_whole(data: bytes, swarm: bytes) -> tuple[Roster, bytes]:
    """(roster, the sealed change that proves it). Raises `PeerError` unless it verifies and is a valid plan."""
    proof, body = unpack(_whole_decoder, data, "roster")
    change = open_change(proof, swarm)
    if blake3(body).digest() != change.digest:
        raise PeerError("roster: not the roster that its change names")
    roster = unpack(_roster_decoder, body, "roster")
    if roster.swarm != swarm or roster.stamp != change.stamp:
        raise PeerError("roster: belongs to another swarm")
    _check(roster)
    return roster, proof


def _check(roster: Roster) -> None:
    """Raise `PeerError` unless slots ascend, no peer occurs twice, and every tree reaches all members."""
    slots = [m.slot for m in roster.members]
    if slots != sorted(set(slots)) or len({m.peer for m in roster.members}) != len(slots):
        raise PeerError("roster: a slot or a peer occurs twice, or slots are not in order")
    for stripe, parents in enumerate(roster.parents):
        if len(parents) != len(slots) or not _reaches_all(slots, parents):
            raise PeerError(f"roster: stripe {stripe} is not a tree")


def _reaches_all(slots: Sequence[int], parents: Sequence[int]) -> bool:
    children_of: dict[int, list[int]] = {}
    for slot, parent in zip(slots, parents, strict=True):
        children_of.setdefault(parent, []).append(slot)
    seen = 0
    frontier = [AUTHORITY]
    while frontier:
        children = children_of.get(frontier.pop(), [])
        seen += len(children)
        frontier += children
    return seen == len(slots)
