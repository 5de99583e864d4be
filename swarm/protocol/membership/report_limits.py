"""The limits on the reports that a neighbour may have the authority or a member verify."""

from swarm.protocol.membership.session import Session

__all__ = ["REPORTS_TAKEN", "may_verify"]

REPORTS_TAKEN = 1024
"""Reports that are read of one message: as many as members of earlier releases put into one."""
REPORTS_A_MEMBER = 3
"""Reports of each member that one neighbour may send us between two heartbeats, on average: one up each of two trees,
and one when the member holds a new version."""


def may_verify(session: Session, members: int, heartbeat_s: float, now: float) -> bool:
    """Whether this neighbour may have us verify the signature of one more report (0.13 ms).

    The rate is what a swarm of `members` members has to say between two heartbeats; the burst is twice that.
    """
    a_beat = REPORTS_A_MEMBER * (members + 8)
    session.reports.rate, session.reports.burst = a_beat / heartbeat_s, 2.0 * a_beat
    return session.reports.take(1, now)
