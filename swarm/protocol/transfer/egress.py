"""The egress budget: a hard cap on what the trainer sends (`--egress-copies`), kept even if the swarm must wait.

Of each version the trainer may send `copies` times the payload. Of the model it may send `copies` times the size, to
members that catch up and find it nowhere else. Each chunk brings the budget for its own first copy, so a first copy can
always be sent. Further copies (for a child that lost its parent, or a member that pulls) are charged to the newest
version, which has `copies` - 1 times its payload so far for them. What is left of that when the next version begins is
added to the model's account.

A part whose only holders have left the swarm would delay its version for ever. So half of the budget for further copies
is reserved (`KEPT_BACK`) for such parts, and when it is used up the model's account pays: without the part nobody could
follow, so no next version might ever bring a budget. The trainer is asked last, so when it is asked, no other holder is
known. A holder that asks for the same part again has lost it, as after a power failure, or it never arrived, as when a
session ended first: it counts as gone. It is believed once in a session, so that it cannot use up the budget by asking,
or because it is impatient. Holders from before the trainer's start count as gone too,
until the part has been sent again.

Only payload is counted: headers and pieces, blocks and files; not heartbeats, plans and the framing of TLS.
"""

from dataclasses import dataclass

import msgspec

from codec import ChunkKey

__all__ = ["KEPT_BACK", "Egress", "EgressStatus"]

Attempt = tuple[int, int, int]
"""(epoch, version, attempt). Each attempt at a version has its own account."""
KEPT_BACK = 0.5
"""Share of the budget for further copies that is reserved for parts whose holders have all left the swarm."""
_HEADER = -1
"""The index of a chunk's header."""
_KEPT = 4
"""Attempts whose copies are remembered: more are never in flight."""


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
    """Model blocks, hash lists and files sent to members that catch up, and parts of versions that were sent again at
    the cost of the model's account, since the start."""
    model_left_bytes: int | None = None
    """What may still be sent of those; None: no cap."""
    refused: int = 0
    """Requests for this version, or for model blocks since it was begun, that the cap did not allow."""


@dataclass(slots=True)
class _Account:
    """The account of one attempt at a version, in payload bytes."""

    made: int = 0
    """Sealed so far."""
    sent: int = 0
    spare: float = 0.0
    """Left for further copies, while this is the newest attempt."""
    rescued: int = 0
    """Of `sent`: further copies of parts whose holders had left."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of one part of a chunk: its receiver, and the account that paid. `rescue`: all holders had left."""

    peer: bytes
    payer: Attempt | None
    """None: the model's account."""
    rescue: bool = False
    session: int = 0
    """The number of the session with the receiver (see `Egress._sessions`)."""


class Egress:
    """Accounts for everything that the trainer sends. Not safe to share between threads."""

    def __init__(self, copies: float | None = None, model_bytes: int = 0) -> None:
        """`copies`: at least 1; None counts without a limit. `model_bytes`: size of the whole model."""
        if copies is not None and copies < 1:
            raise ValueError("copies must be at least 1: with less, no version could be sent")
        self.copies = copies
        self._model_most = model_bytes * (copies or 0.0)
        self._model_spare = self._model_most
        self._model_sent = 0
        self._accounts: dict[Attempt, _Account] = {}
        self._copies: dict[ChunkKey, dict[int, list[_Copy]]] = {}
        """The copies of each part (-1: the header) of each chunk. The chunk's own attempt paid for the first."""
        self._gone: set[bytes] = set()
        """Peers that got copies and have left."""
        self._sessions: dict[bytes, int] = {}
        """By peer: how many of its sessions have ended since it got a copy that is remembered."""
        self._refused = 0

    # ------------------------------------------------------------ versions

    def add_chunk(self, key: ChunkKey, size: int) -> None:
        """A chunk of `size` bytes, header included, is sealed and about to be assigned."""
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
        holders = {copy.peer for parts in self._copies.values() for part in parts.values() for copy in part}
        self._gone &= holders
        self._sessions = {peer: ended for peer, ended in self._sessions.items() if peer in holders}

    def pay_for_part(self, key: ChunkKey, index: int, size: int, peer: bytes) -> bool:
        """Pay for a copy of a part of a chunk for `peer`; whether the budget allows it."""
        if not self._accounts:  # no version was published since the start: charge the model's account
            return self.pay_for_model(size)
        rescue, made = self._holders_left(key, index, peer), key in self._copies and key[:3] in self._accounts
        copies = self._copies.setdefault(key, {}).setdefault(index, [])
        first = made and not copies
        payer = key[:3] if first else next(reversed(self._accounts))
        account = self._accounts[payer]
        if not first and self.copies is not None:
            kept = 0.0 if rescue else KEPT_BACK * (self.copies - 1) * account.made - account.rescued
            if size > account.spare - max(0.0, kept):
                if not rescue or not self.pay_for_model(size):
                    self._refused += not rescue
                    return False
                copies.append(_Copy(peer, None, rescue, self._sessions.get(peer, 0)))
                return True
            account.spare -= size
        copies.append(_Copy(peer, payer, rescue, self._sessions.get(peer, 0)))
        account.sent += size
        account.rescued += size if rescue else 0
        return True

    def _holders_left(self, key: ChunkKey, index: int, asks: bytes) -> bool:
        """Whether all peers that got this part have left or lost it, while `asks` asks for it. For a header: whether
        that is so for any part. Peers that got it before the trainer's start, or long ago, are not remembered, and
        count as gone."""
        parts = self._copies.get(key, {})
        asked = parts.values() if index == _HEADER else [parts.get(index, [])]
        if key[:3] not in self._accounts and not any(asked):
            return True
        return any(part and all(self._has_lost(copy.peer, part, asks) for copy in part) for part in asked)

    def _has_lost(self, peer: bytes, part: list[_Copy], asks: bytes) -> bool:
        session = self._sessions.get(peer, 0)
        sent = sum(copy.peer == peer and copy.session == session for copy in part)
        return peer in self._gone or (peer == asks and sent <= 1)

    def peer_left(self, peer: bytes) -> None:
        """The session with this peer has ended: parts that only it got may be lost."""
        self._gone.add(peer)
        self._sessions[peer] = self._sessions.get(peer, 0) + 1

    def peer_connected(self, peer: bytes) -> None:
        """The peer is connected (again), and has what it got."""
        self._gone.discard(peer)

    def refund_part(self, key: ChunkKey, index: int, size: int, peer: bytes) -> None:
        """Refund a copy that was paid for and not sent."""
        copies = self._copies.get(key, {}).get(index, [])
        paid = next((copy for copy in reversed(copies) if copy.peer == peer), None)
        if paid is None:
            return  # too long ago to be remembered
        copies.remove(paid)
        if paid.payer is None:
            self._model_sent -= size
            self._model_spare = min(self._model_spare + size, self._model_most)
            return
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

    def pay_for_model(self, size: int) -> bool:
        """Pay for a block, hash list or file of `size` bytes for a catch-up; whether the budget allows it."""
        if self.copies is not None:
            if size > self._model_spare:
                self._refused += 1
                return False
            self._model_spare -= size
        self._model_sent += size
        return True

    # ------------------------------------------------------------ status

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
