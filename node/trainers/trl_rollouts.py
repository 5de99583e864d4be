"""TRL's `GRPOTrainer` on the swarm, without a change to it: it publishes each step, and nodes draw its samples.

    swarm = Swarm.attach(base="Qwen/dir", max_lag=0)
    rollouts = SwarmRollouts(swarm)
    trainer = GRPOTrainer(
        model="Qwen/dir", args=GRPOConfig(...), rollout_func=rollouts, callbacks=[rollouts], ...
    )

Implements the `rollout_func` of TRL 1.16.0. `AsyncGRPOTrainer` has another way in: `node.trainers.trl`.
"""

from itertools import groupby
from math import gcd
from typing import Any

from transformers import TrainerCallback

from codec.errors import UsageError
from node.engines.base import SamplingParams
from node.trainers.api import Publication, Swarm
from node.trainers.connection.patience import log
from node.trainers.errors import PromptRefused
from node.trainers.gathered import in_parts, publish_from_rank_0, whole_tensors
from node.trainers.rollout_group import RefusedPrompt, RolloutGroup

__all__ = ["SwarmRollouts"]


class SwarmRollouts(TrainerCallback):
    """Both the trainer's `rollout_func` and one of its `callbacks`."""

    def __init__(self, swarm: Swarm, *, adapter: str | None = None, timeout_s: float = 600.0) -> None:
        """`swarm`: attached with `max_lag=0`. TRL takes the samples of a `rollout_func` for samples of the weights that
        it trains, and corrects nothing. Of several ranks, each attaches; the seed runs already.

        `adapter`: publish only the LoRA adapter under this name, and draw with it; without it, a LoRA run publishes the
        merged weights. `timeout_s`: for each wait: for the swarm, and for the next complete group.
        """
        self.swarm, self.adapter, self.timeout_s = swarm, adapter, timeout_s
        self.publication: Publication | None = None
        """The newest version that this rank published."""
        self._step: int | None = None
        """The optimizer step whose weights were published last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Publish what the step has changed. Raises what `Swarm.publish` raises."""
        self._publish(more["model"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Wait until the last version is sealed. Raises what `Publication.wait` raises."""
        if self.publication is not None:
            self.publication.wait(timeout_s=self.timeout_s)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """A sample for each of `prompts`, in their order: what TRL asks of a `rollout_func`.

        Neighbours that are equal are the samples of one prompt. A prompt that no node can continue is logged, and
        does not end the run: TRL wants as many samples as prompts, so each of its samples is an end token alone, which
        TRL's `env_mask` keeps out of the loss. Raises `UsageError` for tools, images and `generation_kwargs`,
        `PromptRefused` when not one of the prompts can be continued, and what `Swarm.rollouts` raises.
        """
        if trainer.tools or trainer.args.generation_kwargs:
            raise UsageError("The swarm draws by GRPOConfig's own sampling fields: give neither tools, of which TRL "
                             "would generate the later turns itself, nor generation_kwargs.")  # fmt: skip
        self._publish(trainer.model, trainer.state)
        if self.publication is not None:  # an adapter can be asked for, and other ranks count lags, once it is sealed
            self.publication.wait(timeout_s=self.timeout_s)
        trainer.accelerator.wait_for_everyone()
        n = gcd(*(len(list(equal)) for _, equal in groupby(prompts)))
        groups = self.swarm.rollouts(
            _token_ids(prompts[::n], trainer), n, _sampling(trainer), adapter=self.adapter, timeout_s=self.timeout_s
        )
        return _as_trl_reads(sorted(groups, key=lambda group: group.index), n, _tokenizer(trainer).eos_token_id)

    def _publish(self, model: Any, state: Any) -> None:
        """Publish the weights of this step, once. Of several ranks, the first publishes."""
        step: int = state.global_step
        if step == self._step:
            return
        self._step = step
        swarm = self.swarm if state.is_world_process_zero else None
        if self.adapter is None and in_parts(model):
            self.publication = publish_from_rank_0(swarm, whole_tensors(model), step=step, timeout_s=self.timeout_s)
        elif swarm is not None:
            self.publication = swarm.publish(model, step=step, adapter=self.adapter, timeout_s=self.timeout_s)


def _as_trl_reads(groups: list[RolloutGroup | RefusedPrompt], n: int, end: int) -> dict[str, list[Any]]:
    """The samples of all prompts, n of each. `end`: the token that stands for a sample of a refused prompt, and for its
    prompt, which may be longer than the model can read."""
    refused = [group for group in groups if isinstance(group, RefusedPrompt)]
    if len(refused) == len(groups):
        raise PromptRefused(refused[0].index, f"{refused[0].refused} So was every other prompt of this batch.")
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for group in groups:
        if isinstance(group, RefusedPrompt):
            log.warning("Prompt %d of the batch is left out of this step: %s", group.index, group.refused)
            rows = [([end], [end], [0.0], [0])] * n
        else:
            rows = [(list(group.prompt), list(one.token_ids), list(one.logprobs), [1] * len(one.token_ids))
                    for one in group.rollouts]  # fmt: skip
        for row in rows:
            for column, value in zip(found.values(), row, strict=True):
                column.append(value)
    if not refused:
        del found["env_mask"]
    return found


def _token_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """As TRL reads prompts for its own engines."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    for message in (message for prompt in prompts for message in prompt):
        if not isinstance(message["content"], str) and any(part["type"] != "text" for part in message["content"]):
            raise UsageError("The swarm's engines read text only: give prompts without images.")
    return trainer.processing_class.apply_chat_template(
        prompts, chat_template=trainer.chat_template, add_generation_prompt=True, tokenize=True, return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]  # fmt: skip


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _sampling(trainer: Any) -> SamplingParams:
    """`GRPOConfig`'s, which has None and 0 for what is not wanted. A completion ends with any of TRL's end tokens."""
    args = trainer.args
    ends = tuple(getattr(trainer, "eos_token_ids", None) or [_tokenizer(trainer).eos_token_id])  # older TRLs: one
    sampling = SamplingParams(args.max_completion_length, args.temperature, args.top_p, stop_tokens=ends)
    return sampling.with_options(
        top_k=args.top_k or 0, min_p=args.min_p or 0.0, repetition_penalty=args.repetition_penalty
    )
