"""The authority's heartbeats: its time, its newest version and the live leases; its children forward them."""

from collections.abc import Callable

from swarm.protocol.core.documents import AuthorityTime, Heartbeat, seal
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import HeartbeatNews
from swarm.protocol.membership.lease import LeaseBook
from swarm.protocol.state import State

__all__ = ["Heartbeats"]


class Heartbeats:
    """The heartbeats of one boot of the authority. `plan_serial()`: the serial of the newest roster."""

    def __init__(
        self,
        state: State,
        book: LeaseBook,
        time: Callable[[float], AuthorityTime],
        plan_serial: Callable[[], int],
        *,
        boot: int,
        now: float,
    ) -> None:
        self._state = state
        self._book = book
        self._time = time
        self._plan_serial = plan_serial
        self._boot = boot
        self._serial = 0
        self._next_at = now

    def send(self, now: float) -> None:
        """Sign a heartbeat and send it to every child."""
        state = self._state
        time = self._time(now)
        live, fresh = self._book.bits(time)
        self._serial += 1
        head = state.held or VersionId(0, 0)
        beat = Heartbeat(state.swarm, self._boot, self._serial, time, self._plan_serial(), *head, live, fresh)
        sealed = seal(beat, state.key)
        self._book.beat(sealed, time)
        state.leases.hear(sealed, state.swarm, now)
        self._next_at = now + state.tuning.heartbeat_s
        for peer in state.children():
            state.outbox.send(peer, HeartbeatNews(sealed))

    def send_if_due(self, now: float) -> None:
        if now >= self._next_at:
            self.send(now)
