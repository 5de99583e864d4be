"""Workers and ledger together: rewards of samples, lies about them, and rewards that take their time."""

import math
from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from work_kit import SAMPLING, Swarm, TimedEngine, collect, gid

from codec.errors import PeerError
from codec.sign import Key
from node.engines.base import OPTIONS, RewardAsked
from node.ledger.binding import Binding
from node.ledger.messages import AskReward, RewardAnswer, WorkLease, decode
from node.ledger.packing import pack_tokens
from node.ledger.state import Group
from node.member.reward_queue import CHECKS_HELD, RewardQueue
from node.rewards.outcome import Outcome

ABILITY = "reward:r@" + "1" * 16
REWARDED = SAMPLING.with_options(reward=RewardAsked("r", b'{"answer":"42"}'))


def right(token_ids: Sequence[int]) -> float:
    return token_ids[-2] / 8


class Rewards:
    """Rewards that are computed in `seconds` of virtual time. `lie(outcome)`: what this node says instead."""

    def __init__(self, seconds: float = 0.01, lie: Callable[[Outcome], Outcome] = lambda outcome: outcome) -> None:
        self.seconds, self.lie = seconds, lie
        self.abilities = frozenset({ABILITY})
        self.asked: list[RewardAsked] = []

    async def compute(self, asked: RewardAsked, prompt: Sequence[int], token_ids: Sequence[int]) -> Outcome:
        self.asked.append(asked)
        await trio.sleep(self.seconds)
        return self.lie(Outcome(right(token_ids)))


def engine() -> TimedEngine:
    engine = TimedEngine(1000.0)
    engine.abilities = frozenset({OPTIONS})
    return engine


@pytest.fixture
async def swarm(tmp_path):
    async with trio.open_nursery() as nursery:
        yield Swarm(tmp_path, nursery)
        nursery.cancel_scope.cancel()


def values(groups: Sequence[Group]) -> list[tuple[float | None, float]]:
    """(what the trainer gets, what is right) of each sample."""
    return [
        (done.rollout.reward.value, right(memoryview(done.rollout.token_ids).cast("I").tolist()))
        for group in groups
        for done in group.done.values()
    ]


async def test_rewards_come_with_the_samples_and_are_checked(swarm, autojump_clock):
    service = await swarm.start_service()
    rewards = [Rewards(), Rewards()]
    for i, each in enumerate(rewards, 1):
        await swarm.add_node(i, 0, engine=engine(), rewards=each)
    groups = await collect(service, service.open("s", Binding(4, REWARDED)), 20)
    assert all(found == wanted for found, wanted in values(groups))
    assert {check for group in groups for check in group.reward_checks.values()} == {"checked"}
    status = service.status().rewards
    assert (status.checked, status.wrong, status.disputed, status.open) == (80, 0, 0, 0)
    assert status.functions == {"r": {"1" * 16: 2}}
    assert sum(len(each.asked) for each in rewards) == 160, "each reward is computed twice"
    assert {asked.metadata for each in rewards for asked in each.asked} == {b'{"answer":"42"}'}


@pytest.mark.parametrize("name", ["another number", "no number", "the number of another sample"])
async def test_one_node_that_lies_changes_no_reward_that_the_trainer_gets(swarm, autojump_clock, name):
    lies = {
        "another number": lambda outcome: Outcome(math.nextafter(outcome.value, 1e300)),
        "no number": lambda outcome: Outcome.without("I would rather not"),
        "the number of another sample": lambda outcome: Outcome(0.0),
    }
    service = await swarm.start_service()
    for i in range(1, 4):
        await swarm.add_node(i, 0, engine=engine(), rewards=Rewards())
    await swarm.add_node(4, 0, engine=engine(), rewards=Rewards(lie=lies[name]))
    groups = await collect(service, service.open("s", Binding(4, REWARDED)), 40)
    assert all(found == wanted for found, wanted in values(groups))
    status = service.status()
    found = {key: node.quarantine.why for key, node in status.nodes.items() if node.quarantine is not None}
    liar = Key(bytes([4]) * 32).public.hex()
    assert status.rewards.wrong >= 3
    if name == "no number":
        assert not found, "it gets no rewards through, and may be no liar"
    else:
        assert found.keys() == {liar}
        assert "are not those that other nodes compute" in found[liar]


async def test_two_nodes_that_disagree_keep_a_group_and_say_so(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0, engine=engine(), rewards=Rewards())
    await swarm.add_node(2, 0, engine=engine(), rewards=Rewards(lie=lambda outcome: Outcome(0.0)))
    session = service.open("s", Binding(1, REWARDED))
    with pytest.raises(trio.TooSlowError), trio.fail_after(60):
        await collect(service, session, 1)
    assert service.status().rewards.disputed > 3
    await swarm.add_node(3, 0, engine=engine(), rewards=Rewards())
    service.close(session)
    groups = await collect(service, service.open("t", Binding(2, REWARDED)), 10, first=100)
    assert all(found == wanted for found, wanted in values(groups))


async def test_a_node_that_is_alone_has_rewards_that_nobody_has_checked(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0, engine=engine(), rewards=Rewards())
    await swarm.add_node(2, 0, engine=engine())
    groups = await collect(service, service.open("s", Binding(4, REWARDED)), 5)
    assert {check for group in groups for check in group.reward_checks.values()} == {"unchecked"}
    assert service.status().rewards.unchecked == 20


async def test_a_reward_that_no_node_has_is_named(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0, engine=engine(), rewards=Rewards())
    asked = SAMPLING.with_options(reward=RewardAsked("no_such"))
    session = service.open("s", Binding(1, asked))
    service.offer(session, gid(1), pack_tokens((1, 2)))
    await trio.sleep(30)
    assert service.status().unmet == {"s": ["reward:no_such"]}


async def test_slow_rewards_hold_up_no_engine(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0, engine=engine(), rewards=Rewards(seconds=1.0))
    began = trio.current_time()
    session = service.open("s", Binding(4, REWARDED))
    groups = await collect(service, session, 4)
    assert all(found == wanted for found, wanted in values(groups))
    assert trio.current_time() - began < 30


async def test_nothing_is_lost_with_a_seed_that_restarts_and_messages_that_are_lost(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        swarm = Swarm(tmp_path, nursery, loss=0.2)
        service = await swarm.start_service()
        for i in range(1, 4):
            await swarm.add_node(i, 0, engine=engine(), rewards=Rewards())
        session = service.open("s", Binding(4, REWARDED), keep=True)
        groups = await collect(service, session, 5, offers=10)
        await trio.testing.wait_all_tasks_blocked()  # a turn that has begun would find the book closed
        swarm.kill_service()
        service = await swarm.start_service()
        session = service.open("s", Binding(4, REWARDED), keep=True)
        groups += await collect(service, session, 10)
        assert all(found == wanted for found, wanted in values(groups))
        checks = [check for group in groups for check in group.reward_checks.values()]
        assert checks.count("checked") > 0.9 * len(checks), "a question that is lost twice leaves its reward unchecked"
        nursery.cancel_scope.cancel()


async def test_nodes_without_rewards_get_the_leases_that_they_always_got(swarm, autojump_clock):
    sent: list[object] = []
    to_node = swarm.wire.to_node

    async def record(node: bytes, body: bytes) -> None:
        sent.append(decode(body))
        await to_node(node, body)

    swarm.wire.to_node = record
    service = await swarm.start_service()
    await swarm.add_node(1, 1000.0)
    await collect(service, service.open("s", Binding(2, SAMPLING)), 3)
    leases = [message for message in sent if isinstance(message, WorkLease)]
    assert leases
    assert all(lease.sampling == SAMPLING for lease in leases)
    assert not any(isinstance(message, AskReward) for message in sent)


# ------------------------------------------------------------ the queue


async def test_own_samples_and_those_of_others_and_those_that_nobody_wants(autojump_clock):
    order: list[str] = []

    async def send(body: bytes) -> None:
        answer = decode(body)
        assert isinstance(answer, RewardAnswer)
        order.append(f"check {answer.check}: {answer.value}")

    queue = RewardQueue(Rewards(1.0), send)
    for i in range(3):
        queue.ask(AskReward(i, RewardAsked("r"), pack_tokens((1,)), pack_tokens((8, 2))))
    asked = RewardAsked("r")
    queue.compute(asked, (1,), (16, 2), lambda: True, lambda outcome: order.append(f"own {outcome.value}"))
    queue.compute(asked, (1,), (16, 2), lambda: False, lambda outcome: order.append("unwanted"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert sorted(order[:2]) == ["check 0: 1.0", "own 2.0"]
    assert sorted(order[2:]) == ["check 1: 1.0", "check 2: 1.0"]


async def test_neither_own_samples_nor_those_of_others_wait_for_all_of_the_other_kind(autojump_clock):
    order: list[str] = []

    async def send(body: bytes) -> None:
        order.append("check")

    queue = RewardQueue(Rewards(1.0), send)
    for i in range(8):
        queue.ask(AskReward(i, RewardAsked("r"), pack_tokens((1,)), pack_tokens((8, 2))))
        queue.compute(RewardAsked("r"), (1,), (16, 2), lambda: True, lambda outcome: order.append("own"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await trio.sleep(4.5)
        nursery.cancel_scope.cancel()
    assert sorted(order) == ["check"] * 4 + ["own"] * 4


async def test_a_queue_holds_so_many_checks_and_no_more(autojump_clock):
    sent: list[bytes] = []

    async def send(body: bytes) -> None:
        sent.append(body)

    queue = RewardQueue(Rewards(0.0), send)
    for i in range(CHECKS_HELD + 9):
        queue.ask(AskReward(i, RewardAsked("r"), pack_tokens((1,)), pack_tokens((8, 2))))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert len(sent) == CHECKS_HELD


@pytest.mark.parametrize(("prompt", "tokens"), [(b"", b"\0" * 4), (b"\0" * 4, b""), (b"\0" * 5, b"\0" * 4)])
async def test_a_question_without_tokens_is_refused(prompt, tokens, autojump_clock):
    with pytest.raises(PeerError, match="ask reward"):
        RewardQueue(Rewards(), None).ask(AskReward(1, RewardAsked("r"), prompt, tokens))
    await trio.lowlevel.checkpoint()
