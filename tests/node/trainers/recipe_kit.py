"""What the scripts around published trainers share: samples, a loss, a node that is killed, a comparison of bits."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from codec import Checkpoint, Replica
from node import SamplingParams, Swarm
from node.status.query import ask
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.tiny import letters_tokenizer

PROMPTS = ("dbca=", "acbd=", "bdac=", "cadb=", "abdc=", "dcba=", "cbad=", "bcda=")
SAMPLES = 4
"""Of each prompt."""
MAX_TOKENS = 8
"""Of a sample."""
PROVEN_WITHIN_S = 60.0

Row = tuple[list[int], int, float]
"""Token ids, how many of them are the prompt's, and the advantage."""


def reward_sorted(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of neighbouring letters that are in order."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(a <= b for a, b in pairwise(t)) / max(1, len(t) - 1) for t in texts]


class Killing:
    """The swarm's rollouts. Kills the process `lost` in the middle of the second call, and counts what comes."""

    def __init__(self, swarm: Swarm, lost: int) -> None:
        self.samples: list[dict[str, int]] = []
        """Of each call: how many samples each node drew."""
        self.lags: set[int] = set()
        self._lost, self._rollouts = lost, swarm.rollouts

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        drawn: dict[str, int] = {}
        self.samples.append(drawn)
        for group in self._rollouts(*arguments, **options):
            if len(self.samples) == 2 and not drawn:
                os.kill(self._lost, signal.SIGKILL)
            for sample in group.rollouts:
                self.lags.add(sample.lag)
                drawn[sample.node.hex()] = drawn.get(sample.node.hex(), 0) + 1
            yield group


def live_roots(stays: Path, step: int, wanted: str, *, adapter: bool = False) -> list[str | None]:
    """The roots of the weights that the engines run on, once each is `wanted`, or after `PROVEN_WITHIN_S`.

    `stays`: the home of a node. In the first step the other one's, `lost`, beside it, is asked too. `adapter`: a root
    is that of the base with its adapters. An engine proves each of these by itself, and the root is the node's.
    """
    homes = [stays.with_name("lost"), stays] if step == 1 else [stays]
    deadline = time.monotonic() + PROVEN_WITHIN_S
    while True:
        nodes = [ask(home, prove=True).nodes[0] for home in homes]
        live = [node.root if adapter and node.live_proven else node.live_root for node in nodes]
        if live == [wanted] * len(homes) or time.monotonic() > deadline:
            return live
        time.sleep(0.1)


def root_of(base: Path, tensors: dict[str, torch.Tensor], folder: Path) -> str:
    """The root of the model of `base` with these weights, rounded to bfloat16 and saved by transformers in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tied = {} if "lm_head.weight" in tensors else {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.load_state_dict(tensors | tied)
    model.to(torch.bfloat16).save_pretrained(folder)
    return Replica.from_checkpoint(Checkpoint.open(folder), Checkpoint.open(base).layout).root.hex()


def draw(swarm: Swarm | None) -> list[Row]:
    """The step's samples, drawn by rank 0, on every rank."""
    rows: list[list[Row]] = [[]]
    if swarm is not None:
        for group in swarm.rollouts(prompt_ids(), SAMPLES, SamplingParams(MAX_TOKENS, stop_tokens=(SortLetters.END,))):
            rows[0] += rows_of(group.prompt, [one.token_ids for one in group.rollouts])
    dist.broadcast_object_list(rows, src=0)
    return rows[0]


def prompt_ids() -> list[list[int]]:
    """`PROMPTS` as tokens."""
    return letters_tokenizer()(list(PROMPTS))["input_ids"]


def rows_of(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Row]:
    """The rows of one prompt's samples."""
    rewards = torch.tensor([reward_of(tokens, i) for i, tokens in enumerate(completions)])
    advantages = (rewards - rewards.mean()).tolist()
    return [([*prompt, *one], len(prompt), a) for one, a in zip(completions, advantages, strict=True)]


def policy_loss(logits_of: Callable[[torch.Tensor], torch.Tensor], rows: Sequence[Row]) -> torch.Tensor:
    """The mean over the completions' tokens of -advantage * log-probability.

    `logits_of`: from ids, int64 (rows, width), padded with zeros after the end, to float (rows, width, vocabulary).
    """
    width = max(len(ids) for ids, _, _ in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row, _, _ in rows])
    places = torch.arange(width)
    mask = torch.stack([(places >= prompt) & (places < len(row)) for row, prompt, _ in rows])[:, 1:]
    logprobs = logits_of(ids)[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantages = torch.tensor([advantage for _, _, advantage in rows])[:, None]
    return -(logprobs * advantages * mask).sum() / mask.sum()


class Policy:
    """A model of transformers in float32 on one rank, and its tensors as its checkpoint has them, in bfloat16.

    It stands in for the training backends that need a GPU.
    """

    def __init__(self, base: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        self.tensors: dict[str, torch.Tensor] = load_file(base / "model.safetensors")
        """After the last step."""
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def step(self, rows: Sequence[Row]) -> None:
        """An optimizer step."""
        self._adam.zero_grad()
        policy_loss(lambda ids: self._model(ids).logits, rows).backward()
        self._adam.step()
        state = self._model.state_dict()
        self.tensors = {name: state[name].to(torch.bfloat16) for name in self.tensors}


def reward_of(tokens: Sequence[int], sample: int) -> float:
    """The share of neighbouring tokens that are in order, and a little more for each later sample: none are equal."""
    return sum(a <= b for a, b in pairwise(tokens)) / max(1, len(tokens) - 1) + 0.01 * sample
