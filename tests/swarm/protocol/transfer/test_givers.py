"""Further givers of a catch-up: how many members it dials, which, and when it lets go of them."""

from protocol_kit import (
    SWARM,
    TUNING,
    admit,
    grant,
    heartbeat,
    key_of,
    manifest,
    meet,
    member,
    new_peer,
    only,
    say,
    sends,
    version,
)  # fmt: skip

from swarm.protocol.core.events import (  # fmt: skip
    Close,
    Dial,
    Effect,
    Heard,
    JobDone,
    Opened,
    PartsDone,
    PeerDown,
    PeerUp,
    Run,
    Timer,
)
from swarm.protocol.core.wire import Bye, HeartbeatNews, Hello, Lacks, WantBlock
from swarm.protocol.member import Peer
from swarm.protocol.membership.roster import Member
from swarm.protocol.transfer.catchup import Phase
from swarm.protocol.transfer.givers import DIALS_A_GIVER, MOST_DIALED

HEAD = version(5)
USEFUL = TUNING.requests_in_flight // TUNING.requests_per_peer
LEAF = member(0, leaf=True)
"""The one who catches up."""
ALIVE = 48
"""Slots from this on have no lease."""
NOW = 10.0


def fetching(members: list[Member], neighbours: tuple[int, ...] = (1,), blocks: int = 100) -> tuple[Peer, set[bytes]]:
    """A member that begins to fetch `blocks` blocks, child of the authority, connected with these neighbours: (it, the
    members that it dialed then)."""
    peer = new_peer(0, held=None)
    admit(peer, [(-1,) * len(members)], members=members, head=manifest(5, 0))
    say(peer, SWARM, HeartbeatNews(heartbeat(2, live=range(ALIVE))))
    for slot in neighbours:
        meet(peer, slot)
    peer.apply(Timer("tick"), 0.0)
    layout = next(iter(peer.catchup._requests))
    effects = peer.apply(PartsDone(peer.catchup._requests[layout].peer, layout, HEAD, ()), NOW)
    (job,) = [effect.job for effect in only(effects, Run)]
    peer.apply(JobDone(job, True, Opened(bytes(32), empty=True)), NOW)
    (hashes,) = peer.catchup._requests
    giver = peer.catchup._requests[hashes].peer
    effects = peer.apply(PartsDone(giver, hashes, HEAD, tuple(range(blocks))), NOW)
    assert peer.catchup.phase is Phase.BLOCKS
    return peer, dialed(effects)


def dialed(effects: list[Effect]) -> set[bytes]:
    return {effect.peer for effect in only(effects, Dial)} - {SWARM}


def tick(peer: Peer, now: float) -> set[bytes]:
    """The members that it dials at this tick."""
    return dialed(peer.apply(Timer("tick"), now))


def answer(peer: Peer, other: bytes, slot: int, now: float) -> list[Effect]:
    """The session that `peer` dialed is there, and the other end says hello."""
    return peer.apply(PeerUp(other, True), now) + peer.apply(Heard(other, Hello(grant(slot, other), 0, 0, 0, 5)), now)


def slots(peers: set[bytes]) -> set[int]:
    return {slot for slot in range(64) if key_of(slot).public in peers}


def test_it_dials_as_many_members_as_it_can_have_requests_with() -> None:
    _, found = fetching([LEAF, *(member(slot) for slot in range(1, 12))])
    assert len(found) == USEFUL - 1
    assert slots(found) <= set(range(2, 12))


def test_it_dials_nobody_with_enough_neighbours() -> None:
    peer, found = fetching([LEAF, *(member(slot) for slot in range(1, 12))], tuple(range(1, USEFUL + 1)))
    assert found == set()
    assert tick(peer, NOW + 1) == set()


def test_it_dials_nobody_for_few_blocks() -> None:
    members = [LEAF, *(member(slot) for slot in range(1, 12))]
    assert fetching(members, blocks=TUNING.requests_per_peer)[1] == set()
    assert len(fetching(members, blocks=TUNING.requests_per_peer + 1)[1]) == 1


def test_it_dials_only_members_that_have_held_a_version_and_can_be_dialed() -> None:
    newcomers = [member(slot, leaf=True) for slot in (2, 3)]
    unreachable = [member(slot, dialable=False) for slot in (4, 5)]
    peer, found = fetching([LEAF, member(1), *newcomers, *unreachable, member(6)])
    assert slots(found) == {6}
    assert tick(peer, NOW + 1) == set()


def test_it_dials_no_member_whose_lease_is_over() -> None:
    _, found = fetching([LEAF, member(1), member(2), member(ALIVE), member(ALIVE + 1)])
    assert slots(found) == {2}


def test_who_does_not_answer_is_replaced_by_another_once() -> None:
    peer, found = fetching([LEAF, *(member(slot) for slot in range(1, 15))])
    now, tried = NOW, set(found)
    for _ in range(40):
        for other in found:
            peer.apply(PeerDown(other, dial_failed=True, why="no answer"), now)
        now += TUNING.tick_s
        found = tick(peer, now)
        assert not found & tried
        tried |= found
    assert slots(tried) == set(range(2, 15))


def test_one_catch_up_dials_a_bounded_number_of_members() -> None:
    peer, found = fetching([LEAF, *(member(slot) for slot in range(1, 40))])
    now, tried = NOW, set(found)
    for _ in range(40):
        for other in found:
            peer.apply(PeerDown(other, dial_failed=True, why="no answer"), now)
        now += TUNING.tick_s
        found = tick(peer, now)
        tried |= found
    assert len(tried) == MOST_DIALED


def test_a_member_without_blocks_is_replaced() -> None:
    peer, found = fetching([LEAF, *(member(slot) for slot in range(1, 10))])
    (first, *_) = sorted(found)
    (slot,) = slots({first})
    effects = answer(peer, first, slot, NOW + 1) + peer.apply(Timer("tick"), NOW + 1)
    wants = sends(effects, WantBlock, first)
    assert len(wants) == TUNING.requests_per_peer, "it fetches blocks from whom it dialed"
    assert len(dialed(say(peer, first, Lacks(wants[0].request), NOW + 2))) == 1


def test_a_crowd_does_not_dial_the_few_that_have_the_model() -> None:
    """Of two that have it one is a neighbour. The one who catches up counts as one of the crowd."""
    have = [member(1), member(2)]
    crowd = [member(slot, leaf=True) for slot in range(3, 3 + 2 * DIALS_A_GIVER)]
    assert fetching([LEAF, *have, *crowd])[1] == set()
    assert slots(fetching([LEAF, *have, *crowd[: DIALS_A_GIVER - 1]])[1]) == {2}


def test_members_that_return_together_dial_different_ones() -> None:
    members = [LEAF, *(member(slot) for slot in range(1, 16))]
    assert len({frozenset(_seeded(members, seed)) for seed in range(8)}) > 4


def _seeded(members: list[Member], seed: int) -> set[bytes]:
    """Whom a member whose random numbers begin with `seed` dials."""
    peer, found = fetching(members, blocks=1)
    assert found == set()
    peer.state.rng.seed(seed)
    peer.catchup._givers.dial_more(0, 100, NOW + 1)
    return dialed(peer.state.outbox.take())


def test_at_the_end_it_lets_go_of_whom_it_dialed() -> None:
    peer, found = fetching([LEAF, *(member(slot) for slot in range(1, 5))], blocks=8)
    (other,) = found
    (slot,) = slots(found)
    answer(peer, other, slot, NOW + 1)
    effects: list[Effect] = []
    while peer.catchup.phase is Phase.BLOCKS:
        for number, request in list(peer.catchup._requests.items()):
            effects = peer.apply(PartsDone(request.peer, number, HEAD), NOW + 2)
    (job,) = [effect.job for effect in only(effects, Run)]
    effects = peer.apply(JobDone(job, True), NOW + 3)
    assert peer.state.held == HEAD
    assert sends(effects, Bye, other) == [Bye(b"")]
    assert [effect.peer for effect in only(effects, Close)] == [other]
