"""The effects of the event that is being applied: every machine of a core puts what it asks for here.

A core has one `Outbox`, which each of its machines is given when it is built. No method takes a list of effects or
returns one, except the core's own `start` and `apply`, which hand the collected effects to the runtime. So effects
stand in the order in which the machines asked for them, whichever machine calls which.
"""

from swarm.protocol.core.events import Effect, Notify, Send
from swarm.protocol.core.notices import Notice
from swarm.protocol.core.wire import Message

__all__ = ["Outbox"]


class Outbox:
    """Effects in the order in which they were asked for. One per core."""

    def __init__(self) -> None:
        self.pending: list[Effect] = []
        """Not yet handed to the runtime. For reading."""

    def emit(self, effect: Effect) -> None:
        self.pending.append(effect)

    def send(self, peer: bytes, message: Message) -> None:
        """Send a control message to `peer`."""
        self.pending.append(Send(peer, message))

    def notify(self, notice: Notice) -> None:
        """Tell the application."""
        self.pending.append(Notify(notice))

    def take(self) -> list[Effect]:
        """Remove and return all pending effects."""
        taken = self.pending[:]
        self.pending.clear()
        return taken
