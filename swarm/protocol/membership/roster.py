"""The roster: who stands where in each of the K trees, signed; and the changes that lead from one to the next.

A roster of 10,000 members is a megabyte, and somebody comes or goes every few seconds. So what travels is a *change*:
who left, who is new or altered, which edges moved, and the hash of the roster that this leads to. A change is the one
document that is signed. Because it names that hash, anybody who holds the roster can give it whole to a newcomer, who
needs to trust nobody for it (`whole`, `open_whole`); so the authority never sends it to everyone.
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
"""The parent of a head."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
MAX_MEMBERS = 16384
MAX_STRIPES = 64
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Stamp = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DOMAIN = b"swarm-node roster 2"


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One slot's holder, as the planner and the neighbours need to know it."""

    slot: Slot
    peer: Key32
    addrs: Addresses
    """Direct ones that were confirmed by dialing back, then circuits; see `reach`."""
    dialable: bool
    """It has a confirmed direct address."""
    name: Annotated[str, msgspec.Meta(max_length=64)]
    region: Annotated[str, msgspec.Meta(max_length=64)]
    up_mbit: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    """What plans reckon with: what others measured, never more than it offers."""
    leaf: bool
    """No interior place: newly joined, past soft expiry, or with nothing to give (`--up-mbit 0`, budget used up)."""
    scope: Annotated[int, msgspec.Meta(ge=0, le=2)] = Scope.WORLD
    """Where the authority sees it (`reach.Scope`): what it can dial hangs on that."""


class Roster(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The plan. Members in order of their slots; `parents[k][i]` is the slot that `members[i]` hangs on in stripe k, or
    `AUTHORITY`."""

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
        """(boot, serial) as one number: what a `Hello` names."""
        return self.boot << 32 | self.serial

    # A roster is asked about far more often than it changes: these are made once, at the first question.

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of its encoding: what the change that led to it names."""
        return blake3(_encoder.encode(self)).digest()

    @cached_property
    def _index(self) -> dict[int, int]:
        return {m.slot: i for i, m in enumerate(self.members)}

    @cached_property
    def _by_peer(self) -> dict[bytes, Member]:
        return {m.peer: m for m in self.members}

    @cached_property
    def _children(self) -> dict[tuple[int, int], list[int]]:
        """Of whom we were asked: by stripe and slot."""
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
        """The member that this peer is."""
        return self._by_peer.get(peer)

    def index_of(self, slot: int) -> int | None:
        return self._index.get(slot)

    def parent(self, stripe: int, slot: int) -> int | None:
        """The slot that `slot` hangs on (or `AUTHORITY`); None when it is not in the roster."""
        index = self._index.get(slot)
        return None if index is None else self.parents[stripe][index]

    def children(self, stripe: int, slot: int) -> list[int]:
        found = self._children.get((stripe, slot))
        if found is None:
            parents = self.parents[stripe]
            at, found = -1, []
            for _ in range(parents.count(slot)):  # most ask for one slot's only: quicker than a table of them all
                at = parents.index(slot, at + 1)
                found.append(self.members[at].slot)
            self._children[stripe, slot] = found
        return found

    def heads(self, stripe: int) -> list[int]:
        """The slots that hang on the authority itself."""
        return self.children(stripe, AUTHORITY)

    def ancestors(self, stripe: int, slot: int) -> list[int]:
        """From the parent up to the head; the authority is not among them."""
        line: list[int] = []
        at = self.parent(stripe, slot)
        while at is not None and at != AUTHORITY and len(line) <= len(self.members):
            line.append(at)
            at = self.parent(stripe, at)
        return line

    def backups(self, stripe: int, slot: int, among: Iterable[int] | None = None) -> list[int]:
        """Whom to hang on when the parent is gone, best first; see `each_backup`. `among`: look only at these slots."""
        return list(self.each_backup(stripe, slot, among))

    def each_backup(self, stripe: int, slot: int, among: Iterable[int] | None = None) -> Iterator[int]:
        """The ancestors, then whoever does not hang on us: the stripe's interior nodes of our region, its others, then
        the rest of our region, then the rest; last, of all these, whoever hangs on the parent that is gone: they are
        orphans too, and would hang on one another. Found one by one: who needs the first need not wait for thousands.

        Each slot starts to look at the one after its own, so that the orphans of one parent spread over its uncles.
        """
        only = None if among is None else {s for s in among if s in self._index}
        line = self.ancestors(stripe, slot)
        seen = {slot, *line}
        yield from (s for s in line[1:] if only is None or s in only)
        me = self.member(slot)
        near = set(self._by_region.get(me.region, ())) if me is not None and me.region else set[int]()
        inside = [s for s in self._interior[stripe] if only is None or s in only]
        everyone = [m.slot for m in self.members] if only is None else sorted(only)
        orphans: list[int] = []
        for group in (_turned([s for s in inside if s in near], slot), _turned(inside, slot),
                      _turned([s for s in everyone if s in near], slot), _turned(everyone, slot)):  # fmt: skip
            for other in group:
                if other not in seen:
                    seen.add(other)
                    if line and self._is_below(stripe, other, line[0]):
                        orphans.append(other)
                    elif not self._is_below(stripe, other, slot):
                        yield other
        yield from (other for other in orphans if not self._is_below(stripe, other, slot))

    def is_fed(self, stripe: int, slot: int) -> bool:
        """Its way up leads to the authority."""
        at: int | None = slot
        for _ in range(len(self.members) + 1):
            if at is None or at == AUTHORITY:
                return at is not None
            at = self.parent(stripe, at)
        return False

    def _is_below(self, stripe: int, slot: int, top: int) -> bool:
        """`slot` is `top` or hangs on it, directly or not."""
        at: int | None = slot
        for _ in range(len(self.members) + 1):
            if at == top:
                return True
            if at is None or at == AUTHORITY:
                return False
            at = self.parent(stripe, at)
        return False


def _turned(slots: list[int], after: int) -> list[int]:
    """Sorted slots, beginning with the first one past `after`."""
    at = bisect_left(slots, after + 1)
    return slots[at:] + slots[:at]


# ---------------------------------------------------------------- changes


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The step from one roster to the next; signed by the authority."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    serial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    base: Stamp
    """Stamp of the roster that it changes; 0: of none, so that who lacks this roster must ask for it whole."""
    authority: Addresses
    gone: Annotated[tuple[Slot, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    """New, or altered."""
    moves: Annotated[tuple[tuple[tuple[int, int], ...], ...], msgspec.Meta(max_length=MAX_STRIPES)]
    """By stripe: (slot, its parent from now on)."""
    digest: Key32
    """Of the roster that it leads to."""

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
    """The change from `old` to `new`. Where it would be no smaller than the roster (or there is no old one), it says
    only which roster there is now."""
    anew = Change(new.swarm, new.boot, new.serial, 0, new.authority, (), (), ((),) * new.stripes, new.digest)
    if old is None or old.boot != new.boot or old.stripes != new.stripes:
        return anew
    before = {m.slot: m for m in old.members}
    altered = tuple(m for m in new.members if before.get(m.slot) != m)
    gone = tuple(s for s in before if s not in new._index)
    moves = tuple(
        tuple((m.slot, p) for m, p in zip(new.members, parents, strict=True) if old.parent(k, m.slot) != p)
        for k, parents in enumerate(new.parents)
    )
    if 8 * sum(map(len, moves)) + 100 * len(altered) > (100 + 3 * new.stripes) * len(new.members) // 2 + 1000:
        return anew
    return msgspec.structs.replace(anew, base=old.stamp, gone=gone, members=altered, moves=moves)


def seal_change(change: Change, key: Key) -> bytes:
    return key.seal(_DOMAIN, _encoder.encode(change))


@lru_cache(maxsize=64)
def open_change(sealed: bytes, swarm: bytes) -> Change:
    """Verify, then decode."""
    change = unpack(_change_decoder, open_sealed(swarm, _DOMAIN, sealed), "roster")
    if change.swarm != swarm:
        raise PeerError("roster: of another swarm")
    return change


_ADVANCED: OrderedDict[tuple[bytes, bytes], Roster] = OrderedDict()
"""A change comes by several trees, and to all peers of one process: the last few results are remembered."""


def advance(roster: Roster, sealed: bytes, swarm: bytes) -> Roster:
    """`roster` after this change of it, checked: it must be a plan still, and the very one that the change names."""
    name = roster.digest, sealed
    found = _ADVANCED.get(name)
    if found is None:
        found = _ADVANCED[name] = _changed(roster, open_change(sealed, swarm))
        if len(_ADVANCED) > 8:
            _ADVANCED.popitem(last=False)
    return found


def _changed(roster: Roster, change: Change) -> Roster:
    if change.base != roster.stamp or change.stamp <= roster.stamp or len(change.moves) != roster.stripes:
        raise PeerError("roster: a change of another one")
    slots = [m.slot for m in roster.members]
    members = list(roster.members)
    rows = [list(parents) for parents in roster.parents]
    for slot in change.gone:
        at = bisect_left(slots, slot)
        if at == len(slots) or slots[at] != slot:
            raise PeerError("roster: a slot goes that is not there")
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
                raise PeerError("roster: a slot moves that is not there")
            row[at] = parent
    after = Roster(
        roster.swarm, change.boot, change.serial, change.authority, tuple(members), tuple(tuple(row) for row in rows)
    )
    if after.digest != change.digest:
        raise PeerError("roster: a change does not lead where it says")
    _check_moved(after, change)
    return after


def _check_moved(roster: Roster, change: Change) -> None:
    """`_check` for a roster that was a plan before the change: a cycle would have to pass an edge that moved."""
    if len({m.peer for m in roster.members}) != len(roster.members):
        raise PeerError("roster: a peer stands in it twice")
    gone = set(change.gone)
    for stripe, (parents, moves) in enumerate(zip(roster.parents, change.moves, strict=True)):
        if gone and not gone.isdisjoint(parents):
            raise PeerError(f"roster: stripe {stripe} hangs on a slot that is gone")
        for slot in {slot for slot, _ in moves}.union(m.slot for m in change.members):
            if not roster.is_fed(stripe, slot):
                raise PeerError(f"roster: stripe {stripe} is not a tree")


def whole(roster: Roster, change: bytes) -> bytes:
    """The roster for someone who has none of it: `change` is the sealed one that led to it."""
    return _encoder.encode(_Whole(change, _encoder.encode(roster)))


@lru_cache(maxsize=4)
def open_whole(data: bytes, swarm: bytes) -> tuple[Roster, bytes]:
    """(roster, the sealed change that proves it). Verify, decode, and check that it is a plan."""
    proof, body = unpack(_whole_decoder, data, "roster")
    change = open_change(proof, swarm)
    if blake3(body).digest() != change.digest:
        raise PeerError("roster: not the one that its change names")
    roster = unpack(_roster_decoder, body, "roster")
    if roster.swarm != swarm or roster.stamp != change.stamp:
        raise PeerError("roster: of another swarm")
    _check(roster)
    return roster, proof


def _check(roster: Roster) -> None:
    """`PeerError` unless slots rise, nobody stands in it twice, and every tree reaches everyone."""
    slots = [m.slot for m in roster.members]
    if slots != sorted(set(slots)) or len({m.peer for m in roster.members}) != len(slots):
        raise PeerError("roster: a slot or a peer stands in it twice, or out of order")
    for stripe, parents in enumerate(roster.parents):
        if len(parents) != len(slots) or not _reaches_all(slots, parents):
            raise PeerError(f"roster: stripe {stripe} is not a tree")


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
