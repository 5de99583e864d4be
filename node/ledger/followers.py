"""Who follows the tokens of a request group while they are drawn: the gateway, for a client that reads a stream."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from codec.errors import PeerError
from node.engines.base import STREAMS, DrawnTokens
from node.engines.top_logprobs import is_top
from node.ledger.facts import Discarded, Fact, Requeued
from node.ledger.rules import Ledger
from node.ledger.state import LiveLease
from node.ledger.token_messages import DrawnPart

__all__ = ["Follower", "Followers"]


class Follower(Protocol):
    """Follows one group. Its methods must not wait or raise."""

    def hear(self, sample: int, lease: int, drawn: DrawnTokens) -> None:
        """Tokens of a sample that is leased. They are not accepted yet, and some may have been lost on the way."""

    def lapse(self, sample: int) -> bool:
        """The sample was not accepted, or no longer counts: it is drawn from its beginning by another lease. Whether
        the follower does not want that, so that the group is dropped."""
        ...


class Followers:
    """The followers by group. It runs on the event loop and never waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._followers: dict[bytes, Follower] = {}

    def add(self, group: bytes, follower: Follower) -> None:
        """`follower` follows `group`, which is not offered yet, until `remove`."""
        self._followers[group] = follower

    def remove(self, group: bytes) -> None:
        """Nobody follows `group` any more."""
        self._followers.pop(group, None)

    def of(self, node: bytes, leases: Sequence[LiveLease]) -> tuple[int, ...]:
        """Those of the leases of `node` whose tokens it should tell."""
        found = self._ledger.nodes.get(node)
        if not self._followers or found is None or STREAMS not in (found.abilities or ()):
            return ()
        return tuple(lease.id for lease in leases if lease.group in self._followers)

    def hear(self, node: bytes, parts: Iterable[DrawnPart]) -> None:
        """What `node` told. Tokens of samples that it does not hold, or that nobody follows, are dropped.

        Raises `PeerError` for values that no engine draws.
        """
        for part in parts:
            lease = self._ledger.leases.get(part.lease)
            if lease is None or lease.node != node or lease.token != part.token or part.sample not in lease.open:
                continue
            if (follower := self._followers.get(lease.group)) is None:
                continue
            try:
                drawn = part.drawn
            except ValueError as error:
                raise PeerError(f"drawn: {error}") from error
            sampling = self._ledger.groups[lease.group].sampling
            if drawn.end > sampling.max_tokens:
                raise PeerError("drawn: more tokens than were asked for")
            if not is_top(drawn.top, len(drawn.token_ids), sampling.extra.top_logprobs):
                raise PeerError("drawn: other likeliest tokens than were asked for")
            follower.hear(part.sample, lease.id, drawn)

    def note(self, facts: Iterable[Fact]) -> set[bytes]:
        """Tell the followers which samples go to another lease. Returns the groups that they do not want any more."""
        unwanted: set[bytes] = set()
        for fact in facts if self._followers else ():
            match fact:
                case Requeued(_, group, samples, _):
                    pass
                case Discarded(group, sample, _):
                    samples = (sample,)
                case _:
                    continue
            if (follower := self._followers.get(group)) is not None:
                unwanted |= {group for sample in samples if follower.lapse(sample)}
        return unwanted
