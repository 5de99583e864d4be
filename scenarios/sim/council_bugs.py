"""Bugs planted in the council, each of which the simulation must find: a check of `scenarios.sim.council` itself.

python -m scenarios.sim.council_bugs
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from scenarios.sim.council import EPISODE_STEPS, Stalled, Violation, VirtualMachine, World
from swarm.protocol.council import log_window
from swarm.protocol.council.events import Ballot, InstallSnapshot, SaveBallot, SnapshotCame, StoreEntries
from swarm.protocol.council.followers import Followers
from swarm.protocol.council.log_window import LogWindow
from swarm.protocol.council.machine import CouncilMachine
from swarm.protocol.council.messages import Ack, Append, AskVote, Entry
from swarm.protocol.council.timing import Timing

__all__ = ["BUGS", "steps_and_violation"]

Bug = Callable[[], Any]


def _method(name: str, planted: Callable[..., Any], of: type = CouncilMachine) -> Bug:
    """Replace a method; `planted` gets the original first."""

    @contextmanager
    def plant() -> Iterator[None]:
        original = getattr(of, name)
        with patch.object(of, name, lambda *given, **named: planted(original, *given, **named)):
            yield

    return plant


def _ballot_lost(original: Any, world: World, machine: VirtualMachine, ballot: Ballot) -> None:
    if world.rng.random() < 0.5:
        original(world, machine, ballot)


def _entries_later(original: Any, world: World, machine: VirtualMachine, entries: tuple[Entry, ...]) -> None:
    """The disk says that it has stored entries, and writes them after half a second, unless the process dies."""
    life = machine.life

    def write() -> None:
        if machine.life == life and machine.core is not None and entries[0].index == len(machine.disk.entries) + 1:
            original(world, machine, entries)

    world.at(world.now + 0.5, write)


def _answers_first(original: Any, world: World, effects: list[Any]) -> list[Any]:
    """Messages are sent before what they say is stored."""
    stores = (SaveBallot, StoreEntries, InstallSnapshot)
    return [e for e in effects if not isinstance(e, stores)] + [e for e in effects if isinstance(e, stores)]


def _no_wait_after_restart(original: Any, self: CouncilMachine, *given: Any, **named: Any) -> None:
    original(self, *given, **named)
    self._promised_until = named["now"]  # pyright: ignore[reportPrivateUsage]


def _votes_twice(original: Any, self: CouncilMachine, peer: bytes, message: AskVote, now: float) -> None:
    if message.binding and message.term == self.ballot.term and self.role.value != "leader":
        self.ballot = Ballot(message.term, peer)
    original(self, peer, message, now)


def _votes_for_any_log(original: Any, self: CouncilMachine, peer: bytes, message: AskVote, now: float) -> None:
    original(self, peer, AskVote(message.term, max(message.last, self.last), message.binding), now)


def _promise_ignored(original: Any, self: CouncilMachine, peer: bytes, message: AskVote, now: float) -> None:
    self._promised_until = min(self._promised_until, now)  # pyright: ignore[reportPrivateUsage]
    original(self, peer, message, now)


def _own_lease_ignored(original: Any, self: CouncilMachine, now: float) -> bool:
    """A leader that has lost its lease goes on until it hears of another one."""
    return self._leads  # pyright: ignore[reportPrivateUsage]


def _lease_from_answer(original: Any, self: CouncilMachine, peer: bytes, message: Ack, now: float) -> None:
    original(self, peer, Ack(message.term, now if message.sent_at else 0.0, message.last, message.gap), now)


def _older_term_obeyed(original: Any, self: CouncilMachine, peer: bytes, message: Append, now: float) -> None:
    """A follower goes back to a leader of an older term."""
    if message.term < self.ballot.term and self.role.value == "follower":
        self.ballot = Ballot(message.term, b"")
    original(self, peer, message, now)


def _fits_anywhere(original: Any, self: CouncilMachine, peer: bytes, message: Append, now: float) -> None:
    """A follower takes entries of the right number, whatever its own log has before them."""
    if message.before.index == self.last.index:
        message = Append(message.term, message.sent_at, self.last, message.entries)
    original(self, peer, message, now)


def _older_snapshot(original: Any, self: CouncilMachine, event: SnapshotCame, now: float) -> None:
    """A follower takes any snapshot of its leader's, also one that is older than what it has."""
    if (event.term, event.peer) == (self.ballot.term, self.leader):
        self._window = LogWindow(event.last)  # pyright: ignore[reportPrivateUsage]
        self._out.append(InstallSnapshot(event.peer, event.last))  # pyright: ignore[reportPrivateUsage]


def _half_elects(original: Any, self: CouncilMachine, *given: Any, **named: Any) -> None:
    original(self, *given, **named)
    self._majority -= 1  # pyright: ignore[reportPrivateUsage]


def _half_stores(original: Any, self: Followers, last: int) -> int:
    return last


def _half_lends(original: Any, self: Followers, now: float) -> float:
    self._majority -= 1  # pyright: ignore[reportPrivateUsage]
    try:
        return original(self, now)
    finally:
        self._majority += 1  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _old_entries_count() -> Iterator[None]:
    """An entry of an older term is established by itself. Messages have one entry each, so that it comes by itself."""
    with (
        patch.object(LogWindow, "is_of_term", lambda self, index, term: True),
        patch.object(log_window, "MAX_ENTRIES", 1),
    ):
        yield


@contextmanager
def _drift_forgotten() -> Iterator[None]:
    with patch.object(Timing, "leads_s", property(lambda self: self.lease_s * 1.25)):
        yield


BUGS: Final[dict[str, Bug]] = {
    "the ballot is not always stored": _method("save_ballot", _ballot_lost, World),
    "entries are stored after the answer": _method("store", _entries_later, World),
    "answers are sent before what they say is stored": _method("order", _answers_first, World),
    "a machine that restarts does not wait for a lease": _method("__init__", _no_wait_after_restart),
    "a machine votes twice in a term": _method("_ask_vote", _votes_twice),
    "a machine votes for a log that lacks something": _method("_ask_vote", _votes_for_any_log),
    "a promise is forgotten when a candidate asks": _method("_ask_vote", _promise_ignored),
    "a leader leads on after its lease": _method("is_leading", _own_lease_ignored),
    "the lease counts from the answer's arrival": _method("_ack", _lease_from_answer),
    "the lease is longer than the promise": _drift_forgotten,
    "a leader of an older term is obeyed": _method("_append", _older_term_obeyed),
    "entries are stored after others than the leader's": _method("_append", _fits_anywhere),
    "a snapshot replaces what is newer": _method("_snapshot_came", _older_snapshot),
    "less than a majority elects": _method("__init__", _half_elects),
    "less than a majority stores": _method("stored_by_majority", _half_stores, Followers),
    "less than a majority lends the lead": _method("lent_at", _half_lends, Followers),
    "entries of an older term count by themselves": _old_entries_count,
}
"""By what is wrong: a context manager that plants it."""


def steps_and_violation(bug: str, most_steps: int, seed: int = 0) -> tuple[int, str]:
    """Steps until the simulation finds this bug, and what it did wrong. That nothing happened in a calm time does not
    count. Raises `RuntimeError` when `most_steps` are not enough."""
    steps = 0
    rng = random.Random(seed)
    with BUGS[bug]():
        while steps < most_steps:
            episode = World(rng.getrandbits(32), rng.choice((3, 3, 5)))
            try:
                episode.run(min(EPISODE_STEPS, most_steps - steps))
            except Stalled:
                pass
            except Violation as violation:
                return steps + episode.steps, str(violation)
            steps += episode.steps
    raise RuntimeError(f"{most_steps:,} steps did not find: {bug}")


def main() -> int:
    """Plant each bug; the number of those that were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000_000, help="for each bug, at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    missed = 0
    for name in BUGS:
        try:
            steps, violation = steps_and_violation(name, given.steps, given.seed)
            print(f"{name}: found after {steps:,} steps: {violation}", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
            missed += 1
    return missed


if __name__ == "__main__":
    sys.exit(main())
