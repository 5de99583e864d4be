"""Rewards as a trainer asks for them, filters by them, and computes them itself."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rewards_kit import make_model
from seed_kit import RunningSeed, running

from codec.errors import UsageError
from node import PromptSpec, RolloutGroup, SamplingParams, Swarm, SwarmTimeout
from node.coordinator import trainer_server
from node.engines.base import MAX_REWARD_METADATA, OPTIONS
from node.ledger.messages import Abilities, RewardClaim, WorkLease, decode, encode
from node.rewards.functions import built_in

SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,))
EXACT = built_in()["exact_match"]


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningSeed]:
    with running(tmp_path) as seed:
        abilities = (OPTIONS, EXACT.ability, "reward:number@" + "1" * 16)
        seed.call(seed.service.hear, seed.node.key.public, encode(Abilities(abilities, "a kind")))
        yield seed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def swarm(there: RunningSeed, model: Path) -> Iterator[Swarm]:
    with Swarm.attach(home=there.home, base=model, start=False) as swarm:
        yield swarm


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def number(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """What the nodes' `number` is expected to give: the seed's fake node draws (9, 10 + sample, 2)."""
    return float(ord(completion[1]) - 32 - 10)


def test_each_rollout_has_the_reward_that_its_node_signed(there: RunningSeed, swarm: Swarm) -> None:
    leases: list[WorkLease] = []
    send = there.node.send

    async def tapped(node: bytes, body: bytes) -> None:
        leases.extend(each for each in [decode(body)] if isinstance(each, WorkLease))
        await send(node, body)

    there.service._send = tapped
    prompts = [PromptSpec([1], reward_metadata={"b": [1, "\u00e4"], "answer": "42"}), [2]]
    groups = list(swarm.rollouts(prompts, 3, SAMPLING, reward="exact_match", timeout_s=30))
    assert [group.rewards for group in groups] == [(0.0, 1.0, 2.0)] * 2
    assert {rollout.reward_checked for group in groups for rollout in group.rollouts} == {False}
    assert [group.sampling for group in groups] == [SAMPLING] * 2, "the reward is no part of how it was sampled"
    sent = {lease.prompt: lease.sampling.extra.reward for lease in leases}
    assert sorted(asked.metadata for asked in sent.values() if asked is not None) == [
        '{"answer":"42","b":[1,"\u00e4"]}'.encode(), b"{}"
    ]  # fmt: skip


def test_without_the_option_there_is_none(swarm: Swarm) -> None:
    (group,) = swarm.rollouts([[1]], 2, SAMPLING, timeout_s=30)
    assert group.rewards == (None, None)
    assert {(rollout.no_reward, rollout.reward_checked) for rollout in group.rollouts} == {("", False)}


def test_filters_see_rewards(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(1.0)

    def has_signal(group: RolloutGroup) -> bool:
        return len(set(group.rewards)) > 1

    assert not list(swarm.rollouts([[1], [2]], 2, SAMPLING, reward="exact_match", keep=has_signal, timeout_s=30))
    there.node.claim = lambda sample: RewardClaim(float(sample))
    found = list(swarm.rollouts([[1], [2]], 2, SAMPLING, reward="exact_match", keep=has_signal, take=1, timeout_s=30))
    assert len(found) == 1


def test_a_function_that_gave_no_number_costs_its_sample_and_says_why(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(1.0) if sample else RewardClaim(None, "it took more than 10 s")
    (group,) = swarm.rollouts([[1]], 2, SAMPLING, reward="exact_match", timeout_s=30)
    assert group.rewards == (None, 1.0)
    assert group.rollouts[0].no_reward == "it took more than 10 s"


def test_the_trainer_computes_rewards_that_nobody_has_checked(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(float(sample)) if sample else RewardClaim(None, "it failed")
    (group,) = swarm.rollouts([[1]], 3, SAMPLING, reward=number, verify_rewards=0.01, timeout_s=30)
    assert group.rewards == (0.0, 1.0, 2.0), "it fills in what the node did not get"
    assert all(rollout.reward_checked and not rollout.no_reward for rollout in group.rollouts)


def test_a_node_whose_reward_the_trainer_finds_false_is_quarantined(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(math.nextafter(1.0, 2.0) if sample == 1 else float(sample))
    stream = swarm.rollouts([[1]], 2, SAMPLING, reward=number, verify_rewards=1.0, timeout_s=30)
    got: list[RolloutGroup] = []
    waiting = threading.Thread(target=lambda: got.extend(stream))
    waiting.start()
    node = there.node.key.public
    eventually(lambda: there.call(lambda: there.service.status().nodes[node.hex()].quarantine is not None))
    why = there.call(lambda: there.service.status().nodes[node.hex()].quarantine.why)
    assert why == "the trainer's own computation: its reward is 1.0, and not 1.0000000000000002"
    assert not got
    there.node.claim = lambda sample: RewardClaim(float(sample))
    there.call(there.service.release, node, "")
    there.call(there.node.ask)
    waiting.join(20)
    assert [group.rewards for group in got] == [(0.0, 1.0)]


def test_what_the_trainer_cannot_compute_it_does_not_call_a_lie(there: RunningSeed, swarm: Swarm) -> None:
    def number(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
        raise ImportError("sympy")

    (group,) = swarm.rollouts([[1]], 2, SAMPLING, reward=number, verify_rewards=1.0, timeout_s=30)
    assert [(rollout.reward, rollout.reward_checked) for rollout in group.rollouts] == [(0.0, False), (1.0, False)]


def test_the_name_of_a_function_here_may_be_given_as_well(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(1.0)
    prompt = PromptSpec([1], reward_metadata={"answer": [')*"', ')+"']})
    for name in ("exact_match", f"exact_match@{EXACT.digest}"):
        (group,) = swarm.rollouts([prompt], 2, SAMPLING, reward=name, verify_rewards=1.0, timeout_s=30)
        assert all(rollout.reward_checked for rollout in group.rollouts)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify_rewards": 0.5}, "goes with reward"),
        ({"reward": "exact_match", "verify_rewards": 1.5}, "0 to 1"),
        ({"reward": "exact_match", "verify_rewards": math.nan}, "0 to 1"),
        ({"reward": "no spaces"}, "a name of 1 to 32"),
        ({"reward": "exact_match@12"}, "perhaps with @DIGEST"),
        ({"reward": "no_such", "verify_rewards": 1.0}, "no function of that name"),
        ({"reward": "exact_match@" + "0" * 16, "verify_rewards": 1.0}, "no function of that name"),
        ({"reward": 7}, "is of type int"),
        ({"reward": lambda prompt, completion, metadata: 1.0}, "is of type function"),
    ],
)
def test_what_cannot_be_asked_for_is_said_at_once(swarm: Swarm, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        swarm.rollouts([[1]], 1, SAMPLING, **options)


def test_rewards_of_this_process_need_the_texts(there: RunningSeed) -> None:
    with Swarm.attach(home=there.home) as swarm, pytest.raises(UsageError, match="base folder"):
        swarm.rollouts([[1]], 1, SAMPLING, reward="exact_match", verify_rewards=1.0)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"answer": "x" * MAX_REWARD_METADATA}, "at most 16,384"),
        ({"answer": math.nan}, "Out of range float"),
        ({"answer": object()}, "not JSON serializable"),
        ({1: 2}, "no mapping of names"),
        (["answer"], "no mapping of names"),
    ],
)
def test_metadata_that_cannot_be_sent_refuses_one_prompt(swarm: Swarm, metadata: Any, why: str) -> None:
    prompts = [PromptSpec([1], metadata="mine", reward_metadata=metadata), [2]]
    refused, group = sorted(
        swarm.rollouts(prompts, 1, SAMPLING, reward="exact_match", timeout_s=30), key=lambda found: found.index
    )
    assert why in (refused.refused or "")
    assert refused.metadata == "mine"
    assert group.rewards == (0.0,)


def test_metadata_for_a_reward_that_is_not_asked_for_is_a_mistake(swarm: Swarm) -> None:
    (refused,) = swarm.rollouts([PromptSpec([1], reward_metadata={"answer": "1"})], 1, SAMPLING, timeout_s=30)
    assert "no reward is asked for" in (refused.refused or "")


def test_a_key_is_bound_to_the_reward_and_its_metadata(swarm: Swarm) -> None:
    def ask(answer: str, reward: str) -> list[Any]:
        prompt = PromptSpec([1], reward_metadata={"answer": answer})
        return list(swarm.rollouts([prompt], 1, SAMPLING, reward=reward, key="k", timeout_s=30))

    first = ask("1", "exact_match")
    assert ask("1", "exact_match")[0].rewards == first[0].rewards
    for answer, reward in (("2", "exact_match"), ("1", "number")):
        with pytest.raises(UsageError, match="bound to"):
            ask(answer, reward)


def test_a_reward_that_no_node_has_is_named(there: RunningSeed, swarm: Swarm) -> None:
    stream = swarm.rollouts([[1]], 1, SAMPLING, reward="no_such", timeout_s=30.0)
    waiting = threading.Thread(target=lambda: list(stream))
    waiting.start()
    eventually(lambda: ["reward:no_such"] in there.call(lambda: list(there.service.status().unmet.values())))
    stream.close()
    waiting.join(5)
    from node.status.schema import LedgerStatus, MemberStatus, SeedReport, SeedStatus
    from node.trainers.standing import _why_no_group

    nodes = [MemberStatus(engine=(0, 0))]
    report = SeedReport(swarm=SeedStatus(nodes=nodes), work=LedgerStatus(unmet={"s": ["reward:no_such"]}))
    report.work.rewards.functions = {"exact_match": {"1" * 16: 1}}
    assert _why_no_group(report, "s") == (
        "No node has the reward 'no_such' (rewards that nodes have: exact_match): start one with --reward "
        "no_such=MODULE:FUNCTION."
    )


def test_a_seed_of_an_older_release_is_named(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_server, "ROLLOUTS", 1)
    with pytest.raises(UsageError, match="which knows no rewards"):
        list(swarm.rollouts([[1]], 1, SAMPLING, reward="exact_match", timeout_s=30))


def test_nothing_comes_while_a_node_alone_is_in_quarantine(there: RunningSeed, swarm: Swarm) -> None:
    there.node.claim = lambda sample: RewardClaim(0.5)
    with pytest.raises(SwarmTimeout):
        list(swarm.rollouts([[1]], 1, SAMPLING, reward=number, verify_rewards=1.0, timeout_s=2.0))
