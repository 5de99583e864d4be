"""Workers and ledger together, with lost messages, nodes and seeds, and new versions: an hour of simulated time."""

import os
import sqlite3
from collections import Counter
from collections.abc import Sequence

import pytest
import trio
from work_kit import SAMPLING, TOKENS, Swarm, TimedEngine, collect, gid, head, root

from codec.sign import Key
from node.engines.base import Completion, Prompt, Span
from node.engines.room import Room
from node.ledger.binding import Binding
from node.ledger.messages import Reason, SignedRollout, WorkRequest, decode, encode, open_rollout


def assert_whole(groups, n):
    assert len({group.id for group in groups}) == len(groups)
    for group in groups:
        assert sorted(group.done) == list(range(n))
        assert len({done.rollout.token_ids for done in group.done.values()}) == n, (
            "each sample has its own random stream"
        )


def accepted_rows(swarm) -> list[tuple[bytes, int]]:
    return sqlite3.connect(swarm.path).execute("select grp, sample from rollouts").fetchall()


@pytest.fixture
async def swarm(tmp_path):
    """A ledger and its nodes; all of them end with the test. A test asks for the virtual clock itself: pytest-trio does
    not look for it among the arguments of fixtures."""
    async with trio.open_nursery() as nursery:
        yield Swarm(tmp_path, nursery)
        nursery.cancel_scope.cancel()


async def test_groups_are_generated_signed_and_accepted(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=1000.0)
    session = service.open("s", Binding(4, SAMPLING))
    groups = await collect(service, session, 30)
    assert_whole(groups, 4)
    await trio.sleep(10)
    status = swarm.worker(1).status()
    assert status.accepted == 120
    assert status.refused == {}
    assert status.jobs == status.unanswered == status.generating == 0
    assert service.status().accepted == 120
    assert len(accepted_rows(swarm)) == 120


@pytest.mark.parametrize("ratio", [pytest.param(2.0, marks=[pytest.mark.slow, pytest.mark.long]), 8.0])
async def test_unequal_nodes_are_all_kept_busy(swarm, autojump_clock, ratio):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=400.0 * ratio, capacity=32, batch=16)
    await swarm.add_node(2, rate=400.0, capacity=32, batch=16)
    session = service.open("warm", Binding(8, SAMPLING))
    await collect(service, session, 20)
    service.close(session)
    session = service.open("s", Binding(8, SAMPLING), total=200)
    started = trio.current_time()
    groups = await collect(service, session, 200, first=1000)
    seconds = trio.current_time() - started
    assert_whole(groups, 8)
    rate = 200 * 8 * TOKENS / seconds
    assert rate >= 0.95 * 400.0 * (1 + ratio)


class ContinuousEngine(TimedEngine):
    """Generates each sequence at ten tokens per second, however many run; some are ten times as long as others."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.preemptible = self.continuous_batching = True
        self.calls: list[int] = []
        self.running = self.most = 0

    async def generate(self, prompts: Sequence[Prompt], sampling, counts=None, adapter=""):
        self.calls.append(len(prompts))
        self.running += len(prompts)
        self.most = max(self.most, self.running)
        lengths = [10 + prompt.stream % 91 for prompt in prompts]
        try:
            await trio.sleep(max(lengths) / 10)
        finally:
            self.running -= len(prompts)
        completions = [
            Completion(
                (*range(10, 8 + n), p.stream % (1 << 31) + 3, 2), (-1.0,) * n, "stop", (Span(self.version, 0, n),)
            )
            for p, n in zip(prompts, lengths, strict=True)
        ]
        return completions, max(lengths) / 10


@pytest.mark.parametrize("whole", [False, True])
async def test_with_continuous_batching_no_row_waits_for_the_longest_sequence(swarm, autojump_clock, whole):
    service = await swarm.start_service()
    engine = ContinuousEngine()
    await swarm.add_node(1, 0.0, capacity=32, batch=16, engine=engine)
    session = service.open("s", Binding(4, SAMPLING, whole=whole))
    started, before = trio.current_time(), len(swarm.wire.bodies)
    groups = await collect(service, session, 40)
    took_s = trio.current_time() - started
    assert_whole(groups, 4)
    assert engine.most == 16
    drawn = sum(len(done.rollout.token_ids) // 4 for group in groups for done in group.done.values())
    if whole:
        assert set(engine.calls) == {4}
    else:
        assert set(engine.calls) == {1}
        assert took_s < 1.25 * drawn / 160, (
            "with sixteen per call, each call would take as long as its longest sequence"
        )
        asked = [decode(body) for _, body in swarm.wire.bodies[before:]]
        assert sum(isinstance(message, WorkRequest) for message in asked) < 0.85 * 160, "fewer requests than samples"


async def test_a_server_that_runs_more_sequences_gets_them(swarm, autojump_clock):
    service = await swarm.start_service()
    engine = ContinuousEngine()
    engine.room = Room(sequences=64, tokens=64_000)
    await swarm.add_node(1, 0.0, capacity=32, batch=16, engine=engine)
    session = service.open("s", Binding(4, SAMPLING))
    assert_whole(await collect(service, session, 10), 4)
    assert engine.most <= 64
    assert_whole(await collect(service, session, 60, first=100), 4)
    assert engine.most == 64


async def test_a_single_request_goes_to_the_fastest_waiting_node(swarm, autojump_clock):
    """Like requests of the gateway: groups of one sample, offered one after another."""
    service = await swarm.start_service()
    for number, rate in ((1, 400.0), (2, 1600.0), (3, 800.0)):
        await swarm.add_node(number, rate=rate, capacity=32, batch=16)
    session = service.open("warm", Binding(8, SAMPLING))
    await collect(service, session, 40)
    service.close(session)
    await trio.sleep(10.0)
    session = service.open("single", Binding(1, SAMPLING))
    for number in range(5):
        (group,) = await collect(service, session, 1, first=1000 + number)
        assert group.done[0].node == Key(bytes([2]) * 32).public


async def test_a_third_of_all_messages_may_be_lost(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery, loss=0.33)
        service = await swarm.start_service()
        for i in (1, 2, 3):
            await swarm.add_node(i, rate=1000.0, capacity=16, batch=8)
        session = service.open("s", Binding(4, SAMPLING))
        assert_whole(await collect(service, session, 50), 4)
        assert len(accepted_rows(swarm)) == 200
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("known", [True, False])
async def test_a_dead_nodes_work_is_done_by_others(tmp_path, autojump_clock, known):
    """`known`: the ledger learns that its membership lease ended; otherwise its work leases expire."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery)
        service = await swarm.start_service()
        await swarm.add_node(1, rate=500.0, capacity=16, batch=8)
        await swarm.add_node(2, rate=500.0, capacity=16, batch=8)

        async def kill() -> None:
            await trio.sleep(3.0)
            swarm.kill_node(1, known=known)

        nursery.start_soon(kill)
        session = service.open("s", Binding(4, SAMPLING))
        groups = await collect(service, session, 40)
        assert_whole(groups, 4)
        assert Counter(done.node for group in groups for done in group.done.values()).keys() == {
            Key(b"\1" * 32).public,
            Key(b"\2" * 32).public,
        }
        nursery.cancel_scope.cancel()


async def test_the_seed_restarts_while_nodes_work(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=100.0, capacity=16, batch=8)
    session = service.open("s", Binding(4, SAMPLING))
    got = await collect(service, session, 2, offers=8)
    await trio.sleep(0.1)  # until it is durable that the groups were taken
    before = len(accepted_rows(swarm))
    swarm.kill_service()
    await trio.sleep(30.0)  # the node finishes samples that the ledger cannot receive
    assert swarm.worker(1).status().unanswered > 0
    service = await swarm.start_service()
    session = service.open("s", Binding(4, SAMPLING))
    for i in range(8):
        if gid(i) not in {group.id for group in got}:
            service.offer(session, gid(i), prompt_of(i))
    more = await collect(service, session, 6, offers=0)
    assert_whole([*got, *more], 4)
    rows = accepted_rows(swarm)
    assert len(rows) == len(set(rows)) == 32 > before
    assert swarm.worker(1).refused == {}, "samples finished while the seed was away still counted"


def prompt_of(i: int) -> bytes:
    from node.ledger.packing import pack_tokens

    return pack_tokens((1, 2, i))


async def test_a_restarted_node_gets_its_leases_again(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=100.0, capacity=8, batch=8)
    session = service.open("s", Binding(8, SAMPLING))
    service.offer(session, gid(0), prompt_of(0))
    await trio.sleep(2.0)
    swarm.kill_node(1, known=False)
    await trio.sleep(6.0)
    swarm.wire.cut.clear()
    started = trio.current_time()
    await swarm.add_node(1, rate=100.0, capacity=8, batch=8)
    await collect(service, session, 1, offers=0)
    assert trio.current_time() - started < 15.0, "sooner than the expiry of the old lease"


async def test_versions_are_committed_between_batches(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery)
        service = await swarm.start_service()
        engine = await swarm.add_node(1, rate=1000.0, capacity=32, batch=8)

        async def train() -> None:
            for version in range(1, 6):
                await trio.sleep(2.0)
                swarm.head = head(version)
                service.sealed(swarm.head)
                swarm.worker(1).update((0, version), root(version), os.memfd_create("patch"))

        open_before = len(os.listdir("/proc/self/fd"))
        nursery.start_soon(train)
        session = service.open("s", Binding(4, SAMPLING))
        groups = await collect(service, session, 80)
        assert_whole(groups, 4)
        seen = Counter(done.oldest for group in groups for done in group.done.values())
        assert len(seen) >= 4
        assert engine.committed == [(0, version) for version in range(1, 6)]
        await trio.sleep(5.0)
        assert len(os.listdir("/proc/self/fd")) <= open_before
        assert swarm.worker(1).refused.keys() <= {Reason.TOO_OLD}
        nursery.cancel_scope.cancel()


async def test_a_node_with_an_old_version_gets_no_work(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=1000.0, capacity=8, batch=8)
    for version in (1, 2):
        service.sealed(head(version))
    session = service.open("s", Binding(4, SAMPLING))
    with trio.move_on_after(60.0):
        await collect(service, session, 1)
        raise AssertionError("work was done at a version that is too old")
    swarm.worker(1).update((0, 2), root(2), os.memfd_create("patch"))
    with trio.fail_after(20.0):
        groups = await collect(service, session, 1, offers=0)
    assert {done.oldest for done in groups[0].done.values()} == {(0, 2)}


async def test_samples_of_an_engine_that_fails_are_generated_again(swarm, autojump_clock):
    service = await swarm.start_service()
    engine = await swarm.add_node(1, rate=1000.0, capacity=16, batch=16)
    session = service.open("s", Binding(4, SAMPLING))
    engine.fail_next = True
    assert_whole(await collect(service, session, 10), 4)


@pytest.mark.parametrize("nodes", [1, 4])
async def test_work_that_no_engine_can_do_is_reported_and_delays_no_other_work(swarm, autojump_clock, nodes):
    service = await swarm.start_service()
    for i in range(nodes):
        await swarm.add_node(i + 1, rate=1000.0, capacity=16, batch=16)
    bad, good = service.open("bad", Binding(4, SAMPLING)), service.open("good", Binding(4, SAMPLING))
    for i in range(3):
        service.offer(good, gid(i), prompt_of(i))
        service.offer(bad, gid(100 + i), prompt_of(666 if i == 1 else i))
    assert_whole(await collect(service, good, 3, offers=0), 4)
    with trio.fail_after(60.0):
        while not bad.impossible:
            await bad.news.wait()
    assert "token id outside" in bad.impossible[gid(101)]
    assert_whole(await collect(service, bad, 2, offers=0), 4)
    assert service.status().groups_open == 0
    refusers = {row[0] for row in sqlite3.connect(swarm.path).execute("select why from requeues")}
    assert refusers == {str(Reason.IMPOSSIBLE)}


async def a_node_at_work(swarm):
    """The ledger's service and a session, after a slow node has taken leases for four samples."""
    service = await swarm.start_service()
    await swarm.add_node(1, rate=10.0, capacity=8, batch=4)
    session = service.open("s", Binding(4, SAMPLING))
    service.offer(session, gid(0), prompt_of(0))
    await trio.sleep(1.0)
    assert service.status().samples_leased == 4
    return service, session


async def test_a_node_that_leaves_gives_its_work_back(swarm, autojump_clock):
    service, _ = await a_node_at_work(swarm)
    swarm.lives[Key(b"\1" * 32).public].cancel()
    await trio.sleep(0.2)
    assert service.status().samples_free == 4


async def test_a_node_that_finishes_takes_no_more_and_gives_back_nothing(swarm, autojump_clock):
    service, session = await a_node_at_work(swarm)
    service.offer(session, gid(1), prompt_of(1))  # waits at the node, and is finished too
    await trio.sleep(1.0)
    held = service.status().samples_leased
    assert await swarm.worker(1).finish(100.0)
    assert (service.status().samples_leased, service.status().accepted) == (0, held)
    service.offer(session, gid(2), prompt_of(2))
    await trio.sleep(30.0)
    assert service.status().samples_leased == 0  # nothing was asked for
    swarm.lives[Key(b"\1" * 32).public].cancel()
    await trio.sleep(0.2)
    assert sqlite3.connect(swarm.path).execute("select count(*) from requeues").fetchone() == (0,)


async def test_what_is_not_finished_in_time_is_given_back(swarm, autojump_clock):
    service, _ = await a_node_at_work(swarm)
    before = trio.current_time()
    assert not await swarm.worker(1).finish(2.0)
    assert trio.current_time() - before == pytest.approx(2.0)
    assert service.status().samples_leased == 4
    swarm.lives[Key(b"\1" * 32).public].cancel()
    await trio.sleep(0.2)
    assert service.status().samples_free == 4


async def test_withdrawn_work_is_not_done(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=100.0, capacity=32, batch=4)
    session = service.open("s", Binding(4, SAMPLING))
    for i in range(8):
        service.offer(session, gid(i), prompt_of(i))
    await trio.sleep(1.0)
    assert swarm.worker(1).status().jobs > 0
    service.close(session)
    await trio.sleep(0.2)
    assert swarm.worker(1).status().jobs == 0
    assert service.status().groups_open == 0


async def test_forged_and_invalid_messages_change_nothing(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=1000.0, capacity=8, batch=8)
    session = service.open("s", Binding(4, SAMPLING))
    assert_whole(await collect(service, session, 2), 4)
    mallory = Key(b"\x09" * 32).public
    for node, body in list(swarm.wire.bodies):
        service.hear(mallory, body)  # messages of another node
        service.hear(node, body)  # repeated messages
        for i in range(0, len(body), 7):
            service.hear(mallory, body[:i] + bytes([body[i] ^ 0x41]) + body[i + 1 :])
    service.hear(mallory, b"")
    service.hear(mallory, bytes(2 << 20))
    await trio.sleep(5.0)
    assert len(accepted_rows(swarm)) == 8
    refused = service.status().nodes[mallory.hex()].refused
    assert refused[Reason.BAD_SIGNATURE] >= 8
    for _, body in swarm.wire.bodies:
        swarm.worker(1).hear(body)  # messages for the ledger, which a node must ignore
    swarm.worker(1).hear(b"\x01\xff")
    assert_whole(await collect(service, session, 2, first=50, offers=4), 4)


async def test_delivered_rollouts_have_their_nodes_signature(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, rate=1000.0, capacity=8, batch=8)
    session = service.open("s", Binding(2, SAMPLING))
    (group,) = await collect(service, session, 1)
    for sample, done in group.done.items():
        assert open_rollout(done.node, done.sealed) == done.rollout
        assert done.rollout.sample == sample
    sent = [decode(body) for _, body in swarm.wire.bodies]
    assert [encode(message) for message in sent] == [body for _, body in swarm.wire.bodies]
    assert sum(isinstance(message, SignedRollout) for message in sent) >= 2
