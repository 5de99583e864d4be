"""A machine that has sent its day's bytes: it reports that at once, is a leaf, sends no content, and recovers."""

from authority_kit import TICKET, an_authority, join
from hypothesis import given, settings
from hypothesis import strategies as st
from member_kit import a_forwarder, a_member, reports_in, tick
from msgspec.structs import replace
from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    header,
    join_message,
    key_of,
    meet,
    member,
    new_peer,
    only,
    report,
    say,
    sends,
)

from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import heartbeat_hash, open_report, seal
from swarm.protocol.core.events import LocalBudget, Notify, PeerDown, PieceStored, SendBlob, SendBlock, SendPiece, Timer
from swarm.protocol.core.notices import BudgetChanged
from swarm.protocol.core.wire import Attach, Blob, Lacks, LacksChunk, Reports, WantBlob, WantBlock, WantChunk
from swarm.protocol.member import Peer

LOW, NONE, AMPLE = LocalBudget(True, False), LocalBudget(True, True), LocalBudget(False, False)


def with_a_chunk(peer: Peer) -> Peer:
    """The peer, with a whole chunk of version 1 in stripe 0."""
    event = header(1, 0, peer=key_of(1).public)
    peer.apply(event, 1.0)
    for index in range(4):
        peer.apply(PieceStored(key_of(1).public, 0, event.key, index, 1000), 1.0)
    return peer


def test_saving_is_reported_at_once_and_only_when_it_changes() -> None:
    peer = a_member()
    meet(peer, 1)
    tick(peer, 0.5)
    effects = peer.apply(LOW, 1.0)
    assert [e.notice for e in only(effects, Notify)] == [BudgetChanged(saving=True)]
    assert [r.saving for r in reports_in(tick(peer, 1.0 + TUNING.report_batch_s))] == [True]
    assert reports_in(peer.apply(LOW, 2.0) + tick(peer, 2.1)) == []
    peer.apply(AMPLE, 3.0)
    assert [r.saving for r in reports_in(tick(peer, 3.1))] == [False]


def test_a_saving_member_still_sends_and_a_spent_one_does_not() -> None:
    peer = with_a_chunk(a_forwarder())
    want = [WantChunk(0, 1, 0, 0, b""), WantBlob(1, Blob.LAYOUT, bytes(32), 0), WantBlock(2, 0)]
    peer.apply(LOW, 2.0)
    given_away = [e for w in want for e in say(peer, 2, w, 2.0)]
    assert [len(only(given_away, kind)) for kind in (SendPiece, SendBlob, SendBlock)] == [4, 1, 1]
    peer.apply(NONE, 3.0)
    attached = say(peer, 2, Attach(0, 0, 0, 1 << 20, ()), 3.0)
    assert only(attached, SendPiece) == []
    refused = [e for w in want[1:] for e in say(peer, 2, w, 3.0)]
    assert [lacks.request for lacks in sends(refused, Lacks, to=2)] == [1, 2]
    assert only(refused, SendBlob) + only(refused, SendBlock) == []


def test_requests_are_refused_today_and_children_are_served_again_tomorrow() -> None:
    peer = with_a_chunk(a_forwarder())
    peer.apply(NONE, 2.0)
    assert len(sends(say(peer, 2, WantChunk(0, 1, 0, 0, b""), 2.0), LacksChunk, to=2)) == 1
    assert only(say(peer, 2, Attach(0, 0, 0, 1 << 20, ()), 2.0), SendPiece) == []
    assert len(only(peer.apply(AMPLE, 9.0), SendPiece)) == 4


def test_a_member_without_uplink_sends_nothing_on_any_day() -> None:
    peer = new_peer(0)
    peer.membership._join = join_message(up_mbit=0.0)
    peer.state.exchange.give(False, 0.0)
    admit(peer)
    meet(peer, 1)
    assert only(peer.apply(AMPLE, 1.0) + say(peer, 1, WantBlock(1, 0), 1.0), SendBlock) == []


def test_a_member_without_uplink_becomes_no_failover_parent() -> None:
    idle = member(2, up_mbit=0.0, leaf=True)
    peer = a_member(((1, -1, 1, 1),), members=[member(0), member(1), idle, member(3)])
    for slot in (1, 2, 3):
        meet(peer, slot)
    tick(peer, 0.5)
    assert peer.state.exchange.parents.edges[0].peer == key_of(1).public
    peer.apply(PeerDown(key_of(1).public), 1.0)
    assert peer.state.exchange.parents.edges[0].peer == key_of(3).public


# ---------------------------------------------------------------- the plan


def report_from(core: Authority, slot: int, counter: int, saving: bool, now: float) -> None:
    grant = core.book.leases[slot].grant
    plain = report(slot, heartbeat_hash(core.state.leases.sealed), counter, serial=grant.serial)
    say(core, slot, Reports(0, (seal(replace(plain, saving=saving), key_of(slot)),)), now)


@given(words=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=24))
@settings(max_examples=20, deadline=None)
def test_a_saving_member_is_a_leaf_in_every_plan(words: list[tuple[int, bool]]) -> None:
    core, now = an_authority(), 1.0
    for slot in range(6):
        join(core, slot, now, join_message(TICKET))
        report_from(core, slot, 1, False, now)
        now += 0.3
    saving = [False] * 6
    for counter, (slot, word) in enumerate(words, 2):
        saving[slot] = word
        report_from(core, slot, counter, word, now)
        now += TUNING.tick_s + 0.01
        core.apply(Timer("tick"), now)
        roster = core.state.roster
        assert roster is not None
        inside = {parent for row in roster.parents for parent in row} - {-1}
        assert not any(saving[parent] for parent in inside), (saving, roster.parents)
        assert all(roster.is_fed(stripe, s) for stripe in range(roster.stripes) for s in range(6))
        if all(saving):
            assert inside == set(), "then the trainer feeds all"


def test_saving_costs_a_report_few_bytes() -> None:
    plain = report(0, bytes(32), 1)
    assert len(seal(replace(plain, saving=True), key_of(0))) == len(seal(plain, key_of(0)))
    assert open_report(seal(replace(plain, saving=True), key_of(0)), SWARM).saving
