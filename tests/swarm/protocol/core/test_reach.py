"""Which peer can dial which, which end dials, and which addresses are believed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol_kit import (
    AUTHORITY,
    TUNING,
    admit,
    capability,
    join_message,
    key_of,
    manifest,
    member,
    new_peer,
    only,
    say,
)  # fmt: skip

from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import AuthorityTime, seal
from swarm.protocol.core.events import Dial, Effect, PeerDown, PeerUp, Persist, Persisted, Probe, Probed, Timer
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.reach import (
    Location,
    Scope,
    can_connect,
    circuit,
    direct,
    is_circuit,
    relay_of,
    scope,
    to_dial,
)
from swarm.protocol.membership.enrolment import PROBE_AGAIN_S, Enrolment, Enrolments
from swarm.protocol.startup import Boot, Saved, Site

WORLD, LAN, HERE = "/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.5/tcp/1", "/ip4/127.0.0.1/tcp/1"
TICKET = seal(capability(nodes=100), AUTHORITY)
RELAY = "/ip4/9.9.9.9/tcp/4001"
NAT = Location((circuit(RELAY),))
"""A peer that cannot be dialed, and has a reservation at a relay."""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (WORLD, Scope.WORLD),
        (LAN, Scope.NEAR),
        ("/ip4/100.64.0.1/tcp/1", Scope.NEAR),
        (HERE, Scope.HERE),
        ("/ip6/::1/tcp/1", Scope.HERE),
        ("/ip6/fd00::1/tcp/1", Scope.NEAR),
        ("/dns/box.example/tcp/1", Scope.WORLD),
        (circuit(LAN), Scope.NEAR),
        ("/memory/3", Scope.WORLD),
        ("", Scope.WORLD),
        (None, Scope.WORLD),
        ("/ip4/what/tcp/1", Scope.WORLD),
    ],
)
def test_from_how_far_an_address_can_be_dialed(address: str | None, expected: Scope) -> None:
    assert scope(address) is expected


def test_a_circuit_names_its_relay() -> None:
    assert relay_of(circuit(RELAY)) == (RELAY, "")
    assert relay_of(circuit(RELAY, "12D3Koo")) == (RELAY, "12D3Koo")
    assert is_circuit(circuit(RELAY, "12D3Koo"))
    assert not is_circuit(RELAY)


@pytest.mark.parametrize(
    ("me", "other", "dialed"),
    [
        (Location((WORLD,)), Location((WORLD,)), (WORLD,)),
        (Location(()), Location((WORLD, circuit(RELAY))), (WORLD,)),
        (Location((WORLD,)), NAT, ()),  # it dials us
        (Location(()), NAT, NAT.addrs),  # neither can be dialed: a relay is the last resort
        (NAT, NAT, NAT.addrs),
        (Location(()), Location(()), ()),
        (Location((), Scope.WORLD), Location((LAN,), Scope.NEAR), ()),  # of another network
        (Location((), Scope.NEAR), Location((LAN,), Scope.NEAR), (LAN,)),
        (Location((), Scope.NEAR), Location((HERE,), Scope.HERE), ()),
        (Location((), Scope.HERE), Location((HERE, LAN), Scope.HERE), (HERE, LAN)),
        (Location((), Scope.WORLD), Location((circuit(LAN),), Scope.WORLD), ()),
    ],
)
def test_who_dials(me: Location, other: Location, dialed: tuple[str, ...]) -> None:
    assert to_dial(me, other) == dialed


places = st.builds(
    Location,
    st.lists(st.sampled_from([WORLD, LAN, HERE, circuit(RELAY), circuit(LAN)]), max_size=4).map(tuple),
    st.sampled_from(Scope),
)


@given(places, places)
def test_one_end_of_an_edge_dials_if_either_can(a: Location, b: Location) -> None:
    assert can_connect(a, b) == can_connect(b, a)
    if can_connect(a, b):
        assert to_dial(a, b) or to_dial(b, a)
        assert not any(map(is_circuit, to_dial(a, b) + to_dial(b, a)))
    for address in to_dial(a, b):
        assert address in b.addrs
        assert scope(address) >= a.scope
    assert set(direct(a, b)) <= set(b.addrs)


# ---------------------------------------------------------------- dialing back


def enrolled(seen_at: str | None, *addrs: str) -> tuple[Enrolments, list[Effect]]:
    outbox = Outbox()
    book, effects = Enrolments(outbox), outbox.pending
    message = join_message()
    book[b"x"] = Enrolment(replace(message, addrs=addrs), seen_at)
    return book, effects


def test_an_address_is_published_only_after_its_owner_answered_there() -> None:
    book, effects = enrolled("/ip4/8.8.8.8/tcp/5", "/ip4/0.0.0.0/tcp/1", "/ip4/9.9.9.9/tcp/2", circuit(RELAY))
    book.probe(b"x", 1.0)
    assert effects == [Probe(b"x", (WORLD, "/ip4/9.9.9.9/tcp/2"))]
    assert book[b"x"].member(3, bytes(32), leaf=False).addrs == (circuit(RELAY),)
    assert not book[b"x"].member(3, bytes(32), leaf=False).dialable
    assert book.probed(Probed(b"x", (WORLD,)))
    assert book[b"x"].member(3, bytes(32), leaf=False).addrs == (WORLD, circuit(RELAY))
    assert book[b"x"].member(3, bytes(32), leaf=False).dialable
    assert not book.probed(Probed(b"x", (WORLD,)))  # no change
    assert book.probed(Probed(b"x", ()))  # does not answer any more
    assert not book.probed(Probed(b"gone", ()))


def test_private_addresses_of_a_stranger_are_never_dialed() -> None:
    """Otherwise a peer with a ticket could have us dial into our own network."""
    book, effects = enrolled("/ip4/8.8.8.8/tcp/5", LAN, HERE, "/ip4/10.0.0.1/tcp/22")
    book.probe(b"x", 1.0)
    assert effects == []
    book, effects = enrolled("/ip4/192.168.1.9/tcp/5", LAN, HERE, WORLD)
    book.probe(b"x", 1.0)
    assert effects == [Probe(b"x", (LAN, WORLD))]


def test_many_addresses_cost_few_dials() -> None:
    book, effects = enrolled(None, *(f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 17)))
    book.probe(b"x", 1.0)
    assert len(only(effects, Probe)[0].addrs) == 4


def test_members_are_dialed_back_again_at_intervals_one_at_a_time() -> None:
    book, effects = enrolled(None, WORLD)
    book[b"y"] = Enrolment(book[b"x"].join, None)
    book.probe(b"x", 0.0)
    book.probe(b"y", 1.0)
    book.probe_due(PROBE_AGAIN_S - 1)
    assert [e.peer for e in only(effects, Probe)] == [b"x", b"y"]
    book.probe_due(PROBE_AGAIN_S + 1)
    book.probe_due(PROBE_AGAIN_S + 1)
    book.probe_due(PROBE_AGAIN_S + 1)
    assert [e.peer for e in only(effects, Probe)] == [b"x", b"y", b"x", b"y"]


# ---------------------------------------------------------------- a member among such neighbours


def test_a_parent_that_cannot_be_dialed_dials_its_children() -> None:
    members = [member(0, dialable=False), member(1), member(2, dialable=False)]
    effects = admit(new_peer(0), [(-1, 0, 0)], members=members)
    assert [e.addrs for e in only(effects, Dial)] == [("/sim/1",)]  # slot 2 cannot be dialed either


def test_a_child_waits_to_be_dialed_by_a_parent_that_can() -> None:
    members = [member(0), member(1, dialable=False)]
    effects = admit(new_peer(0), [(1, -1)], members=members)
    assert only(effects, Dial) == []


# ---------------------------------------------------------------- the authority


def an_authority(addrs: tuple[str, ...], grants: list[bytes] | None = None) -> Authority:
    core = Authority(
        AUTHORITY, TUNING, random.Random(1),
        Boot(1 if grants is None else 2, clock=lambda now: AuthorityTime(1000.0 + now)),
        Saved(manifest(0, 0), grants or []), Site(addrs),
    )  # fmt: skip
    core.start(0.0)
    return core


def join_from(core: Authority, slot: int, seen_at: str, addrs: tuple[str, ...], now: float = 1.0) -> list[Effect]:
    """The peer connects and asks to join; its grant is durable at once."""
    peer, join = key_of(slot).public, replace(join_message(TICKET), addrs=addrs)
    effects = core.apply(PeerUp(peer, False, seen_at), now) + say(core, slot, join, now)
    for wish in only(effects, Persist):
        effects = effects + core.apply(Persisted(wish.token), now)
    return effects


def addresses_in_roster(core: Authority, slot: int) -> tuple[tuple[str, ...], bool]:
    assert core.state.roster is not None
    member = core.state.roster.member_of(key_of(slot).public)
    assert member is not None
    return member.addrs, member.dialable


def test_addresses_found_by_dialing_back_reach_the_roster_and_the_disk() -> None:
    core = an_authority((WORLD,))
    effects = join_from(core, 0, "/ip4/9.9.9.9/tcp/999", ("/ip4/0.0.0.0/tcp/4001",))
    assert only(effects, Probe) == [Probe(key_of(0).public, ("/ip4/9.9.9.9/tcp/4001",))]
    core.apply(Timer("tick"), 2.0)
    assert addresses_in_roster(core, 0) == ((), False)
    effects = core.apply(Probed(key_of(0).public, ("/ip4/9.9.9.9/tcp/4001",)), 3.0)
    (wish,) = only(effects, Persist)
    core.apply(Timer("tick"), 4.0)
    assert addresses_in_roster(core, 0) == (("/ip4/9.9.9.9/tcp/4001",), True)
    again = an_authority((WORLD,), [wish.record])
    again.apply(Timer("tick"), 1.0)
    assert addresses_in_roster(again, 0) == (("/ip4/9.9.9.9/tcp/4001",), True)
    core.apply(Probed(key_of(0).public, ()), 5.0)
    core.apply(Timer("tick"), 6.0)
    assert addresses_in_roster(core, 0) == ((), False)


def test_an_authority_that_cannot_be_dialed_dials_its_root_children() -> None:
    hidden, open_ = an_authority((circuit(RELAY),)), an_authority((WORLD,))
    for core in (hidden, open_):
        join_from(core, 0, "/ip4/9.9.9.9/tcp/999", ("/ip4/9.9.9.9/tcp/4001",))
        core.apply(Probed(key_of(0).public, ("/ip4/9.9.9.9/tcp/4001",)), 2.0)
        core.apply(PeerDown(key_of(0).public), 2.5)
    dials = [only(core.apply(Timer("tick"), 3.0), Dial) for core in (hidden, open_)]
    assert dials == [[Dial(key_of(0).public, ("/ip4/9.9.9.9/tcp/4001",))], []]
