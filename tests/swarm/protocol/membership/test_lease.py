"""Leases, situation by situation: the views of the authority and of a member."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_kit import AUTHORITY, SWARM, TUNING, capability, grant, heartbeat, key_of, report

from codec.errors import PeerError
from swarm.protocol.core.documents import (
    AuthorityTime,
    Capability,
    Grant,
    Heartbeat,
    Report,
    bit_set,
    has_bit,
    heartbeat_hash,
    open_capability,
    open_grant,
    open_heartbeat,
    open_report,
    seal,
)
from swarm.protocol.membership.lease import Lease, LeaseBook, Leases, Standing
from swarm.protocol.membership.tickets import Refusal

ALICE, BOB = key_of("alice"), key_of("bob")
SOFT, HARD = TUNING.soft_ttl_s, TUNING.hard_ttl_s


def at(seconds: float) -> AuthorityTime:
    return AuthorityTime(1000.0 + seconds)


def new_book() -> LeaseBook:
    return LeaseBook(SWARM, AUTHORITY, TUNING)


def admitted(book: LeaseBook, peer: bytes, seconds: float = 0.0, ticket: Capability | None = None) -> Lease:
    lease = book.admit(ticket or capability(), peer, at(seconds))
    assert isinstance(lease, Lease)
    return lease


def beat(book: LeaseBook, seconds: float, serial: int = 1) -> bytes:
    sealed = heartbeat(serial, time=at(seconds))
    book.beat(sealed, at(seconds))
    return heartbeat_hash(sealed)


def renewal(lease: Lease, beaten: bytes, counter: int, key=ALICE, **more) -> Report:
    return report(lease.grant.slot, beaten, counter, key=key, serial=lease.grant.serial, **more)


# ---------------------------------------------------------------- the authority's end


def test_renewed_late_but_in_time() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beaten = beat(book, SOFT)
    assert book.standing(0, at(SOFT + 1)) is Standing.SOFT
    assert book.renew(renewal(lease, beaten, 1), at(SOFT + 1))
    assert book.standing(0, at(SOFT + 1)) is Standing.FRESH


def test_a_renewal_counts_from_the_heartbeat_that_it_names_not_from_its_arrival() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beaten = beat(book, 1)
    assert book.renew(renewal(lease, beaten, 1), at(HARD))
    assert book.left_s(0, at(HARD)) == pytest.approx(1)


def test_soft_then_hard_expiry() -> None:
    book = new_book()
    admitted(book, ALICE.public)
    assert book.standing(0, at(SOFT)) is Standing.FRESH
    assert book.standing(0, at(SOFT + 0.01)) is Standing.SOFT
    assert book.expire(at(HARD)) == []
    assert book.bits(at(SOFT + 0.01)) == (b"\x01", b"")
    assert book.standing(0, at(HARD + 0.01)) is Standing.DEAD
    assert book.expire(at(HARD + 0.01)) == [(0, ALICE.public)]
    assert book.bits(at(HARD + 0.01)) == (b"", b"")


@pytest.mark.parametrize("counter", [5, 4, 1])
def test_a_replayed_report_renews_nothing(counter: int) -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beaten = beat(book, 1)
    assert book.renew(renewal(lease, beaten, 5), at(1))
    later = beat(book, 3, serial=2)
    assert not book.renew(renewal(lease, later, counter), at(3))
    assert lease.renewed == at(1)


def test_a_report_over_a_heartbeat_never_sent() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beat(book, 1)
    assert not book.renew(renewal(lease, bytes(32), 1), at(1))


def test_a_report_over_a_heartbeat_too_long_ago() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    first = beat(book, 0.1)
    for serial in range(2, 2 + LeaseBook.HEARTBEATS_KEPT):
        beat(book, serial * 0.1, serial)
    assert not book.renew(renewal(lease, first, 1), at(5))


def test_a_forged_report_does_not_open() -> None:
    forged = seal(report(0, bytes(32), 1, key=ALICE), BOB)
    with pytest.raises(PeerError, match="signature"):
        open_report(forged, SWARM)


def test_a_report_for_anothers_slot_renews_nothing() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beaten = beat(book, 1)
    assert not book.renew(renewal(lease, beaten, 1, key=BOB), at(1))


def test_a_grant_is_fenced_by_a_newer_serial() -> None:
    book = new_book()
    first = admitted(book, ALICE.public)
    second = admitted(book, ALICE.public, 1)
    beaten = beat(book, 1)
    assert second.grant.slot == first.grant.slot
    assert second.grant.serial > first.grant.serial
    assert not book.renew(renewal(first, beaten, 1), at(1))
    assert book.renew(renewal(second, beaten, 1), at(1))


def test_the_same_peer_twice_takes_one_slot_and_one_place() -> None:
    book = new_book()
    for _ in range(5):
        admitted(book, ALICE.public, ticket=capability(nodes=1))
    assert list(book.leases) == [0]


def test_two_peers_get_two_slots() -> None:
    book = new_book()
    assert {admitted(book, key.public).grant.slot for key in (ALICE, BOB)} == {0, 1}


def test_ticket_expired() -> None:
    refusal = new_book().admit(capability(expires=1005.0), ALICE.public, at(5))
    assert isinstance(refusal, Refusal)
    assert "expired" in refusal.why
    assert isinstance(new_book().admit(capability(expires=1005.0), ALICE.public, at(4.9)), Lease)


def test_a_place_returns_with_its_lease() -> None:
    book = new_book()
    ticket = capability(nodes=1)
    lease = admitted(book, ALICE.public, ticket=ticket)
    assert "All 1 places" in str(book.admit(ticket, BOB.public, at(1)))
    assert isinstance(book.admit(capability(nodes=1, name=1), BOB.public, at(1)), Lease), "by another ticket"
    book.release(lease.grant.slot)
    assert isinstance(book.admit(ticket, BOB.public, at(2)), Lease)
    assert "All 1 places" in str(book.admit(ticket, ALICE.public, at(3)))
    book.expire(at(HARD + 4))
    assert isinstance(book.admit(ticket, ALICE.public, at(HARD + 5)), Lease)


def test_joining_with_another_ticket_frees_the_place_of_the_first() -> None:
    book = new_book()
    first = admitted(book, ALICE.public, ticket=capability(nodes=1))
    second = admitted(book, ALICE.public, 1, ticket=capability(nodes=1, name=1))
    assert second.grant.slot == first.grant.slot
    assert isinstance(book.admit(capability(nodes=1), BOB.public, at(2)), Lease)
    assert len(book.leases) == 2


def test_a_freed_slot_is_reused_and_its_old_holder_cannot_renew_it() -> None:
    book = new_book()
    old = admitted(book, ALICE.public)
    book.expire(at(HARD + 1))
    new = admitted(book, BOB.public, HARD + 1)
    beaten = beat(book, HARD + 1)
    assert new.grant.slot == old.grant.slot
    assert new.grant.serial > old.grant.serial
    assert not book.renew(renewal(old, beaten, 9), at(HARD + 2))
    assert book.leases[new.grant.slot].grant.peer == BOB.public


def test_leaving_frees_the_slot_at_once() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public)
    beaten = beat(book, 1)
    assert book.renew(renewal(lease, beaten, 1, leaving=True), at(1))
    assert not book.leases
    assert not book.slot_of
    assert not book.renew(renewal(lease, beaten, 2), at(1))


def test_restored_leases_did_not_age_while_the_authority_was_down() -> None:
    book = new_book()
    sealed = [admitted(book, key_of(i).public, ticket=capability(nodes=64)).sealed for i in range(20)]
    restored = new_book()
    restored.restore(sealed, at(10_000))
    assert all(restored.standing(slot, at(10_000 + SOFT)) is Standing.FRESH for slot in range(20))
    assert restored.expire(at(10_000 + HARD)) == []
    assert restored.next_serial == book.next_serial


def test_restored_tickets_remember_who_used_them() -> None:
    book = new_book()
    lease = admitted(book, ALICE.public, ticket=capability(nodes=1))
    restored = new_book()
    restored.restore([lease.sealed], at(0))
    assert isinstance(restored.admit(capability(nodes=1), BOB.public, at(0)), Refusal)


def test_restored_twice_the_later_grant_of_a_slot_counts() -> None:
    old, new = grant(3, ALICE.public, serial=5), grant(3, BOB.public, serial=9)
    for grants in ([old, new], [new, old]):
        restored = new_book()
        restored.restore(grants, at(0))
        assert restored.leases[3].grant.peer == BOB.public
        assert restored.slot_of == {BOB.public: 3}
        assert restored.next_serial == 10


def test_restored_twice_the_later_grant_of_a_peer_counts() -> None:
    """A crash may prevent a release from becoming durable; a peer in two slots would make an invalid roster."""
    for grants in ([2, 5], [5, 2]):
        restored = new_book()
        restored.restore([grant(slot, ALICE.public, serial=slot) for slot in grants], at(0))
        assert restored.slot_of == {ALICE.public: 5}
        assert list(restored.leases) == [5]


def test_a_grant_of_another_authority_is_not_restored() -> None:
    with pytest.raises(PeerError):
        new_book().restore([grant(0, ALICE.public, key=BOB)], at(0))


# ---------------------------------------------------------------- the member's end


def test_a_member_reads_standings_from_the_newest_heartbeat() -> None:
    leases = Leases(TUNING)
    assert leases.standing(0, 0.0) is Standing.DEAD
    assert leases.hear(heartbeat(1, live=[0, 1], fresh=[0]), SWARM, 0.0)
    standings = [leases.standing(slot, 0.0) for slot in (0, 1, 2, 10_000)]
    assert standings == [Standing.FRESH, Standing.SOFT, Standing.DEAD, Standing.DEAD]


@pytest.mark.parametrize(("boot", "serial"), [(1, 5), (1, 4), (0, 99)])
def test_an_old_heartbeat_keeps_nobody_alive(boot: int, serial: int) -> None:
    leases = Leases(TUNING)
    assert leases.hear(heartbeat(5, live=[]), SWARM, 0.0)
    assert not leases.hear(heartbeat(serial, boot=boot, live=[0], time=5000.0), SWARM, 1.0)
    assert leases.standing(0, 1.0) is Standing.DEAD


def test_a_later_boot_counts_more_than_any_serial() -> None:
    leases = Leases(TUNING)
    leases.hear(heartbeat(500), SWARM, 0.0)
    assert leases.hear(heartbeat(1, boot=2), SWARM, 1.0)
    one, two = open_heartbeat(heartbeat(500), SWARM), open_heartbeat(heartbeat(1, boot=2), SWARM)
    assert one.stamp < two.stamp


def test_the_authority_silent_for_an_hour() -> None:
    """Leases do not age meanwhile, and all end at once if it lasts too long."""
    leases = Leases(TUNING)
    leases.hear(heartbeat(1, live=[0]), SWARM, 10.0)
    assert leases.standing(0, 10.0 + 3599.0) is Standing.FRESH
    assert leases.silent_s(10.0 + 3599.0) == 3599.0
    assert leases.authority_time(10.0 + 3599.0) == leases.authority_time(10.0)
    assert leases.standing(0, 10.0 + 3601.0) is Standing.DEAD
    leases.hear(heartbeat(2, live=[0]), SWARM, 10.0 + 4000.0)
    assert leases.standing(0, 10.0 + 4000.0) is Standing.FRESH


def test_a_forged_heartbeat_changes_nothing() -> None:
    leases = Leases(TUNING)
    leases.hear(heartbeat(1, live=[0]), SWARM, 0.0)
    with pytest.raises(PeerError):
        leases.hear(heartbeat(2, live=[], key=ALICE), SWARM, 1.0)
    assert leases.standing(0, 1.0) is Standing.FRESH


# ---------------------------------------------------------------- documents

DOCUMENTS = {
    "capability": (seal(capability(), AUTHORITY), open_capability),
    "grant": (grant(0, ALICE.public), open_grant),
    "heartbeat": (heartbeat(1), open_heartbeat),
    "report": (seal(report(0, bytes(32), 1, key=ALICE), ALICE), open_report),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_of_another_swarm(name: str) -> None:
    sealed, open_ = DOCUMENTS[name]
    with pytest.raises(PeerError):
        open_(sealed, BOB.public)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_truncated_extended_or_altered(name: str) -> None:
    sealed, open_ = DOCUMENTS[name]
    assert open_(sealed, SWARM) == open_(sealed, SWARM)

    @given(st.integers(0, len(sealed) - 1), st.integers(1, 255))
    def check(cut: int, flip: int) -> None:
        altered = bytearray(sealed)
        altered[cut] ^= flip
        for bad in (sealed[:cut], sealed + bytes((flip,)), bytes(altered)):
            with pytest.raises(PeerError):
                open_(bad, SWARM)

    check()


def test_a_signature_for_one_kind_of_document_is_none_for_another() -> None:
    for name, (sealed, _) in DOCUMENTS.items():
        for other, (_, open_) in DOCUMENTS.items():
            if other != name:
                with pytest.raises(PeerError):
                    open_(sealed, SWARM)


def test_a_document_of_this_key_that_names_another_swarm() -> None:
    sealed = seal(Grant(BOB.public, ALICE.public, 0, 1, 0.0, bytes(16)), AUTHORITY)
    with pytest.raises(PeerError, match="another swarm"):
        open_grant(sealed, SWARM)


@given(st.sets(st.integers(0, 300)))
def test_bit_sets(slots: set[int]) -> None:
    bits = bit_set(slots)
    assert {slot for slot in range(400) if has_bit(bits, slot)} == slots
    sealed = seal(Heartbeat(SWARM, 1, 1, 0.0, 1, 0, 0, bits, bits), AUTHORITY)
    assert open_heartbeat(sealed, SWARM).live == bits
