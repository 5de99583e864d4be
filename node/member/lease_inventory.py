"""The work leases that a node holds: their samples that wait or are being generated, and results without a verdict.

Only bookkeeping: it uses no engine and sends no messages, and time is an argument.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from codec.errors import PeerError
from node.engines.base import SamplingParams, Version
from node.ledger.messages import Renew, WorkLease
from node.ledger.packing import unpack_tokens

__all__ = ["Held", "Job", "LeaseInventory", "Result", "together"]


@dataclass(eq=False)
class Held:
    """A work lease. `deadline`: by this node's clock, counted from its arrival or its last renewal."""

    message: WorkLease
    deadline: float
    prompt: tuple[int, ...]
    waiting: set[int]
    """Samples not begun."""
    drawing: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    """Generated so far, by sample."""
    alone: bool = False
    """The engine refused a batch that it was part of, so it is tried by itself."""
    lost: set[int] = field(default_factory=set)
    """Samples that were being generated when an engine was lost."""
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
        """It shares no batch with other leases."""
        return self.alone or bool(self.message.whole)


Job = tuple[Held, int]
"""A lease and the number of one of its samples."""


@dataclass(slots=True)
class Result:
    """A signed rollout (`bodies` of messages), sent again until the ledger's verdict comes."""

    bodies: tuple[bytes, ...]
    held: Held
    next_send: float


class LeaseInventory:
    """All work leases of one node, oldest first."""

    def __init__(self, has_images: Callable[[SamplingParams], bool] = lambda sampling: True) -> None:
        """`has_images(sampling)`: whether the node has the images that the sampling names."""
        self._has_images = has_images
        self.leases: dict[int, Held] = {}
        self.results: dict[tuple[int, int], Result] = {}

    def take(self, lease: WorkLease, now: float) -> None:
        """Add a lease; one that is known (it was sent again) changes nothing. Raises `PeerError` without a prompt."""
        if lease.lease in self.leases:
            return
        prompt = unpack_tokens(lease.prompt)
        if not prompt:
            raise PeerError("lease.prompt: empty")
        self.leases[lease.lease] = Held(lease, now + lease.deadline_s, prompt, set(lease.samples), renewed_at=now)

    def drop(self, lease: int) -> bool:
        """Forget a lease, which was withdrawn or has expired, and its results. False: it was not known."""
        if self.leases.pop(lease, None) is None:
            return False
        self.results = {key: result for key, result in self.results.items() if key[0] != lease}
        return True

    def settle(self, lease: int, sample: int) -> Held | None:
        """The verdict on a result came; its lease, which is forgotten after the last verdict. None: not known."""
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
        """How many samples are not begun."""
        return sum(len(held.waiting) for held in self.leases.values())

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Ids of the leases with samples that wait or are being generated."""
        return tuple(sorted(held.id for held in self.leases.values() if held.unfinished))

    def unfinished_leases(self) -> Iterable[WorkLease]:
        """The leases with samples that wait or are being generated."""
        return (held.message for held in self.leases.values() if held.unfinished)

    def expired(self, now: float) -> list[int]:
        return [held.id for held in self.leases.values() if held.deadline <= now]

    def begin(self, version: Version, room: int) -> list[Job]:
        """Begin the next samples that an engine at `version` may generate: at most `room`, all drawn alike.

        A lease waits for its images. Urgent leases come first. A whole group is a batch by itself; it waits until there
        is room for it, or, if there will never be enough, until nothing else is being generated.
        """
        fit = [h for h in self.leases.values() if h.waiting and (h.message.epoch, h.message.version) <= version]
        fit = [h for h in fit if self._has_images(h.message.sampling)]
        fit.sort(key=lambda held: not held.message.urgent)
        if not fit or room <= 0:
            return []
        first = fit[0]
        if first.message.whole:
            if first.message.whole > room and any(held.drawing for held in self.leases.values()):
                return []
            room = len(first.waiting)
        drawing = first.message.sampling.drawing
        alike = [h for h in fit if h.message.sampling.drawing == drawing and not h.apart]
        jobs = [(held, s) for held in ([first] if first.apart else alike) for s in sorted(held.waiting)][:room]
        for held, sample in jobs:
            held.waiting.discard(sample)
            held.drawing.add(sample)
        return jobs

    def undo(self, jobs: Sequence[Job]) -> None:
        """These samples will be generated again, and their tokens counted from 0."""
        for held, sample in jobs:
            held.drawing.discard(sample)
            held.waiting.add(sample)
            held.renewed_tokens = 0

    def lose(self, jobs: Sequence[Job]) -> bool:
        """An engine was lost with these samples: another one will generate them again. Whether one of them was lost
        before; then nothing is changed."""
        if any(sample in held.lost for held, sample in jobs):
            return True
        for held, sample in jobs:
            held.lost.add(sample)
        self.undo([(held, sample) for held, sample in jobs if held.id in self.leases])
        return False

    def renewals(self, now: float, every_s: float) -> list[Renew]:
        """For each lease that has new tokens, at most every `every_s` seconds, how many it has."""
        found: list[Renew] = []
        for held in self.leases.values():
            tokens = sum(held.tokens.get(sample, 0) for sample in held.message.samples)
            if held.drawing and tokens > held.renewed_tokens and now - held.renewed_at >= every_s:
                held.renewed_at, held.renewed_tokens = now, tokens
                found.append(Renew(held.id, held.message.token, tokens))
        return found


def together(jobs: Sequence[Job]) -> list[Job]:
    """The samples of a batch. Of a whole group these are all of its samples, also those that another node delivered,
    because a sample's last bits may depend on the size of its batch."""
    (held, _), *_ = jobs
    return [(held, sample) for sample in range(held.message.whole)] or list(jobs)
