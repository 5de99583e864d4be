"""The roster: who stands where in each of the K trees, and the planner that decides it.

One tree of fan-out f takes f times the best possible time, because its leaves' uplinks idle. K trees whose interior
nodes differ use every uplink (SplitStream, SOSP 2003; Mutualcast, MMSP 2005). Stripe k's interior nodes are dealt so
that each stripe has about the same uplink; inside a stripe a node gets children in proportion to its uplink; the
authority sends a stripe to one peer only, its *head*, so that each chunk leaves the trainer once.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Annotated

import msgspec

from codec.errors import PeerError
from codec.sign import Key, open_sealed
from swarm.protocol.reach import Scope

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
    """Direct ones that were confirmed by dialing back, then circuits; see `reach`."""
    dialable: bool
    """It has a confirmed direct address."""
    name: Annotated[str, msgspec.Meta(max_length=64)]
    region: Annotated[str, msgspec.Meta(max_length=64)]
    up_mbit: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    leaf: bool
    """No interior place: newly joined, past soft expiry, or with nothing to give (`--up-mbit 0`)."""
    scope: Annotated[int, msgspec.Meta(ge=0, le=2)] = Scope.WORLD
    """Where the authority sees it (`reach.Scope`): what it can dial hangs on that."""


class Roster(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The signed plan. `parents[k][i]` is the slot that `members[i]` hangs on in stripe k, or `AUTHORITY`."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    serial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    authority: Addresses
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    parents: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(max_length=64)]

    @property
    def stripes(self) -> int:
        return len(self.parents)

    @property
    def stamp(self) -> int:
        """(boot, serial) as one number: what a `Hello` names."""
        return self.boot << 32 | self.serial

    # A roster is asked about far more often than it changes: these are made once, at the first question.

    @cached_property
    def _index(self) -> dict[int, int]:
        return {m.slot: i for i, m in enumerate(self.members)}

    @cached_property
    def _by_peer(self) -> dict[bytes, Member]:
        return {m.peer: m for m in self.members}

    @cached_property
    def _kids(self) -> tuple[dict[int, list[int]], ...]:
        """By stripe: the children of each slot that has some, and of `AUTHORITY`."""
        kids: tuple[dict[int, list[int]], ...] = tuple({} for _ in self.parents)
        for of, parents in zip(kids, self.parents, strict=True):
            for member, parent in zip(self.members, parents, strict=True):
                of.setdefault(parent, []).append(member.slot)
        return kids

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
        return self._kids[stripe].get(slot, [])

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
        """Whom to hang on when the parent is gone, best first: ancestors, then others that do not hang on us, of those
        the stripe's interior nodes first. `among`: look only at these slots (None: at all).

        Each slot starts to look at the one after its own, so that the orphans of one parent spread over its uncles.
        """
        line = self.ancestors(stripe, slot)
        above = {s: i for i, s in enumerate(line)}
        kids = self._kids[stripe]

        def rank(other: int) -> tuple[int, int]:
            if other in above:
                return 0, above[other]
            return 1 if other in kids else 2, (other - slot) % MAX_MEMBERS

        others = self._index if among is None else [s for s in among if s in self._index]
        return sorted((s for s in others if s not in line[:1] and not self._is_below(stripe, s, slot)), key=rank)

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Roster)


def seal_roster(roster: Roster, key: Key) -> bytes:
    return key.seal(_DOMAIN, _encoder.encode(roster))


@lru_cache(maxsize=4)
def open_roster(sealed: bytes, swarm: bytes) -> Roster:
    """Verify, decode, and check that it is a plan: slots differ, every tree reaches every member.

    A roster comes by several trees, so the last few are remembered.
    """
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

    With no more relays than stripes one may head several, the more the larger its uplink (largest quotient, d'Hondt);
    with more, each goes to the stripe that has least so far (longest processing time first); those that can be dialed
    are dealt first, so that each tree has some.
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
    for member in sorted(by_uplink, key=lambda m: not m.dialable):
        k = min(range(stripes), key=lambda i: (weight[i], i))
        dealt[k].append(member)
        weight[k] += member.up_mbit
    return [sorted(interior, key=lambda m: (-m.up_mbit, m.slot)) for interior in dealt]


def _tree(ordered: list[Member], interior: list[Member], shift: int) -> tuple[int, ...]:
    """One stripe: a breadth-first tree whose interior nodes take children in proportion to their uplinks.

    An edge needs one end that can be dialed, so leaves that cannot be choose first, and of the nodes with room take the
    first that can; where there is none, the edge is left to chance (who cannot have its parent turns to a backup).
    """
    head, *rest = interior
    dialable = {m.slot: m.dialable for m in ordered}
    room = _shares(len(ordered) - 1, interior)
    inside = {m.slot for m in interior}
    leaves = [m.slot for m in ordered if m.slot not in inside]
    turn = shift % len(leaves) if leaves else 0
    leaves = sorted(leaves[turn:] + leaves[:turn], key=lambda s: dialable[s])
    parent_of = {head.slot: AUTHORITY}
    givers = [head.slot]
    at = 0
    for slot in [m.slot for m in rest] + leaves:
        while room[givers[at]] == 0:
            at += 1
        giver = givers[at]
        if not dialable[slot] and not dialable[giver]:
            giver = next((g for g in givers[at:] if room[g] and dialable[g]), giver)
        parent_of[slot] = giver
        room[giver] -= 1
        if slot in inside:
            givers.append(slot)
    return tuple(parent_of[m.slot] for m in ordered)


def _shares(children: int, interior: list[Member]) -> dict[int, int]:
    """How many of `children` each interior node takes, in proportion to uplink (largest remainder).

    `interior` is sorted by uplink, so shares never rise along it, and whoever is placed before the shares are used up
    has room for the next.
    """
    total = sum(m.up_mbit for m in interior)
    exact = [children * m.up_mbit / total for m in interior]
    share = [int(e) for e in exact]
    left = children - sum(share)
    for i in sorted(range(len(interior)), key=lambda i: (share[i] - exact[i], i))[:left]:
        share[i] += 1
    return {m.slot: n for m, n in zip(interior, share, strict=True)}
