"""A machine of the council: it follows a leader, campaigns when there is none, and leads when a majority elects it.

Pure: `apply(event, now)` returns effects, which the runtime carries out one after another (see `events`). The rules are
Raft's (Ongaro and Ousterhout, 2014), with its vote in two rounds, and the lease of its leader (section 6.4.1 of
Ongaro's thesis). What differs: a log that does not fit is replaced by a snapshot as a whole, and a machine that
restarts elects nobody for a lease, since it may have promised one before.
"""

import math
import random
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from codec.errors import PeerError
from swarm.protocol.council.events import (
    AskedToHandOver,
    Ballot,
    CouncilEffect,
    CouncilEvent,
    CouncilHeard,
    Established,
    InstallSnapshot,
    Lead,
    Propose,
    Resign,
    SaveBallot,
    SendSnapshot,
    SendTo,
    SnapshotCame,
    StopLeading,
    StoreEntries,
    TakeOver,
    Tick,
    WakeAt,
)
from swarm.protocol.council.followers import Follower, Followers
from swarm.protocol.council.log_window import LogWindow
from swarm.protocol.council.messages import (
    START,
    Ack,
    Append,
    AskVote,
    CouncilMessage,
    Entry,
    HandOver,
    Position,
    Release,
    Vote,
)
from swarm.protocol.council.timing import Timing

__all__ = ["CouncilMachine", "Role"]


class Role(Enum):
    """What a machine is doing."""

    FOLLOWER = "follower"
    ASKING = "asking"
    """It asks whether it would be elected; nothing is stored yet."""
    CANDIDATE = "candidate"
    LEADER = "leader"


class CouncilMachine:
    """One machine of a council. `role`, `ballot`, `last` and `leader` may be read, and `may_lead` set.

    The machine that founds a council begins with a position after `START`, since it has a state; the others begin at
    `START`, campaign for nothing, and get that state as a snapshot.
    """

    def __init__(
        self,
        me: bytes,
        machines: Sequence[bytes],
        timing: Timing,
        rng: random.Random,
        ballot: Ballot,
        last: Position,
        *,
        now: float,
    ) -> None:
        """`machines`: the keys of all machines of the council, this one's (`me`) among them. `ballot`, `last`: as they
        are on disk. Raises `ValueError` when `me` is not among `machines`, or a key is there twice."""
        if me not in machines or len(set(machines)) != len(machines):
            raise ValueError("a council lists each of its machines once, this one among them")
        self.me = me
        self.ballot = ballot
        self.role = Role.FOLLOWER
        self.leader = b""
        """Key of the leader of `ballot.term`; empty: none is known."""
        self.may_lead = True
        """Whether its application could act as the leader; otherwise it campaigns for nothing, and elects others."""
        self._others = tuple(peer for peer in machines if peer != me)
        self._majority = len(machines) // 2 + 1
        self._timing, self._rng = timing, rng
        self._window = LogWindow(last)
        self._seen_term = ballot.term
        """The highest term that another machine has named."""
        self._promised_until = now + timing.lease_s  # a promise of the run before may still hold
        self._campaign_at = self._promised_until + rng.random() * timing.jitter_s
        self._wants_lead = False
        """Whether a person wants this machine to lead: it asks the leader at each of its messages."""
        self._votes: set[bytes] = set()
        self._wanted_term = 0
        """For which this machine asks, as `ASKING`."""
        self._followers = Followers((), last, now)
        self._leads = False
        """Whether `Lead` was emitted in this term."""
        self._established = 0
        self._elected_at = -math.inf
        self._next_beat = math.inf
        self._out: list[CouncilEffect] = []
        self._on_event: dict[type, Callable[[Any, float], None]] = {
            CouncilHeard: self._heard,
            Tick: lambda event, now: None,
            Propose: self._propose,
            SnapshotCame: self._snapshot_came,
            TakeOver: self._take_over,
            Resign: self._resign,
        }
        self._on_message: dict[type, Callable[[bytes, Any, float], None]] = {
            Append: self._append,
            Ack: self._ack,
            AskVote: self._ask_vote,
            Vote: self._vote,
            Release: self._release,
            HandOver: self._hand_over,
        }

    @property
    def last(self) -> Position:
        """The position of the newest entry that is stored here."""
        return self._window.last

    def is_leading(self, now: float) -> bool:
        """Whether this machine may act for the swarm at this time of its clock."""
        return self._leads and now < self.leads_until(now)

    def leads_until(self, now: float) -> float:
        """Until when this machine leads if no further message comes, by its clock; minus infinity: it does not."""
        if self.role is not Role.LEADER:
            return -math.inf
        return self._followers.lent_at(now) + self._timing.leads_s

    def start(self, now: float) -> list[CouncilEffect]:
        """The first effects."""
        return self.apply(Tick(), now)

    def apply(self, event: CouncilEvent, now: float) -> list[CouncilEffect]:
        """Apply one event; return its effects. Raises `PeerError` for a message that no machine of ours sends; the
        machine must not run on then."""
        self._check_time(now)
        self._on_event[type(event)](event, now)
        self._check_time(now)
        self._out.append(WakeAt(self._wakes_at(now)))
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ time

    def _wakes_at(self, now: float) -> float:
        if self.role is not Role.LEADER:
            return self._campaign_at
        return min(self._next_beat, self._leader_until(now))

    def _leader_until(self, now: float) -> float:
        """When this leader gives up, unless a majority answers: at the end of its lease, or a lease after it was
        elected, if it has not led yet."""
        return self.leads_until(now) if self._leads else self._elected_at + self._timing.lease_s

    def _check_time(self, now: float) -> None:
        if self.role is Role.LEADER:
            if now >= self._leader_until(now):
                self._follow(now, "no majority of the council has answered within a lease")
            elif now >= self._next_beat:
                self._beat(now)
        elif now >= self._campaign_at:
            if self.last > START and self.may_lead:
                self._ask(now)
            else:  # without any state there is nothing to lead
                self._campaign_at = self._pause(now)

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._timing.beat_s
        for peer, follower in self._followers:
            if follower.sent > follower.matched and now - follower.progress_at > self._timing.resend_s:
                follower.progress_at = now
                if self._window.has(follower.matched):
                    follower.sent = follower.matched
            self._append_to(peer, follower, now)

    def _pause(self, now: float) -> float:
        return now + 2 * self._timing.beat_s + self._rng.random() * self._timing.jitter_s

    # ------------------------------------------------------------ campaigns

    def _ask(self, now: float) -> None:
        """Ask the others whether they would elect this machine."""
        self.role, self.leader = Role.ASKING, b""
        self._wanted_term = max(self.ballot.term, self._seen_term) + 1
        self._votes = {self.me}
        self._campaign_at = self._pause(now)
        self._tell_all(AskVote(self._wanted_term, self.last, False))
        self._count_votes(now)

    def _count_votes(self, now: float) -> None:
        while len(self._votes) >= self._majority:
            if self.role is Role.ASKING:
                self.role = Role.CANDIDATE
                self._save(Ballot(self._wanted_term, self.me))
                self._votes = {self.me}
                self._tell_all(AskVote(self.ballot.term, self.last, True))
            else:
                self._become_leader(now)
                return

    def _ask_vote(self, peer: bytes, message: AskVote, now: float) -> None:
        known = self.ballot
        is_new = message.term > known.term
        granted = (
            now >= self._promised_until
            and now >= self.leads_until(now)
            and message.last >= self.last
            and (is_new or (message.binding and known == Ballot(message.term, peer)))
        )
        if granted and message.binding:
            self._follow(now, "another machine is elected")
            if is_new:
                self._save(Ballot(message.term, peer))
        self._tell(peer, Vote(message.term if granted else known.term, message.binding, granted))

    def _vote(self, peer: bytes, message: Vote, now: float) -> None:
        self._seen_term = max(self._seen_term, message.term)
        asked = {Role.ASKING: (self._wanted_term, False), Role.CANDIDATE: (self.ballot.term, True)}.get(self.role)
        if message.granted and asked == (message.term, message.binding):
            self._votes.add(peer)
            self._count_votes(now)

    def _become_leader(self, now: float) -> None:
        self.role, self.leader, self._wants_lead = Role.LEADER, self.me, False
        self._leads, self._elected_at = False, now
        self._established = 0
        self._followers = Followers(self._others, self.last, now)
        self._add_entry(b"", now)  # an entry of its own term: with it, all before it are established

    def _follow(self, now: float, why: str) -> None:
        """Be a follower, and campaign if nothing is heard of a leader for a while."""
        was_leading, was_leader = self._leads, self.role is Role.LEADER
        self.role, self.leader, self._leads = Role.FOLLOWER, b"", False
        self._followers = Followers((), self.last, now)
        self._next_beat = math.inf
        self._campaign_at = max(self._promised_until, self._pause(now))
        if was_leader and was_leading:
            self._out.append(StopLeading(why))

    def _save(self, ballot: Ballot) -> None:
        self.ballot = ballot
        self._out.append(SaveBallot(ballot))

    # ------------------------------------------------------------ following

    def _append(self, peer: bytes, message: Append, now: float) -> None:
        if message.term < self.ballot.term:
            self._tell(peer, Ack(self.ballot.term, 0.0, self.last, False))
            return
        self._hear_leader(peer, message.term, now)
        fits = message.before == self.last
        if fits or self.last.term == message.term:
            new = tuple(entry for entry in message.entries if entry.index > self.last.index)
            fits = message.before <= self.last
            if new and fits:
                self._window.add(new)
                self._out.append(StoreEntries(new))
        self._tell(peer, Ack(message.term, message.sent_at, self.last, not fits))
        if self._wants_lead and self.may_lead:
            self._tell(peer, HandOver(message.term))

    def _hear_leader(self, peer: bytes, term: int, now: float) -> None:
        """Follow the leader of `term`, and promise it a lease."""
        if term > self.ballot.term or self.role is not Role.FOLLOWER:
            if term == self.ballot.term and self.role is Role.LEADER:
                raise PeerError("append: of this machine's own term")
            self._follow(now, "another machine leads")
            if term > self.ballot.term:
                self._save(Ballot(term, b""))
        self.leader = peer
        self._promised_until = now + self._timing.lease_s
        self._campaign_at = self._promised_until + self._rng.random() * self._timing.jitter_s

    def _snapshot_came(self, event: SnapshotCame, now: float) -> None:
        if (event.term, event.peer) != (self.ballot.term, self.leader) or event.last <= self.last:
            return
        self._window = LogWindow(event.last)
        self._out.append(InstallSnapshot(event.peer, event.last))
        self._tell(event.peer, Ack(event.term, 0.0, self.last, False))

    def _release(self, peer: bytes, message: Release, now: float) -> None:
        if message.term != self.ballot.term or peer != self.leader:
            return
        self.leader = b""
        self._promised_until = now
        self._campaign_at = now if message.to == self.me else self._pause(now)
        self._check_time(now)

    def _take_over(self, event: TakeOver, now: float) -> None:
        self._wants_lead = self.role is not Role.LEADER
        if self.role is Role.FOLLOWER:
            self._campaign_at = max(now, self._promised_until)

    # ------------------------------------------------------------ leading

    def _propose(self, event: Propose, now: float) -> None:
        if self.role is Role.LEADER:
            self._add_entry(event.body, now)

    def _add_entry(self, body: bytes, now: float) -> None:
        entry = Entry(self.ballot.term, self.last.index + 1, body)
        self._window.add((entry,))
        self._out.append(StoreEntries((entry,)))
        self._next_beat = now + self._timing.beat_s
        for peer, follower in self._followers:
            if follower.matched >= follower.sent:
                follower.progress_at = now
            self._append_to(peer, follower, now)
        self._establish(now)

    def _append_to(self, peer: bytes, follower: Follower, now: float) -> None:
        """Send what the follower lacks, or a renewal."""
        if not self._window.has(follower.sent):
            self._send_snapshot(peer, follower, now)
            self._tell(peer, Append(self.ballot.term, now, self.last, ()))
            return
        before, entries = follower.sent, self._window.after(follower.sent)
        if entries:
            follower.sent = entries[-1].position
        self._tell(peer, Append(self.ballot.term, now, before, entries))

    def _send_snapshot(self, peer: bytes, follower: Follower, now: float) -> None:
        if now - follower.snapshot_at > self._timing.resend_s:
            follower.snapshot_at = now
            self._out.append(SendSnapshot(peer, self.ballot.term))

    def _ack(self, peer: bytes, message: Ack, now: float) -> None:
        self._seen_term = max(self._seen_term, message.term)
        if self.role is not Role.LEADER or message.term < self.ballot.term:
            return
        if message.term > self.ballot.term:
            self._follow(now, "another machine was elected")
            return
        follower = self._followers[peer]
        if message.sent_at:
            follower.lent_at = max(follower.lent_at, min(message.sent_at, now))
        if message.last.term == self.ballot.term or self._window.has(message.last):
            if message.last > follower.matched:
                follower.matched, follower.progress_at = message.last, now
            follower.sent = max(follower.sent, follower.matched)
            if message.gap and message.sent_at >= follower.rewound_at:
                follower.sent, follower.rewound_at = follower.matched, now
            if follower.sent < self.last:
                self._append_to(peer, follower, now)
        else:
            self._send_snapshot(peer, follower, now)
        self._establish(now)

    def _establish(self, now: float) -> None:
        """Tell the application what a majority has stored. An entry of an older term counts only with one of this term
        after it (Raft, section 5.4.2)."""
        index = self._followers.stored_by_majority(self.last.index)
        if index <= self._established or not self._window.is_of_term(index, self.ballot.term):
            return
        if not self._leads:
            if now >= self.leads_until(now):
                return
            self._leads = True
            self._out.append(Lead(self.ballot.term))
        self._established = index
        self._out.append(Established(index))

    def _hand_over(self, peer: bytes, message: HandOver, now: float) -> None:
        """Hand over to a machine that follows this log: what it lacks is on its way, before the `Release`."""
        in_step = self.is_leading(now) and self._followers[peer].matched.term == self.ballot.term
        if message.term == self.ballot.term and in_step:
            self._out.append(AskedToHandOver(peer))

    def _resign(self, event: Resign, now: float) -> None:
        if self.role is not Role.LEADER:
            return
        self._leads = False
        self._follow(now, "")
        self._campaign_at = now + self._timing.lease_s + self._rng.random() * self._timing.jitter_s
        self._tell_all(Release(self.ballot.term, event.to))

    # ------------------------------------------------------------ messages

    def _heard(self, event: CouncilHeard, now: float) -> None:
        if event.peer in self._others:
            self._on_message[type(event.message)](event.peer, event.message, now)

    def _tell(self, peer: bytes, message: CouncilMessage) -> None:
        self._out.append(SendTo(peer, message))

    def _tell_all(self, message: CouncilMessage) -> None:
        for peer in self._others:
            self._tell(peer, message)
