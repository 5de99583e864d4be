"""A relay's circuits for peers that are not members yet: how many, how often, and which one makes room for another.

Keys cost an attacker nothing, addresses do. So a stranger's circuits are counted by its address as well as by its key.
When all are taken, a newcomer gets the place of the oldest circuit of the address that holds the most: a flood pays for
the newcomer. Pure; the clock is an argument.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from swarm.protocol.core.bucket import Bucket
from swarm.transport.base import PeerKey

__all__ = ["StrangerCircuit", "StrangerCircuits", "StrangerRules"]

_MAX_BUCKETS: Final = 4096
"""Keys and addresses whose bucket is kept. Full buckets are forgotten first: a new bucket is full, too."""


@dataclass(frozen=True, slots=True)
class StrangerRules:
    """How many circuits strangers get."""

    in_all: int = 256
    """Half of a relay's circuits; the other half is kept for members."""

    to_one: int = 32
    """To one target, of the 96 circuits that it takes."""

    from_one: int = 2
    """From one key: a joiner needs one, and a second one while the first ends."""

    from_address: int = 8
    """From one address: a site behind one NAT joins eight at a time. A circuit used to join lasts some seconds."""

    least_age_s: float = 5.0
    """A younger circuit is not ended for another: a join takes two or three seconds. An attacker needs 20 addresses to
    keep all 32 circuits of a target younger than this (one new circuit an address each `address_every_s`)."""

    key_every_s: float = 5.0
    """In the long run a key gets one new circuit in this time; `from_one` at once."""

    address_every_s: float = 3.0
    """In the long run an address gets one new circuit in this time; `from_address` at once."""


@dataclass(eq=False, slots=True)
class StrangerCircuit:
    """A stranger's circuit that is open or being opened."""

    peer: PeerKey
    address: str
    """The caller's address, as `admission.origin` counts addresses."""
    target: PeerKey
    end: Callable[[], None]
    """Called to end the circuit when another stranger gets its place."""
    since_s: float = 0.0


@dataclass(slots=True)
class StrangerCircuits:
    """The strangers' circuits of one relay."""

    is_member: Callable[[PeerKey], bool]
    """Whether a peer has become a member meanwhile; then its circuit no longer counts here."""
    rules: StrangerRules = field(default_factory=StrangerRules)
    _open: list[StrangerCircuit] = field(default_factory=list)  # the oldest first
    _buckets: dict[PeerKey | str, Bucket] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many are open or being opened."""
        return len(self._open)

    def add_circuit(self, circuit: StrangerCircuit, now_s: float) -> bool:
        """Add a circuit; False if it exceeds a bound. It may end another one. After True, call `remove_circuit`."""
        rules, circuit.since_s = self.rules, now_s
        if (
            sum(each.peer == circuit.peer for each in self._open) >= rules.from_one
            or sum(each.address == circuit.address for each in self._open) >= rules.from_address
            or not self._take_tokens(circuit, now_s)
        ):
            return False
        self._open = [each for each in self._open if not self.is_member(each.peer)]
        to_same = [each for each in self._open if each.target == circuit.target]
        for among, most in ((to_same, rules.to_one), (self._open, rules.in_all)):
            if len(among) >= most and not self._make_room(among, circuit, now_s):
                return False
        self._open.append(circuit)
        return True

    def remove_circuit(self, circuit: StrangerCircuit) -> None:
        """The circuit has ended; harmless if it made room before."""
        if circuit in self._open:
            self._open.remove(circuit)

    def _make_room(self, among: list[StrangerCircuit], circuit: StrangerCircuit, now_s: float) -> bool:
        held = Counter(each.address for each in among)
        most = max(held.values(), default=0)
        # Not if the newcomer's address holds as many: two strangers would end each other's circuits in turn.
        victim = next((each for each in among if held[each.address] == most > held[circuit.address]), None)
        if victim is None or now_s - victim.since_s < self.rules.least_age_s:
            return False
        self._open.remove(victim)
        if among is not self._open:
            among.remove(victim)
        victim.end()
        return True

    def _take_tokens(self, circuit: StrangerCircuit, now_s: float) -> bool:
        """Charge the buckets of the caller's key and address; False if either has too little."""
        rules = self.rules
        if len(self._buckets) >= _MAX_BUCKETS:
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if not _is_full(bucket, now_s)}
            if len(self._buckets) >= _MAX_BUCKETS:  # an attack from thousands of addresses
                return False
        of_key = self._buckets.setdefault(circuit.peer, Bucket(1 / rules.key_every_s, rules.from_one))
        of_address = self._buckets.setdefault(circuit.address, Bucket(1 / rules.address_every_s, rules.from_address))
        return of_key.take(1.0, now_s) and of_address.take(1.0, now_s)


def _is_full(bucket: Bucket, now_s: float) -> bool:
    return bucket.level + (now_s - bucket.at_s) * bucket.rate >= bucket.burst
