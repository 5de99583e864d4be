"""Successions: which members get one, forward it, and are admitted with it."""

import dataclasses

import pytest
from authority_kit import TICKET, an_authority, connect_peer, join, members, notices_of, reconnect, renewal
from member_kit import a_member
from msgspec.structs import replace
from protocol_kit import AUTHORITY, SWARM, capability, heartbeat, join_message, key_of, meet, only, say, sends

from codec.errors import PeerError
from codec.sign import Key
from swarm.protocol.core.documents import AuthorityTime, seal
from swarm.protocol.core.events import Close, PeerUp, Persist
from swarm.protocol.core.wire import Bye, HeartbeatNews, Join, Refused, Succession, WantBlock, Welcome, decode, encode
from swarm.protocol.membership.succession import Successor, open_successor, seal_successor
from swarm.protocol.membership.tickets import Tickets

NEW = Key(b"n" * 32)
DOCUMENT = Successor(SWARM, NEW.public, ("/ip4/127.0.0.1/tcp/1",), seal(capability(swarm=NEW.public), NEW), "wan")
SEALED = seal_successor(DOCUMENT, AUTHORITY)


# ---------------------------------------------------------------- the document


def test_round_trip_and_size() -> None:
    assert open_successor(SEALED, SWARM) == DOCUMENT
    most = replace(DOCUMENT, addrs=("/" + "a" * 255,) * 4, capability=bytes(1024))
    message = Succession(seal_successor(most, AUTHORITY))
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "sealed",
    [
        b"", b"x" * 64, b"x" * 5000, SEALED[:-1], SEALED[:64] + SEALED[70:],
        key_of("mallory").seal(b"swarm-node succession 1", SEALED[64:]),
        AUTHORITY.seal(b"swarm-node capability 1", SEALED[64:]),
        AUTHORITY.seal(b"swarm-node succession 1", b"\xc1"),
        AUTHORITY.seal(b"swarm-node succession 1", SEALED[64:] + b"\0"),
        seal_successor(replace(DOCUMENT, successor=SWARM), AUTHORITY),
        seal_successor(replace(DOCUMENT, addrs=()), AUTHORITY),
        seal_successor(replace(DOCUMENT, addrs=("a",) * 5), AUTHORITY),
        AUTHORITY.seal(b"swarm-node succession 1", SEALED[64:].replace(b"/ip4", b"\xff\xfe\xfd\xfc")),
    ],
)  # fmt: skip
def test_documents_that_the_old_key_did_not_sign(sealed: bytes) -> None:
    with pytest.raises(PeerError):
        open_successor(sealed, SWARM)


def test_a_key_does_not_sign_for_another_swarm() -> None:
    with pytest.raises(ValueError, match="signed by the key"):
        seal_successor(DOCUMENT, NEW)


# ---------------------------------------------------------------- members


def test_a_member_forwards_it_once_to_all_neighbours_and_tells_its_process() -> None:
    peer = a_member(((1, 2, 3, -1),))
    for slot in (1, 2, 3):
        meet(peer, slot)
    effects = say(peer, 1, Succession(SEALED), 1.0)
    assert notices_of(effects, "succession") == [{"sealed": SEALED}]
    assert [len(sends(effects, Succession, to=slot)) for slot in (1, 2, 3)] == [0, 1, 1]
    other = seal_successor(replace(DOCUMENT, successor=key_of("thief").public), AUTHORITY)
    for sealed in (SEALED, other):  # the first one counts
        effects = say(peer, 2, Succession(sealed), 2.0)
        assert (sends(effects, Succession), notices_of(effects, "succession")) == ([], [])
    assert peer.state.succession == SEALED


def test_a_forged_one_closes_the_session_and_moves_no_member() -> None:
    peer = a_member()
    meet(peer, 1)
    effects = say(peer, 1, Succession(seal_successor(replace(DOCUMENT, swarm=NEW.public), NEW)), 1.0)
    assert only(effects, Close)[0].ban_s > 0
    assert notices_of(effects, "succession") == []
    assert peer.state.succession == b""


def test_a_peer_without_a_grant_may_bring_it_since_only_the_signature_counts() -> None:
    peer = a_member()
    peer.apply(PeerUp(key_of(9).public, False, "/sim/9"), 1.0)
    assert notices_of(say(peer, 9, Succession(SEALED), 1.0), "succession") == [{"sealed": SEALED}]


# ---------------------------------------------------------------- the seed's last run


def last_run(core):
    """The next boot of this authority, which only hands over to the new key."""
    again = an_authority(boot=2, grants=[])
    again.state.succession = SEALED
    again.book.restore([lease.sealed for lease in core.book.leases.values()], AuthorityTime(1000.0))
    for peer in core.book.slot_of:
        again._enrolled[peer] = core._enrolled[peer]
    return again


def test_members_that_return_are_told_and_no_others_are_admitted() -> None:
    before = members(an_authority(), 2)
    core = last_run(before)
    effects = reconnect(core, 0, before.book.leases[0].sealed)
    assert sends(effects, Succession, to=0) == [Succession(SEALED)]
    assert [r.code for r in sends(say(core, 0, WantBlock(1, 0), 6.0), Refused)] == []
    connect_peer(core, 7, 6.0)
    effects = say(core, 7, join_message(TICKET), 6.0)
    assert (sends(effects, Welcome), only(effects, Persist)) == ([], [])
    assert sends(effects, Succession, to=7) == [Succession(SEALED)], "its lease may have expired"
    connect_peer(core, 8, 7.0)
    assert sends(say(core, 8, join_message(b""), 7.0), Succession) == [], "a stranger without a ticket gets no answer"


def test_it_is_over_when_every_lease_is_released() -> None:
    before = members(an_authority(), 2)
    core = last_run(before)
    for slot in (0, 1):
        reconnect(core, slot, before.book.leases[slot].sealed, 5.0 + slot)
        say(core, slot, Bye(renewal(core, slot, 1, leaving=True)), 5.5 + slot)
    assert core.book.leases == {}


def test_a_thief_with_a_later_boot_does_not_silence_it() -> None:
    core = last_run(members(an_authority(), 1))
    connect_peer(core, 0, 5.0)
    before = core.book.leases[0].sealed
    reconnect(core, 0, before, 5.0)
    assert notices_of(say(core, 0, HeartbeatNews(heartbeat(1, boot=900)), 6.0), "superseded") == []
    assert sends(reconnect(core, 0, before, 7.0), Succession, to=0) == [Succession(SEALED)]


# ---------------------------------------------------------------- admission to the new swarm


def test_the_ticket_inside_is_for_former_members_only_over_restarts() -> None:
    who = [key_of(slot).public for slot in range(300)]
    ticket = replace(capability(nodes=300), nodes_ever=300)
    tickets = Tickets()
    tickets.reserve(ticket, who)
    restored = Tickets()
    restored.restore([tickets.record(ticket.id)])
    for each in (tickets, restored):
        now = AuthorityTime(1000.0)
        assert "300 different machines" in str(each.refusal(ticket, key_of("thief").public, now))
        for peer in who:
            assert each.refusal(ticket, peer, now) is None
            each.bind(ticket.id, peer)
        assert "All 300 places" in str(each.refusal(ticket, key_of("thief").public, now))
        (found,) = each
        assert dataclasses.replace(found, turns=None).ever == 300


def test_without_members_it_admits_no_peer() -> None:
    ticket = replace(capability(nodes=0), nodes_ever=1)
    tickets = Tickets()
    tickets.reserve(ticket, [])
    assert "All 0 places" in str(tickets.refusal(ticket, key_of("thief").public, AuthorityTime(1000.0)))


def test_a_join_with_it_is_an_ordinary_join() -> None:
    core = an_authority()
    ticket = replace(capability(nodes=1), nodes_ever=1)
    core.book.tickets.reserve(ticket, [key_of(4).public])
    message: Join = join_message(seal(ticket, AUTHORITY))
    assert [r.code for r in sends(join(core, 5, 1.0, message), Refused, to=5)] == ["ticket"]
    assert len(sends(join(core, 4, 3.0, message), Welcome, to=4)) == 1
