"""Sleep and wake of a node's engines, so that a trainer on the same GPU can use their memory.

Asleep, a node has no engine process: the weights, the caches and what the libraries hold on the GPU are gone, for every
engine alike. The replica stays, in the machine's memory or on its disk, and follows each version. To wake, the engines
are started, filled from the replica as it is then, and serve once they have proven its bits.
"""

from collections.abc import Callable

import structlog
import trio

from codec.errors import UsageError
from node.engines.group import EngineGroup
from node.member.worker import NodeWorker
from node.status.sleeping import Rested, Sleep, Wake

__all__ = ["EngineSleep"]

_log = structlog.get_logger(__name__)


class EngineSleep:
    """Of one node. Requests are carried out one after the other."""

    def __init__(
        self, engines: EngineGroup, worker: NodeWorker, restored: Callable[[], None], *, runs_apart: bool
    ) -> None:
        """`restored()` has the engines' adapters given to them. `runs_apart`: the user runs the servers."""
        self._engines, self._worker, self._restored, self._runs_apart = engines, worker, restored, runs_apart
        self._turn = trio.Lock()
        self.asleep = False
        """Versions need not be given to the engines."""

    async def sleep(self, within_s: float) -> bool:
        """Finish the work that is here, for at most `within_s` seconds, give the rest back, and end the engines. On
        return their memory is free. Whether nothing was given back. Does nothing while they sleep.

        Raises `UsageError` where the engines are not this node's processes, or there are none yet.
        """
        if self._runs_apart:
            raise UsageError("This node's engines are servers that you run (--engine-url): stop them yourself.")
        async with self._turn:
            if not self._engines.engines:
                raise UsageError("This node has no engines yet: it waits for the model. Try again once it is here.")
            if self.asleep:
                return True
            _log.info("engines_finish", within_s=within_s)
            finished = await self._worker.rest(within_s)
            self.asleep = True
            await self._engines.sleep()
            _log.info("engines_asleep", finished=finished)
            return finished

    async def answer(self, request: Sleep | Wake) -> Rested:
        """The answer to a request from this machine, when it was carried out."""
        try:
            carry_out = self.sleep if isinstance(request, Sleep) else self.wake
            return Rested(await carry_out(request.within_s))
        except UsageError as error:
            return Rested(why=str(error))

    async def wake(self, within_s: float) -> bool:
        """Start the engines, and wait for at most `within_s` seconds. Whether one is ready by then; the others, and one
        that takes longer, become ready later. Does nothing while they are awake."""
        async with self._turn:
            if self.asleep:
                _log.info("engines_wake")
                self.asleep = False
                self._restored()
                self._engines.wake()
                self._worker.resume()
        with trio.move_on_after(within_s):
            await self._engines.wait_ready()
        return self._engines.ready
