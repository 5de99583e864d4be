"""What the trainer may send (`--egress-copies`): a hard cap, kept even if the swarm must wait.

Of each version it may send `copies` times its payload; of the model, to those who catch up and find it nowhere else,
`copies` times its size. A chunk pays for its first copy as it is made, so that what leaves once can always leave; what
is sent a second time (to a child that lost its parent, to one that pulls) is paid for by the newest version, which has
`copies` - 1 times its payload so far for that. What is over when the next version begins goes to the model's account.

Payload is counted: headers and pieces, blocks and files. Heartbeats, plans and the frames of TLS are not.
"""

from dataclasses import dataclass
from typing import Any

from codec import ChunkKey

__all__ = ["Egress"]

Attempt = tuple[int, int, int]
"""(epoch, version, attempt): each attempt at a version has its own account."""
_KEPT = 4
"""Attempts of which it is known what has left: more are never on their way."""


@dataclass(slots=True)
class _Account:
    """Of one attempt at a version; payload bytes."""

    made: int = 0
    sent: int = 0
    spare: float = 0.0
    """For second copies, as long as it is the newest."""


class Egress:
    """`copies` None: no limit, but counted all the same. `model_bytes`: of the whole model."""

    def __init__(self, copies: float | None = None, model_bytes: int = 0) -> None:
        if copies is not None and copies < 1:
            raise ValueError("with less than one copy nobody would get anything")
        self.copies = copies
        self._model_most = model_bytes * (copies or 0.0)
        self._model_spare = self._model_most
        self._model_sent = 0
        self._accounts: dict[Attempt, _Account] = {}
        self._payers: dict[ChunkKey, dict[int, list[Attempt]]] = {}
        """By part of a chunk (-1: its header), who paid for each copy of it. The first is the chunk's own attempt."""
        self._refused = 0

    # ------------------------------------------------------------ versions

    def made(self, key: ChunkKey, size: int) -> None:
        """A chunk of this size, header included, is sealed and about to be dealt."""
        if key[:3] not in self._accounts:
            self._begin(key[:3])
        account = self._accounts[key[:3]]
        self._payers[key] = {}
        account.made += size
        account.spare += ((self.copies or 1.0) - 1) * size

    def _begin(self, attempt: Attempt) -> None:
        for account in self._accounts.values():
            self._model_spare += account.spare
            account.spare = 0.0
        self._model_spare = min(self._model_spare, self._model_most)
        self._refused = 0
        self._accounts[attempt] = _Account()
        while len(self._accounts) > _KEPT:
            del self._accounts[next(iter(self._accounts))]
        self._payers = {key: parts for key, parts in self._payers.items() if key[:3] in self._accounts}

    def take(self, key: ChunkKey, index: int, size: int) -> bool:
        """Whether this part of a chunk may be queued for one more peer; if so, it is paid for."""
        parts = self._payers.get(key)
        payers = [] if parts is None else parts.setdefault(index, [])
        if parts is not None and not payers:
            payer = key[:3]
        elif not self._accounts:  # nothing was made since our start: what is left of earlier runs is of the model
            return self.take_of_model(size)
        else:
            payer = next(reversed(self._accounts))
            account = self._accounts[payer]
            if self.copies is not None and size > account.spare:
                self._refused += 1
                return False
            account.spare -= size if self.copies is not None else 0
        payers.append(payer)
        self._accounts[payer].sent += size
        return True

    def back(self, key: ChunkKey, index: int, size: int) -> None:
        """A copy of it was paid for, and did not leave."""
        payers = self._payers.get(key, {}).get(index, [])
        if not payers:
            return  # of long ago
        account = self._accounts.get(payers.pop())
        if account is None:
            return
        account.sent -= size
        if payers and self.copies is not None:
            if account is self._accounts[next(reversed(self._accounts))]:
                account.spare += size
            else:
                self._model_spare = min(self._model_spare + size, self._model_most)

    # ------------------------------------------------------------ the model

    def take_of_model(self, size: int) -> bool:
        """Whether a block, list or file of this size may be given to somebody who catches up."""
        if self.copies is not None:
            if size > self._model_spare:
                self._refused += 1
                return False
            self._model_spare -= size
        self._model_sent += size
        return True

    # ------------------------------------------------------------ for people

    def state(self) -> dict[str, Any]:
        """Plain values: `copies` (None: no cap); of the newest version `sent_bytes` and `budget_bytes`; of the model
        `model_sent_bytes` and `model_left_bytes`; `refused`: how often somebody had to go without since then."""
        newest = next(reversed(self._accounts), None)
        account = _Account() if newest is None else self._accounts[newest]
        return {
            "copies": self.copies,
            "version": None if newest is None else [newest[0], newest[1]],
            "payload_bytes": account.made,
            "sent_bytes": account.sent,
            "budget_bytes": None if self.copies is None else int(self.copies * account.made),
            "model_sent_bytes": self._model_sent,
            "model_left_bytes": None if self.copies is None else int(self._model_spare),
            "refused": self._refused,
        }
