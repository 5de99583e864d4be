"""A member without a lease sends no content: before it is admitted, when its lease is over, and when it is void."""

from member_kit import CHAIN, a_forwarder, a_member, tick
from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    grant,
    header,
    heartbeat,
    key_of,
    manifest,
    meet,
    member,
    new_peer,
    only,
    roster,
    say,
    sends,
)

from swarm.protocol.core.events import LocalBudget, PeerUp, PieceStored, SendBlock, SendPiece
from swarm.protocol.core.wire import (  # fmt: skip
    Attach,
    HeartbeatNews,
    Join,
    Lacks,
    LacksChunk,
    Message,
    Refused,
    RosterNews,
    WantBlock,
    WantChunk,
    Welcome,
)
from swarm.protocol.member import Peer


def with_a_chunk() -> Peer:
    """A member with two neighbours, and a whole chunk of version 1 in stripe 0."""
    peer, event = a_forwarder(), header(1, 0, peer=key_of(1).public)
    peer.apply(event, 1.0)
    for index in range(4):
        peer.apply(PieceStored(key_of(1).public, 0, event.key, index, 1000), 1.0)
    return peer


def gives(peer: Peer, now: float) -> bool:
    """Whether it sends what a neighbour asks for; otherwise it says that it lacks that."""
    found = say(peer, 2, WantChunk(0, 1, 0, 0, b""), now) + say(peer, 2, WantBlock(2, 0), now)
    sent, lacked = only(found, SendPiece) + only(found, SendBlock), sends(found, LacksChunk) + sends(found, Lacks)
    assert bool(sent) != bool(lacked)
    return bool(sent)


def test_a_member_gives_until_its_grant_is_void_and_again_with_the_next_one() -> None:
    peer = with_a_chunk()
    assert gives(peer, 1.5)
    say(peer, SWARM, Refused("unknown", "join again"), 2.0)
    assert not gives(peer, 2.1)
    assert only(say(peer, 2, Attach(0, 0, 0, 1 << 20, ()), 2.2), SendPiece) == []
    admit(peer, CHAIN, now=3.0)
    assert gives(peer, 3.1)


def test_a_member_whose_lease_expired_gives_nothing_until_a_heartbeat_says_otherwise() -> None:
    peer = with_a_chunk()
    say(peer, 1, HeartbeatNews(heartbeat(3, live=[1, 2])), 2.0)
    assert not gives(peer, 2.1)
    say(peer, 1, HeartbeatNews(heartbeat(4, live=[0, 1, 2])), 3.0)
    assert gives(peer, 3.1)


def test_a_member_knows_that_its_lease_ended_while_it_heard_nothing() -> None:
    """Its slot's bit may be that of the next holder. It joins again, and does not ask first whether its lease holds."""
    peer = a_member()
    meet(peer, 2)
    last = 1002.0 + TUNING.hard_ttl_s
    say(peer, 2, HeartbeatNews(heartbeat(3, time=last)), 20.0)
    assert peer.state.grant is not None
    say(peer, 2, HeartbeatNews(heartbeat(4, time=last + TUNING.hard_ttl_s + 0.1)), 40.0)
    assert peer.state.grant is None
    assert not peer.state.exchange.gives
    assert [type(message) for message in sends(tick(peer, 41.0), Message, to=SWARM)] == [Join]


def test_a_silence_across_a_restart_of_the_authority_ends_no_lease() -> None:
    peer = a_member()
    meet(peer, 2)
    say(peer, 2, HeartbeatNews(heartbeat(1, boot=2, time=5000.0)), 20.0)
    assert peer.state.grant is not None


def test_a_lease_that_was_granted_in_the_silence_goes_on() -> None:
    peer = a_member()
    again = grant(0, peer.state.key.public, serial=2, issued=2000.0)
    say(peer, SWARM, Welcome(again, b"", heartbeat(9, time=2000.0), manifest(0, 0)), 4.0)
    assert peer.state.grant is not None


def test_a_grant_younger_than_the_heartbeat_is_valid() -> None:
    peer = a_member()
    meet(peer, 2)
    say(peer, SWARM, HeartbeatNews(heartbeat(2, live=[1, 2], time=999.0)), 1.0)
    assert peer.state.exchange.gives


def test_a_member_whose_slot_has_another_holder_gives_nothing() -> None:
    peer = with_a_chunk()
    others = [member(0, peer=key_of(7).public), member(1), member(2)]
    say(peer, 1, RosterNews(roster(CHAIN, others, serial=2)), 2.0)
    say(peer, 1, HeartbeatNews(heartbeat(9, roster=2)), 2.0)
    assert not gives(peer, 2.1)


def test_a_newcomer_gives_nothing_before_it_is_admitted() -> None:
    peer = new_peer(0)
    peer.apply(PeerUp(SWARM, True), 0.0)
    assert not peer.state.exchange.gives
    admit(peer, CHAIN)
    assert peer.state.exchange.gives


def test_a_day_without_bytes_outlasts_a_new_grant() -> None:
    peer = with_a_chunk()
    peer.apply(LocalBudget(True, True), 1.5)
    say(peer, SWARM, Refused("unknown", "join again"), 2.0)
    admit(peer, CHAIN, now=3.0)
    tick(peer, 3.1)
    assert not gives(peer, 3.2)
    peer.apply(LocalBudget(False, False), 4.0)
    assert gives(peer, 4.1)
