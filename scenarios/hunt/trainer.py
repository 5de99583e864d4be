"""A model of a trainer: it asks for rollouts, "trains" on them, and publishes the next version.

It knows what a trainer's process knows, and its only memory that outlives its process is its last checkpoint: the
version that it published last, and which prompts it has used for the versions up to that. It does with the coordinator
what `node.coordinator.trainer_server` does for a trainer, in the seed's own tasks.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np
import trio

from codec.chunk import CODER_RICE
from codec.errors import SwarmError
from codec.staging import encode
from node.coordinator.coordinator import Coordinator
from node.coordinator.publisher import Publisher
from node.engines.base import SamplingParams
from node.ledger.binding import Binding
from node.ledger.packing import pack_tokens
from node.ledger.session import WorkSession
from node.ledger.state import Group
from node.trainers.messages import VersionRef
from node.trainers.rollouts import group_id
from scenarios.hunt.engine import TOKENS
from scenarios.hunt.observed import bits_of
from scenarios.hunt.oracle import Blocks, Oracle
from scenarios.sim.virtual.engine import STOP
from swarm.protocol.core.version import VersionId

__all__ = ["Trainer"]

_KEY: Final = "hunt"
_GROUPS: Final = 2
"""Request groups a step."""
_SAMPLES: Final = 2
_MAX_LAG: Final = 1
_TRAIN_S: Final = 1.0
_AGAIN_S: Final = 1.0
_LEAVE_S: Final = 10.0
"""As `node.coordinator.trainer_server.LEAVE_WITHIN_S`."""
_CHANGED: Final = 0.05
"""Share of the elements that a step changes."""
_BACK: Final = 3
"""The most versions that a rollback goes back."""


class _Died(Exception):
    """The trainer's process ended. `down_s`: for how long."""

    def __init__(self, down_s: float) -> None:
        self.down_s = down_s


class Trainer:
    """The trainer of a run."""

    def __init__(self, oracle: Oracle, seed: int, pause: Callable[[], Awaitable[None]]) -> None:
        """`pause()` returns when another step may begin."""
        self._oracle = oracle
        self._rng = random.Random(f"trainer {seed}")
        self._numbers = np.random.default_rng(seed)
        self._seed = seed
        self._pause = pause
        self.dies: dict[str, float] = {}
        """By phase of a step: the trainer ends there next time, for so many seconds."""
        self.rolls_back = False
        """Its next step is a return to an older version."""
        self.has_rival = False
        """Another trainer comes with its name, and must be turned away."""
        self.steps = 0
        """Versions that it knows to be sealed."""
        self.busy = False
        """It is in the middle of a step."""
        self.deaths = 0
        self._used: set[int] = set()
        """Prompts of which it has used the group, as its checkpoint says."""
        self._batch: list[tuple[int, Group, VersionId]] = []
        """Of this step: prompt, group, and the head when it was taken."""
        self._unsure: tuple[bytes, list[tuple[int, Group, VersionId]]] | None = None
        """The root and the batch of a version whose seal the trainer has not heard of."""

    def _phase(self, name: str) -> None:
        if name in self.dies:
            self.deaths += 1
            raise _Died(self.dies.pop(name))

    async def attend(self, coordinator: Coordinator) -> None:
        """Train as long as the seed's process lives; whenever the trainer ends, it is started again."""
        while True:
            try:
                await self._live(coordinator)
            except _Died as died:
                await trio.sleep(died.down_s)
            except SwarmError:
                await trio.sleep(_AGAIN_S)

    async def _live(self, coordinator: Coordinator) -> None:
        """One process of the trainer."""
        self._batch.clear()
        self._hear_of(coordinator)
        publisher = Publisher(coordinator)
        sampling = SamplingParams(2 * TOKENS, stop_tokens=(STOP,))
        ledger = coordinator.ledger
        await ledger.wait_closed(_KEY)
        session = ledger.open(_KEY, Binding(_SAMPLES, sampling, _MAX_LAG), keep=True, paced=True)
        try:
            asked: set[int] = set()
            while True:
                await self._pause()
                self.busy = True
                if self.rolls_back:
                    await self._roll_back(coordinator, publisher)
                await self._gather(coordinator, session, asked)
                await trio.sleep(_TRAIN_S)
                await self._publish(coordinator, publisher)
                self.busy = False
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(_LEAVE_S):
                await publisher.abandon()
            ledger.close(session)

    def _hear_of(self, coordinator: Coordinator) -> None:
        """Learn whether the version whose seal was not heard of is sealed."""
        if self._unsure is not None:
            root, batch = self._unsure
            if coordinator.replica.root == root:
                self._checkpoint(batch)
            self._unsure = None

    def _checkpoint(self, batch: list[tuple[int, Group, VersionId]]) -> None:
        """A version is sealed that was trained on `batch`."""
        self.steps += 1
        for prompt, group, head in batch:
            self._used.add(prompt)
            self._oracle.trained(group, head, _MAX_LAG)

    # ------------------------------------------------------------ rollouts

    async def _gather(self, coordinator: Coordinator, session: WorkSession, asked: set[int]) -> None:
        ledger = coordinator.ledger
        unconfirmed: bytes | None = None
        while len(self._batch) < _GROUPS:
            news = session.news
            if self.has_rival:
                self._turn_away(coordinator, session)
            self._offer(coordinator, session, asked)
            if unconfirmed is not None:
                ledger.taken(unconfirmed)
                unconfirmed = None
            while session.impossible or session.refused:
                (session.impossible or session.refused).popitem()
                self._oracle.violate("no work refused", "a group was given up, although nodes generate")
            if not session.groups:
                await news.wait()
                continue
            group, head = session.groups.popleft(), coordinator.head
            self._phase("got")
            oldest = VersionId(*min(done.oldest for done in group.done.values()))
            if oldest.epoch != head.epoch or oldest.version + _MAX_LAG < head.version:
                ledger.stale(group.id, head)
                continue
            prompt = next(number for number in asked if self._group(number) == group.id)
            self._batch.append((prompt, group, head))
            unconfirmed = group.id
        if unconfirmed is not None:
            ledger.taken(unconfirmed)
        self._phase("used")

    def _turn_away(self, coordinator: Coordinator, session: WorkSession) -> None:
        self.has_rival = False
        try:
            coordinator.ledger.open(_KEY, session.work, keep=True, paced=True)
        except SwarmError:
            return
        self._oracle.violate("one trainer a name", "a second trainer opened the session of the first")

    def _group(self, prompt: int) -> bytes:
        return group_id(_KEY, prompt)

    def _offer(self, coordinator: Coordinator, session: WorkSession, asked: set[int]) -> None:
        prompt = 0
        while session.offered < session.allowed and len(asked - self._used) < 3 * _GROUPS:
            while prompt in asked or prompt in self._used:
                prompt += 1
            asked.add(prompt)
            self._oracle.offered.add(self._group(prompt))
            coordinator.ledger.offer(
                session, self._group(prompt), pack_tokens([1000 + prompt % 100, 7, self._seed % 1000])
            )
            self._phase("offer")

    # ------------------------------------------------------------ versions

    def _next_bits(self, coordinator: Coordinator) -> Blocks:
        changed = []
        for old in bits_of(coordinator._model):
            where = self._numbers.random(old.size) < _CHANGED
            changed.append(np.where(where, old ^ self._numbers.integers(1, 4, old.size, np.uint16), old))
        return tuple(changed)

    async def _publish(self, coordinator: Coordinator, publisher: Publisher) -> None:
        self._phase("begin")
        await publisher.begin()
        replica, new = coordinator.replica, self._next_bits(coordinator)
        root = self._oracle.begun(new)
        deltas = [
            encode(number, replica.block(number), bits, replica.layout.block(number).dtype, CODER_RICE)
            for number, bits in enumerate(new)
        ]
        known = [delta for delta in deltas if delta is not None]
        self._rng.shuffle(known)
        half = len(known) // 2
        await publisher.add(known[:half])
        self._phase("add")
        await trio.sleep(self._rng.random())
        await publisher.add(known[half:])
        self._phase("end")
        self._unsure = root, list(self._batch)
        await publisher.end(1, root)
        self._phase("sealed")
        self._unsure = None
        self._checkpoint(self._batch)
        self._batch.clear()

    async def _roll_back(self, coordinator: Coordinator, publisher: Publisher) -> None:
        self.rolls_back = False
        number = max(0, coordinator.head.version - self._rng.randint(1, _BACK))
        try:
            await publisher.go_back(VersionRef(version=number))
        except SwarmError:
            return  # too little is kept

    def status(self) -> dict[str, Any]:
        """For the report."""
        return {"steps": self.steps, "used": len(self._used), "deaths": self.deaths}
