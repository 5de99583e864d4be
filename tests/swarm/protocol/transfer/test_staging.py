"""Staging: chunks are staged early, and versions applied late, in the order of the chain."""

from dataclasses import replace

import pytest
from member_kit import a_forwarder, reports_in, tick
from protocol_kit import (
    admit,
    header,
    heartbeat,
    key_of,
    manifest,
    meet,
    new_peer,
    only,
    root_of,
    say,
    sends,
    version,
)

from codec import open_manifest
from swarm.protocol.core.events import (  # fmt: skip
    Announce,
    Close,
    Drop,
    Effect,
    HeaderStored,
    Job,
    JobDone,
    JobKind,
    ManifestSeen,
    Notify,
    PieceStored,
    Run,
    SendHeader,
    SendPiece,
    Stray,
    Timer,
    VersionApplied,
)
from swarm.protocol.core.wire import Attach, HeartbeatNews, ManifestNews, WantManifest
from swarm.protocol.member import Peer


def a_member(*, relay: bool = False) -> Peer:
    """A member that holds version 0, and is connected to slots 1 and 2."""
    peer = new_peer(0, relay=relay)
    admit(peer)
    meet(peer, 1)
    meet(peer, 2)
    return peer


def arrive(peer: Peer, event: HeaderStored, pieces: int = 4, now: float = 0.0, source: int = 1) -> list[Effect]:
    giver = key_of(source).public
    stored = HeaderStored(
        giver, event.stripe, event.key, event.chunk_id, event.parent_root, event.piece_bytes, event.header_bytes
    )
    effects = peer.apply(stored, now)
    for index in range(pieces):
        effects += peer.apply(PieceStored(giver, event.stripe, event.key, index, 1000), now)
    return effects


def jobs(effects: list[Effect]) -> list[Job]:
    return [e.job for e in only(effects, Run)]


def finish(peer: Peer, effects: list[Effect], *, ok: bool = True) -> list[Effect]:
    """Finish the jobs among the effects, and those that follow from them."""
    done: list[Effect] = []
    todo = jobs(effects)
    while todo:
        more = peer.apply(JobDone(todo.pop(0), ok, None if ok else (0,)), 0.0)
        done += more
        todo += jobs(more) if ok else []
    return done


def notice_names(effects: list[Effect]) -> list[str]:
    return [e.notice.log_name for e in only(effects, Notify)]


def test_chunks_are_staged_when_complete_and_versions_committed_when_sealed() -> None:
    peer = a_member()
    effects = arrive(peer, header(1, 0))
    assert [(j.kind, j.key) for j in jobs(effects)] == [(JobKind.STAGE, header(1, 0).key)]
    assert jobs(finish(peer, effects)) == []
    sealed = say(peer, 1, ManifestNews(manifest(1, 1)))
    assert [j.kind for j in jobs(sealed)] == [JobKind.APPLY]
    committed = only(finish(peer, sealed), VersionApplied)
    assert [(c.version, c.manifest.root) for c in committed] == [(version(1), root_of(version(1)))]
    assert peer.state.held == version(1)


def test_the_manifest_may_come_before_the_chunks() -> None:
    peer = a_member()
    assert jobs(say(peer, 1, ManifestNews(manifest(1, 2)))) == []
    first, second = arrive(peer, header(1, 1)), arrive(peer, header(1, 0))
    assert [j.kind for j in jobs(first + second)] == [JobKind.STAGE, JobKind.STAGE]
    assert only(finish(peer, first + second), VersionApplied)


def test_a_version_whose_parent_we_lack_waits_for_it() -> None:
    peer = a_member()
    assert jobs(arrive(peer, header(2, 0)) + say(peer, 1, ManifestNews(manifest(2, 1)))) == []
    effects = arrive(peer, header(1, 0)) + say(peer, 1, ManifestNews(manifest(1, 1)))
    assert [c.version for c in only(finish(peer, effects), VersionApplied)] == [version(1), version(2)]


@pytest.mark.parametrize("dead_first", [True, False])
def test_a_dead_attempt_of_a_newer_epoch_holds_up_no_sealed_version(dead_first: bool) -> None:
    """The trainer died on its way back to an older version, and goes on from the newest one."""
    peer = a_member()
    dead = replace(header(7, 0, epoch=1), parent_root=root_of(version(0)))
    effects = arrive(peer, dead) if dead_first else []
    effects += arrive(peer, header(1, 0)) + say(peer, 1, ManifestNews(manifest(1, 1)))
    effects += [] if dead_first else arrive(peer, dead)
    assert [c.version for c in only(finish(peer, effects), VersionApplied)] == [version(1)]
    effects = arrive(peer, header(2, 0)) + say(peer, 1, ManifestNews(manifest(2, 1)))
    assert [c.version for c in only(finish(peer, effects), VersionApplied)] == [version(2)]


def test_manifests_in_reverse() -> None:
    peer = a_member()
    effects: list[Effect] = []
    for number in (4, 3, 2, 1):
        effects += say(peer, 1, ManifestNews(manifest(number, 0)))
    assert [c.version for c in only(finish(peer, effects), VersionApplied)] == [version(n) for n in (1, 2, 3, 4)]


def test_a_job_is_run_once_however_often_we_look() -> None:
    peer = a_member()
    arrive(peer, header(1, 0))
    assert jobs(peer.apply(Timer("tick"), 0.1) + peer.apply(Timer("tick"), 0.2)) == []


def test_a_manifest_is_forwarded_once_and_announced() -> None:
    peer = a_member()
    say(peer, 1, Attach(0, 0, 0, 1 << 20, ()))
    say(peer, 2, Attach(0, 0, 0, 1 << 20, ()))
    effects = say(peer, 1, ManifestNews(manifest(1, 1)))
    assert (len(sends(effects, ManifestNews, to=1)), len(sends(effects, ManifestNews, to=2))) == (0, 1)
    assert len(only(effects, Announce)) == 1
    again = say(peer, 2, ManifestNews(manifest(1, 1)))
    assert sends(again, ManifestNews) == []
    assert only(again, Announce) == []


def test_a_manifest_by_gossip_goes_down_the_trees_and_not_back_into_gossip() -> None:
    peer = a_member()
    say(peer, 1, Attach(0, 0, 0, 1 << 20, ()))
    effects = peer.apply(ManifestSeen(manifest(1, 1)), 0.0)
    assert len(sends(effects, ManifestNews, to=1)) == 1
    assert only(effects, Announce) == []


def test_a_forged_manifest_closes_the_session() -> None:
    peer = a_member()
    effects = say(peer, 1, ManifestNews(manifest(1, 1, key=key_of("mallory"))))
    assert [(c.peer, c.ban_s > 0) for c in only(effects, Close)] == [(key_of(1).public, True)]
    assert peer.state.chunks.versions == {}


@pytest.mark.parametrize("data", [b"", b"rubbish" * 30, manifest(1, 1, key=key_of("mallory"))])
def test_a_forged_manifest_by_gossip_or_from_disk_changes_nothing(data: bytes) -> None:
    peer = a_member()
    effects = peer.apply(ManifestSeen(data), 0.0)
    assert notice_names(effects) == ["bad_bytes"]
    assert only(effects, Close) == []


@pytest.mark.parametrize("when", ["pending", "held", "held before"])
def test_two_seals_of_one_version_with_different_roots_stop_us(when: str) -> None:
    peer = a_member()
    finish(peer, say(peer, 1, ManifestNews(manifest(1, 1 if when == "pending" else 0))))
    if when == "held before":
        finish(peer, say(peer, 1, ManifestNews(manifest(2, 0))))
    effects = say(peer, 2, ManifestNews(manifest(1, 0, root=b"\x07" * 32)))
    assert notice_names(effects) == ["equivocation"]
    held = peer.state.held
    later = arrive(peer, header(1, 0)) + say(peer, 1, ManifestNews(manifest(2, 0))) + peer.apply(Timer("tick"), 50.0)
    later += say(peer, 1, ManifestNews(manifest(3, 0)))
    assert jobs(later) == []
    assert peer.state.held == held


def test_a_later_attempt_supersedes_what_was_staged() -> None:
    peer = a_member()
    finish(peer, arrive(peer, header(1, 0)))
    effects = arrive(peer, header(1, 0, attempt=1))
    assert Drop(version(1), 0) in effects
    assert [j.key for j in jobs(effects)] == [header(1, 0, attempt=1).key]
    effects += say(peer, 1, ManifestNews(manifest(1, 1, attempt=1)))
    assert only(finish(peer, effects), VersionApplied)


def test_results_of_jobs_on_a_dropped_attempt_are_ignored() -> None:
    peer = a_member()
    old = jobs(arrive(peer, header(1, 0)))[0]
    arrive(peer, header(1, 0, attempt=1), pieces=0)
    say(peer, 1, ManifestNews(manifest(1, 1, attempt=1)))
    for ok in (True, False):
        effects = peer.apply(JobDone(old, ok, None if ok else (0,)), 0.0)
        assert jobs(effects) == []
        assert notice_names(effects) == []
    assert not peer.catchup.active
    assert peer.state.held == version(0)


def test_the_commit_of_a_dropped_attempt_is_ignored() -> None:
    peer = a_member()
    stale = Job(JobKind.APPLY, version(1), generation=5)
    arrive(peer, header(1, 0), pieces=0)
    assert only(peer.apply(JobDone(stale, True), 0.0), VersionApplied) == []
    assert peer.state.held == version(0)


def test_a_torn_block_leads_to_a_repair_of_the_version_we_held() -> None:
    peer = a_member()
    effects = finish(peer, arrive(peer, header(1, 0)), ok=False)
    assert "damaged" in notice_names(effects)
    assert peer.catchup.active
    assert peer.state.floor == version(0)


def test_a_relay_holds_without_staging() -> None:
    peer = a_member(relay=True)
    effects = arrive(peer, header(1, 0)) + say(peer, 1, ManifestNews(manifest(1, 1)))
    assert jobs(effects) == []
    assert [c.version for c in only(effects, VersionApplied)] == [version(1)]


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("sealed_first", [False, True])
def test_a_new_version_is_reported_at_once_with_its_links(relay: bool, sealed_first: bool) -> None:
    peer = a_member(relay=relay)
    tick(peer, 0.5)
    effects = say(peer, 1, ManifestNews(manifest(1, 1))) if sealed_first else []
    effects += arrive(peer, header(1, 0))
    effects += [] if sealed_first else say(peer, 1, ManifestNews(manifest(1, 1)))
    finish(peer, effects)
    reports = reports_in(tick(peer, 1.0))
    assert {report.held for report in reports} == {version(1)}
    assert {link.slot for report in reports for link in report.links if link.kbit_s} == {1}


def test_a_relay_is_caught_up_with_its_welcome() -> None:
    peer = new_peer(0, held=None, relay=True)
    admit(peer)
    assert {report.catching_up for report in reports_in(tick(peer, 0.5))} == {1.0}


def test_a_piece_goes_on_before_its_chunk_is_whole() -> None:
    peer = a_forwarder()
    say(peer, 2, Attach(0, 0, 0, 1 << 20, ()))
    effects = arrive(peer, header(1, 0), pieces=1)
    assert [(e.peer, e.index) for e in only(effects, SendPiece)] == [(key_of(2).public, 0)]


def test_the_stripe_of_a_frame_counts_from_our_parent_and_from_sources() -> None:
    """Otherwise any member could make us push a chunk down the wrong tree, by being the first to send its header."""
    peer = a_forwarder()
    meet(peer, 3)
    say(peer, 2, Attach(0, 0, 0, 1 << 20, ()))
    early = peer.apply(header(1, 0, peer=key_of(3).public), 0.9)
    early += peer.apply(PieceStored(key_of(3).public, 0, header(1, 0).key, 0, 1000), 0.9)
    chunk = peer.state.chunks.find(header(1, 0).key)
    assert chunk is not None
    assert chunk.stripe is None
    assert only(early, SendPiece) == []
    effects = peer.apply(header(1, 0, peer=key_of(1).public), 1.0)
    assert chunk.stripe == 0
    assert [e.peer for e in only(effects, SendHeader)] == [key_of(2).public]
    assert [(e.peer, e.index) for e in only(effects, SendPiece)] == [(key_of(2).public, 0)], "also the earlier headers"


def test_news_of_applied_versions_is_ignored() -> None:
    peer = a_member()
    finish(peer, say(peer, 1, ManifestNews(manifest(1, 0))))
    effects = arrive(peer, header(1, 0)) + say(peer, 1, ManifestNews(manifest(0, 0)))
    assert jobs(effects) == []
    assert version(1) not in peer.state.chunks.versions or not peer.state.chunks.versions[version(1)].chunks


def test_useless_bytes_return_their_credit() -> None:
    peer = new_peer(0)
    admit(peer, [(1, -1, 1)])
    meet(peer, 1)
    parent = key_of(1).public
    assert peer.state.exchange.parents.edges[0].peer == parent
    peer.apply(Stray(parent, 0, 5000), 0.0)
    peer.apply(Stray(parent, None, 5000), 0.0)
    assert peer.state.exchange.parents.edges[0].received == 5000
    peer.apply(PieceStored(parent, 0, header(9, 0).key, 0, 700), 0.0)  # of an unknown chunk
    assert peer.state.exchange.parents.edges[0].received == 5700


def test_gaps_are_filled_by_asking() -> None:
    peer = a_member()
    say(peer, 1, ManifestNews(manifest(3, 0)))
    wants = sends(peer.apply(Timer("tick"), 0.2), WantManifest)
    assert [w.version for w in wants] == [1, 2]
    assert sends(peer.apply(Timer("tick"), 0.3), WantManifest) == []
    effects: list[Effect] = []
    for number in (2, 1):
        effects += say(peer, 2, ManifestNews(manifest(number, 0)))
    assert [c.version for c in only(finish(peer, effects), VersionApplied)] == [version(n) for n in (1, 2, 3)]


def test_the_head_in_a_heartbeat_is_requested() -> None:
    peer = a_member()
    say(peer, 1, HeartbeatNews(heartbeat(2, head=version(1))))
    assert [w.version for w in sends(peer.apply(Timer("tick"), 0.2), WantManifest)] == [1]


def test_an_unavailable_seal_is_given_up_for_a_later_one() -> None:
    peer = a_member()
    say(peer, 1, ManifestNews(manifest(3, 0)))
    for tenth in range(1, 100):
        peer.apply(Timer("tick"), tenth / 10)
    assert peer.catchup.active
    assert peer.state.floor == version(3)


def test_a_chain_longer_than_peers_keep_is_not_waited_for() -> None:
    peer = a_member()
    say(peer, 1, ManifestNews(manifest(40, 0)))
    peer.apply(Timer("tick"), 0.2)
    assert peer.catchup.active


def test_a_sealed_version_whose_chunks_nobody_keeps_is_not_waited_for() -> None:
    """A member is cut off in the middle of a version of which it has the seal, and comes back much later."""
    peer = a_member()
    arrive(peer, header(1, seq=0), pieces=1)
    say(peer, 1, ManifestNews(manifest(1, 2)))
    kept = peer.state.tuning.retain_versions
    say(peer, 1, ManifestNews(manifest(kept, 0)))
    peer.apply(Timer("tick"), 600.0)
    assert not peer.catchup.active, "others still keep version 1"
    say(peer, 1, ManifestNews(manifest(kept + 1, 0)))
    peer.apply(Timer("tick"), 600.5)
    assert peer.catchup.active
    assert peer.state.floor == version(kept + 1)


def test_the_head_is_requested_while_the_next_version_waits_for_chunks_that_nobody_keeps() -> None:
    peer = a_member()
    say(peer, 1, ManifestNews(manifest(1, 2)))
    kept = peer.state.tuning.retain_versions
    say(peer, 1, HeartbeatNews(heartbeat(2, head=version(kept))))
    assert sends(peer.apply(Timer("tick"), 0.5), WantManifest) == []
    say(peer, 1, HeartbeatNews(heartbeat(3, head=version(kept + 5))))
    wants = [want.version for want in sends(peer.apply(Timer("tick"), 1.0), WantManifest)]
    assert wants[-1] == kept + 5


def test_a_version_that_is_here_is_applied_however_old_it_is() -> None:
    peer = a_member()
    say(peer, 1, ManifestNews(manifest(1, 1)))
    effects = arrive(peer, header(1, seq=0))
    say(peer, 1, ManifestNews(manifest(40, 0)))
    peer.apply(Timer("tick"), 0.2)
    assert not peer.catchup.active
    finish(peer, effects)
    assert peer.state.held == version(1)


def test_requested_manifests_are_forgotten() -> None:
    peer = a_member()
    for number in range(1, 60):
        finish(peer, say(peer, 1, ManifestNews(manifest(number + 1, 0))))
        peer.apply(Timer("tick"), number * 0.2)
        finish(peer, say(peer, 1, ManifestNews(manifest(number, 0))))
    assert peer.state.held == version(60)
    peer.apply(Timer("tick"), 20.0)
    assert len(peer.progress._asked) <= 2
    assert len(peer.state.manifests) <= 16
    assert len(peer.state.chunks.versions) <= 17
    assert open_manifest(peer.state.sealed_manifest, key_of("authority").public).version == 60
