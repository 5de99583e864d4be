"""What TRL asks of a `rollout_func` and of a callback, without TRL: which prompts are drawn, and what is published."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

from codec.errors import UsageError
from node.engines.base import Span
from node.trainers.errors import PromptRefused
from node.trainers.rollout_group import RefusedPrompt, Rollout, RolloutGroup
from node.trainers.trl_rollouts import SwarmRollouts


class Recording:
    """A swarm that answers each prompt with its first token, in reverse order, and notes what it was asked."""

    def __init__(self, refuses: int = -1) -> None:
        self.refuses = refuses
        """The first token of the prompts that it refuses."""
        self.asked: list[tuple[list[list[int]], int, Any]] = []
        self.steps: list[int] = []

    def publish(self, model: Any, *, step: int, adapter: str | None, timeout_s: float) -> Any:
        self.steps.append(step)
        return SimpleNamespace(wait=lambda **_: None)

    def rollouts(self, prompts: list[list[int]], n: int, sampling: Any, **_: Any) -> Any:
        self.asked.append((prompts, n, sampling))
        for index, prompt in reversed(list(enumerate(prompts))):
            if prompt[0] == self.refuses:
                yield RefusedPrompt(index, prompt, "It is too long.")
                continue
            ones = [Rollout((prompt[0], i), (-0.5, -1.0), "stop", (Span((0, 1), 0, 2),), b"") for i in range(n)]
            yield RolloutGroup(index, tuple(prompt), tuple(ones))


class Letters:
    """A processor with one token a character; a conversation is its messages' texts."""

    eos_token_id = 7

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, one)) for one in text]}

    def apply_chat_template(self, prompts: Any, *, tools: Any = None, **how: Any) -> dict[str, list[list[int]]]:
        assert how.pop("add_generation_prompt")
        assert how == {"tokenize": True, "return_dict": True, "chat_template": "own", "thinking": False}
        return self(["".join(m["content"] for m in prompt) for prompt in prompts])


def trainer(step: int = 0, **changes: Any) -> Any:
    args = SimpleNamespace(
        max_completion_length=5, temperature=0.7, top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.0,
        generation_kwargs=None,
    )  # fmt: skip
    there = SimpleNamespace(
        args=args, tools=[], model=SimpleNamespace(parameters=list), processing_class=Letters(), chat_template="own",
        chat_template_kwargs={"thinking": False}, eos_token_ids=[9, 8],
        accelerator=SimpleNamespace(wait_for_everyone=list),
        state=SimpleNamespace(global_step=step, is_world_process_zero=True),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(args if hasattr(args, name) else there, name, value)
    return there


def draw(prompts: list[Any], **changes: Any) -> tuple[dict[str, Any], Recording]:
    swarm: Any = Recording()
    return SwarmRollouts(swarm)(prompts, trainer(**changes)), swarm


@pytest.mark.parametrize(
    ("prompts", "asked", "n"),
    [("aaabbb", "ab", 3), ("aaab", "aaab", 1), ("aaaabb", "aab", 2), ("aa", "a", 2)],
    ids=["whole groups", "a part of a group", "a greatest common divisor", "one group"],
)
def test_equal_neighbours_are_samples_of_one_prompt(prompts: str, asked: str, n: int) -> None:
    found, swarm = draw(list(prompts))
    assert swarm.asked[0][:2] == ([[ord(p)] for p in asked], n)
    assert found["prompt_ids"] == [[ord(p)] for p in prompts], "in TRL's order"
    assert [ids[0] for ids in found["completion_ids"]] == list(map(ord, prompts))
    assert found["logprobs"] == [[-0.5, -1.0]] * len(prompts)


def test_a_refused_prompt_is_kept_out_of_the_loss_and_said(caplog: pytest.LogCaptureFixture) -> None:
    swarm: Any = Recording(refuses=ord("b"))
    found = SwarmRollouts(swarm)(list("aabbcc"), trainer())
    assert found["prompt_ids"] == [[97], [97], [7], [7], [99], [99]]
    assert [ids[0] for ids in found["completion_ids"]] == [97, 97, 7, 7, 99, 99]
    assert found["logprobs"][1:3] == [[-0.5, -1.0], [0.0]]
    assert found["env_mask"] == [[1, 1], [1, 1], [0], [0], [1, 1], [1, 1]]
    assert caplog.messages == ["Prompt 1 of the batch is left out of this step: It is too long."]


def test_no_mask_is_given_when_nothing_was_refused() -> None:
    found, _ = draw(["a"])
    assert set(found) == {"prompt_ids", "completion_ids", "logprobs"}, (
        "TRL gives what it does not know to the reward functions"
    )


def test_a_batch_without_any_sample_ends_the_run() -> None:
    swarm: Any = Recording(refuses=ord("b"))
    with pytest.raises(PromptRefused, match=r"too long\. So was every other"):
        SwarmRollouts(swarm)(["b", "b"], trainer())


def test_a_conversation_is_read_as_trl_reads_it() -> None:
    found, _ = draw([[{"role": "user", "content": "ab"}]])
    assert found["prompt_ids"] == [[97, 98]]


def test_sampling_is_that_of_the_config() -> None:
    _, swarm = draw(["a"], top_k=3, min_p=0.1, repetition_penalty=1.5)
    sampling = swarm.asked[0][2]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop_tokens) == (5, 0.7, 0.9, (9, 8))
    assert (sampling.extra.top_k, sampling.extra.min_p, sampling.extra.repetition_penalty) == (3, 0.1, 1.5)


def test_the_tokenizers_end_token_ends_a_sample_where_trl_knows_no_others() -> None:
    older = trainer()
    del older.eos_token_ids
    swarm: Any = Recording()
    SwarmRollouts(swarm)(["a"], older)
    assert swarm.asked[0][2].stop_tokens == (7,)


@pytest.mark.parametrize(
    ("prompts", "changes", "why"),
    [
        (["a"], {"tools": [print]}, "tools"),
        (["a"], {"generation_kwargs": {"seed": 1}}, "generation_kwargs"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], {}, "without images"),
    ],
)
def test_what_the_swarm_cannot_draw_is_refused(prompts: list[Any], changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        draw(prompts, **changes)


def test_each_steps_weights_are_published_once_and_by_the_first_rank() -> None:
    swarm: Any = Recording()
    rollouts = SwarmRollouts(swarm)
    for step in (0, 0, 1):
        rollouts(["a"], trainer(step))
    after = trainer(2)
    rollouts.on_step_end(None, after.state, None, model=after.model)
    rollouts(["a"], after)
    assert swarm.steps == [0, 1, 2]
    after.state.is_world_process_zero, after.state.global_step = False, 3
    rollouts.on_step_end(None, after.state, None, model=after.model)
    assert swarm.steps == [0, 1, 2]
