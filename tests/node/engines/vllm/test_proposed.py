"""The sampling parameters of proposed tokens, and what becomes of a vLLM that does not draw by them. Needs no vLLM."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from codec.errors import UsageError  # noqa: E402
from node.engines.base import EngineError  # noqa: E402
from node.engines.vllm.agreement import check_agreement  # noqa: E402
from node.engines.vllm.links import PluginLink  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.messages import Front, Generate, Generated, Output, Score, Scored  # noqa: E402
from node.engines.vllm.plugin.swarm_vllm.proposed import repeated, unless_empty  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_proposed_token_has_the_value_of_its_request(dtype: Any) -> None:
    values = torch.tensor([3, 0, 7, 5]).to(dtype)
    found = repeated(values, torch.tensor([2, 3, 3, 6], dtype=torch.int32), 6)
    assert found.dtype == dtype
    assert found.tolist() == [3, 3, 0, 5, 5, 5]


def test_a_greedy_requests_temperature_becomes_one() -> None:
    temperature = torch.tensor([0.8, 0.0])
    found = repeated(temperature, torch.tensor([1, 3], dtype=torch.int32), 3, replace_from=0, replace_to=1)
    assert found.tolist() == [temperature[0].item(), 1.0, 1.0]
    assert temperature[1] == 0.0


def test_a_step_without_proposed_tokens_is_left_alone() -> None:
    def constrain(logits: Any, by: float) -> Any:
        return logits.div_(by) - logits.max()

    found = unless_empty(constrain)
    assert found(torch.zeros(0, 4), 2.0).shape == (0, 4)
    assert found(torch.tensor([[2.0, 4.0]]), 2.0).tolist() == [[-1.0, 0.0]]


class Pretended:
    """A vLLM's front that draws tokens with a log-probability of -1. `score`: what it says to each when asked again."""

    hello = Front(1, "0.32", 1, {}, "", None, vocabulary=50, longest=40)

    def __init__(self, score: float, finish: str = "length") -> None:
        self.score, self.finish = score, finish

    def ask(self, make: Callable[[int], Any], **_: Any) -> "Future[Any]":
        message, future = make(1), cast("Future[Any]", Future())
        if isinstance(message, Generate):
            count = message.max_tokens
            assert all(len(prompt) + count <= self.hello.longest for prompt in message.prompts)
            output = Output(tuple(range(count)), (-1.0,) * count, self.finish, (("0.3", 0, count),))
            future.set_result(Generated(1, (output,) * len(message.prompts)))
        else:
            assert isinstance(message, Score)
            future.set_result(Scored(1, (*(-1.02,) * (len(message.token_ids) - 1), self.score), "0.3"))
        return future


def test_a_vllm_that_draws_what_it_says_is_taken() -> None:
    check_agreement(cast(PluginLink, Pretended(-0.95)), "0.3")


@pytest.mark.parametrize("score", [-1e4, -3.0, float("-inf"), float("nan")])
def test_one_that_draws_something_else_is_refused(score: float) -> None:
    with pytest.raises(UsageError, match="--draft-tokens 0"):
        check_agreement(cast(PluginLink, Pretended(score)), "0.3")


def test_one_that_fails_is_not_called_wrong() -> None:
    with pytest.raises(EngineError, match="abort"):
        check_agreement(cast(PluginLink, Pretended(-1.0, finish="abort")), "0.3")
