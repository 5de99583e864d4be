"""A trainer's rollouts of an adapter: what it asks for, what it gets, and when it asks again."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from codec.errors import UsageError
from node.engines.base import SamplingParams
from node.ipc.channel import ChannelTimeout
from node.ledger.packing import pack_floats, pack_tokens
from node.trainers import api
from node.trainers.api import NEWER_THAN_ALL, Swarm
from node.trainers.messages import OpenRollouts, Room, Sample, Stale, Taken
from node.trainers.rollouts import _Batch, _Prompt, group_id

SAMPLING = SamplingParams(4)


class Delivered:
    """A channel that has received these messages already. `later`: what comes when a group was sent back."""

    def __init__(self, messages: list[Any], later: list[Any]) -> None:
        self.messages, self.later, self.sent = deque(messages), deque(later), list[Any]()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Stale):
            self.messages.append(self.later.popleft())

    def recv(self, timeout_s: float) -> tuple[Any, list[int]]:
        if not self.messages:
            raise ChannelTimeout("nothing more")
        return self.messages.popleft(), []


def sample(version: int, counted: tuple[int, int] | None, lag: int, own: tuple[int, ...] = ()) -> Sample:
    spans = ((0, version - 1, 1), (0, version, 2)) if len(own) == 2 else ((0, version, 2),)
    packed = pack_tokens([9, 8]), pack_floats([-1.0, -1.0])
    return Sample(group_id("s", 0), 0, 0, *packed, "length", spans, bytes(32), own, counted, lag)


def take(samples: list[Sample], newest: tuple[int, int], max_lag: int = 1, adapter: str = "a"):
    """(the groups that the trainer gets, what it sends). Each of `samples` is a delivery of the group of one prompt."""
    asked = OpenRollouts("s", 1, SAMPLING.with_options(adapter=adapter), max_lag)
    batch = _Batch(asked, iter([_Prompt(0, [1], pack_tokens([1]))]), 5.0, None, lambda: newest, lambda: "")
    channel = Delivered([Room(2), samples[0]], samples[1:])
    groups = list(batch.converse(channel))  # type: ignore[arg-type]
    return groups, channel.sent


def test_a_rollout_says_its_adapter_its_own_versions_and_its_lag():
    (group,), sent = take([sample(7, (0, 9), 1, (3, 4))], (0, 9))
    (rollout,) = group.rollouts
    assert (rollout.adapter, rollout.own, rollout.lag) == ("a", (3, 4), 1)
    assert rollout.own_versions == (3, 4)
    assert rollout.versions == ((0, 6), (0, 7))
    assert group.lag == 1
    assert isinstance(sent[-1], Taken)
    (group,), _ = take([sample(7, (0, 7), 0)], (0, 7), adapter="")
    assert group.rollouts[0].own_versions == (7, 7), "without adapters, the version"


@pytest.mark.parametrize(
    ("counted", "lag", "newest", "max_lag", "asks"),
    [
        ((0, 9), 0, (0, 9), 0, False),
        ((0, 900), 1, (0, 9), 1, False),  # the seed has counted more than this trainer knows
        ((0, 9), 0, (0, 10), 1, False),
        ((0, 9), 1, (0, 10), 1, True),
        ((0, 9), 0, (0, 10), 0, True),
        ((0, 9), 0, (1, 2), 1, True),  # it went back
        ((0, 9), 0, (0, NEWER_THAN_ALL), 0, True),
    ],
)
def test_only_the_seed_knows_what_a_version_changed_so_it_is_asked(counted, lag, newest, max_lag, asks):
    again = sample(8, max(newest, counted), 0, (5,))
    groups, sent = take([sample(7, counted, lag, (3,)), *([again] if asks else [])], newest, max_lag)
    assert [message for message in sent if isinstance(message, Stale)] == (
        [Stale(group_id("s", 0), *newest)] if asks else []
    )
    assert [group.rollouts[0].own for group in groups] == [(5,) if asks else (3,)]


def test_of_a_seed_that_does_not_count_by_part_the_version_decides():
    groups, sent = take([sample(7, None, 0), sample(9, None, 0)], (0, 9), 1, adapter="")
    assert [group.oldest for group in groups] == [(0, 9)]
    assert sum(isinstance(message, Stale) for message in sent) == 1


def handle(head: dict[str, tuple[int, int]], unsealed: dict[str, list[Any]], max_lag: int) -> Swarm:
    lines = SimpleNamespace(home=None, head_of=lambda name: head[name], unsealed_of=lambda name: unsealed.get(name, []))
    return Swarm(lines, None, None, max_lag)  # type: ignore[arg-type]


def test_lags_are_counted_from_what_this_process_published_for_the_adapter():
    pub = SimpleNamespace(superseded=False, version=None)
    head = {"": (0, 3), "a": (0, 8)}
    assert handle(head, {"a": [pub]}, 1)._lag_base("a") == (0, 8)
    assert handle(head, {}, 0)._lag_base("a") == (0, 8)
    assert handle(head, {"a": [pub]}, 0)._lag_base("") == (0, 3)
    assert handle(head, {"": [pub]}, 0)._lag_base("") == (0, 4)
    assert handle(head, {"a": [pub]}, 0)._lag_base("a") == (0, NEWER_THAN_ALL), "others' may come before it"
    pub.superseded = True
    assert handle(head, {"a": [pub]}, 0)._lag_base("a") == (0, 8)


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(api, "rollouts", lambda home, request, *more: asked.append(request.sampling))
    swarm = handle({}, {}, 1)
    swarm.rollouts([[1]], 1, SAMPLING, adapter="a")
    swarm.rollouts([[1]], 1, SAMPLING)
    assert [sampling.extra.adapter for sampling in asked] == ["a", ""]
    assert asked[1] == SAMPLING, "the bytes of older releases"
    with pytest.raises(UsageError, match="adapter: a name of 1 to 64"):
        swarm.rollouts([[1]], 1, SAMPLING, adapter="a b")
