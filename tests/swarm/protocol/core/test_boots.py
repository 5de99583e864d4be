"""Boot numbers: one hostile heartbeat uses them up neither for members nor for the seed. Clocks are virtual."""

import pytest
from authority_kit import an_authority, join, members, notices_of
from member_kit import a_member
from protocol_kit import AUTHORITY, SWARM, TUNING, heartbeat, key_of, meet, only, say
from test_rosterbook import story

from swarm.protocol.core.boots import MAX_BOOT, latest_boot, next_boot
from swarm.protocol.core.events import Close, Timer
from swarm.protocol.core.wire import HeartbeatNews
from swarm.protocol.membership.roster import Roster, difference, seal_change, whole
from swarm.protocol.membership.rosterbook import RosterBook

WALL = 1_800_000_000.0
"""Unix time at local time 0 of all peers here: 2027."""
HONEST = next_boot(0, WALL)
DAY = 86_400


def believed(now: float) -> int:
    return latest_boot(WALL + now)


# ---------------------------------------------------------------- numbers


def test_boots_are_numbered_by_the_second_and_always_rise() -> None:
    assert next_boot(0, WALL) == int(WALL) - 1_577_836_800
    assert next_boot(HONEST, WALL) == HONEST + 1, "two starts in one second"
    assert next_boot(HONEST + 5 * DAY, WALL) == HONEST + 5 * DAY + 1, "above a rival with a plausible boot"
    assert latest_boot(WALL) == HONEST + 30 * DAY


@pytest.mark.parametrize("last", [MAX_BOOT, HONEST + 400 * DAY, HONEST + 30 * DAY])
def test_a_boot_number_that_is_not_believed_is_not_continued(last: int) -> None:
    """Even if our own clock was a year ahead once, our next heartbeats must be believed."""
    assert HONEST < next_boot(last, WALL) <= latest_boot(WALL)


@pytest.mark.parametrize("unix_s", [0.0, 946_684_800.0, 1_767_225_599.0])
def test_a_clock_that_is_not_set_rejects_no_boot(unix_s: float) -> None:
    assert latest_boot(unix_s) == MAX_BOOT
    assert next_boot(HONEST, unix_s) == HONEST + 1


# ---------------------------------------------------------------- members


def test_a_member_ignores_the_highest_boot_number_and_follows_the_honest_one() -> None:
    peer = a_member()
    peer.state.latest_boot = believed
    meet(peer, 1)
    for boot in (MAX_BOOT, HONEST + 31 * DAY):
        effects = say(peer, 1, HeartbeatNews(heartbeat(1, boot=boot, time=9e9)), 1.0)
        assert only(effects, Close) == [], "the member that forwards it may have a wrong clock"
    beat = heartbeat(7, boot=HONEST, time=5000.0)
    say(peer, 1, HeartbeatNews(beat), 2.0)
    assert peer.state.leases.sealed == beat
    later = heartbeat(1, boot=HONEST + 29 * DAY, time=5001.0)
    say(peer, 1, HeartbeatNews(later), 3.0)
    assert peer.state.leases.sealed == later, (
        "a plausible boot is believed: nothing distinguishes the two holders of a key"
    )
    again = heartbeat(1, boot=next_boot(HONEST + 29 * DAY, WALL + 60), time=5061.0)
    say(peer, 1, HeartbeatNews(again), 60.0)
    assert peer.state.leases.sealed == again, "the restarted honest seed is followed again"


def test_a_member_notes_once_that_the_clocks_are_apart() -> None:
    peer = a_member()
    peer.state.latest_boot = believed
    meet(peer, 1)
    noted = [
        notices_of(say(peer, 1, HeartbeatNews(heartbeat(n, boot=MAX_BOOT)), n), "clocks_apart") for n in range(1, 50)
    ]
    assert sum(map(len, noted)) == 1


def test_a_roster_of_a_boot_that_is_not_believed_is_ignored() -> None:
    rosters, changes = story(3)
    hostile = Roster(SWARM, MAX_BOOT, 1, rosters[0].authority, rosters[0].members, rosters[0].parents)
    change = seal_change(difference(None, hostile), AUTHORITY)
    book = RosterBook(SWARM, TUNING)
    assert not book.take_whole(whole(hostile, change), believed(0.0))
    assert not book.take_step(change, 0.0, believed(0.0))
    assert book.take_whole(whole(rosters[0], changes[0]), believed(0.0))
    assert book.take_step(changes[1], 1.0, believed(0.0))
    assert book.stamp == rosters[1].stamp


# ---------------------------------------------------------------- the seed


def test_the_seed_does_not_stop_for_a_boot_that_is_not_believed() -> None:
    core = members(an_authority(boot=HONEST), 1)
    core.state.latest_boot = believed
    for boot in (MAX_BOOT, HONEST + 31 * DAY):
        assert notices_of(say(core, 0, HeartbeatNews(heartbeat(1, boot=boot, time=9e9)), 5.0), "superseded") == []
    assert not core.superseded
    assert join(core, 1, 6.0) != []
    core.apply(Timer("tick"), 6.0 + TUNING.heartbeat_s)
    assert core.state.leases.heartbeat is not None
    assert (core.state.leases.heartbeat.boot, core.state.leases.heartbeat.live) == (HONEST, b"\x03")


def test_a_superseded_seed_that_restarts_takes_a_higher_boot_number_and_is_followed() -> None:
    core = members(an_authority(boot=HONEST), 1)
    core.state.latest_boot = believed
    rival = HONEST + 20 * DAY
    (seen,) = notices_of(say(core, 0, HeartbeatNews(heartbeat(1, boot=rival, time=9e9)), 5.0), "superseded")
    boot = next_boot(seen["boot"], WALL + 10)
    assert rival < boot <= believed(10.0)
    peer = a_member()
    peer.state.latest_boot = believed
    meet(peer, 1)
    say(peer, 1, HeartbeatNews(heartbeat(1, boot=rival, time=9e9)), 5.0)
    again = members(an_authority(boot=boot), 1)
    again.state.latest_boot = believed
    say(peer, 1, HeartbeatNews(again.state.leases.sealed), 10.0)
    assert peer.state.leases.sealed == again.state.leases.sealed
    assert notices_of(say(again, 0, HeartbeatNews(heartbeat(2, boot=rival)), 11.0), "superseded") == []
    assert key_of(0).public in again.book.slot_of
