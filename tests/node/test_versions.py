"""Versions that arrive while a node works: sequences that continue or are cancelled, renewals, checks and time
accounting."""

import os
import sqlite3
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import trio
from work_kit import SAMPLING, TOKENS, Swarm, TimedEngine, collect, gid, head, root

from codec.sign import Key
from node.engines.base import Completion, SamplingParams, Span
from node.engines.host import Commitment
from node.engines.room import NO_ROOM_TOLD
from node.ledger.binding import Binding
from node.ledger.messages import Reason, Renew, Timesheet, decode
from node.ledger.packing import pack_tokens
from node.member.time_accounting import TimeAccounting


class ContinuingEngine:
    """Generates a token of every sequence each `step_s`, and continues over commits."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.version, self.root = (0, 0), root(0)
        self.ready, self.preemptible, self.continuous_batching, self.scores = True, True, False, True
        self.room = NO_ROOM_TOLD
        self.abilities, self.kind = frozenset[str](), "timed"
        self.adapters: dict[str, tuple[int, int]] = {}
        self.running = 0
        self.cancelled = 0
        self.frozen = False
        self.committed: list[tuple[tuple[int, int], int]] = []
        """Versions, and how many sequences were running when each was committed."""

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_up = wait_ready

    def lacks(self, version: tuple[int, int]) -> bool:
        return self.version < version

    async def generate(self, prompts, sampling, counts=None, adapter=""):
        versions = []
        self.running += len(prompts)
        try:
            for i in range(sampling.max_tokens):
                await trio.sleep(self.step_s)
                while self.frozen:  # noqa: ASYNC110 - a stalled engine says nothing
                    await trio.sleep(1.0)
                versions.append(self.version)
                if counts is not None:
                    counts((i + 1,) * len(prompts))
        except trio.Cancelled:
            self.cancelled += len(prompts)
            raise
        finally:
            self.running -= len(prompts)
        spans, count = [], sampling.max_tokens
        for version in sorted(set(versions)):
            spans.append(Span(version, versions.index(version), versions.index(version) + versions.count(version)))
        return [
            Completion((*range(10, 9 + count), p.stream % (1 << 31) + 300), (-1.0,) * count, "length", tuple(spans))
            for p in prompts
        ], 0.0

    async def score(self, prompt, token_ids, sampling, adapter=""):
        return (-1.0,) * len(token_ids), self.version

    async def judge(self, claim):
        raise AssertionError("it does not name the ability JUDGES")

    async def stage(self, patch_fd, version):
        await trio.sleep(0.5)
        return 0.5

    async def commit(self, version, new_root):
        self.committed.append((version, self.running))
        self.version, self.root = version, new_root
        return Commitment(0.01, 0.02)


async def start(tmp_path, nursery, engine, **pace) -> tuple:
    swarm = Swarm(tmp_path, nursery)
    service = await swarm.start_service()
    await swarm.add_node(1, rate=1.0, engine=engine, **pace)
    return swarm, service


def seal(swarm, service, version: int, nodes=(1,)) -> None:
    swarm.head = head(version)
    service.sealed(swarm.head)
    for i in nodes:
        swarm.worker(i).update((0, version), root(version), os.memfd_create("patch"))


SIXTY_TOKENS = SamplingParams(max_tokens=60)


async def test_sequences_continue_over_a_commit_and_record_the_version_of_each_span(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        engine = ContinuingEngine(1.0)
        swarm, service = await start(tmp_path, nursery, engine, capacity=8, batch=8)
        session = service.open("s", Binding(4, SIXTY_TOKENS))
        for i in range(2):
            service.offer(session, gid(i), pack_tokens((1, 2, i)))
        await trio.sleep(20.0)
        seal(swarm, service, 1)
        groups = await collect(service, session, 2, offers=0)
        assert engine.committed == [((0, 1), 8)], "all eight sequences were running"
        assert engine.cancelled == 0
        for group in groups:
            for done in group.done.values():
                assert [(s.version, s.end) for s in done.rollout.spans] == [(0, done.rollout.spans[0].end), (1, 60)]
                assert 15 < done.rollout.spans[0].end < 25
                assert done.oldest == (0, 0)
        assert swarm.worker(1).lost_tokens == 0
        assert swarm.worker(1).refused == {}
        (commit,) = swarm.worker(1).commits
        assert (commit.version, commit.pause_s, commit.resume_s) == (1, 0.01, 0.02)
        assert commit.stage_s == pytest.approx(0.5)
        assert commit.wait_s == pytest.approx(0.5, abs=0.1)
        nursery.cancel_scope.cancel()


async def test_samples_that_would_be_refused_are_cancelled(tmp_path, autojump_clock):
    """With a lag of one, samples begun at version 0 are useless at version 2: they are cancelled and generated
    again."""
    async with trio.open_nursery() as nursery:
        engine = ContinuingEngine(1.0)
        swarm, service = await start(tmp_path, nursery, engine, capacity=8, batch=8)
        session = service.open("s", Binding(4, SIXTY_TOKENS))
        service.offer(session, gid(0), pack_tokens((1, 2, 3)))
        for version in (1, 2):
            await trio.sleep(20.0)
            seal(swarm, service, version)
        (group,) = await collect(service, session, 1, offers=0)
        assert engine.cancelled == 4
        assert 4 * 38 <= swarm.worker(1).lost_tokens <= 4 * 42
        assert {done.oldest for done in group.done.values()} == {(0, 2)}
        assert swarm.worker(1).refused == {}, "no sample was sent that the ledger would refuse"
        nursery.cancel_scope.cancel()


async def test_leases_are_renewed_only_while_tokens_arrive(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        engine = ContinuingEngine(1.0)
        swarm = Swarm(tmp_path, nursery)
        swarm.settings = type(swarm.settings)(min_deadline_s=10.0, max_deadline_s=15.0)
        service = await swarm.start_service()
        await swarm.add_node(1, rate=1.0, engine=engine, capacity=8, batch=8)
        session = service.open("s", Binding(4, SIXTY_TOKENS))
        service.offer(session, gid(0), pack_tokens((1, 2, 3)))
        (group,) = await collect(service, session, 1, offers=0)
        assert len(group.done) == 4, "sixty seconds on leases of fifteen"
        renewals = [m for m in map(decode, (body for _, body in swarm.wire.bodies)) if isinstance(m, Renew)]
        assert 12 <= len(renewals) <= 25
        assert [m.tokens for m in renewals] == sorted(m.tokens for m in renewals)
        service.offer(session, gid(1), pack_tokens((1, 2, 4)))
        await trio.sleep(10.0)
        engine.frozen = True
        assert service.status().samples_leased == 4
        await trio.sleep(20.0)
        why = sqlite3.connect(swarm.path).execute("select why from requeues").fetchall()
        assert why == [("lease expired",)], "no token came any more, so other nodes may get the samples"
        nursery.cancel_scope.cancel()


async def test_the_self_test_reports_a_rate_before_any_work(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        _, service = await start(
            tmp_path, nursery, ContinuingEngine(0.1), self_test_tokens=16, self_test_rows=8, capacity=8
        )
        await trio.sleep(3.0)
        (node,) = service.status().nodes.values()
        assert node.tokens_per_s == pytest.approx(80.0, rel=0.05)
        assert node.accepted == 0
        nursery.cancel_scope.cancel()


async def test_a_slow_self_test_delays_no_work(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        _, service = await start(
            tmp_path, nursery, ContinuingEngine(60.0), self_test_tokens=16, self_test_within_s=10.0, capacity=8
        )
        await trio.sleep(12.0)
        (node,) = service.status().nodes.values()
        assert (node.tokens_per_s, node.capacity) == (0.0, 8)
        nursery.cancel_scope.cancel()


class LyingEngine(TimedEngine):
    """Reports log-probabilities that no other node computes for its tokens."""

    async def generate(self, prompts: Sequence, sampling, counts=None, adapter=""):
        completions, seconds = await super().generate(prompts, sampling, counts, adapter)
        return [msgspec.structs.replace(each, logprobs=(-3.0,) * TOKENS) for each in completions], seconds


@pytest.mark.parametrize("lies", [False, True])
async def test_nodes_check_each_other(tmp_path, autojump_clock, lies):
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery)
        swarm.settings = type(swarm.settings)(check_share=0.5)
        service = await swarm.start_service()
        for i in (1, 2, 3, 4):
            liar = LyingEngine(1000.0) if lies and i == 1 else None
            await swarm.add_node(i, rate=1000.0, engine=liar, capacity=16, batch=8)
        session = service.open("s", Binding(4, SAMPLING))
        await collect(service, session, 100)
        status = service.status()
        assert status.checks.begun > 20
        quarantined = [key for key, node in status.nodes.items() if node.quarantine]
        assert quarantined == ([Key(bytes([1]) * 32).public.hex()] if lies else [])
        if not lies:
            assert status.checks.confirmed > 20
        nursery.cancel_scope.cancel()


async def test_every_second_is_accounted_for(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        engine = ContinuingEngine(1.0)
        swarm, service = await start(tmp_path, nursery, engine, capacity=8, batch=8)
        began = trio.current_time()
        await trio.sleep(10.0)  # no work
        session = service.open("s", Binding(4, SIXTY_TOKENS))
        service.offer(session, gid(0), pack_tokens((1, 2, 3)))
        await collect(service, session, 1, offers=0)
        for version in (1, 2):
            service.sealed(head(version))
        service.offer(session, gid(1), pack_tokens((1, 2, 4)))  # but the node is two versions behind
        await trio.sleep(20.0)
        seconds = swarm.worker(1).status().seconds
        assert seconds.total == pytest.approx(trio.current_time() - began, abs=0.1)
        assert seconds.generate == pytest.approx(60.0, abs=1.0)
        assert seconds.wait_work == pytest.approx(10.0, abs=6.0)
        assert seconds.wait_version == pytest.approx(20.0, abs=6.0)
        await trio.sleep(6.0)
        sheets = [m for m in map(decode, (body for _, body in swarm.wire.bodies)) if isinstance(m, Timesheet)]
        (node,) = service.status().nodes.values()
        assert node.seconds.generate == pytest.approx(sheets[-1].generate_s)
        assert service.status().generating == pytest.approx(sheets[-1].useful, abs=1e-3)
        nursery.cancel_scope.cancel()


def test_time_accounting_adds_up():
    now = [0.0]
    time_accounting = TimeAccounting(lambda: now[0])
    for state, seconds in (("generate", 3.0), ("wait_work", 2.0), ("generate", 1.0), ("commit", 0.5)):
        time_accounting.enter(state)
        now[0] += seconds
    assert time_accounting.seconds == {"generate": 4.0, "wait_work": 2.0, "wait_version": 0.0, "commit": 0.5}
    assert time_accounting.state == "commit"
    time_accounting.enter("generate")
    now[0] += 1.0
    time_accounting.correct(0.25)
    assert time_accounting.seconds == {"generate": 4.75, "wait_work": 2.0, "wait_version": 0.0, "commit": 0.75}
    assert time_accounting.state == "generate"
    time_accounting.correct(100.0)
    assert time_accounting.seconds["generate"] == 0.0
    assert sum(time_accounting.seconds.values()) == 7.5


async def test_an_engine_that_is_not_preemptible_commits_between_batches(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery)
        service = await swarm.start_service()
        engine = await swarm.add_node(1, rate=50.0, capacity=32, batch=8)
        session = service.open("s", Binding(4, SAMPLING))
        for i in range(8):
            service.offer(session, gid(i), pack_tokens((1, 2, i)))
        await trio.sleep(2.0)
        seal(swarm, service, 1)
        await trio.sleep(8 * TOKENS / 50.0 + 1.0)
        assert engine.committed == [(0, 1)], "after one batch, although more work was waiting"
        groups = await collect(service, session, 8, offers=0)
        assert Counter(done.oldest for group in groups for done in group.done.values())[(0, 0)] == 8
        assert swarm.worker(1).refused.keys() <= {Reason.TOO_OLD}
        nursery.cancel_scope.cancel()
