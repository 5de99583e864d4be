"""What a node holds of the ledger: leases, the samples of them that wait or are drawn, results without a verdict.

Plain bookkeeping: no engine, no messages sent, and time is an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from codec.errors import PeerError
from node.engines.base import Version
from node.ledger.messages import Renew, WorkLease, unpack_tokens

__all__ = ["Held", "Job", "LeaseInventory", "Result", "together"]


@dataclass(eq=False)
class Held:
    """A lease. `deadline`: by our clock, counted from its arrival or its last renewal."""

    message: WorkLease
    deadline: float
    prompt: tuple[int, ...]
    waiting: set[int]
    """Samples not yet begun."""
    drawing: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    """Drawn so far, by sample."""
    alone: bool = False
    """The engine refused a batch with it: it is tried by itself."""
    renewed_at: float = 0.0
    renewed_tokens: int = 0

    @property
    def id(self) -> int:
        return self.message.lease

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.drawing)

    @property
    def apart(self) -> bool:
        """It shares no batch with others."""
        return self.alone or bool(self.message.whole)


Job = tuple[Held, int]
"""A lease and one of its samples."""


@dataclass(slots=True)
class Result:
    """A signed sample (`body`), said again until its verdict comes."""

    body: bytes
    held: Held
    next_send: float


class LeaseInventory:
    """All of one node's leases, oldest first."""

    def __init__(self) -> None:
        self.leases: dict[int, Held] = {}
        self.results: dict[tuple[int, int], Result] = {}

    def take(self, lease: WorkLease, now: float) -> None:
        """One that is known already (it was thought lost, and sent again) changes nothing. Raises `PeerError`."""
        if lease.lease in self.leases:
            return
        prompt = unpack_tokens(lease.prompt)
        if not prompt:
            raise PeerError("lease.prompt: empty")
        self.leases[lease.lease] = Held(lease, now + lease.deadline_s, prompt, set(lease.samples), renewed_at=now)

    def drop(self, lease: int) -> bool:
        """Nobody wants it, or its time is over. False: it was not here."""
        if self.leases.pop(lease, None) is None:
            return False
        self.results = {key: result for key, result in self.results.items() if key[0] != lease}
        return True

    def settle(self, lease: int, sample: int) -> Held | None:
        """The verdict on a result came: its lease, which is forgotten with its last one."""
        result = self.results.pop((lease, sample), None)
        if result is None:
            return None
        if not result.held.unfinished and not any(other == lease for other, _ in self.results):
            self.leases.pop(lease, None)
        return result.held

    def renewed(self, lease: int, seconds: float, now: float) -> None:
        if (held := self.leases.get(lease)) is not None:
            held.deadline = max(held.deadline, now + seconds)

    @property
    def waiting(self) -> int:
        """Samples not yet begun."""
        return sum(len(held.waiting) for held in self.leases.values())

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Leases with samples that wait or are drawn."""
        return tuple(sorted(held.id for held in self.leases.values() if held.unfinished))

    def expired(self, now: float) -> list[int]:
        return [held.id for held in self.leases.values() if held.deadline <= now]

    def begin(self, version: Version, room: int) -> list[Job]:
        """The next samples of equal sampling, at most `room`, that an engine at `version` may draw; now it does.

        What is urgent comes first. A whole group is a batch by itself, which waits for room, and for all where there
        will never be enough.
        """
        fit = [h for h in self.leases.values() if h.waiting and (h.message.epoch, h.message.version) <= version]
        fit.sort(key=lambda held: not held.message.urgent)
        if not fit or room <= 0:
            return []
        first = fit[0]
        if first.message.whole:
            if first.message.whole > room and any(held.drawing for held in self.leases.values()):
                return []
            room = len(first.waiting)
        alike = [h for h in fit if h.message.sampling == first.message.sampling and not h.apart]
        jobs = [(held, s) for held in ([first] if first.apart else alike) for s in sorted(held.waiting)][:room]
        for held, sample in jobs:
            held.waiting.discard(sample)
            held.drawing.add(sample)
        return jobs

    def undo(self, jobs: Sequence[Job]) -> None:
        """These are to be drawn anew, and their tokens counted from nothing."""
        for held, sample in jobs:
            held.drawing.discard(sample)
            held.waiting.add(sample)
            held.renewed_tokens = 0

    def renewals(self, now: float, every_s: float) -> list[Renew]:
        """For each lease whose tokens flow, now and then, how far it is."""
        found: list[Renew] = []
        for held in self.leases.values():
            tokens = sum(held.tokens.get(sample, 0) for sample in held.message.samples)
            if held.drawing and tokens > held.renewed_tokens and now - held.renewed_at >= every_s:
                held.renewed_at, held.renewed_tokens = now, tokens
                found.append(Renew(held.id, held.message.token, tokens))
        return found


def together(jobs: Sequence[Job]) -> list[Job]:
    """What a batch consists of: the samples of a whole group all, also those that somebody else has delivered, because
    a sample's last bits may depend on how many are drawn with it."""
    (held, _), *_ = jobs
    return [(held, sample) for sample in range(held.message.whole)] or list(jobs)
