"""Which events came in which states of a core, and which never did."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from swarm.protocol.authority import Authority
from swarm.protocol.core.events import Event, Heard
from swarm.protocol.core.standing import Standing
from swarm.protocol.transfer.catchup_phases import Phase

__all__ = ["Coverage", "event_name", "role_of", "state_of"]

_MEMBERS: Final = ("alone", "one", "many")
_FLIGHT: Final = ("resting", "in flight")
STATES: Final = {
    "authority": {" ".join(words) for words in product(_MEMBERS, _FLIGHT)},
    "member": {
        " ".join(words) for words in product((each.value for each in Standing), (each.value for each in Phase), _FLIGHT)
    },
}
"""By role: every state. Of an authority, its members and whether a version is in flight; of a member, its lease, the
phase of its catch-up, and the same."""


def role_of(core: Any) -> str:
    return "authority" if isinstance(core, Authority) else "member"


def state_of(core: Any, now: float) -> str:
    """The state of a core, one of `STATES`."""
    state = core.state
    flight = _FLIGHT[any(state.held is None or version > state.held for version in state.chunks.versions)]
    if isinstance(core, Authority):
        return f"{_MEMBERS[min(2, len(core.book.leases))]} {flight}"
    return f"{core.standing(now).value} {core.catchup.phase.value} {flight}"


def event_name(event: Event) -> str:
    """The name of an event; of a message, the message's."""
    return type(event.message).__name__ if isinstance(event, Heard) else type(event).__name__


@dataclass
class Coverage:
    """What was reached, by role."""

    pairs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """How often an event came in a state: (role, state, event)."""
    handled: dict[str, set[str]] = field(default_factory=dict)
    """By role: the events that its core has a handler for."""

    def note_core(self, core: Any) -> None:
        """A core was made: learn which events it handles."""
        names = {kind.__name__ for table in (core._on_event, core._on_message) for kind in table} - {"Heard"}
        self.handled.setdefault(role_of(core), set()).update(names)

    def add(self, other: "Coverage") -> None:
        self.pairs.update(other.pairs)
        for role, names in other.handled.items():
            self.handled.setdefault(role, set()).update(names)

    def report(self) -> dict[str, Any]:
        """By role: how many of all pairs were reached, the states and events that never were, and by state the events
        that came in other states only."""
        return {role: self._of(role, names) for role, names in sorted(self.handled.items())}

    def _of(self, role: str, names: Set[str]) -> Mapping[str, Any]:
        reached = {(state, event) for of, state, event in self.pairs if of == role}
        states, events = {state for state, _ in reached}, {event for _, event in reached}
        return {
            "pairs": len(reached),
            "of": len(STATES[role]) * len(names | events),
            "states_never": sorted(STATES[role] - states),
            "events_never": sorted(names - events),
            "pairs_never": {
                state: sorted(event for event in events if (state, event) not in reached) for state in sorted(states)
            },
        }
