"""Tickets over restarts of the authority: places, revocations, bars, and their records."""

import dataclasses

import msgspec
import pytest
from authority_kit import an_authority, clock, connect_peer, join, renewal
from authority_kit import members as with_members
from msgspec.structs import replace
from protocol_kit import AUTHORITY, TUNING, capability, join_message, key_of, only, say, sends

from codec.errors import PeerError
from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import AuthorityTime, open_capability, seal
from swarm.protocol.core.events import Close, Effect, Persist, Timer
from swarm.protocol.core.wire import Bye, Hello, Refused, Welcome
from swarm.protocol.membership.tickets import BARRED, LATER, REMEMBERED, REVOKED, TURNS_MORE, TicketRecord, Tickets

ALICE, BOB = key_of("alice").public, key_of("bob").public
NOW = AuthorityTime(1000.0)


def persist_to(effects: list[Effect], disk: dict[str, bytes]) -> list[Effect]:
    disk |= {wish.name: wish.record for wish in only(effects, Persist)}
    return effects


def restarted(disk: dict[str, bytes], boot: int = 2) -> Authority:
    """The next boot, restored from the disk."""

    def records_under(prefix: str) -> list[bytes]:
        return [record for name, record in sorted(disk.items()) if name.startswith(prefix) and record]

    bars = records_under("bar/") + records_under("kick/")

    core = an_authority(boot=boot)
    core.admission.restore(records_under("grant/"), records_under("ticket/"), bars, 0.0)
    core.apply(Timer("tick"), TUNING.tick_s + 0.01)
    return core


def answer(core: Authority, slot: int, ticket: bytes, now: float) -> str | None:
    """The refusal for a peer that joins with it; None if it is admitted."""
    effects = join(core, slot, now, join_message(ticket))
    refused = sends(effects, Refused, to=slot)
    assert bool(refused) != bool(sends(effects, Welcome, to=slot))
    return refused[0].why if refused else None


def test_a_place_is_free_again_once_its_lease_is_over_and_a_restart_counts_the_same() -> None:
    ticket, disk = seal(capability(nodes=2), AUTHORITY), {}
    core = an_authority()
    persist_to(join(core, 0, 1.0, join_message(ticket)), disk)
    persist_to(join(core, 1, 2.0, join_message(ticket)), disk)
    assert "All 2 places" in str(answer(core, 2, ticket, 3.0))
    assert "All 2 places" in str(answer(restarted(disk), 2, ticket, 3.0))
    persist_to(say(core, 1, Bye(renewal(core, 1, 1, leaving=True)), 4.0), disk)
    assert answer(core, 2, ticket, 5.0) is None
    assert "All 2 places" in str(answer(core, 1, ticket, 6.0)), "no place is kept for a peer that left"
    assert answer(restarted(disk), 1, ticket, 5.0) is None


@pytest.mark.parametrize("ends", ["leaves", "expires", "kicked", "barred"])
def test_however_a_lease_ends_its_place_returns(ends: str) -> None:
    ticket, core, now = seal(capability(nodes=1), AUTHORITY), an_authority(), 5.0
    join(core, 0, 1.0, join_message(ticket))
    peer = key_of(0).public
    match ends:
        case "leaves":
            say(core, 0, Bye(renewal(core, 0, 1, leaving=True)), now)
        case "expires":
            now = TUNING.hard_ttl_s + 5.0
            core.apply(Timer("tick"), now)
        case "kicked":
            core.kick(peer, now)
        case "barred":
            core.bar(peer, now)
    assert answer(core, 1, ticket, now + 1.0) is None


def test_the_total_of_machines_is_bounded_over_restarts_and_former_ones_may_return() -> None:
    ticket, disk = seal(replace(capability(nodes=2), nodes_ever=3), AUTHORITY), {}
    core = an_authority()
    for slot in range(3):
        assert sends(persist_to(join(core, slot, 1.0 + 10 * slot, join_message(ticket)), disk), Refused) == []
        persist_to(say(core, slot, Bye(renewal(core, core.book.slot_of[key_of(slot).public], 1, key=key_of(slot),
                                         leaving=True)), 6.0 + 10 * slot), disk)  # fmt: skip
    for now, each in ((40.0, core), (5.0, restarted(disk))):
        assert "3 different machines" in str(answer(each, 3, ticket, now))
        assert answer(each, 1, ticket, now + 1.0) is None


def test_taking_turns_is_bounded_and_refused_as_temporary() -> None:
    """Two keys that take turns with a ticket for one machine: a few times, then at a bounded rate."""
    ticket = capability(nodes=1)
    tickets, came, codes = Tickets(), 0, set()
    for tenth in range(36_000):
        peer = ALICE if tenth % 2 else BOB
        refusal = tickets.refusal(ticket, peer, AuthorityTime(NOW + tenth / 10))
        if refusal is None:
            tickets.bind(ticket.id, peer)
            tickets.left(ticket.id, peer)
            came += 1
        else:
            codes.add(refusal.code)
    assert codes == {LATER}
    assert came <= (1 + TURNS_MORE) * 61


def test_a_member_asks_again_after_a_temporary_refusal() -> None:
    core = an_authority()
    ticket = capability(nodes=1)
    for turn in range(1 + TURNS_MORE):
        assert answer(core, turn, seal(ticket, AUTHORITY), 1.0 + turn) is None
        core.kick(key_of(turn).public, 1.5 + turn)
    (refused,) = sends(join(core, 9, 8.0, join_message(seal(ticket, AUTHORITY))), Refused, to=9)
    assert refused.code == LATER
    assert answer(core, 9, seal(ticket, AUTHORITY), 30.0) is None


def test_a_ticket_without_a_limit_remembers_the_last_few_hundred() -> None:
    tickets, ticket = Tickets(), capability(nodes=10)
    for number in range(3 * REMEMBERED):
        tickets.bind(ticket.id, number.to_bytes(32, "big"))
        tickets.left(ticket.id, number.to_bytes(32, "big"))
    record = tickets.record(ticket.id)
    assert len(record) < 40 * REMEMBERED
    other = Tickets()
    other.restore([record])
    (found,) = other
    assert (len(found.peers), found.ever) == (REMEMBERED, 3 * REMEMBERED)
    assert (3 * REMEMBERED - 1).to_bytes(32, "big") in found.peers
    tickets.bind(ticket.id, (1).to_bytes(32, "big"))
    (found,) = tickets
    assert (1).to_bytes(32, "big") in found.peers, "the latest stay"


def test_a_kick_outlives_a_restart_and_ends_by_itself() -> None:
    disk: dict[str, bytes] = {}
    core = with_members(an_authority(), 2)
    persist_to(core.kick(key_of(0).public, 5.0), disk)
    ticket = seal(capability(), AUTHORITY)
    assert answer(restarted(disk), 0, ticket, 100.0) == BARRED
    core = restarted(disk, 3)
    assert answer(core, 0, ticket, 606.0) is None
    persist_to(join(core, 1, 610.0), disk)
    persist_to(core.kick(key_of(1).public, 620.0), disk)
    assert [name for name, record in disk.items() if name.startswith("kick/") and record] == [
        f"kick/{key_of(1).public.hex()}"
    ], "expired kicks are forgotten"


def test_a_kick_is_taken_back_with_undo() -> None:
    disk: dict[str, bytes] = {}
    core = with_members(an_authority(), 2)
    persist_to(core.kick(key_of(0).public, 5.0), disk)
    persist_to(core.bar(key_of(0).public, 6.0, undo=True), disk)
    for each, now in ((core, 7.0), (restarted(disk), 7.0)):
        assert answer(each, 0, seal(capability(), AUTHORITY), now) is None


def test_a_copied_ticket_is_useless_once_its_place_is_taken() -> None:
    """A copied ticket for one machine is useless after that machine has used it."""
    ticket = seal(capability(nodes=1), AUTHORITY)
    core = an_authority()
    assert answer(core, 0, ticket, 1.0) is None
    assert "All 1 places" in str(answer(core, 1, ticket, 2.0))


def test_an_expired_ticket_admits_no_peer_but_members_stay() -> None:
    ticket = seal(capability(expires=clock(5.0)), AUTHORITY)
    core = an_authority()
    assert answer(core, 0, ticket, 1.0) is None
    assert "expired" in str(answer(core, 1, ticket, 6.0))
    assert 0 in core.book.leases


def test_revoking_a_ticket_expels_its_members_and_is_durable() -> None:
    ticket, other, disk = capability(nodes=5, name=1), capability(nodes=5, name=2), {}
    core = an_authority()
    for slot, of in ((0, ticket), (1, ticket), (2, other)):
        persist_to(join(core, slot, 1.0 + slot, join_message(seal(of, AUTHORITY))), disk)
    effects = persist_to(core.revoke(ticket.id, 5.0), disk)
    assert sorted(c.peer for c in only(effects, Close)) == sorted(key_of(s).public for s in (0, 1))
    assert {refused.why for refused in sends(effects, Refused)} == {REVOKED}
    assert list(core.book.leases) == [2]
    assert core.state.leases.heartbeat is not None
    assert core.state.leases.heartbeat.live == b"\x04", "the next heartbeat tells all members"
    core = restarted(disk)
    assert list(core.book.leases) == [2]
    assert answer(core, 0, seal(ticket, AUTHORITY), 6.0) == REVOKED
    persist_to(core.revoke(ticket.id, 7.0, undo=True), disk)
    assert answer(restarted(disk, 3), 0, seal(ticket, AUTHORITY), 8.0) is None


def test_a_barred_peer_is_refused_with_every_ticket_until_undone() -> None:
    disk: dict[str, bytes] = {}
    core = with_members(an_authority(), 2)
    peer = key_of(0).public
    effects = persist_to(core.bar(peer, 5.0), disk)
    assert [c.peer for c in only(effects, Close)] == [peer]
    assert list(core.book.leases) == [1]
    core = restarted(disk)
    for name in (1, 2):
        assert answer(core, 0, seal(capability(name=name), AUTHORITY), 5.0 + name) == BARRED
    assert core.bar(peer, 9.0) != [], "a repeated bar is as durable as the first"
    persist_to(core.bar(peer, 10.0, undo=True), disk)
    assert answer(restarted(disk, 3), 0, seal(capability(name=1), AUTHORITY), 11.0) is None


def test_a_peer_expelled_without_a_session_is_told_why_on_its_return() -> None:
    core = with_members(an_authority(), 2)
    grant = core.book.leases[0].sealed
    core.kick(key_of(0).public, 5.0)
    connect_peer(core, 0, 6.0)
    (refused,) = sends(say(core, 0, Hello(grant, 0, 0, 0, 0), 6.0), Refused, to=0)
    assert refused.code == "unknown"
    (refused,) = sends(say(core, 0, join_message(seal(capability(), AUTHORITY)), 8.0), Refused, to=0)
    assert (refused.code, refused.why) == ("ticket", BARRED)
    assert answer(core, 0, seal(capability(), AUTHORITY), 700.0) is None, "a kick lasts ten minutes"


# ---------------------------------------------------------------- records


def test_a_record_of_the_first_release_is_read() -> None:
    tickets = Tickets()
    ticket = capability(nodes=1)
    tickets.restore([msgspec.msgpack.encode((ticket.id, False, (ALICE,)))])
    assert [list(found.peers) for found in tickets] == [[ALICE]]
    tickets.resume(ticket.id, ALICE)
    assert tickets.refusal(ticket, ALICE, NOW) is None
    assert "All 1 places" in str(tickets.refusal(ticket, BOB, NOW))
    tickets.left(ticket.id, ALICE)
    assert tickets.refusal(replace(ticket, nodes_ever=1), ALICE, NOW) is None
    assert "1 different machines" in str(tickets.refusal(replace(ticket, nodes_ever=1), BOB, NOW))


def test_a_capability_of_the_first_releases_is_opened() -> None:
    ticket = capability(nodes=7)
    old = msgspec.msgpack.encode((ticket.swarm, ticket.id, ticket.expires, ticket.nodes, ticket.quota_bytes))
    assert open_capability(AUTHORITY.seal(b"swarm-node capability 1", old), AUTHORITY.public) == ticket


@pytest.mark.parametrize(
    ("records", "bars"),
    [([b"\xc0"], []), ([msgspec.msgpack.encode((b"short", False, ()))], []), ([], [msgspec.msgpack.encode(b"short")])],
)
def test_a_malformed_record_is_refused(records: list[bytes], bars: list[bytes]) -> None:
    with pytest.raises(PeerError, match="ticket record"):
        Tickets().restore(records, bars)


def replace_turns(ticket: TicketRecord) -> TicketRecord:
    return dataclasses.replace(ticket, turns=None)


def test_quota_and_use_come_back_as_they_were() -> None:
    ticket = replace(capability(nodes=3), quota_bytes=1000)
    tickets = Tickets()
    assert tickets.refusal(ticket, ALICE, NOW) is None
    for _ in range(2):
        tickets.bind(ticket.id, ALICE)
    tickets.left(ticket.id, ALICE)
    assert not tickets.fetched(ticket.id, 9), "less than a hundredth"
    assert tickets.fetched(ticket.id, 600)
    other = Tickets()
    other.restore([tickets.record(ticket.id)])
    assert [replace_turns(each) for each in other] == [replace_turns(each) for each in tickets]
    assert not other.fetched(ticket.id, 5)
    assert other.fetched(ticket.id, 500)
    assert "used up" in str(other.refusal(ticket, ALICE, NOW))
