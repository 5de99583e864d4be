"""A relay's circuits for peers that are no members yet: how many, how often, and which one makes room for another.

Keys cost nothing to make up, addresses do. So what a stranger holds is counted by its address as well as by its key,
and when the places are taken, the oldest circuit of the address that has most makes room: whoever floods pays for a
newcomer. Pure; the clock is an argument.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from swarm.protocol.core.bucket import Bucket
from swarm.transport.base import PeerKey

__all__ = ["StrangerCircuit", "StrangerCircuits", "StrangerRules"]

_MAX_BUCKETS: Final = 4096
"""Keys and addresses whose pace is remembered. Full buckets are forgotten first: that changes nothing."""


@dataclass(frozen=True, slots=True)
class StrangerRules:
    """What strangers get of a relay."""

    in_all: int = 256
    """Half of a relay's circuits: the other half is members' whatever happens."""

    to_one: int = 32
    """To one target, of the 96 that it takes."""

    from_one: int = 2
    """From one key: a joiner needs one, and a second one while the first ends."""

    from_address: int = 8
    """So a site behind one NAT joins eight at a time; a circuit to join takes some seconds."""

    least_age_s: float = 5.0
    """A younger circuit makes no room: a join takes two or three seconds. To keep all places of a target young takes
    20 addresses (32 places, each address `address_every_s`)."""

    key_every_s: float = 5.0
    """One new circuit for a key, in the long run; `from_one` at once."""

    address_every_s: float = 3.0
    """And one for an address; `from_address` at once."""


@dataclass(eq=False, slots=True)
class StrangerCircuit:
    """One that is open, or being made."""

    peer: PeerKey
    address: str
    """As `admission.origin` counts addresses."""
    target: PeerKey
    end: Callable[[], None]
    """Ends it: another stranger gets its place."""
    since_s: float = 0.0


@dataclass(slots=True)
class StrangerCircuits:
    """Those of one relay. `is_member`: whether a peer has become one meanwhile; then its circuit is none of these."""

    is_member: Callable[[PeerKey], bool]
    rules: StrangerRules = field(default_factory=StrangerRules)
    _open: list[StrangerCircuit] = field(default_factory=list)  # the oldest first
    _paces: dict[PeerKey | str, Bucket] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._open)

    def begin(self, circuit: StrangerCircuit, now_s: float) -> bool:
        """Whether there may be one more; if so `over` must follow. Another one may be ended for it."""
        rules, circuit.since_s = self.rules, now_s
        if (
            sum(each.peer == circuit.peer for each in self._open) >= rules.from_one
            or sum(each.address == circuit.address for each in self._open) >= rules.from_address
            or not self._is_in_time(circuit, now_s)
        ):
            return False
        self._open = [each for each in self._open if not self.is_member(each.peer)]
        to_same = [each for each in self._open if each.target == circuit.target]
        for among, most in ((to_same, rules.to_one), (self._open, rules.in_all)):
            if len(among) >= most and not self._make_room(among, circuit, now_s):
                return False
        self._open.append(circuit)
        return True

    def over(self, circuit: StrangerCircuit) -> None:
        """It has ended, whoever ended it."""
        if circuit in self._open:
            self._open.remove(circuit)

    def _make_room(self, among: list[StrangerCircuit], circuit: StrangerCircuit, now_s: float) -> bool:
        held = Counter(each.address for each in among)
        most = max(held.values(), default=0)
        # Never for an address that has as many itself: two strangers would take turns in ending one another.
        victim = next((each for each in among if held[each.address] == most > held[circuit.address]), None)
        if victim is None or now_s - victim.since_s < self.rules.least_age_s:
            return False
        self._open.remove(victim)
        if among is not self._open:
            among.remove(victim)
        victim.end()
        return True

    def _is_in_time(self, circuit: StrangerCircuit, now_s: float) -> bool:
        rules = self.rules
        if len(self._paces) >= _MAX_BUCKETS:
            self._paces = {name: pace for name, pace in self._paces.items() if not _is_full(pace, now_s)}
            if len(self._paces) >= _MAX_BUCKETS:  # an attack from everywhere
                return False
        of_key = self._paces.setdefault(circuit.peer, Bucket(1 / rules.key_every_s, rules.from_one))
        of_address = self._paces.setdefault(circuit.address, Bucket(1 / rules.address_every_s, rules.from_address))
        return of_key.take(1.0, now_s) and of_address.take(1.0, now_s)


def _is_full(pace: Bucket, now_s: float) -> bool:
    return pace.level + (now_s - pace.at_s) * pace.rate >= pace.burst
