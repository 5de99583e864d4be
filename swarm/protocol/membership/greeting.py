"""Greetings and news between neighbours, and answers to requests for the roster."""

from swarm.protocol.core.reach import Located, direct
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import HeartbeatNews, Hello, ManifestNews, RosterNews, RosterStep, WantRoster
from swarm.protocol.membership.roster import Roster
from swarm.protocol.membership.session import Session
from swarm.protocol.state import State

__all__ = ["give_roster", "greet", "pass_on", "reach_out", "share_news"]

STEPS_AT_ONCE = 16
"""Upper bound of the roster changes in answer to a greeting; a peer that lacks more requests them."""


def greet(state: State, peer: bytes) -> None:
    """Send a hello: our grant, and the newest roster, heartbeat and version that we know."""
    heartbeat, roster = state.leases.heartbeat, state.roster
    held = state.held or VersionId(0, 0)
    state.outbox.send(
        peer,
        Hello(
            state.sealed_grant,
            roster.stamp if roster is not None else 0,
            heartbeat.stamp if heartbeat is not None else 0,
            held.epoch,
            held.version,
        ),
    )


def share_news(state: State, peer: bytes, hello: Hello) -> None:
    """Send a peer that greeted us the roster changes, heartbeat and manifest that are newer than its own."""
    if state.rosters.stamp > hello.roster:
        steps = state.rosters.since(hello.roster)
        for step in steps if steps is not None and len(steps) <= STEPS_AT_ONCE else [state.rosters.proof]:
            state.outbox.send(peer, RosterStep(step))  # a peer that lacks its base requests it
    if state.leases.heartbeat is not None and state.leases.heartbeat.stamp > hello.heartbeat:
        state.outbox.send(peer, HeartbeatNews(state.leases.sealed))
    if state.held is not None and state.held > (hello.epoch, hello.version):
        state.outbox.send(peer, ManifestNews(state.sealed_manifest))


def reach_out(state: State, slot: int, place: Located, now: float) -> None:
    """Dial our children that cannot dial us: an edge needs one dialable end. `slot`, `place`: our slot and place."""
    roster = state.roster
    if roster is None:
        return
    for child in sorted({child for stripe in range(roster.stripes) for child in roster.children(stripe, slot)}):
        member = roster.member(child)
        if member is None or state.sessions.get(member.peer) is not None:
            continue
        if not direct(member, place):
            state.sessions.reach(member.peer, direct(place, member), now)


def pass_on(state: State, roster: Roster) -> None:
    """Send the change that led to a new roster down two trees, which rotate. Members request changes that they miss."""
    stripes = {roster.serial % max(1, roster.stripes), (roster.serial + 1) % max(1, roster.stripes)}
    for child in sorted({peer for k in stripes for peer in state.exchange.children.get(k, {})}):
        state.outbox.send(child, RosterStep(state.rosters.proof))


def give_roster(state: State, session: Session, message: WantRoster, now: float) -> None:
    """Answer with the changes that the peer lacks, or with the whole roster, that at most once per heartbeat."""
    if not session.roster_requests.take(1, now):
        return
    steps = state.rosters.since(message.have)
    if steps is not None:
        for step in steps:
            state.outbox.send(session.peer, RosterStep(step))
    elif state.roster is not None and now - session.gave_roster_at >= state.tuning.heartbeat_s:
        session.gave_roster_at = now
        state.outbox.send(session.peer, RosterNews(state.rosters.whole()))
