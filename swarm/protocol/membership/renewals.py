"""A member's renewals: reports over the newest heartbeat, signed, and how they climb to the authority.

Each report goes up two trees, others for each heartbeat; every node on the way gathers what comes in for
`report_batch_s` and passes it on once. Nobody can forge one, and an old one renews nothing.
"""

from collections.abc import Iterable, Iterator
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
"""Reports that we put into one message, of about 300 bytes each. To verify them takes whoever gets them 17 ms."""
TOLD_TIMES = 3
"""What was given to whom is said in so many reports, of which one will arrive; the next gift says it again."""


def batched(items: Iterable[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    """The items in tuples of at most `size`."""
    left = iter(items)
    while batch := tuple(islice(left, size)):
        yield batch


@dataclass(slots=True)
class Account:
    """What the face tells us to say of ourselves in reports."""

    engine: str = ""
    engine_version: VersionId = VersionId(0, 0)  # noqa: RUF009 - a tuple cannot be changed
    sent_bytes: int = 0
    received_bytes: int = 0
    tokens_s: float = 0.0


class Renewals:
    """Our own reports, and those that climb through us."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.account = Account()
        self._catching_up = 0.0
        """How much of the model we have; 1: all."""
        self._saving = False
        """What we may send today is as good as used up."""
        self._fetched_bytes = 0
        self._gave: dict[bytes, int] = {}
        """Bytes of blocks by peer, since our grant."""
        self._untold: dict[bytes, int] = {}
        """Of whom it is still to be said, and how often."""
        self._counter = 0
        self._climbing: dict[int, dict[int, bytes]] = {}
        """Reports to pass on, sealed, by stripe and slot."""
        self._climbed: dict[tuple[int, int], tuple[int, int]] = {}
        """By stripe and slot, the newest report that we passed on: (serial of the grant, counter)."""
        self._climb_at = 0.0

    def begin(self) -> None:
        """We have a new grant: all is counted from here on."""
        self._counter = self._fetched_bytes = 0
        self._gave.clear()
        self._untold.clear()

    def note_progress(self, fraction: float) -> None:
        """We have so much of the model, 0 to 1: what reports say from now on."""
        self._catching_up = fraction

    def note_saving(self, saving: bool) -> bool:
        """What we may send today is as good as used up, or not any more; True when that is news."""
        news, self._saving = self._saving != saving, saving
        return news

    def new_roster(self, roster: Roster) -> None:
        """What was kept of those who are gone may go."""
        self._climbed = {(k, s): n for (k, s), n in self._climbed.items() if roster.member(s) is not None}
        for peer in [p for p in self._gave if roster.member_of(p) is None]:
            del self._gave[peer]
            self._untold.pop(peer, None)

    # ------------------------------------------------------------ blocks, which tickets may limit

    def fetched(self, size: int) -> None:
        """So many bytes of blocks, lists and files came."""
        self._fetched_bytes += size

    def gave(self, peer: bytes, size: int) -> None:
        """And so many left for `peer`."""
        self._gave[peer] = self._gave.get(peer, 0) + size
        self._untold[peer] = TOLD_TIMES

    def _uploads(self) -> tuple[tuple[int, int], ...]:
        """Those that are to be told, by slot."""
        roster = self._state.roster
        made: list[tuple[int, int]] = []
        for peer, times in list(self._untold.items())[:MAX_UPLOADS]:
            del self._untold[peer]
            if times > 1:
                self._untold[peer] = times - 1  # at the end: the others' turn
            if roster is not None and (member := roster.member_of(peer)) is not None:
                made.append((member.slot, self._gave[peer]))
        return tuple(made)

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
        """Sign a report over the last heartbeat and start it up two trees (which ones: `turn`)."""
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
            self._climb(stripe, grant.slot, (grant.serial, self._counter), sealed, now)
        return sealed

    def climb(self, session: Session, message: Reports, now: float) -> None:
        """A child's reports: on to our own parent of that stripe, if they are of the holders of their slots.

        A neighbour that is not our child in that stripe brings its own report only. Raises `PeerError` for a forged
        one: whoever passes reports on verifies them first, so the neighbour that brought it forged it.
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
                self._climb(message.stripe, report.slot, (report.grant, report.counter), sealed, now)

    def farewell(self, session: Session, release: bytes, now: float) -> None:
        """A neighbour leaves: its release climbs on a stripe that does not hang on it, if it cannot reach the authority
        itself."""
        edges = self._state.exchange.parents
        stripe = next((k for k in sorted(edges) if edges[k].peer != session.peer), None)
        if stripe is not None:
            self.climb(session, Reports(stripe, (release,)), now)

    def _climb(self, stripe: int, slot: int, number: tuple[int, int], sealed: bytes, now: float) -> None:
        if self._climbed.get((stripe, slot), (-1, -1)) >= number:
            return
        if not self._climbing:
            self._climb_at = now + self._state.tuning.report_batch_s
        self._climbed[stripe, slot] = number
        self._climbing.setdefault(stripe, {})[slot] = sealed

    def tick(self, now: float) -> None:
        """Pass on what was gathered, when it is time."""
        if not self._climbing or now < self._climb_at:
            return
        state = self._state
        for stripe, reports in sorted(self._climbing.items()):
            edge = state.exchange.parents.get(stripe)
            parent = edge.peer if edge is not None else state.swarm
            if state.sessions.ready(parent):
                for batch in batched(reports.values(), REPORTS_A_MESSAGE):
                    state.outbox.send(parent, Reports(stripe, batch))
        self._climbing.clear()
