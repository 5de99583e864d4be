"""The authority and its members: leases, restarts, rivals, and which chunks it assigns."""

import msgspec
import pytest
from authority_kit import TICKET, an_authority, join, members, notices_of, renewal
from protocol_kit import (
    SWARM,
    TUNING,
    grant,
    header,
    heartbeat,
    join_message,
    key_of,
    manifest,
    only,
    report,
    say,
    sends,
    version,
)  # fmt: skip

from codec.errors import PeerError
from swarm.protocol.authority import MEMBERS_DIALED
from swarm.protocol.core.documents import heartbeat_hash, open_heartbeat, seal
from swarm.protocol.core.events import (  # fmt: skip
    Announce,
    Close,
    Dial,
    Effect,
    Heard,
    LocalAbandon,
    LocalChunk,
    LocalSeal,
    PeerUp,
    Persist,
    SendHeader,
    SendPiece,
    Timer,
    VersionId,
)
from swarm.protocol.core.wire import (  # fmt: skip
    Attach,
    Bye,
    Credit,
    HeartbeatNews,
    Hello,
    ManifestNews,
    Refused,
    Reports,
    WantChunk,
    Work,
)
from swarm.protocol.membership.enrolment import Enrolment, observed_addresses, record_of

# ---------------------------------------------------------------- leases


def test_reports_renew_and_say_what_is_held() -> None:
    core = members(an_authority(), 1)
    effects = say(core, 0, Reports(0, (renewal(core, 0, 1),)), 5.0)
    assert [i["version"] for i in notices_of(effects, "held")] == [version(0)]
    assert notices_of(say(core, 0, Reports(0, (renewal(core, 0, 1),)), 5.1), "held") == []


def test_a_member_that_takes_back_what_it_held_is_noted_once_a_version() -> None:
    """Each notice is a line of the log: once a member caused 25 a second."""
    core = members(an_authority(), 1)
    core.apply(LocalSeal(manifest(1, 1)), 3.0)
    beaten = heartbeat_hash(core.state.leases.sealed)
    heard, serial = [], core.book.leases[0].grant.serial
    for counter in range(1, 7):
        changed = msgspec.structs.replace(report(0, beaten, counter, serial=serial), version=counter % 2)
        heard += notices_of(say(core, 0, Reports(0, (seal(changed, key_of(0)),)), 5.0 + counter), "held")
    assert [info["version"] for info in heard] == [version(1)]


def test_a_forged_report_expels_its_bearer() -> None:
    core = members(an_authority(), 2)
    forged = seal(report(0, heartbeat_hash(core.state.leases.sealed), 9), key_of(1))
    assert [c.peer for c in only(say(core, 1, Reports(0, (forged,)), 5.0), Close)] == [key_of(1).public]


def test_an_old_report_brought_by_another_member_ends_no_lease() -> None:
    """A replayed report of an earlier grant does not tell its author to join again."""
    core = members(an_authority(), 2)
    old = renewal(core, 0, 1, serial=3)
    effects = say(core, 1, Reports(0, (old,)), 5.0)
    assert sends(effects, Refused) == []
    effects = say(core, 0, Reports(0, (old,)), 5.0)
    assert [r.code for r in sends(effects, Refused, to=0)] == ["unknown"]
    assert [(c.peer, c.ban_s) for c in only(effects, Close)] == [(key_of(0).public, 0.0)]
    assert say(core, 0, Credit(0, 5), 5.0) == []  # sent before it could know, so not punished


def test_members_whose_leases_expired_are_closed_and_forgotten() -> None:
    core = members(an_authority(), 2)
    peer = key_of(0).public
    say(core, 0, Attach(0, 0, 0, 1 << 20, ()), 3.0)
    while core.state.leases.heartbeat is not None and core.book.leases.get(0) is not None:
        now = core.state.leases.heartbeat.time - 1000.0 + TUNING.heartbeat_s
        effects = core.apply(Timer("tick"), now)
        say(core, 1, Reports(0, (renewal(core, 1, int(now * 10)),)), now)
    assert [i["peer"] for i in notices_of(effects, "lease_expired")] == [peer]
    assert peer in [c.peer for c in only(effects, Close)]
    assert [p.record for p in only(effects, Persist)] == [b""]
    assert peer not in core._enrolled
    assert 1 in core.book.leases


def test_leaving_frees_the_slot_on_disk_too() -> None:
    core = members(an_authority(), 1)
    effects = say(core, 0, Bye(renewal(core, 0, 1, leaving=True)), 5.0)
    assert [(p.name, p.record) for p in only(effects, Persist)] == [("grant/0", b"")]
    assert notices_of(effects, "member_left") == [{"peer": key_of(0).public, "slot": 0}]
    assert not core.book.leases


def test_a_member_whose_goodbye_another_member_brings_is_served_no_more() -> None:
    core = members(an_authority(), 2)
    core.apply(LocalChunk(header(1, 0)), 4.0)
    effects = say(core, 1, Reports(0, (renewal(core, 0, 1, leaving=True),)), 5.0)
    assert [(e.peer, e.why) for e in only(effects, Close)] == [(key_of(0).public, "left")]
    assert say(core, 0, WantChunk(0, 1, 0, 0, b""), 5.1) == []


@pytest.mark.parametrize("leaving", [True, False])
def test_a_goodbye_with_another_members_report_or_without_leaving(leaving: bool) -> None:
    core = members(an_authority(), 2)
    release = renewal(core, 1, 1, leaving=leaving) if leaving else renewal(core, 0, 1)
    assert only(say(core, 0, Bye(release), 5.0), Close)[0].ban_s > 0
    assert len(core.book.leases) == 2


def test_a_kick_ends_lease_and_session() -> None:
    core = members(an_authority(), 2)
    effects = core.kick(key_of(0).public, 5.0)
    assert [refused.code for refused in sends(effects, Refused, to=0)] == ["ticket"]
    assert [c.peer for c in only(effects, Close)] == [key_of(0).public]
    assert [p.name for p in only(effects, Persist)] == [f"kick/{key_of(0).public.hex()}", "grant/0"]
    assert core.state.leases.heartbeat is not None
    assert core.state.leases.heartbeat.live == b"\x02"
    assert core.kick(key_of(0).public, 5.1) == []
    core.apply(Timer("tick"), 5.0 + TUNING.tick_s + 0.01)
    assert core.state.roster is not None
    assert [m.slot for m in core.state.roster.members] == [1]


def test_hearsay_moves_only_a_member_that_is_late_itself() -> None:
    core = members(an_authority(), 3)
    core.apply(Timer("tick"), 4.5)
    for slot in range(3):
        say(core, slot, Reports(0, (renewal(core, slot, 1),)), 4.5)
    say(core, 1, Reports(0, (renewal(core, 1, 2, lost=(0, 77)),)), 4.6)
    assert core.replanner.lost == {}
    for tenth in range(46, 62):
        core.apply(Timer("tick"), tenth / 10)
    say(core, 2, Reports(0, (renewal(core, 2, 2),)), 6.2)
    say(core, 1, Reports(0, (renewal(core, 1, 3, lost=(0, 77)),)), 6.2)
    assert list(core.replanner.lost) == [0]
    core.apply(Timer("tick"), 6.4)
    assert core.state.roster is not None
    assert [m.leaf for m in core.state.roster.members] == [True, False, False]


# ---------------------------------------------------------------- restarts and rivals


def records(effects: list[Effect], into: dict[str, bytes]) -> None:
    into.update({wish.name: wish.record for wish in only(effects, Persist)})


def test_a_restart_restores_leases_addresses_and_serials() -> None:
    disk: dict[str, bytes] = {}
    core = an_authority()
    for slot in range(3):
        records(join(core, slot, 1.0 + slot), disk)
    records(core.kick(key_of(1).public, 5.0), disk)
    again = an_authority(boot=2, grants=[r for name, r in disk.items() if r and name.startswith("grant/")], now=100.0)
    assert {s: lease.grant.peer for s, lease in again.book.leases.items()} == {0: key_of(0).public, 2: key_of(2).public}
    assert again.state.roster is not None
    assert [m.addrs for m in again.state.roster.members] == [("/sim/me",), ("/sim/me",)]
    assert again.state.roster.stamp > (core.state.roster.stamp if core.state.roster else 0)
    join(again, 5, 101.0)
    serials = [lease.grant.serial for lease in core.book.leases.values()]
    assert again.book.leases[1].grant.serial > max(serials) + 1


@pytest.mark.parametrize("record", [b"x", record_of(grant(0, key_of(0).public), Enrolment(join_message(), None))[:-3]])
def test_a_torn_record_is_noticed(record: bytes) -> None:
    with pytest.raises(PeerError):
        an_authority(grants=[record])


def test_a_rival_of_a_later_boot_makes_it_stop() -> None:
    core = members(an_authority(boot=2), 1)
    assert notices_of(say(core, 0, HeartbeatNews(heartbeat(900, boot=1)), 5.0), "superseded") == []
    assert notices_of(say(core, 0, HeartbeatNews(heartbeat(1, boot=3, time=5000.0)), 5.1), "superseded") == [
        {"boot": 3}
    ]
    assert core.superseded
    assert core.apply(Timer("tick"), 6.0) == []
    assert say(core, 0, join_message(TICKET), 7.0) == []


def test_a_forged_rival_is_expelled() -> None:
    core = members(an_authority(), 1)
    effects = say(core, 0, HeartbeatNews(heartbeat(1, boot=9, key=key_of("mallory"))), 5.0)
    assert only(effects, Close)[0].ban_s > 0
    assert not core.superseded


# ---------------------------------------------------------------- versions


def test_chunks_go_to_the_root_child_and_the_seal_to_every_child() -> None:
    core = members(an_authority(), 1)
    say(core, 0, Attach(0, 0, 0, 1 << 20, ()), 3.0)
    effects = core.apply(LocalChunk(header(1, 0, stripe=None)), 3.1)
    assert [e.key.seq for e in only(effects, SendHeader)] == [0]
    assert [e.index for e in only(effects, SendPiece)] == [0, 1, 2, 3]
    effects = core.apply(LocalSeal(manifest(1, 1)), 3.2)
    assert len(sends(effects, ManifestNews, to=0)) == 1
    assert len(only(effects, Announce)) == 1
    (beat,) = sends(effects, HeartbeatNews, to=0)
    assert open_heartbeat(beat.heartbeat, SWARM).head == version(1)


def test_a_chunk_given_twice_is_assigned_once() -> None:
    core = members(an_authority(), 1)
    say(core, 0, Attach(0, 0, 0, 1 << 20, ()), 3.0)
    effects = core.apply(LocalChunk(header(1, 0, stripe=None)), 3.1)
    effects += core.apply(LocalChunk(header(1, 0, stripe=None)), 3.1)
    assert len(only(effects, SendHeader)) == 1


def test_without_members_the_queue_holds_what_is_kept_and_no_more() -> None:
    core = an_authority()
    for number in range(1, 60):
        core.apply(LocalChunk(header(number, 0, stripe=None)), float(number))
        core.apply(LocalSeal(manifest(number, 1)), float(number))
    assert len(core.assigner) <= TUNING.retain_versions
    assert len(core.state.chunks.versions) <= TUNING.retain_versions


def test_an_abandoned_attempt_is_not_assigned() -> None:
    core = members(an_authority(), 1)
    core.apply(LocalChunk(header(1, 0, stripe=None)), 3.1)
    core.apply(LocalAbandon(VersionId(0, 1), 0), 3.1)
    assert core.state.chunks.find(header(1, 0).key) is None, "and no peer may pull it"
    effects = say(core, 0, Attach(0, 0, 0, 1 << 20, ()), 3.2)
    assert only(effects, SendHeader) == []


def test_attaching_to_a_stripe_that_does_not_exist() -> None:
    core = members(an_authority(), 1)
    for stripe in range(64):
        say(core, 0, Attach(stripe, 0, 0, 1 << 60, ()), 3.0)
    assert sorted(core.state.exchange.children) == list(range(TUNING.stripes))


def test_work_is_handed_to_the_application() -> None:
    core = members(an_authority(), 1)
    assert notices_of(say(core, 0, Work(b"cargo"), 5.0), "work") == [{"peer": key_of(0).public, "body": b"cargo"}]


def test_a_message_of_a_peer_without_a_session_is_ignored() -> None:
    core = an_authority()
    assert core.apply(Heard(key_of(3).public, join_message(TICKET)), 1.0) == []


@pytest.mark.parametrize(
    ("addrs", "seen_at", "expected"),
    [
        (("/ip4/0.0.0.0/tcp/7000",), "/ip4/5.6.7.8/tcp/999", ("/ip4/5.6.7.8/tcp/7000",)),
        (("/ip6/::/tcp/7000",), "/ip6/2001:db8::1/tcp/999", ("/ip6/2001:db8::1/tcp/7000",)),
        (("/ip4/0.0.0.0/tcp/7000",), None, ()),
        (("/ip4/1.2.3.4/tcp/1", "/ip4/0.0.0.0/tcp/1"), "/ip4/1.2.3.4/tcp/9", ("/ip4/1.2.3.4/tcp/1",)),
        (("/dns4/box.example/tcp/1",), "/sim/x", ("/dns4/box.example/tcp/1",)),
        (("rubbish", "/", ""), "rubbish", ("rubbish", "/", "")),
    ],
)
def test_addresses_as_the_world_sees_them(
    addrs: tuple[str, ...], seen_at: str | None, expected: tuple[str, ...]
) -> None:
    assert observed_addresses(addrs, seen_at) == expected


def test_downlinks_of_members_with_a_replica() -> None:
    core = an_authority()
    for slot, (down_mbit, relay_only) in enumerate([(300.0, False), (20.0, True), (50.0, False)]):
        message = msgspec.structs.replace(join_message(TICKET), down_mbit=down_mbit, relay_only=relay_only)
        join(core, slot, 1.0 + slot, message)
    assert core.down_mbits == (300.0, 50.0)


def test_an_authority_that_restarts_elsewhere_dials_its_members_when_none_comes() -> None:
    disk: dict[str, bytes] = {}
    core = an_authority()
    for slot in range(6):
        records(join(core, slot, 1.0 + slot), disk)
    again = an_authority(boot=2, grants=[r for name, r in disk.items() if r and name.startswith("grant/")], now=100.0)
    late = 100.0 + 3 * TUNING.heartbeat_s + 0.1
    assert only(again.apply(Timer("tick"), late - 0.2), Dial) == []
    dialed = only(again.apply(Timer("tick"), late), Dial)
    assert len(dialed) == MEMBERS_DIALED
    assert {dial.addrs for dial in dialed} == {("/sim/me",)}
    # One of them follows another seed with our key that started later, and shows us that seed's heartbeat.
    peer = dialed[0].peer
    again.apply(PeerUp(peer, True, "/ip4/9.9.9.9/tcp/1"), late + 0.1)
    hello = Hello(again.book.leases[again.book.slot_of[peer]].sealed, 0, 0, 0, 0)
    assert sends(say(again, peer, hello, late + 0.1), Hello, to=peer) != []
    assert only(again.apply(Timer("tick"), late + 0.5), Dial) == []
    say(again, peer, HeartbeatNews(heartbeat(1, boot=3)), late + 0.6)
    assert again.superseded


def test_an_authority_that_restarts_elsewhere_dials_members_that_nobody_tells() -> None:
    disk: dict[str, bytes] = {}
    core = an_authority()
    for slot in range(3):
        records(join(core, slot, 1.0 + slot), disk)
    again = an_authority(boot=2, grants=[r for name, r in disk.items() if r and name.startswith("grant/")], now=100.0)
    first, second, third = (again.book.leases[slot].grant.peer for slot in range(3))
    again.apply(PeerUp(first, True, "/ip4/9.9.9.9/tcp/1"), 100.1)
    say(again, first, Hello(again.book.leases[0].sealed, 0, 0, 0, 0), 100.1)
    assert only(again.apply(Timer("tick"), 100.0 + TUNING.soft_ttl_s - 0.1), Dial) == []
    dialed = only(again.apply(Timer("tick"), 100.0 + TUNING.soft_ttl_s + 0.1), Dial)
    assert {dial.peer for dial in dialed} == {second, third}
    assert {dial.addrs for dial in dialed} == {("/sim/me",)}
    assert only(again.apply(Timer("tick"), 100.0 + TUNING.hard_ttl_s + 0.1), Dial) == []
