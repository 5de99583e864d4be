"""Renewals: signed reports over the newest heartbeat, which renew a member's lease, and their way to the authority.

Each report goes up two trees, which rotate with each heartbeat. Every node on the way collects reports for
`report_batch_s` and forwards them together. Reports are signed, and a report over an old heartbeat renews nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from swarm.protocol.core.documents import MAX_UPLOADS, Link, Report, claimed_reporter, open_report, seal
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Reports
from swarm.protocol.membership.report_limits import REPORTS_TAKEN, may_verify
from swarm.protocol.membership.roster import Roster
from swarm.protocol.membership.session import Session
from swarm.protocol.state import State

__all__ = ["Account", "Renewals"]

REPORTS_A_MESSAGE = 128
"""Reports in one message, of about 300 bytes each. The receiver takes 17 ms to verify them."""
TOLD_TIMES = 3
"""An upload total is repeated in this number of reports, so that one arrives; and again after the next upload."""


def batched(items: Iterable[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    """The items in tuples of at most `size`."""
    left = iter(items)
    while batch := tuple(islice(left, size)):
        yield batch


@dataclass(slots=True)
class Account:
    """What the application tells the member to report of itself."""

    engine: str = ""
    engine_version: VersionId = VersionId(0, 0)  # noqa: RUF009 - a tuple cannot be changed
    sent_bytes: int = 0
    received_bytes: int = 0
    tokens_s: float = 0.0


class Renewals:
    """A member's own reports, and those that it forwards."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._account = Account()
        self.fill_account: Callable[[Account], None] = lambda account: None
        """Brings the account up to date; the application sets it. It is called whenever the account is read."""
        self._catching_up = 0.0
        """The share of the model that we have, 0 to 1."""
        self._saving = False
        """Whether the daily upload limit is nearly used up."""
        self._fetched_bytes = 0
        self._gave: dict[bytes, int] = {}
        """Bytes of blocks given to each peer since our grant."""
        self._untold: dict[bytes, int] = {}
        """Peers whose total is to be reported, and how often."""
        self._counter = 0
        self._to_forward: dict[int, dict[int, bytes]] = {}
        """Sealed reports to forward, by stripe and slot."""
        self._queued: dict[tuple[int, int], tuple[int, int]] = {}
        """By stripe and slot, the newest report that was queued to forward: (serial of the grant, counter)."""
        self._queued_before: dict[tuple[int, int], tuple[int, int]] = {}
        """What `_queued` was until `_queued_since`, less what has been queued again. A report that comes again after
        that is forwarded again, which harms nobody: the authority knows the counter."""
        self._queued_since = float("-inf")
        self._forward_at = 0.0

    @property
    def account(self) -> Account:
        self.fill_account(self._account)
        return self._account

    def begin(self) -> None:
        """There is a new grant: all totals restart at zero."""
        self._counter = self._fetched_bytes = 0
        self._gave.clear()
        self._untold.clear()

    def note_progress(self, fraction: float) -> None:
        """Set the share of the model that we have, 0 to 1, for later reports."""
        self._catching_up = fraction

    def note_saving(self, saving: bool) -> bool:
        """Set whether the daily upload limit is nearly used up; True if that changed."""
        news, self._saving = self._saving != saving, saving
        return news

    def new_roster(self, roster: Roster) -> None:
        """Forget members that have left the roster."""
        for queued in (self._queued, self._queued_before):
            for key in [key for key in queued if roster.member(key[1]) is None]:
                del queued[key]
        for peer in [p for p in self._gave if roster.member_of(p) is None]:
            del self._gave[peer]
            self._untold.pop(peer, None)

    # ------------------------------------------------------------ blocks, for the quotas of tickets

    def fetched(self, size: int) -> None:
        """`size` bytes of blocks, hash lists or files came."""
        self._fetched_bytes += size

    def gave(self, peer: bytes, size: int) -> None:
        """`size` bytes of them were given to `peer`."""
        self._gave[peer] = self._gave.get(peer, 0) + size
        self._untold[peer] = TOLD_TIMES

    def _uploads(self) -> tuple[tuple[int, int], ...]:
        """The upload totals to report now: (slot, bytes)."""
        roster = self._state.roster
        totals: list[tuple[int, int]] = []
        for peer, times in list(self._untold.items())[:MAX_UPLOADS]:
            del self._untold[peer]
            if times > 1:
                self._untold[peer] = times - 1  # moves to the end, so that the others get their turn
            if roster is not None and (member := roster.member_of(peer)) is not None:
                totals.append((member.slot, self._gave[peer]))
        return tuple(totals)

    # ------------------------------------------------------------ reports

    def report(
        self,
        now: float,
        *,
        turn: int | None = None,
        leaving: bool = False,
        lost: tuple[int, ...] = (),
        links: tuple[Link, ...] = (),
    ) -> bytes:
        """Sign a report over the newest heartbeat and send it up two trees, which `turn` selects."""
        state = self._state
        grant, heartbeat = state.grant, state.leases.heartbeat
        if grant is None or heartbeat is None:
            return b""
        self._counter += 1
        held = state.held or VersionId(0, 0)
        account = self.account
        sealed = seal(
            Report(
                state.swarm, state.key.public, grant.slot, grant.serial, self._counter,
                state.leases.hash, held.epoch, held.version, account.engine_version.epoch,
                account.engine_version.version, account.engine, account.sent_bytes, account.received_bytes,
                account.tokens_s, leaving, self._catching_up, lost, links, self._fetched_bytes, self._uploads(),
                self._saving,
            ),
            state.key,
        )  # fmt: skip
        stripes = state.roster.stripes if state.roster is not None else 1
        turn = heartbeat.serial if turn is None else turn
        for stripe in sorted({turn % stripes, (turn + 1) % stripes}):
            self._queue_report(stripe, grant.slot, (grant.serial, self._counter), sealed, now)
        return sealed

    def forward_reports(self, session: Session, message: Reports, now: float) -> None:
        """Take a child's reports, to forward them to our parent of that stripe if their authors hold their slots.

        A neighbour that is not our child in that stripe may send only its own report. Raises `PeerError` for a forged
        report: every node verifies reports before it forwards them, so the neighbour that sent it is to blame.
        """
        roster = self._state.roster
        if roster is None or message.stripe >= roster.stripes:
            return
        is_child = session.peer in self._state.exchange.children.get(message.stripe, {})
        for sealed in message.reports[:REPORTS_TAKEN]:
            author = claimed_reporter(sealed)
            holder = roster.member_of(author)
            if holder is None or (author != session.peer and not is_child):
                continue
            if not may_verify(session, len(roster.members), self._state.tuning.heartbeat_s, now):
                return
            report = open_report(sealed, self._state.swarm)
            if holder.slot == report.slot:
                self._queue_report(message.stripe, report.slot, (report.grant, report.counter), sealed, now)

    def forward_release(self, session: Session, release: bytes, now: float) -> None:
        """Forward the release of a neighbour that leaves, up a stripe in which it is not our parent.

        It may have no session with the authority itself.
        """
        edges = self._state.exchange.parents.edges
        stripe = next((k for k in sorted(edges) if edges[k].peer != session.peer), None)
        if stripe is not None:
            self.forward_reports(session, Reports(stripe, (release,)), now)

    def _queue_report(self, stripe: int, slot: int, number: tuple[int, int], sealed: bytes, now: float) -> None:
        key = stripe, slot
        if (self._queued.get(key) or self._queued_before.get(key, (-1, -1))) >= number:
            return
        if now - self._queued_since > self._state.tuning.hard_ttl_s:
            self._queued, self._queued_before, self._queued_since = {}, self._queued, now
        if not self._to_forward:
            self._forward_at = now + self._state.tuning.report_batch_s
        self._queued_before.pop(key, None)
        self._queued[key] = number
        self._to_forward.setdefault(stripe, {})[slot] = sealed

    @property
    def has_to_forward(self) -> bool:
        """Whether reports wait to be forwarded."""
        return bool(self._to_forward)

    def tick(self, now: float) -> None:
        """Forward the collected reports when they are due."""
        if not self._to_forward or now < self._forward_at:
            return
        state = self._state
        for stripe, reports in sorted(self._to_forward.items()):
            edge = state.exchange.parents.edges.get(stripe)
            parent = edge.peer if edge is not None else state.swarm
            if state.sessions.ready(parent):
                for batch in batched(reports.values(), REPORTS_A_MESSAGE):
                    state.outbox.send(parent, Reports(stripe, batch))
        self._to_forward.clear()
