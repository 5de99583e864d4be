"""Catch-up: layout, files, blocks from many peers, and every way in which givers fail."""

from protocol_kit import (
    LAYOUT,
    SWARM,
    TUNING,
    admit,
    header,
    key_of,
    manifest,
    meet,
    member,
    new_peer,
    only,
    root_of,
    say,
    sends,
    version,
)  # fmt: skip

from scenarios.sim.simulator import World
from swarm.protocol.core.events import (  # fmt: skip
    Effect,
    HeaderStored,
    Job,
    JobDone,
    JobKind,
    Notify,
    Opened,
    PartsDone,
    PeerDown,
    PieceStored,
    Run,
    Send,
    Timer,
    UnknownLabel,
    VersionApplied,
    VersionId,
)
from swarm.protocol.core.notices import CatchupFailed
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Blob, Lacks, ManifestNews, WantBlob, WantBlock, WantManifest
from swarm.protocol.member import Peer
from swarm.protocol.transfer.catchup import OVERTAKE_TIMES, SLOW_S, Phase

HEAD = version(5)
BLOCKS = 8


def requests_in(effects: list[Effect]) -> list[tuple[bytes, WantBlob | WantBlock]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, WantBlob | WantBlock)]


def a_newcomer(*slots: int) -> tuple[Peer, list[Effect]]:
    """A member without replica, connected to these members, that requests the layout of the head."""
    peer = new_peer(0, held=None)
    everyone = (0, *slots)
    admit(peer, [(-1, *[0] * len(slots))], members=[member(slot) for slot in everyone], head=manifest(5, 0))
    effects = [e for slot in slots for e in meet(peer, slot)] + peer.apply(Timer("tick"), 0.0)
    assert peer.catchup.phase is Phase.LAYOUT
    return peer, effects


def open_model(peer: Peer, root: bytes = bytes(32), now: float = 0.0) -> list[Effect]:
    """Bring a catch-up through layout, OPEN (with a replica of this root) and CHAIN to the list of block hashes."""
    request = next(iter(peer.catchup._requests))
    giver = peer.catchup._requests[request].peer
    effects = peer.apply(PartsDone(giver, request, HEAD, (), ()), now)
    (job,) = [e.job for e in only(effects, Run)]
    assert job.kind == JobKind.OPEN
    effects = peer.apply(JobDone(job, True, Opened(root, empty=False)), now)
    if peer.catchup.phase is Phase.CHAIN:
        effects += peer.apply(Timer("tick"), now + TUNING.pull_deadline_s)
    return effects


def to_blocks(peer: Peer, differs: int = BLOCKS, now: float = 10.0) -> list[Effect]:
    open_model(peer, now=now)
    (request,) = peer.catchup._requests
    giver = peer.catchup._requests[request].peer
    return peer.apply(PartsDone(giver, request, HEAD, tuple(range(differs))), now + 3)


def bring(peer: Peer, wants: list, label: VersionId = HEAD, now: float = 13.0) -> list[Effect]:
    """Deliver each requested block with this label."""
    return [e for giver, want in wants for e in peer.apply(PartsDone(giver, want.request, label), now)]


def run_jobs(effects: list[Effect]) -> list[Job]:
    return [e.job for e in only(effects, Run)]


def test_a_whole_catch_up() -> None:
    peer, _ = a_newcomer(1, 2)
    assert [r.name for r in peer.catchup._requests.values()] == [LAYOUT]
    wants = requests_in(to_blocks(peer))
    assert {w.block for _, w in wants} == set(range(BLOCKS))
    assert {giver for giver, _ in wants} == {key_of(1).public, key_of(2).public}
    assert peer.catchup.fraction == 0
    bring(peer, wants[:4])
    assert peer.catchup.fraction == 0.5
    (job,) = run_jobs(bring(peer, wants[4:]))
    assert (job.kind, job.version) == (JobKind.REPLAY, HEAD)
    assert [c.version for c in only(peer.apply(JobDone(job, True), 14.0), VersionApplied)] == [HEAD]
    assert peer.state.held == HEAD
    assert peer.catchup.fraction == 1


def test_files_are_fetched_before_opening() -> None:
    peer, _ = a_newcomer(1)
    ((number, request),) = peer.catchup._requests.items()
    effects = peer.apply(PartsDone(request.peer, number, HEAD, (), (b"a" * 32, b"b" * 32)), 0.0)
    wants = requests_in(effects)
    assert [(w.kind, w.name) for _, w in wants] == [(Blob.FILE, b"a" * 32), (Blob.FILE, b"b" * 32)]
    assert run_jobs(bring(peer, wants[:1])) == []
    assert [j.kind for j in run_jobs(bring(peer, wants[1:]))] == [JobKind.OPEN]


def test_a_folder_that_is_the_head_needs_nothing_else() -> None:
    peer, _ = a_newcomer(1)
    assert [c.version for c in only(open_model(peer, root_of(HEAD)), VersionApplied)] == [HEAD]


def test_a_folder_that_is_an_older_version_is_replayed_from() -> None:
    peer, _ = a_newcomer(1)
    request = next(iter(peer.catchup._requests))
    (job,) = run_jobs(peer.apply(PartsDone(peer.catchup._requests[request].peer, request, HEAD), 0.0))
    effects = peer.apply(JobDone(job, True, Opened(root_of(version(3)), empty=False)), 0.0)
    assert {w.version for w in sends(effects, WantManifest)} == {0, 1, 2, 3, 4}
    effects = say(peer, 1, ManifestNews(manifest(3, 0)))
    assert [c.version for c in only(effects, VersionApplied)] == [version(3)]
    assert not peer.catchup.active
    effects = say(peer, 1, ManifestNews(manifest(4, 0)))
    (job,) = run_jobs(effects)
    effects = peer.apply(JobDone(job, True), 0.1)
    (job,) = run_jobs(effects)
    assert (job.kind, job.version) == (JobKind.APPLY, HEAD)


def test_a_node_with_no_folder_looks_for_no_chain() -> None:
    peer, _ = a_newcomer(1)
    request = next(iter(peer.catchup._requests))
    (job,) = run_jobs(peer.apply(PartsDone(peer.catchup._requests[request].peer, request, HEAD), 0.0))
    effects = peer.apply(JobDone(job, True, Opened(bytes(32), empty=True)), 0.0)
    assert sends(effects, WantManifest) == []
    assert [(w.kind, w.name) for _, w in requests_in(effects)] == [(Blob.HASHES, root_of(HEAD))]


def test_a_model_that_cannot_be_opened_is_reported() -> None:
    peer, _ = a_newcomer(1)
    request = next(iter(peer.catchup._requests))
    (job,) = run_jobs(peer.apply(PartsDone(peer.catchup._requests[request].peer, request, HEAD), 0.0))
    effects = peer.apply(JobDone(job, False, "no space"), 0.0)
    assert [e.notice for e in only(effects, Notify) if isinstance(e.notice, CatchupFailed)] == [
        CatchupFailed("no space")
    ]


# ---------------------------------------------------------------- givers


def test_the_authority_is_asked_only_without_other_sources() -> None:
    peer, _ = a_newcomer()
    assert {r.peer for r in peer.catchup._requests.values()} == {SWARM}
    other, _ = a_newcomer(1)
    assert {giver for giver, _ in requests_in(to_blocks(other))} == {key_of(1).public}


def test_the_authority_is_not_asked_while_others_may_be_reached() -> None:
    peer = new_peer(0, held=None)
    effects = admit(peer, head=manifest(5, 0))
    assert requests_in(effects + peer.apply(Timer("tick"), TUNING.pull_deadline_s - 0.1)) == []
    late = requests_in(peer.apply(Timer("tick"), TUNING.pull_deadline_s + 0.1))
    assert [giver for giver, _ in late] == [SWARM]


def test_a_giver_gets_few_requests_at_once() -> None:
    peer, _ = a_newcomer(1)
    assert len(requests_in(to_blocks(peer, differs=100))) == TUNING.requests_per_peer
    many, _ = a_newcomer(*range(1, 12))
    assert len(requests_in(to_blocks(many, differs=100))) == TUNING.requests_in_flight


def test_a_hash_list_that_does_not_come_soon_is_requested_from_a_second_member() -> None:
    """Much else may be queued for us at the first. One of the two answers is enough."""
    peer, _ = a_newcomer(1, 2, 3)
    open_model(peer, now=10.0)
    ((number, request),) = peer.catchup._requests.items()
    asked_at = request.deadline - TUNING.request_deadline_s
    assert requests_in(peer.apply(Timer("tick"), asked_at + TUNING.pull_after_s)) == []
    ((second, want),) = requests_in(peer.apply(Timer("tick"), asked_at + TUNING.pull_after_s + 0.1))
    assert want.name == root_of(HEAD)
    assert second not in (request.peer, SWARM)
    assert requests_in(peer.apply(Timer("tick"), asked_at + 3 * TUNING.pull_after_s)) == []
    effects = peer.apply(PartsDone(second, want.request, HEAD, (0, 1)), asked_at + 4)
    assert {each.block for _, each in requests_in(effects)} == {0, 1}
    assert number not in peer.catchup._requests
    assert requests_in(peer.apply(PartsDone(request.peer, number, HEAD, (0, 1)), asked_at + 5)) == []


def test_the_authority_is_not_the_second_that_is_asked_for_a_hash_list() -> None:
    peer, _ = a_newcomer(1)
    open_model(peer, now=10.0)
    (request,) = peer.catchup._requests.values()
    later = request.deadline - TUNING.request_deadline_s + 2 * TUNING.pull_after_s
    assert requests_in(peer.apply(Timer("tick"), later)) == []


def test_a_giver_that_lacks_it_is_not_asked_again_before_the_others() -> None:
    peer, _ = a_newcomer(1, 2)
    ((number, request),) = peer.catchup._requests.items()
    first = request.peer
    ((second, want),) = requests_in(say(peer, first, Lacks(number)))
    assert second != first
    assert second != SWARM
    ((third, _),) = requests_in(say(peer, second, Lacks(want.request)))
    assert third == SWARM


def test_when_all_lack_it_there_is_a_pause() -> None:
    peer, _ = a_newcomer(1)
    count = 0
    now = 0.0
    for _ in range(60):
        for number, request in list(peer.catchup._requests.items()):
            count += 1
            say(peer, request.peer, Lacks(number), now)
        now += 0.05
        peer.apply(Timer("tick"), now)
    assert 2 < count <= 2 * (3.0 / TUNING.pull_after_s + 1)


def test_a_giver_that_does_not_answer_is_passed_over() -> None:
    """After SIGSTOP its session stays open, but no answers come. The authority is asked in the end."""
    peer, _ = a_newcomer(1)
    ((number, request),) = peer.catchup._requests.items()
    assert request.peer == key_of(1).public
    effects = peer.apply(Timer("tick"), TUNING.request_deadline_s + 0.01)
    assert [giver for giver, _ in requests_in(effects)] == [SWARM]
    assert number not in peer.catchup._requests


def test_givers_that_are_slow_on_purpose_hold_half_of_the_window_at_most() -> None:
    """Ten Sybils answer just before the deadline, two honest members within 0.2 s. The Sybils get the first window."""
    honest = {key_of(slot).public for slot in (1, 2)}
    peer, _ = a_newcomer(*range(1, 13))
    now, total = 13.0, 400
    coming = [(giver, want, now) for giver, want in requests_in(to_blocks(peer, differs=total))]
    most_slow = 0
    while coming:
        coming.sort(key=lambda each: each[2] + (0.2 if each[0] in honest else 14.9))
        giver, want, since = coming.pop(0)
        now = max(now, since + (0.2 if giver in honest else 14.9))
        effects = peer.apply(PartsDone(giver, want.request, HEAD), now)
        coming += [(other, more, now) for other, more in requests_in(effects)]
        if now > 13.0 + 15:
            held = [r.peer for r in peer.catchup._requests.values() if r.peer not in honest]
            most_slow = max(most_slow, len(held))
    assert most_slow <= TUNING.requests_in_flight // 2
    assert peer.catchup.phase is Phase.REPLAY
    assert now - 13.0 < 3 * 15, "without this bound it took some hundred seconds"


def waiting_for_a_slow_giver() -> tuple[Peer, bytes, bytes, list[WantBlock]]:
    """All blocks are requested at 13 s. One giver has sent its own by 13.5 s, the other one none: (the member, the
    quick giver, the slow one, what the slow one was asked for)."""
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    quick, slow = key_of(1).public, key_of(2).public
    bring(peer, [each for each in wants if each[0] == quick], now=13.5)
    return peer, quick, slow, [want for giver, want in wants if giver == slow]


def test_an_idle_giver_sends_a_block_that_a_slow_one_holds_up() -> None:
    peer, quick, slow, held_up = waiting_for_a_slow_giver()
    assert requests_in(peer.apply(Timer("tick"), 13.0 + SLOW_S)) == []
    ((giver, again),) = requests_in(peer.apply(Timer("tick"), 13.1 + SLOW_S))
    assert (giver, again.block) == (quick, held_up[0].block)
    assert requests_in(peer.apply(Timer("tick"), 13.2 + SLOW_S)) == [], "it is not idle any more"
    bring(peer, [(slow, held_up[0])], now=14.3)
    assert peer.catchup.fraction == 0.5, "the runtime drops an answer to the older request"
    ((giver, more),) = requests_in(bring(peer, [(quick, again)], now=14.4))
    assert (giver, more.block) == (quick, held_up[1].block)


def test_no_block_is_requested_from_a_third_giver_before_the_deadline() -> None:
    peer, quick, slow, held_up = waiting_for_a_slow_giver()
    asked, more, now = list[tuple[bytes, WantBlob | WantBlock]](), list[tuple[bytes, WantBlob | WantBlock]](), 13.0
    while (now := now + 0.1) < 13.0 + TUNING.request_deadline_s - 0.2:
        wants = more + requests_in(peer.apply(Timer("tick"), now))
        asked += wants
        more = requests_in(bring(peer, wants, now=now)) if len(asked) < len(held_up) else []
    assert [want.block for _, want in asked] == [want.block for want in held_up]
    assert {giver for giver, _ in asked} == {quick}
    assert slow not in {request.peer for request in peer.catchup._requests.values()}


def test_a_giver_that_is_not_much_slower_is_waited_for() -> None:
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    bring(peer, [each for each in wants if each[0] == key_of(1).public], now=23.0)
    late_s = 10.0 * OVERTAKE_TIMES
    assert late_s > TUNING.request_deadline_s
    assert requests_in(peer.apply(Timer("tick"), 12.9 + TUNING.request_deadline_s)) == []


def test_the_requests_of_a_lost_giver_go_to_others() -> None:
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    gone = key_of(1).public
    effects = peer.apply(PeerDown(gone), 13.0)
    effects += bring(peer, [w for w in wants if w[0] != gone])
    assert {w.block for giver, w in requests_in(effects)} == {w.block for giver, w in wants if giver == gone}
    assert {giver for giver, _ in requests_in(effects)} == {key_of(2).public}


def test_answers_of_other_peers_or_without_request_are_ignored() -> None:
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    giver, want = wants[0]
    other = key_of(2).public if giver == key_of(1).public else key_of(1).public
    peer.apply(PartsDone(other, want.request, HEAD), 13.0)
    peer.apply(PartsDone(giver, 10_000, HEAD), 13.0)
    peer.apply(UnknownLabel(giver, 10_001, version(9)), 13.0)
    say(peer, 2, Lacks(10_002))
    assert peer.catchup.fraction == 0


# ---------------------------------------------------------------- while the swarm moves on


def version_6(peer: Peer) -> None:
    say(peer, 1, ManifestNews(manifest(6, 1)))
    event = header(6, 0)
    peer.apply(
        HeaderStored(key_of(1).public, 0, event.key, event.chunk_id, event.parent_root, event.piece_bytes, 100), 13.0
    )


def test_blocks_of_a_later_version_want_its_list_and_a_replay() -> None:
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer, differs=2))
    giver, want = wants[0]
    effects = peer.apply(UnknownLabel(giver, want.request, version(6)), 13.0)
    assert [w.version for w in sends(effects, WantManifest, to=giver)] == [6]
    version_6(peer)
    ((lister, list_want),) = requests_in(peer.apply(Timer("tick"), 13.1))
    assert (list_want.kind, list_want.name) == (Blob.HASHES, root_of(version(6)))
    effects = peer.apply(PartsDone(lister, list_want.request, version(6)), 13.2)
    ((again, block_want),) = requests_in(effects)
    assert block_want.block == want.block
    bring(peer, wants[1:])
    assert run_jobs(peer.apply(PartsDone(again, block_want.request, version(6)), 13.3)) == []
    assert peer.catchup.phase is Phase.REPLAY
    effects: list[Effect] = []
    for index in range(4):
        effects += peer.apply(PieceStored(key_of(1).public, 0, header(6, 0).key, index), 13.4)
    (job,) = run_jobs(effects + peer.apply(Timer("tick"), 13.5))
    assert (job.kind, job.version) == (JobKind.REPLAY, version(6))
    assert [c.version for c in only(peer.apply(JobDone(job, True), 13.6), VersionApplied)] == [version(6)]


def test_the_manifest_of_a_label_is_asked_for_again() -> None:
    peer, _ = a_newcomer(1)
    wants = requests_in(to_blocks(peer, differs=1))
    peer.apply(UnknownLabel(wants[0][0], wants[0][1].request, version(6)), 13.0)
    effects = peer.apply(Timer("tick"), 13.0 + TUNING.pull_deadline_s + 0.1)
    assert [w.version for w in sends(effects, WantManifest)] == [6]


def test_a_giver_that_is_behind_is_not_asked_repeatedly() -> None:
    """Each answer would be a whole block, which is discarded."""
    peer, _ = a_newcomer(1)
    wants = requests_in(to_blocks(peer, differs=1))
    effects = peer.apply(UnknownLabel(wants[0][0], wants[0][1].request, version(4)), 13.0)
    assert [giver for giver, _ in requests_in(effects)] == [SWARM]


def test_a_false_label_only_delays_its_block() -> None:
    """Labels are not signed. A false label once delayed its block, and so the catch-up, for ever."""
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    liar = wants[0][0]
    mine = [want for giver, want in wants if giver == liar]
    for number, want in enumerate(mine):
        peer.apply(UnknownLabel(liar, want.request, version(1 << 40 | number)), 13.0)
    bring(peer, [want for want in wants if want[0] != liar])
    again = requests_in(peer.apply(Timer("tick"), 13.0 + TUNING.request_deadline_s))
    assert sorted(want.block for _, want in again) == sorted(want.block for want in mine)
    assert {giver for giver, _ in again} == {key_of(1).public, key_of(2).public} - {liar}
    (job,) = run_jobs(bring(peer, again, now=13.1 + TUNING.request_deadline_s))
    assert (job.kind, job.version) == (JobKind.REPLAY, HEAD)
    assert not peer.catchup._unlisted
    assert not peer.catchup._seals_asked


def test_a_block_older_than_the_target_is_requested_from_another_peer() -> None:
    """Its hash may be right, but no replay starts that far back."""
    peer, _ = a_newcomer(1, 2)
    wants = requests_in(to_blocks(peer))
    giver, want = wants[0]
    bring(peer, wants[1:])
    (again,) = requests_in(peer.apply(PartsDone(giver, want.request, version(4)), 13.0))
    assert again[1].block == want.block
    assert again[0] != giver


def test_a_block_that_does_not_match_after_the_replay_is_fetched_again() -> None:
    peer, _ = a_newcomer(1)
    (job,) = run_jobs(bring(peer, requests_in(to_blocks(peer, differs=3))))
    effects = peer.apply(JobDone(job, False, (1,)), 14.0)
    assert [w.block for _, w in requests_in(effects)] == [1]
    (job,) = run_jobs(bring(peer, requests_in(effects)))
    assert only(peer.apply(JobDone(job, True), 15.0), VersionApplied)


def test_a_rollback_changes_the_target() -> None:
    peer, _ = a_newcomer(1)
    to_blocks(peer)
    say(peer, 1, ManifestNews(manifest(3, 0, epoch=1)), 13.0)
    peer.apply(Timer("tick"), 13.1)
    assert peer.state.floor == VersionId(1, 3)
    assert peer.catchup.phase is Phase.HASHES


def test_a_target_without_available_hashes_is_replaced_by_the_newest() -> None:
    peer, _ = a_newcomer(1)
    open_model(peer)
    assert peer.catchup.phase is Phase.HASHES
    say(peer, 1, ManifestNews(manifest(30, 0)), 3.0)
    for tenth in range(30, 60):
        for number, request in list(peer.catchup._requests.items()):
            say(peer, request.peer, Lacks(number), tenth / 10)
        peer.apply(Timer("tick"), tenth / 10)
        if peer.state.floor == version(30):
            break
    assert peer.state.floor == version(30)


def waiting_for_version_6() -> Peer:
    """All blocks have come, one with the label of version 6, of which no chunk has come: the replay waits for these."""
    peer, _ = a_newcomer(1)
    wants = requests_in(to_blocks(peer, differs=2))
    say(peer, 1, ManifestNews(manifest(6, 1)), 13.0)
    assert run_jobs(bring(peer, wants[:1]) + bring(peer, wants[1:], version(6))) == []
    assert peer.catchup.phase is Phase.REPLAY
    return peer


def test_a_replay_of_chunks_that_nobody_keeps_any_more_is_replaced_by_a_newer_target() -> None:
    """A catch-up that lasted longer than peers keep chunks waited for them for ever."""
    peer = waiting_for_version_6()
    newest = HEAD.version + TUNING.retain_versions + 1
    say(peer, 1, ManifestNews(manifest(newest, 1)), 14.0)
    peer.apply(Timer("tick"), 14.1)
    assert peer.state.floor == version(newest)
    assert peer.catchup.phase is Phase.HASHES


def test_a_replay_of_a_version_whose_seal_nobody_brings_is_replaced_by_a_newer_target() -> None:
    """A regression: all others had caught up without version 6, and were asked for its seal for ever."""
    peer, _ = a_newcomer(1)
    wants = requests_in(to_blocks(peer, differs=2))
    say(peer, 1, ManifestNews(manifest(7, 1)), 13.0)
    assert run_jobs(bring(peer, wants[:1]) + bring(peer, wants[1:], version(7))) == []
    patience_s = 3 * TUNING.pull_deadline_s
    for at_s, floor, phase in [
        (14.0, HEAD, Phase.REPLAY),
        (13.9 + patience_s, HEAD, Phase.REPLAY),
        (14.1 + patience_s, version(7), Phase.HASHES),
    ]:
        peer.apply(Timer("tick"), at_s)
        assert (peer.state.floor, peer.catchup.phase) == (floor, phase)


def test_a_replay_waits_for_chunks_that_others_still_keep() -> None:
    peer = waiting_for_version_6()
    say(peer, 1, ManifestNews(manifest(HEAD.version + TUNING.retain_versions, 1)), 14.0)
    peer.apply(Timer("tick"), 14.1)
    assert (peer.state.floor, peer.catchup.phase) == (HEAD, Phase.REPLAY)


def test_a_replay_whose_chunks_are_here_goes_on_when_nobody_else_keeps_them() -> None:
    peer = waiting_for_version_6()
    version_6(peer)
    for index in range(4):
        peer.apply(PieceStored(key_of(1).public, 0, header(6, 0).key, index), 13.4)
    say(peer, 1, ManifestNews(manifest(HEAD.version + TUNING.retain_versions + 1, 1)), 14.0)
    peer.apply(Timer("tick"), 14.1)
    assert (peer.state.floor, peer.catchup.phase) == (HEAD, Phase.REPLAY)


def test_a_member_that_catches_up_gives_no_blocks() -> None:
    peer, _ = a_newcomer(1)
    effects = say(peer, 1, WantBlock(7, 0))
    assert [m.request for m in sends(effects, Lacks, to=1)] == [7]


def test_a_catch_up_survives_joining_again() -> None:
    peer, _ = a_newcomer(1)
    to_blocks(peer)
    assert peer.state.grant is not None
    admit(peer, [(-1, 0)], head=manifest(5, 0), now=14.0)
    assert peer.catchup.phase is Phase.BLOCKS


def test_a_catch_up_that_has_ended_keeps_nothing() -> None:
    world = World(Tuning.loopback())
    for _ in range(4):
        world.join(held=world.base)
    world.run(world.now + 2)
    newcomer = world.join()
    assert world.run_until(lambda: newcomer.root == world.authority.root, 30)
    world.run(world.now + 2)
    catchup = newcomer.core.catchup
    assert not catchup.active
    assert not any((catchup._requests, catchup._labels, catchup._took, catchup._sealed_target, catchup._givers._left))
