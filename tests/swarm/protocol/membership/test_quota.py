"""Quotas: which reports count, what is charged, and which peers are expelled."""

from authority_kit import an_authority, connect_peer, join, make_durable
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol_kit import AUTHORITY, TUNING, capability, join_message, key_of, only, report, say, sends

from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import heartbeat_hash, seal
from swarm.protocol.core.events import Close, Gave, Persist, Timer
from swarm.protocol.core.wire import Refused, Reports
from swarm.protocol.membership.quota import Fetched

ALICE, BOB, CAROL, DAVE = (key_of(name).public for name in ("alice", "bob", "carol", "dave"))


# ---------------------------------------------------------------- who is believed


def test_a_peers_own_report_counts() -> None:
    fetched = Fetched()
    assert (fetched.own(ALICE, 100), fetched.own(ALICE, 100), fetched.own(ALICE, 250)) == (100, 0, 150)


def test_a_total_that_restarts_is_of_another_grant() -> None:
    fetched = Fetched()
    assert (fetched.own(ALICE, 100), fetched.own(ALICE, 30)) == (100, 30)


def test_one_givers_report_alone_charges_no_peer_but_two_do() -> None:
    fetched = Fetched()
    assert fetched.said(BOB, ALICE, 10**12) == 0
    assert fetched.said(CAROL, ALICE, 70) == 70
    assert fetched.said(ALICE, ALICE, 10**9) == 0


def test_givers_of_another_ticket_count_as_one_however_many_they_are() -> None:
    """Ten machines of one ticket cannot use up another ticket's quota."""
    fetched = Fetched()
    ticket = bytes(16)
    assert sum(fetched.said(key_of(n).public, ALICE, 10**12, ticket) for n in range(10)) == 0
    assert fetched.said(BOB, ALICE, 70) == 70, "a giver of the peer's own ticket, in addition to those"


def test_a_peer_that_hides_what_it_fetched_from_several_is_charged() -> None:
    fetched = Fetched()
    assert fetched.own(ALICE, 0) == 0
    charged = sum(fetched.said(giver, ALICE, 100) for giver in (BOB, CAROL, DAVE))
    assert charged == 200
    assert fetched.gave(ALICE, 50) == 50, "the authority trusts its own count"


def test_bytes_that_both_ends_report_are_charged_once() -> None:
    fetched = Fetched()
    assert fetched.own(ALICE, 300) == 300
    assert sum(fetched.said(giver, ALICE, 100) for giver in (BOB, CAROL, DAVE)) == 0


def test_after_a_restart_counting_starts_at_the_first_report() -> None:
    fetched = Fetched()
    for peer in (ALICE, BOB, CAROL):
        fetched.resume(peer)
    assert (fetched.own(ALICE, 900), fetched.own(ALICE, 950)) == (0, 50)
    assert (fetched.said(BOB, ALICE, 500), fetched.said(CAROL, ALICE, 400)) == (0, 0)
    fetched.forget(ALICE)
    assert fetched.own(ALICE, 20) == 20


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=40))
def test_no_single_giver_can_charge_more_than_others_confirm(words: list[tuple[int, int]]) -> None:
    """BOB reports anything; three honest givers report what they gave. The charge stays within what the others confirm,
    and within twice the truth if BOB gave too."""
    fetched, charged, true = Fetched(), 0, [0, 0, 0, 0]
    for who, size in words:
        if who == 3:
            charged += fetched.said(BOB, ALICE, 10**9 + size)
        else:
            true[who] += size
            giver = (CAROL, DAVE, key_of("eve").public)[who]
            charged += fetched.said(giver, ALICE, true[who])
    assert charged <= sum(true)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000), st.booleans()), max_size=40))
def test_givers_that_have_left_count_as_before(words: list[tuple[int, int, bool]]) -> None:
    """Six givers, two of them of one other ticket. Whoever leaves does not come back. The charge is as if all had
    stayed, but only sums are kept of those that left."""
    fetched, stayed, gone = Fetched(), Fetched(), set[int]()
    charged = expected = 0
    for who, size, leaves in words:
        giver, side = key_of(who).public, b"another ticket.." if who > 3 else b""
        if who in gone:
            continue
        charged += fetched.said(giver, ALICE, size, side)
        expected += stayed.said(giver, ALICE, size, side)
        if leaves:
            fetched.forget(giver)
            gone.add(who)
    assert charged == expected
    kept = fetched._peers.get(ALICE)
    assert kept is None or (len(kept.said) <= 6 - len(gone) and len(kept.past) <= 2)


def test_a_giver_that_left_and_came_back_is_still_one_side() -> None:
    fetched = Fetched()
    assert fetched.said(BOB, ALICE, 10**9) == 0
    fetched.forget(BOB)
    assert fetched.said(BOB, ALICE, 10**9) == 0
    assert fetched.said(CAROL, ALICE, 70) == 70


# ---------------------------------------------------------------- at the authority


def report_from(
    core: Authority, slot: int, counter: int, now: float, fetched: int = 0, gave: tuple = (), part: float = 0.5
):
    """A report of this slot's holder, as forwarded up a tree."""
    grant = core.book.leases[slot].grant
    plain = report(slot, heartbeat_hash(core.state.leases.sealed), counter, serial=grant.serial, catching_up=part)
    sealed = seal(replace(plain, fetched_bytes=fetched, gave=gave), key_of(slot))
    return say(core, slot, Reports(0, (sealed,)), now)


def ticket(quota: int, name: int = 7, nodes: int = 9) -> bytes:
    return seal(replace(capability(nodes=nodes, name=name), quota_bytes=quota), AUTHORITY)


def test_a_peer_beyond_the_quota_is_expelled_and_its_ticket_admits_no_peer() -> None:
    core = an_authority()
    small = join_message(ticket(1000))
    join(core, 0, 1.0, small)
    join(core, 1, 2.0, small)
    assert only(report_from(core, 0, 1, 3.0, fetched=600), Close) == []
    assert only(report_from(core, 1, 1, 3.1, fetched=400), Close) == [], "using the whole quota does not exceed it"
    connect_peer(core, 2, 3.5)
    (refused,) = sends(say(core, 2, small, 3.5), Refused, to=2)
    assert "used up" in refused.why
    effects = report_from(core, 1, 2, 4.0, fetched=401)
    assert [refused.code for refused in sends(effects, Refused, to=1)] == ["ticket"]
    assert [close.peer for close in only(effects, Close)] == [key_of(1).public]
    assert sorted(core.book.leases) == [0], "a peer that fetches nothing more stays"
    core.apply(Timer("tick"), 4.0 + 2 * TUNING.tick_s)
    assert core.state.roster is not None
    assert [member.slot for member in core.state.roster.members] == [0]


def test_a_liar_is_expelled_by_the_counts_of_two_givers_and_of_the_trainer() -> None:
    core = an_authority()
    for slot, quota in ((0, 0), (1, 0), (2, 1000)):
        join(core, slot, 1.0 + slot, join_message(ticket(quota, name=20 + slot)))
    report_from(core, 2, 1, 5.0, fetched=0)
    report_from(core, 0, 1, 5.1, gave=((2, 5000),))
    assert 2 in core.book.leases, "one giver alone may lie"
    effects = report_from(core, 1, 1, 5.2, gave=((2, 1001),))
    assert [close.peer for close in only(effects, Close)] == [key_of(2).public]

    join(core, 3, 6.0, join_message(ticket(1000, name=30)))
    assert only(core.apply(Gave(key_of(3).public, 900), 7.0), Close) == []
    assert len(only(core.apply(Gave(key_of(3).public, 101), 7.1), Close)) == 1
    assert core.apply(Gave(key_of(99).public, 10**9), 7.2) == [], "a peer that has left since"


def test_fetched_bytes_are_remembered_over_a_restart() -> None:
    core = an_authority()
    join(core, 0, 1.0, join_message(ticket(10_000)))
    disk: dict[str, bytes] = {}
    for counter, fetched in enumerate((50, 300, 4000, 4050), 1):
        effects = report_from(core, 0, counter, 2.0 + counter, fetched=fetched)
        disk |= {wish.name: wish.record for wish in only(effects, Persist)}
        make_durable(core, effects, 2.0 + counter)
    (name,) = disk
    assert name.startswith("ticket/")
    again = an_authority()
    again.book.tickets.restore([disk[name]])
    (kept,) = again.book.tickets
    assert 4050 - 100 < kept.fetched_bytes <= 4050, "up to a hundredth of the quota may be lost"
    assert kept.quota_bytes == 10_000


def test_a_ticket_without_a_quota_is_counted_and_never_used_up() -> None:
    core = an_authority()
    join(core, 0, 1.0, join_message(ticket(0)))
    assert only(report_from(core, 0, 1, 3.0, fetched=10**15), Close) == []
    assert [t.fetched_bytes for t in core.book.tickets if t.peers] == [10**15]
