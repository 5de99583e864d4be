"""What one process may send, hold and queue at most, counted apart from the product's own accounts."""

from typing import Any, Final

from scenarios.hunt.oracle import Oracle
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import (
    Effect,
    Event,
    Gave,
    LocalBudget,
    LocalChunk,
    SendBlob,
    SendBlock,
    SendHeader,
    SendPiece,
)
from swarm.runtime.sessions.blob_service import model_bytes

__all__ = ["Bounds"]

_QUEUE_MOST: Final = 5 << 20
_PIECES_MOST: Final = 80 << 20
"""Bytes: what `RuntimeLimits` allows of control messages for one peer and of pieces in memory, and one more message."""


class Bounds:
    """Of one process; it ends with the process, as the product's own accounts do."""

    def __init__(self, core: Any, oracle: Oracle, where: str) -> None:
        self._core, self._oracle, self._where = core, oracle, where
        self._copies = core.egress.copies if isinstance(core, Authority) else None
        self._made_bytes = model_bytes(oracle.layout)
        """Payload that there was to send: the model, and all versions since the start."""
        self._sent_bytes = 0
        self._spent = False
        """The core was told that this machine's day is used up."""

    def note_event(self, event: Event) -> None:
        """The core is about to be told of this."""
        if isinstance(event, LocalChunk):
            self._made_bytes += event.header.header_bytes + sum(event.header.piece_bytes)
        elif isinstance(event, Gave):
            self._sent(event.size_bytes)
        elif isinstance(event, LocalBudget):
            self._spent = event.spent

    def note_effect(self, effect: Effect) -> None:
        """The core decided this."""
        if isinstance(effect, SendHeader | SendPiece | SendBlob | SendBlock):
            self._oracle.check("daily limit kept", not self._spent, f"{self._where} sends content; its day is used up")
        if isinstance(effect, SendHeader | SendPiece):
            chunk = self._core.state.chunks.find(effect.key)
            if chunk is not None:
                self._sent(chunk.sizes[effect.index] if isinstance(effect, SendPiece) else chunk.header_bytes)

    def _sent(self, size_bytes: int) -> None:
        """The seed sends at most `--egress-copies` times the payload of all versions, and of the model."""
        self._sent_bytes += size_bytes
        if self._copies is not None:
            self._oracle.check(
                "egress within its cap",
                self._sent_bytes <= self._copies * self._made_bytes,
                f"{self._where} sent {self._sent_bytes} bytes: {self._copies:g} copies of {self._made_bytes} at most",
            )

    def check_memory(self, runtime: Any) -> None:
        """Check what the process holds: pieces, messages that wait for one peer, versions kept for others."""
        state, check = self._core.state, self._oracle.check
        pieces = runtime._store.chunks.memory_bytes
        check("memory bounded", pieces <= _PIECES_MOST, f"{self._where}: {pieces} bytes of pieces in memory")
        for session in runtime.peers:
            queued = session._queued_bytes
            check("memory bounded", queued <= _QUEUE_MOST, f"{self._where}: {queued} bytes wait for one peer")
        kept, most = len(state.manifests), state.tuning.retain_versions
        check("memory bounded", kept <= most, f"{self._where} keeps {kept} manifests")
        if state.held is not None:
            old = sum(id_ <= state.held and v.manifest is not None for id_, v in state.chunks.versions.items())
            check("memory bounded", old <= most, f"{self._where} keeps the chunks of {old} versions")
