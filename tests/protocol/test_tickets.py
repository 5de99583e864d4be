"""Tickets over a life of the authority and the next: who is bound, what is revoked, what the disk remembers."""

import msgspec
import pytest
from authority_kit import an_authority, clock, comes, join, renewal
from authority_kit import members as with_members
from msgspec.structs import replace
from protocol_kit import AUTHORITY, TUNING, capability, join_message, key_of, only, say, sends

from codec.errors import PeerError
from swarm.protocol.authority import Authority
from swarm.protocol.documents import AuthorityTime, seal
from swarm.protocol.events import Close, Effect, Persist, Timer
from swarm.protocol.tickets import BARRED, REVOKED, Tickets
from swarm.protocol.wire import Bye, Hello, Refused, Welcome

ALICE, BOB = key_of("alice").public, key_of("bob").public
NOW = AuthorityTime(1000.0)


def kept(effects: list[Effect], disk: dict[str, bytes]) -> list[Effect]:
    disk |= {wish.name: wish.record for wish in only(effects, Persist)}
    return effects


def again(disk: dict[str, bytes], boot: int = 2) -> Authority:
    """The next boot, from what the disk holds."""

    def under(prefix: str) -> list[bytes]:
        return [record for name, record in sorted(disk.items()) if name.startswith(prefix) and record]

    core = an_authority(boot=boot)
    core.admission.restore(under("grant/"), under("ticket/"), under("bar/"), 0.0)
    core.apply(Timer("tick"), TUNING.tick_s + 0.01)
    return core


def answer(core: Authority, slot: int, ticket: bytes, now: float) -> str | None:
    """What somebody who joins by it is told; None when it is let in."""
    effects = join(core, slot, now, join_message(ticket))
    refused = sends(effects, Refused, to=slot)
    assert bool(refused) != bool(sends(effects, Welcome, to=slot))
    return refused[0].why if refused else None


def test_a_peer_is_bound_at_its_first_use_and_who_left_keeps_its_place_over_a_restart() -> None:
    ticket, disk = seal(capability(nodes=2), AUTHORITY), {}
    core = an_authority()
    kept(join(core, 0, 1.0, join_message(ticket)), disk)
    kept(join(core, 1, 2.0, join_message(ticket)), disk)
    kept(say(core, 1, Bye(renewal(core, 1, 1, leaving=True)), 3.0), disk)
    assert "places of this ticket are taken" in str(answer(core, 2, ticket, 4.0))
    second = again(disk)
    assert "places of this ticket are taken" in str(answer(second, 3, ticket, 5.0))
    assert answer(second, 1, ticket, 6.0) is None, "whoever was bound comes back"


def test_a_ticket_in_other_hands_is_no_use_once_its_place_is_taken() -> None:
    """Whoever copies a ticket for one machine after that machine has used it gets nothing."""
    ticket = seal(capability(nodes=1), AUTHORITY)
    core = an_authority()
    assert answer(core, 0, ticket, 1.0) is None
    assert "All 1 places" in str(answer(core, 1, ticket, 2.0))


def test_an_expired_ticket_lets_nobody_in_but_whoever_is_in_stays() -> None:
    ticket = seal(capability(expires=clock(5.0)), AUTHORITY)
    core = an_authority()
    assert answer(core, 0, ticket, 1.0) is None
    assert "expired" in str(answer(core, 1, ticket, 6.0))
    assert 0 in core.book.leases


def test_a_revoked_ticket_puts_its_members_out_and_stays_revoked() -> None:
    ticket, other, disk = capability(nodes=5, name=1), capability(nodes=5, name=2), {}
    core = an_authority()
    for slot, of in ((0, ticket), (1, ticket), (2, other)):
        kept(join(core, slot, 1.0 + slot, join_message(seal(of, AUTHORITY))), disk)
    effects = kept(core.revoke(ticket.id, 5.0), disk)
    assert sorted(c.peer for c in only(effects, Close)) == sorted(key_of(s).public for s in (0, 1))
    assert {refused.why for refused in sends(effects, Refused)} == {REVOKED}
    assert list(core.book.leases) == [2]
    assert core.state.leases.heartbeat is not None
    assert core.state.leases.heartbeat.live == b"\x04", "everybody hears of it at once"
    core = again(disk)
    assert list(core.book.leases) == [2]
    assert answer(core, 0, seal(ticket, AUTHORITY), 6.0) == REVOKED
    kept(core.revoke(ticket.id, 7.0, undo=True), disk)
    assert answer(again(disk, 3), 0, seal(ticket, AUTHORITY), 8.0) is None


def test_a_barred_peer_comes_in_by_no_ticket_until_that_is_undone() -> None:
    disk: dict[str, bytes] = {}
    core = with_members(an_authority(), 2)
    peer = key_of(0).public
    effects = kept(core.bar(peer, 5.0), disk)
    assert [c.peer for c in only(effects, Close)] == [peer]
    assert list(core.book.leases) == [1]
    core = again(disk)
    for name in (1, 2):
        assert answer(core, 0, seal(capability(name=name), AUTHORITY), 5.0 + name) == BARRED
    assert core.bar(peer, 9.0) != [], "again: as durable as the first time"
    kept(core.bar(peer, 10.0, undo=True), disk)
    assert answer(again(disk, 3), 0, seal(capability(name=1), AUTHORITY), 11.0) is None


def test_one_that_was_put_out_without_a_session_hears_why_when_it_comes_back() -> None:
    core = with_members(an_authority(), 2)
    grant = core.book.leases[0].sealed
    core.kick(key_of(0).public, 5.0)
    comes(core, 0, 6.0)
    (refused,) = sends(say(core, 0, Hello(grant, 0, 0, 0, 0), 6.0), Refused, to=0)
    assert refused.code == "unknown"
    (refused,) = sends(say(core, 0, join_message(seal(capability(), AUTHORITY)), 8.0), Refused, to=0)
    assert (refused.code, refused.why) == ("ticket", BARRED)
    assert answer(core, 0, seal(capability(), AUTHORITY), 700.0) is None, "a kick is for ten minutes"


# ---------------------------------------------------------------- records


def test_a_record_of_the_first_release_is_read() -> None:
    tickets = Tickets()
    ticket = capability(nodes=1)
    tickets.restore([msgspec.msgpack.encode((ticket.id, False, (ALICE,)))])
    assert tickets.refusal(ticket, ALICE, NOW) is None
    assert "All 1 places" in str(tickets.refusal(ticket, BOB, NOW))


@pytest.mark.parametrize(
    ("records", "bars"),
    [([b"\xc0"], []), ([msgspec.msgpack.encode((b"short", False, ()))], []), ([], [msgspec.msgpack.encode(b"short")])],
)
def test_a_record_that_is_none_of_ours_is_noticed(records: list[bytes], bars: list[bytes]) -> None:
    with pytest.raises(PeerError, match="ticket record"):
        Tickets().restore(records, bars)


def test_quota_and_use_come_back_as_they_were() -> None:
    ticket = replace(capability(nodes=3), quota_bytes=1000)
    tickets = Tickets()
    assert tickets.refusal(ticket, ALICE, NOW) is None
    assert tickets.bind(ticket.id, ALICE)
    assert not tickets.bind(ticket.id, ALICE)
    assert not tickets.fetched(ticket.id, 9), "less than a hundredth"
    assert tickets.fetched(ticket.id, 600)
    other = Tickets()
    other.restore([tickets.record(ticket.id)])
    assert list(other) == list(tickets)
    assert not other.fetched(ticket.id, 5)
    assert other.fetched(ticket.id, 500)
    assert "used up" in str(other.refusal(ticket, ALICE, NOW))
