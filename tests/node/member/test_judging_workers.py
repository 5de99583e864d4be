"""Workers that judge each other's samples through a ledger service, under the virtual clock."""

import pytest
import trio
from work_kit import SAMPLING, TOKENS, Swarm, TimedEngine, collect

from codec.sign import Key
from node.engines.base import JUDGES, OPTIONS, PORTABLE_DRAWS, REPLAYS
from node.engines.host import EngineFailed
from node.engines.judgement import Judgement
from node.ledger.binding import Binding
from node.ledger.messages import Ask, JudgeAnswer, JudgeRequest, WorkLease, decode
from node.ledger.packing import pack_tokens
from node.member.held_version import HeldVersion
from node.member.judge_queue import MOST, JudgeQueue


class JudgingEngine(TimedEngine):
    """Finds what honest engines claim; `claims` is what it claims itself."""

    def __init__(self, rate: float, claims: float = -1.0) -> None:
        super().__init__(rate)
        self.abilities, self.kind = frozenset({OPTIONS, PORTABLE_DRAWS, JUDGES}), "timed/f32/cpu"
        self.claims = claims
        self.judged = self.judging = self.most = 0
        self.fails = False

    async def generate(self, prompts, sampling, counts=None, adapter=""):
        completions, seconds = await super().generate(prompts, sampling, counts, adapter)
        changed = [
            type(found)(found.token_ids, (self.claims,) * TOKENS, found.finish_reason, found.spans)
            for found in completions
        ]
        return changed, seconds

    async def judge(self, claim):
        self.judging += 1
        self.most = max(self.most, self.judging)
        await trio.sleep(0.2)
        self.judging -= 1
        if self.fails:
            raise EngineFailed("no memory", poisoned=False)
        self.judged += 1
        n = claim.tokens
        scores = (-1.0,) * (n - 1) + (float("-inf"),) if claim.token_ids[0] == 7 else (-1.0,) * n
        margins = (0.0,) * n if claim.sampling.extra.portable else ()
        return Judgement(self.version, scores, (-1.001,) * n if claim.previous else (), margins)


class ReplayingEngine(JudgingEngine):
    """All of these have the same bits."""

    def __init__(self, rate: float, claims: float = -1.0) -> None:
        super().__init__(rate, claims)
        self.abilities |= {REPLAYS, "class:timed/1/cpu-avx512-0000/float32/eager/tp1"}
        self.asked: set[tuple[bool, bool]] = set()

    async def judge(self, claim):
        self.asked.add((claim.replay, claim.previous))
        found = await super().judge(claim)
        return Judgement(found.version, (-1.0,) * claim.tokens, found.previous, found.margins)


@pytest.fixture
async def swarm(tmp_path):
    async with trio.open_nursery() as nursery:
        yield Swarm(tmp_path, nursery)
        nursery.cancel_scope.cancel()


def messages_to_nodes(swarm: Swarm) -> list[object]:
    """Record what the service sends."""
    sent: list[object] = []
    to_node = swarm.wire.to_node

    async def record(node: bytes, body: bytes) -> None:
        sent.append(decode(body))
        await to_node(node, body)

    swarm.wire.to_node = record
    return sent


async def test_able_nodes_judge_each_other_and_one_that_lies_is_found(swarm, autojump_clock):
    sent = messages_to_nodes(swarm)
    service = await swarm.start_service()
    engines = [await swarm.add_node(i, 0, engine=JudgingEngine(1000.0)) for i in range(1, 6)]
    liar = await swarm.add_node(6, 0, engine=JudgingEngine(1000.0, claims=-3.0))
    session = service.open("s", Binding(2, SAMPLING))
    await collect(service, session, 60)
    await trio.sleep(10)
    await collect(service, session, 60, first=100)  # by now the ledger knows what each engine can do
    await trio.sleep(30)
    nodes = service.status().nodes
    key = Key(bytes([6]) * 32).public.hex()
    assert "judged one of its samples false" in nodes[key].quarantine.why
    assert [name for name, node in nodes.items() if node.quarantine is not None] == [key]
    assert all(engine.judged for engine in engines)
    assert all(node.evidence.tokens for name, node in nodes.items() if name != key)
    assert nodes[key].evidence.arithmetic == "timed/f32/cpu///tp1"
    leases = [message for message in sent if isinstance(message, WorkLease)]
    assert leases
    assert any(message.sampling.extra.portable for message in leases)
    assert any(isinstance(message, JudgeRequest) for message in sent)
    assert service.status().checks.judged > 50
    assert liar.judged >= 0


async def test_nodes_of_one_class_replay_each_other_and_one_bit_is_found(swarm, autojump_clock):
    service = await swarm.start_service()
    engines = [await swarm.add_node(i, 0, engine=ReplayingEngine(1000.0)) for i in range(1, 6)]
    await swarm.add_node(6, 0, engine=ReplayingEngine(1000.0, claims=-1.0 + 2**-24))
    session = service.open("s", Binding(2, SAMPLING))
    await collect(service, session, 60)
    await trio.sleep(10)
    await collect(service, session, 120, first=100)
    await trio.sleep(30)
    nodes = service.status().nodes
    key = Key(bytes([6]) * 32).public.hex()
    assert "not those that its weights and the leased noise give" in nodes[key].quarantine.why
    assert [name for name, node in nodes.items() if node.quarantine is not None] == [key]
    assert all(engine.asked == {(True, False)} for engine in engines)
    assert nodes[key].evidence.kinds["unlike"] > 1e6


async def test_evidence_and_quarantine_survive_a_restart_of_the_seed(swarm, autojump_clock):
    service = await swarm.start_service()
    for i in range(1, 6):
        await swarm.add_node(i, 0, engine=JudgingEngine(1000.0, claims=-3.0 if i == 5 else -1.0))
    session = service.open("s", Binding(2, SAMPLING))
    await collect(service, session, 40)
    await trio.sleep(30)
    before = service.status()
    swarm.kill_service()
    service = await swarm.start_service()
    after = service.status()
    key = Key(bytes([5]) * 32).public.hex()
    assert after.nodes[key].quarantine is not None
    assert after.checks.commitment == before.checks.commitment
    for name, node in after.nodes.items():
        assert (node.evidence.tokens, node.evidence.factor) == (
            before.nodes[name].evidence.tokens,
            before.nodes[name].evidence.factor,
        )


async def test_nodes_that_are_not_able_are_checked_as_before_and_get_no_new_message(swarm, autojump_clock):
    sent = messages_to_nodes(swarm)
    service = await swarm.start_service()
    for i in range(1, 5):
        await swarm.add_node(i, 1000.0)
    session = service.open("s", Binding(8, SAMPLING))
    await collect(service, session, 80)
    await trio.sleep(30)
    assert service.status().checks.confirmed
    assert any(isinstance(message, Ask) for message in sent)
    assert not any(isinstance(message, JudgeRequest) for message in sent)
    assert not any(message.sampling.extra.portable for message in sent if isinstance(message, WorkLease))


async def test_abilities_that_change_are_told_again(swarm, autojump_clock):
    service = await swarm.start_service()
    engine = JudgingEngine(1000.0)
    await swarm.add_node(1, 0, engine=engine)
    await trio.sleep(60)
    (node,) = service._ledger.nodes.values()
    assert node.abilities == engine.abilities
    engine.abilities = engine.abilities | {"class:timed/1/cpu-1f3a9c02/float32/plain/tp1"}
    await trio.sleep(60)
    assert node.abilities == engine.abilities


async def test_an_engine_that_fails_to_judge_answers_nothing_and_others_judge(swarm, autojump_clock):
    service = await swarm.start_service()
    broken = await swarm.add_node(1, 0, engine=JudgingEngine(1000.0))
    broken.fails = True
    for i in range(2, 6):
        await swarm.add_node(i, 0, engine=JudgingEngine(1000.0))
    session = service.open("s", Binding(2, SAMPLING))
    await collect(service, session, 30)
    await trio.sleep(60)
    status = service.status()
    assert status.checks.judging == status.checks.not_judged == 0
    assert status.checks.judged > 30
    assert not any(node.quarantine for node in status.nodes.values())


def request(tokens: tuple[int, ...], start: int = 0, version: int = 0, stream: int = 5) -> JudgeRequest:
    return JudgeRequest(
        1, pack_tokens((1, 2)), pack_tokens(tokens), SAMPLING, stream, 0, version, start, len(tokens), True
    )


async def test_what_a_queue_answers(autojump_clock):
    engine, sent = JudgingEngine(1.0), []

    async def send(body: bytes) -> None:
        sent.append(decode(body))

    queue = JudgeQueue(engine, HeldVersion(engine), send)
    for _ in range(MOST + 3):  # more than it holds
        queue.ask(request((5, 6, 7)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await trio.sleep(1)
        assert len(sent) == MOST
        assert engine.most <= MOST
        sent.clear()
        queue.ask(request((7, 6, 5), start=1))
        queue.ask(request((5, 6, 7), version=9))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    found, lacking = sorted(sent, key=lambda answer: -len(answer.scores))
    assert len(found.scores) == len(found.previous) == 8
    assert found.scores[4:] == b"\x00\x40\x1c\xc6", "-10000: what cannot be drawn has a finite number"
    assert found.margins == b""
    assert lacking == JudgeAnswer(1, 0, 0, b"")


@pytest.mark.parametrize(
    "bad", [request(()), request((5, 6), start=2), request((5,), stream=-1), request((5,), stream=2**64)]
)
async def test_a_request_that_nobody_can_judge_is_refused(bad, autojump_clock):
    from codec.errors import PeerError

    with pytest.raises(PeerError, match="judge request"):
        JudgeQueue(engine := JudgingEngine(1.0), HeldVersion(engine), None).ask(bad)
    await trio.lowlevel.checkpoint()
