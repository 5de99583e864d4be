"""Attacks of a peer with a ticket on the authority's core and on a member's: each costs the attacker only."""

import pytest
from authority_kit import an_authority, members, renewal
from hypothesis import given
from hypothesis import strategies as st
from member_kit import a_forwarder, a_member
from msgspec.structs import replace
from protocol_kit import AUTHORITY, SWARM, TUNING, header, join_message, key_of, meet, member, only, report, say, sends

from codec.errors import PeerError
from codec.sign import Key
from swarm.protocol import authority as authority_module
from swarm.protocol.core.documents import Report, claimed_reporter, open_report, seal
from swarm.protocol.core.events import Close, PeerDown, Timer
from swarm.protocol.core.reach import Scope
from swarm.protocol.core.reach import scope as scope_of
from swarm.protocol.core.wire import Attach, Have, Reports, RosterNews, RosterStep, WantRoster
from swarm.protocol.membership import renewals as renewals_module
from swarm.protocol.membership.enrolment import Enrolment
from swarm.protocol.membership.quota import MOST_BYTES, Fetched
from swarm.protocol.membership.tickets import Tickets

BAD_TEXT = b"\xa3\xff\xfe\xfd"
"""A MessagePack string of three bytes that are not UTF-8."""


def with_bad_text(key: Key) -> bytes:
    """A report with a valid signature whose engine is not UTF-8."""
    good = seal(replace(report(0, bytes(32), 1, key=key), engine="abc"), key)[64:]
    body = good.replace(b"\xa3abc", BAD_TEXT)
    assert body != good
    return key.seal(b"swarm-node report 1", body)


def test_a_report_whose_text_is_not_utf_8_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="report"):
        open_report(with_bad_text(key_of(0)), SWARM)


@given(st.binary(max_size=300))
def test_nothing_is_decoded_of_a_report_before_its_signature_is_checked(data: bytes) -> None:
    with pytest.raises(PeerError):
        open_report(data, SWARM)
    with pytest.raises(PeerError, match=r"signature|report: not a signed report"):
        open_report(bytes(64) + seal(report(0, bytes(32), 1, key=key_of(0)), key_of(0))[64:] + data, SWARM)


def test_a_report_names_its_author_at_a_fixed_place() -> None:
    sealed = seal(report(3, bytes(32), 7, key=key_of(3)), key_of(3))
    assert claimed_reporter(sealed) == key_of(3).public
    assert isinstance(open_report(sealed, SWARM), Report)


def test_a_bad_report_ends_its_bearer_and_nothing_else() -> None:
    core = members(an_authority(), 2)
    effects = say(core, 0, Reports(0, (with_bad_text(key_of(0)),)), 3.0)
    assert [e.peer for e in only(effects, Close)] == [key_of(0).public]
    assert say(core, 1, Reports(0, (renewal(core, 1, 1),)), 3.0) is not None
    peer = a_forwarder()
    assert [e.peer for e in only(say(peer, 2, Reports(0, (with_bad_text(key_of(2)),)), 3.0), Close)] == [
        key_of(2).public
    ]


def verified(module, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The list of reports whose signatures the core checks from now on."""
    seen: list[bytes] = []
    real = module.open_report

    def counting(sealed: bytes, swarm: bytes) -> Report:
        seen.append(sealed)
        return real(sealed, swarm)

    monkeypatch.setattr(module, "open_report", counting)
    return seen


def test_reports_of_made_up_keys_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    core = members(an_authority(), 2)
    made_up = tuple(seal(report(1, bytes(32), 1, key=Key(bytes([i]) * 32)), Key(bytes([i]) * 32)) for i in range(50))
    seen = verified(authority_module, monkeypatch)
    assert only(say(core, 0, Reports(0, made_up), 3.0), Close) == []
    assert seen == []


@pytest.mark.parametrize("at", ["authority", "member"])
def test_reports_of_one_bearer_are_verified_up_to_a_limit(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid reports of its own, repeated: ten such members must leave the loop time for the others."""
    core = members(an_authority(), 2) if at == "authority" else a_forwarder()
    module = authority_module if at == "authority" else renewals_module
    if at == "member":
        say(core, 2, Attach(0, 0, 0, 0, ()), 0.9)
    bearer = 0 if at == "authority" else 2
    own = tuple(seal(report(bearer, bytes(32), i, key=key_of(bearer)), key_of(bearer)) for i in range(500))
    seen = verified(module, monkeypatch)
    for second in range(10):
        say(core, bearer, Reports(0, own), 3.0 + second)
    assert len(seen) <= 2 * 3 * 12 + 10 * 3 * 12 / TUNING.heartbeat_s


def test_a_forged_report_of_a_member_ends_its_bearers_session() -> None:
    core = members(an_authority(), 2)
    forged = bytes(64) + renewal(core, 1, 9)[64:]
    effects = say(core, 0, Reports(0, (forged,)), 3.0)
    assert [(e.peer, e.ban_s > 0) for e in only(effects, Close)] == [(key_of(0).public, True)]


@given(st.lists(st.integers(0, (1 << 63) - 1), max_size=8))
def test_any_claim_of_fetched_bytes_can_be_stored(totals: list[int]) -> None:
    fetched, tickets, ticket = Fetched(), Tickets(), bytes(16)
    for giver, total in enumerate(totals):
        for more in (fetched.own(b"a", total), fetched.said(bytes([giver]), b"a", total), fetched.gave(b"a", total)):
            assert 0 <= more <= MOST_BYTES
            tickets.fetched(ticket, more)
    again = Tickets()
    again.restore([tickets.record(ticket)])
    assert again.get(ticket) is not None


def test_nobody_is_dialed_back_by_name() -> None:
    """A member's own name server could lead the seed or other members to any host of their networks."""
    addrs = ("/dns4/metadata.internal/tcp/80", "/ip4/8.8.8.8/tcp/4001", "/dns/box/tcp/1/p2p-circuit")
    enrolment = Enrolment(replace(join_message(), addrs=addrs), "/ip4/9.9.9.9/tcp/5")
    assert enrolment.claims() == ("/ip4/8.8.8.8/tcp/4001",)
    assert enrolment.member(0, bytes(32), leaf=True).addrs == ()
    near = Enrolment(replace(join_message(), addrs=("/ip4/10.0.0.1/tcp/1/p2p-circuit",)), "/ip4/9.9.9.9/tcp/5")
    assert near.member(0, bytes(32), leaf=True).addrs == ()


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("/ip6/64:ff9b::7f00:1/tcp/22", Scope.HERE),
        ("/ip6/64:ff9b::a00:1/tcp/22", Scope.NEAR),
        ("/ip6/64:ff9b::808:808/tcp/22", Scope.WORLD),
        ("/ip6/2002:7f00:1::/tcp/22", Scope.HERE),
        ("/ip6/::ffff:10.0.0.1/tcp/22", Scope.NEAR),
        ("/ip4/224.0.0.1/tcp/80", Scope.NEAR),
        ("/ip6/ff0e::1/tcp/80", Scope.NEAR),
        ("/ip4/0.0.0.0/tcp/80", Scope.HERE),
    ],
)
def test_an_ipv6_address_has_the_scope_of_the_ipv4_address_in_it(address: str, scope: Scope) -> None:
    assert scope_of(address) is scope


def test_a_frame_of_a_stripe_that_does_not_exist_has_no_stripe() -> None:
    peer = a_forwarder()
    event = header(1, 0, stripe=200, peer=key_of(1).public)
    peer.apply(event, 1.0)
    chunk = peer.state.chunks.find(event.key)
    assert chunk is not None
    assert chunk.stripe is None
    for second in range(2, 40):
        peer.apply(Timer("tick"), float(second))  # it is pulled like any other


def test_repeated_roster_questions_are_answered_at_a_limited_rate() -> None:
    core = members(an_authority(), 2)
    answered = sum(bool(sends(say(core, 0, WantRoster(1), 3.0), (RosterStep, RosterNews))) for _ in range(500))
    assert answered <= 40


def test_names_of_chunks_that_do_not_exist_fill_no_memory() -> None:
    from swarm.protocol.core.wire import Skip

    peer = a_forwarder()
    say(peer, 2, Attach(0, 0, 0, 1 << 20, ()))
    for seq in range(100):
        say(peer, 2, Skip(0, 0, 1, 0, seq))
    assert peer.state.exchange.children[0][key_of(2).public].skipped == set()


def test_the_kit_signs_as_the_authority_does() -> None:
    assert AUTHORITY.public == SWARM


def test_a_child_that_attaches_against_the_plan_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise ten machines on one ticket that attach to every peer would take all uplinks, the trainer's first."""
    core = members(an_authority(), 2)
    monkeypatch.setattr(core.state.exchange, "_entitled", lambda stripe, peer: peer == key_of(0).public)
    for slot in (0, 1):
        say(core, slot, Attach(0, 0, 0, 1 << 40, ()), 3.0)
    edges = core.state.exchange.children[0]
    assert not edges[key_of(0).public].late_joiner
    assert edges[key_of(1).public].late_joiner


def test_the_trainer_estimates_its_uplink_where_late_joiners_ask_for_it() -> None:
    """No roster names the trainer's uplink. While it is unknown, late joiners would get all of it."""
    core = members(an_authority(up_mbit=8.0), 2)
    exchange = core.state.exchange
    assert exchange.has_time(3.0)
    core.state.uplink.take(1_000_000, 3.0)  # a second's worth
    assert not exchange.has_time(3.5)
    assert exchange.has_time(4.5)


def test_an_orphan_is_served_at_once_and_a_late_joiner_again_when_its_parent_is_back() -> None:
    peer = a_member([(-1, -1, -1, -1), (1, -1, 1, 1)], members=[member(s) for s in range(4)])
    for slot in (1, 2):
        meet(peer, slot)
    say(peer, 2, Attach(1, 0, 0, 1 << 20, ()), 1.0)
    edge = peer.state.exchange.children[1][key_of(2).public]
    assert edge.late_joiner, "slot 1, its parent in that stripe, is there"
    peer.apply(PeerDown(key_of(1).public), 2.0)
    assert not edge.late_joiner
    meet(peer, 1, 3.0)
    assert edge.late_joiner


def test_attaching_too_often_ends_the_session() -> None:
    core = members(an_authority(), 2)
    closed = [only(say(core, 0, Attach(0, 0, 0, 0, ()), 3.0), Close) for _ in range(1100)]
    assert sum(map(len, closed)) == 1
    long = (Have(0, 1, 0, 0, b""),) * 65536
    assert only(say(core, 1, Attach(0, 0, 0, 0, long), 3.0), Close)
