"""The reference trainer: GRPO with float32 masters, AdamW, and a policy of bf16 bits.

The policy that nodes sample from is `bf16(master)`. The trainer's forward and backward run on exactly those values,
held in float32 (`node/engines/live.py` says why). So the importance ratio of fresh samples is 1 up to rounding. The
gradient is applied to the masters.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from codec.checkpoint import Checkpoint, write_checkpoint
from codec.errors import UsageError
from codec.layout import Layout
from codec.routes import Routes
from node.engines.base import Completion, Prompt, SamplingOptions, SamplingParams
from node.engines.live import LiveParameters
from node.engines.load import load_model
from node.trainers.grpo.loss import group_advantages, grpo_loss, token_logprobs
from node.trainers.grpo.task import Task, Tokens
from node.trainers.routes import padded_routes, replayed_routes

__all__ = ["GrpoConfig", "GrpoTrainer", "SampleGroup", "StepStats"]


class GrpoConfig(msgspec.Struct, frozen=True):
    """How to train. Defaults are those of `tiny`."""

    lr: float = 2e-5
    """Learning rate of AdamW after the warm-up. A larger one changes more bf16 elements a step
    (`StepStats.density`)."""
    lr_warmup_steps: int = 8
    """Steps over which the rate rises: Adam's first steps have full length whatever the gradient is."""
    prompts: int = 16
    """Prompts of each step."""
    samples: int = 8
    """Samples of each prompt: the group within which advantages are normalised."""
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    rows: int = 64
    """Samples in one forward and backward. Bounds memory, and does not change the result."""
    routes: bool = False
    """Train with the experts that each token took in the engine (`node.trainers.routes`). Only a mixture of experts."""


class SampleGroup(NamedTuple):
    """All samples of one prompt. `routes`: with `GrpoConfig.routes`, one array a sample, as `Rollout.routes`."""

    prompt: Tokens
    completions: tuple[Completion, ...]
    routes: tuple[Routes, ...] = ()


class StepStats(msgspec.Struct, frozen=True):
    """What one step did. `density`: share of the policy's bf16 elements whose bits changed. `reward`: mean, 0 to 1."""

    step: int
    loss: float
    reward: float
    density: float
    grad_norm: float
    clipped: float
    """Share of tokens whose ratio was clipped."""
    tokens: int
    seconds: float
    """Of the optimizer step, without sampling."""


class _Batch(NamedTuple):
    """Right-padded rows: in a causal model, padding after a row's tokens does not affect them. All are (rows, width),
    the last two without their first `first` columns."""

    ids: torch.Tensor
    old_logprobs: torch.Tensor
    mask: torch.Tensor
    first: int
    """Tokens of the shortest prompt: logits from `first - 1` on predict `ids[:, first:]`."""


class GrpoTrainer:
    """Trains the model in `base` on `task`. On one CPU thread, the same seed gives the same bits.

    Steps are numbered from 1: step v turns policy version v - 1 into version v, with the prompts `prompts(v)`.
    """

    def __init__(
        self, base: Path, task: Task, config: GrpoConfig | None = None, *, seed: int = 0, device: str | None = None
    ) -> None:
        """`base`: a Hugging Face folder with bf16 weights, which is version 0. `device`: None takes a GPU if there is
        one.

        Raises `UsageError` when the folder cannot be loaded, or its weights are not all bf16.
        """
        self.task, self.config, self.seed = task, config or GrpoConfig(), seed
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = load_model(base, torch.float32, self.device)
        self._base = Checkpoint.open(base)
        self.layout: Layout = self._base.layout
        """The tensors and small files of the base. Every later version has the same."""
        if any(spec.dtype != "BF16" for spec in self.layout.tensors):
            raise UsageError(f"{base} holds weights that are not bf16: convert it first.")
        self.vocabulary: int = self.model.config.vocab_size
        """Token ids are below this. `step` checks it, because rollouts come from other machines."""
        self.step_done = 0
        self._live = LiveParameters(self.model, self.layout)
        self._policy = list(self.model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().clone()) for p in self._policy]
        self._adam = torch.optim.AdamW(self._masters, lr=self.config.lr, betas=self.config.betas, weight_decay=0.0)

    def sampling(self, step: int) -> SamplingParams:
        """How nodes must sample for a step. The seed follows from the run and the step."""
        (seed,) = np.random.SeedSequence((self.seed, step)).generate_state(1, np.uint64)
        return SamplingParams(
            max_tokens=self.task.max_tokens,
            temperature=self.config.temperature,
            seed=int(seed),
            stop_tokens=self.task.stop_tokens,
            options=SamplingOptions(routes=True) if self.config.routes else msgspec.UNSET,
        )

    def prompts(self, step: int) -> list[Tokens]:
        """The prompts of a step; the same at every call."""
        return self.task.prompts(step, self.config.prompts, np.random.default_rng((self.seed, step)))

    def samples(self, index: int, prompt: Tokens) -> list[Prompt]:
        """The engine's requests for prompt `index` of a step. Each sample has a random stream of its own."""
        count = self.config.samples
        return [Prompt(prompt, index * count + i, routes=self.config.routes and i == 0) for i in range(count)]

    def step(self, groups: Sequence[SampleGroup]) -> StepStats:
        """One optimizer step on whole groups of any size. Their order affects only the rounding of sums.

        Raises `ValueError`, and changes nothing, without groups, for a token id that the policy does not have, and with
        `GrpoConfig.routes` for a sample without routes.
        """
        started = time.perf_counter()
        if not groups or not all(g.completions for g in groups):
            raise ValueError("step: no completions")
        if any(t >= self.vocabulary or t < 0 for g in groups for c in g.completions for t in (*g.prompt, *c.token_ids)):
            raise ValueError(f"step: a token id outside 0 to {self.vocabulary - 1}")
        routes = [ids for g in groups for ids in g.routes] if self.config.routes else []
        if self.config.routes and any(len(g.routes) != len(g.completions) for g in groups):
            raise ValueError("step: a sample has no routes; sample with `sampling(step)`")
        rewards = [[self.task.score(g.prompt, c.token_ids) for c in g.completions] for g in groups]
        advantages = torch.cat([group_advantages(torch.tensor([row]))[0] for row in rewards])
        rows = [(g.prompt, c) for g in groups for c in g.completions]
        tokens = sum(len(c.token_ids) for _, c in rows)
        loss = clipped = 0.0
        for at in range(0, len(rows), self.config.rows):
            here = slice(at, at + self.config.rows)
            part = self._backward(rows[here], routes[here], advantages[here], tokens)
            loss, clipped = loss + part[0], clipped + part[1]
        grad_norm = self._update()
        return StepStats(
            step=self.step_done,
            loss=loss,
            reward=sum(map(sum, rewards)) / len(rows),
            density=self._round(),
            grad_norm=grad_norm,
            clipped=clipped / tokens,
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    def policy_bits(self) -> Iterator[tuple[str, NDArray[np.uint16]]]:
        """(checkpoint name, bf16 bits as flat uint16) of the policy after the last step, in the layout's order."""
        for spec in self.layout.tensors:
            yield spec.name, self._live.read(spec.name)

    def save(self, folder: Path) -> None:
        """Write the policy as a new Hugging Face folder, with the base's config and tokenizer, byte for byte.

        Raises `UsageError` when the folder exists, or cannot be written.
        """
        write_checkpoint(folder, self.layout, self._live.read, self._base.files)

    def _backward(
        self, rows: list[tuple[Tokens, Completion]], routes: list[Routes], advantages: torch.Tensor, tokens: int
    ) -> tuple[float, float]:
        """Add the gradient of some rows to that of the batch. `routes`: one a row, or none. `tokens`: of the whole
        batch, which the loss is averaged over.

        Returns the rows' share of the loss, and how many of their tokens were clipped.
        """
        batch = self._pad(rows)
        replayed = replayed_routes(self.model, padded_routes(routes, batch.ids.shape[1])) if routes else nullcontext()
        with replayed:
            return self._backward_batch(batch, advantages, tokens)

    def _backward_batch(self, batch: _Batch, advantages: torch.Tensor, tokens: int) -> tuple[float, float]:
        output = self.model(input_ids=batch.ids, use_cache=False, logits_to_keep=batch.ids.shape[1] - batch.first + 1)
        logprobs = token_logprobs(output.logits[:, :-1], batch.ids[:, batch.first :], self.config.temperature)
        loss = grpo_loss(
            logprobs,
            batch.old_logprobs,
            advantages.to(self.device),
            batch.mask,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        (loss.total / tokens).backward()
        return loss.total.item() / tokens, loss.clipped.item()

    def _pad(self, rows: list[tuple[Tokens, Completion]]) -> _Batch:
        width = max(len(prompt) + len(c.token_ids) for prompt, c in rows)
        first = min(len(prompt) for prompt, _ in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        old = torch.zeros((len(rows), width))
        mask = torch.zeros((len(rows), width), dtype=torch.bool)
        for i, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion.token_ids)
            ids[i, :end] = torch.tensor(prompt + completion.token_ids)
            old[i, len(prompt) : end] = torch.tensor(completion.logprobs)
            mask[i, len(prompt) : end] = True
        return _Batch(ids.to(self.device), old[:, first:].to(self.device), mask[:, first:].to(self.device), first)

    def _update(self) -> float:
        """Clip the gradient, step AdamW on the masters, and clear the gradients. Returns the norm before clipping."""
        self.step_done += 1
        for group in self._adam.param_groups:
            group["lr"] = self.config.lr * min(1.0, self.step_done / max(1, self.config.lr_warmup_steps))
        for master, parameter in zip(self._masters, self._policy, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def _round(self) -> float:
        """Set the policy to bf16(master). Returns the share of elements whose bits changed."""
        changed = total = 0
        for master, parameter in zip(self._masters, self._policy, strict=True):
            new = master.to(torch.bfloat16)
            changed += int((new.view(torch.int16) != _bf16_bits(parameter)).sum())
            total += new.numel()
            parameter.copy_(new)
        return changed / total


def _bf16_bits(parameter: torch.Tensor) -> torch.Tensor:
    """The bf16 bits, as int16, of a float32 tensor that holds bf16 values."""
    return (parameter.detach().view(torch.int32) >> 16).to(torch.int16)
