"""What the trainer may send (`--egress-copies`): a hard cap, kept even if the swarm must wait.

Of each version it may send `copies` times its payload; of the model, to those who catch up and find it nowhere else,
`copies` times its size. A chunk pays for its first copy as it is made, so that what leaves once can always leave; what
is sent a second time (to a child that lost its parent, to one that pulls) is paid for by the newest version, which has
`copies` - 1 times its payload so far for that. What is over when the next version begins goes to the model's account.

What left once and died with all whom we gave it would hold its version up for ever. So half of what may be sent a
second time is kept back (`KEPT_BACK`) for parts of chunks that only peers were given that are gone since. We are asked
last, so by then nobody else is known to have them. With `copies` 1 there is nothing to keep: they wait for a holder.

Payload is counted: headers and pieces, blocks and files. Heartbeats, plans and the frames of TLS are not.
"""

from dataclasses import dataclass

import msgspec

from codec import ChunkKey

__all__ = ["KEPT_BACK", "Egress", "EgressStatus"]

Attempt = tuple[int, int, int]
"""(epoch, version, attempt): each attempt at a version has its own account."""
KEPT_BACK = 0.5
"""Of what may be sent a second time: only for what died with its only holders. What slow peers pull takes the rest."""
_HEADER = -1
_KEPT = 4
"""Attempts of which it is known what has left: more are never on their way."""


class EgressStatus(msgspec.Struct, kw_only=True):
    """What the seed sent and may still send, as `node.status.schema` shows it. Payload bytes of the newest version."""

    copies: float | None = None
    """The cap (`--egress-copies`), in multiples of a version's payload; None: no cap."""
    version: tuple[int, int] | None = None
    """(epoch, version) that the counts are of; None: none was published since the start."""
    payload_bytes: int = 0
    """Of the version's chunks."""
    sent_bytes: int = 0
    budget_bytes: int | None = None
    """What may be sent of this version; None: no cap."""
    rescued_bytes: int = 0
    """Of `sent_bytes`: sent a second time, because all holders were gone."""
    model_sent_bytes: int = 0
    """Model blocks, hash lists and files sent to members that catch up, since the start."""
    model_left_bytes: int | None = None
    """What may still be sent of those; None: no cap."""
    refused: int = 0
    """Requests for this version, or for model blocks since it was begun, that the cap did not allow."""


@dataclass(slots=True)
class _Account:
    """Of one attempt at a version; payload bytes."""

    made: int = 0
    sent: int = 0
    spare: float = 0.0
    """For second copies, as long as it is the newest."""
    rescued: int = 0
    """Of what was sent: a second time, because its holders died."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Of one part of a chunk: to whom it went, and who paid for it."""

    peer: bytes
    payer: Attempt
    rescue: bool = False


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
        self._copies: dict[ChunkKey, dict[int, list[_Copy]]] = {}
        """By part of a chunk (-1: its header). The chunk's own attempt paid for the first."""
        self._gone: set[bytes] = set()
        self._refused = 0

    # ------------------------------------------------------------ versions

    def made(self, key: ChunkKey, size: int) -> None:
        """A chunk of this size, header included, is sealed and about to be dealt."""
        if key[:3] not in self._accounts:
            self._begin(key[:3])
        account = self._accounts[key[:3]]
        self._copies[key] = {}
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
        self._copies = {key: parts for key, parts in self._copies.items() if key[:3] in self._accounts}
        self._gone &= {copy.peer for parts in self._copies.values() for part in parts.values() for copy in part}

    def take(self, key: ChunkKey, index: int, size: int, peer: bytes) -> bool:
        """Whether this part of a chunk may be queued for `peer`; if so, it is paid for."""
        if not self._accounts:  # nothing was made since our start: what is left of earlier runs is of the model
            return self.take_of_model(size)
        parts = self._copies.get(key)
        copies = [] if parts is None else parts.setdefault(index, [])
        first = parts is not None and not copies
        copy = _Copy(peer, key[:3] if first else next(reversed(self._accounts)), self._died(key, index))
        account = self._accounts[copy.payer]
        if not first and self.copies is not None:
            kept = 0.0 if copy.rescue else KEPT_BACK * (self.copies - 1) * account.made - account.rescued
            if size > account.spare - max(0.0, kept):
                self._refused += 1
                return False
            account.spare -= size
        copies.append(copy)
        account.sent += size
        account.rescued += size if copy.rescue else 0
        return True

    def _died(self, key: ChunkKey, index: int) -> bool:
        """All whom we gave it are gone. A header goes with any such piece."""
        parts = self._copies.get(key, {})
        asked = parts.values() if index == _HEADER else [parts.get(index, [])]
        return any(part and all(copy.peer in self._gone for copy in part) for part in asked)

    def gone(self, peer: bytes) -> None:
        """The session with this peer has ended: what it alone was given may be lost."""
        self._gone.add(peer)

    def here(self, peer: bytes) -> None:
        """It is with us (again), with what it was given."""
        self._gone.discard(peer)

    def back(self, key: ChunkKey, index: int, size: int, peer: bytes) -> None:
        """A copy of it was paid for, for `peer`, and did not leave."""
        copies = self._copies.get(key, {}).get(index, [])
        paid = next((copy for copy in reversed(copies) if copy.peer == peer), None)
        if paid is None:
            return  # of long ago
        copies.remove(paid)
        account = self._accounts.get(paid.payer)
        if account is None:
            return
        account.sent -= size
        if paid.rescue:
            account.rescued -= size
        if copies and self.copies is not None:
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

    def status(self) -> EgressStatus:
        """For people and programs."""
        newest = next(reversed(self._accounts), None)
        account = _Account() if newest is None else self._accounts[newest]
        return EgressStatus(
            copies=self.copies,
            version=None if newest is None else (newest[0], newest[1]),
            payload_bytes=account.made,
            sent_bytes=account.sent,
            budget_bytes=None if self.copies is None else int(self.copies * account.made),
            rescued_bytes=account.rescued,
            model_sent_bytes=self._model_sent,
            model_left_bytes=None if self.copies is None else int(self._model_spare),
            refused=self._refused,
        )
