"""The ranks of one trainer while they attach, over a `torch.distributed` group of their own.

After attaching, the ranks agree through memory that they share (`node.trainers.ranks.copies`). So the trainer's own
collectives are never disturbed, and a rank that dies does not make a publish of the others hang.
"""

import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from codec.errors import SwarmError, UsageError
from node.trainers.connection.patience import Wait, logged_wait
from node.trainers.errors import SwarmTimeout
from node.trainers.ranks.peers import have, named

__all__ = ["RankMeeting"]

T = TypeVar("T")
MEET_WITHIN_S: Final = 900.0
"""How long a rank waits for the others. A seed that rank 0 starts hashes the base before the ranks go on."""
_MEETINGS: Final = itertools.count()
"""Numbers the meetings of this process. Every rank attaches equally often, so the number is the same on all ranks."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Differs between hosts, and is the same in all containers of one."""


class RankMeeting:
    """The processes of one trainer while they attach. All ranks make every call, and all raise its error."""

    def __init__(self, ranks: list[int]) -> None:
        """A collective: every process of the trainer calls it. `ranks`: see
        `node.trainers.tensors.sharding.sharded_over`.

        Raises `UsageError` when the model is not sharded over all processes or they are on several hosts,
        `SwarmTimeout` when another rank does not come within `MEET_WITHIN_S`.
        """
        import torch.distributed as dist

        if ranks != list(range(dist.get_world_size())):
            raise UsageError("The model is sharded over some of the processes only: shard it over all of them.")
        self.rank, self.world = dist.get_rank(), len(ranks)
        self._dist = dist
        self._meet()
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=MEET_WITHIN_S))
        hosts = self.gather(_BOOT_ID.read_text().strip)
        if len(set(hosts)) > 1:
            raise UsageError(
                f"The ranks are on {len(set(hosts))} hosts. In this version a trainer publishes from one host: shard "
                "within it, or publish an iterator of (checkpoint name, full tensor) from one rank."
            )

    def gather(self, ask: Callable[[], T]) -> list[T]:
        """What `ask()` returns on each rank, by rank.

        When `ask()` raises a `SwarmError` anywhere, a rank raises its own error, or else that of the first rank.
        """
        answer: tuple[Any, SwarmError | None]
        try:
            answer = ask(), None
        except SwarmError as error:
            answer = None, error
        answers: list[Any] = [None] * self.world
        self._run_collective(lambda: self._dist.all_gather_object(answers, answer, group=self._group))
        for _, error in answers:
            if error is not None:
                raise answer[1] or error
        return [value for value, _ in answers]

    def gather_own(self, make: Callable[[], T]) -> T:
        """What `make()` returns on this rank. Errors as in `gather`."""
        results: list[T] = []
        self.gather(lambda: results.append(make()))
        return results[0]

    def lead(self, do: Callable[[], T]) -> T:
        """What `do()` returns on rank 0, which alone calls it. Every rank raises its `SwarmError`."""
        return self.gather(do if self.rank == 0 else lambda: None)[0]  # pyright: ignore[reportReturnType]

    def _meet(self) -> None:
        """Wait until every rank has come. Uses keys in the trainer's own store: a collective could not name those
        missing.

        Raises `SwarmTimeout` naming the ranks that have not come.
        """
        store = self._dist.distributed_c10d._get_default_store()
        key = f"swarm-node/attach/{next(_MEETINGS)}"
        store.set(f"{key}/{self.rank}", "here")
        missing = list(range(self.world))
        wait = Wait(
            MEET_WITHIN_S,
            lambda: f"attach waits for {named(missing, self.world)}, which {have(missing)} not called it",
        )
        while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
            if wait.over:
                raise SwarmTimeout(
                    f"{named(missing, self.world).capitalize()} {have(missing)} not called Swarm.attach within "
                    f"{MEET_WITHIN_S:.0f} s of this one. Call it on every rank."
                )
            wait.log_if_due()
            time.sleep(wait.slice_s())

    def close(self) -> None:
        """Destroy the meeting's process group; the ranks share only memory from here on."""
        self._dist.destroy_process_group(self._group)

    def _run_collective(self, collective: Callable[[], None]) -> None:
        try:
            with logged_wait(MEET_WITHIN_S, lambda: "attach waits for another rank: rank 0 may be starting the seed"):
                collective()
        except RuntimeError as error:
            raise SwarmTimeout(
                f"Another rank ended, or did not answer, while this trainer attached: {error}"
            ) from error
