"""Samples of honest nodes and of nodes that cheat, drawn for real, with everything that a checker finds about them.

A checker reads a sample in one pass (*prefill*), or token by token with a cache, as it was drawn (*replay*). A record
has, for each token, the log-probability that the node claims, those that each checker computes, and the margins by
which the token loses against the winner of the leased noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from node.engines.base import Completion, Prompt, SamplingOptions, SamplingParams
from node.engines.cohort import Cohort
from node.engines.rows import ROW_MULTIPLE, vocabulary_of
from node.engines.sampling import log_probabilities, scores
from node.verification.draws import kept_logprobs, margins
from node.verification.noise import gumbel
from scenarios.verification.models import FORMATS

__all__ = ["ATTACKS", "LEASED_TOP_P", "Checker", "Record", "collect", "load_record"]

LEASED_TOP_P: Final = 0.95
"""Of the lease in the attack `top_p`, in which the node draws from all tokens instead."""
OTHER: Final = 1 << 40
"""Added to a stream: noise that nobody leased."""

ROWS: Final = 32
"""Samples that are drawn together."""
REPLAYED_ROWS: Final = 8
"""Samples that a checker replays together: others than they were drawn with."""

FAKED: Final = ("temperature", "top_p", "no_end")
"""Attacks whose node claims what the leased sampling would give to the tokens that it drew by another one."""
FAKED_LOGPROB: Final = -8.0
"""What it claims for a token that the leased sampling cannot draw, in nats."""

ATTACKS: Final = {
    "honest": "nothing: the leased version, noise and sampling",
    "honest_top_p": "nothing, where a top-p of .95 is leased",
    "stale": "draws and claims by the version one step older",
    "claims": "draws by the leased version, and claims the log-probabilities of the version one step older",
    "best_of_two": "draws two samples and delivers the better one",
    "no_end": "never draws the end of the text",
    "temperature": "draws at temperature .9, leased was 1",
    "top_p": "draws from all tokens, leased was a top-p of .95",
    "replayed": "delivers a text that another node drew for the prompt",
    **{form: f"draws and claims by the right version in {form}" for form in FORMATS},
}


@dataclass
class Record:
    """Samples of one kind. Token arrays are flat; sample i has the tokens [ends[i - 1], ends[i])."""

    ends: list[int] = field(default_factory=list)
    columns: dict[str, list[NDArray[np.floating]]] = field(default_factory=dict)

    def add(self, **columns: NDArray[np.floating]) -> None:
        """Add one sample: arrays of equal length."""
        (length,) = {len(values) for values in columns.values()}
        self.ends.append(length + (self.ends[-1] if self.ends else 0))
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(np.asarray(values, np.float64))

    def save(self, file: Path) -> None:
        """Write the record under its final name only when it is whole."""
        scratch = file.with_name("scratch-" + file.name)
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        np.savez(scratch, ends=self.ends, **columns)  # pyright: ignore[reportArgumentType] - none is `allow_pickle`
        scratch.replace(file)


def _sampling(task: Any, attack: str, seed: int) -> SamplingParams:
    options = SamplingOptions(portable=True, min_tokens=task.max_tokens if attack == "no_end" else 0)
    return SamplingParams(
        max_tokens=task.max_tokens,
        temperature=0.9 if attack == "temperature" else 1.0,
        top_p=LEASED_TOP_P if attack == "honest_top_p" else 1.0,
        seed=seed,
        stop_tokens=task.stop_tokens,
        options=options,
    )


def _leased(task: Any, attack: str, seed: int) -> SamplingParams:
    """What the lease of an attacked sample says."""
    top_p = LEASED_TOP_P if attack in ("top_p", "honest_top_p") else 1.0
    return SamplingParams(max_tokens=task.max_tokens, top_p=top_p, seed=seed, stop_tokens=task.stop_tokens)


def _drawn(model: Any, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
    """Completions in the prompts' order; prompts of one length are a batch, as in the transformers engine.

    `model`: of transformers, or a `scenarios.verification.vllm_author.VllmAuthor`.
    """
    if not isinstance(model, PreTrainedModel):
        return model.draw(prompts, sampling)
    out: dict[int, Completion] = {}
    lengths = {len(prompt.token_ids) for prompt in prompts}
    for length in sorted(lengths):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt.token_ids) == length]
        cohort = Cohort(model, [prompts[i] for i in rows], sampling)
        while not cohort.done:
            cohort.step((0, 0))
        out.update(zip(rows, cohort.completions(), strict=True))
    return [out[i] for i in range(len(prompts))]


class Checker(NamedTuple):
    """What computes one column. `replay`: token by token, as samples are drawn, instead of in one pass."""

    model: Any
    replay: bool = False
    with_margins: bool = False


@torch.inference_mode()
def _prefilled(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    ids = torch.tensor([[*prompt, *tokens]])
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float().numpy()


@torch.inference_mode()
def _replayed(model: Any, rows: Sequence[tuple[Prompt, Completion]]) -> list[NDArray[np.float32]]:
    """The logits of each row's tokens, (tokens, vocabulary), computed as `Cohort` computes them when it draws.

    Rows with prompts of one length are read together, padded as engines pad them (`node.engines.rows`). What the other
    rows hold changes nothing.
    """
    out: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(rows))}
    for length in sorted({len(prompt.token_ids) for prompt, _ in rows}):
        at = [i for i, (prompt, _) in enumerate(rows) if len(prompt.token_ids) == length]
        padded = at + [at[0]] * (-len(at) % ROW_MULTIPLE)
        past: Any = DynamicCache(config=model.config)
        current = torch.tensor([rows[i][0].token_ids for i in padded])
        for step in range(max(len(rows[i][1].token_ids) for i in at)):
            logits = model(input_ids=current, use_cache=True, past_key_values=past, logits_to_keep=1).logits[:, -1]
            for row, i in enumerate(at):
                if step < len(rows[i][1].token_ids):
                    out[i].append(logits[row].float())
            ids = [rows[i][1].token_ids for i in padded]
            current = torch.tensor([[tokens[min(step, len(tokens) - 1)]] for tokens in ids])
    return [torch.stack(out[i]).numpy() for i in range(len(rows))]


def _margins(
    logits: NDArray[np.float32], leased: SamplingParams, noise: NDArray[np.float64], tokens: tuple[int, ...]
) -> NDArray[np.float64]:
    """Without slack at the border of top-p: with it a token outside the border would not lose at all, because it is the
    winner among all tokens. What rounding puts outside is part of the honest traffic that nulls are learned from."""
    return margins(kept_logprobs(logits, leased.temperature, top_p=leased.top_p), noise, np.array(tokens))


def _scores(
    logits: NDArray[np.float32], tokens: tuple[int, ...], leased: SamplingParams, replayed: bool
) -> NDArray[np.float32]:
    """Log-probabilities of the tokens. `replayed`: as engines claim them when they draw, not as they score them."""
    rows = torch.from_numpy(logits)
    found = log_probabilities(rows, leased) if replayed else scores(rows, leased)
    return found.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def _delivered(model: Any, task: Any, prompts: list[Prompt], sampling: SamplingParams, attack: str) -> list[Completion]:
    """What the node delivers for these prompts."""
    drawn = [] if attack == "replayed" else _drawn(model, prompts, sampling)
    if attack not in ("best_of_two", "replayed"):
        return drawn
    others = _drawn(model, [Prompt(prompt.token_ids, prompt.stream + OTHER) for prompt in prompts], sampling)
    if attack == "replayed":
        return others
    return [
        max(both, key=lambda one: task.score(prompt.token_ids, one.token_ids))
        for prompt, both in zip(prompts, zip(others, drawn, strict=True), strict=True)
    ]


def collect(
    models: tuple[Any, Any],
    task: Any,
    attack: str,
    count: int,
    checkers: Mapping[str, Checker],
    *,
    seed: int,
    threads: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Record:
    """Draw `count` samples as a node does that attacks in this way, and score them.

    `models`: of the node, the one that draws and the one that computes claims. `checkers`: by the suffix of their
    columns. `threads`: with which the node draws.
    """
    prompts = [Prompt(ids, i) for i, ids in enumerate(task.prompts(1, count, np.random.default_rng(seed)))]
    sampling, leased = _sampling(task, attack, seed), _leased(task, attack, seed)
    drawer, claimer = models
    vocabulary = vocabulary_of(next(iter(checkers.values())).model)
    record = Record()
    for start in range(0, count, ROWS):
        some = prompts[start : start + ROWS]
        torch.set_num_threads(threads)
        drawn = _delivered(drawer, task, some, sampling, attack)
        rows = list(zip(some, drawn, strict=True))
        claims = [np.array(one.logprobs) for one in drawn]
        if claimer is not drawer or attack in FAKED:
            replays = zip(_replayed(claimer, rows), drawn, strict=True)
            claims = [_scores(logits, one.token_ids, leased, True) for logits, one in replays]
            claims = [np.where(np.isfinite(claim), claim, FAKED_LOGPROB) for claim in claims]
        torch.set_num_threads(1)
        columns: list[dict[str, Any]] = [{"claim": claim} for claim in claims]
        noises = [
            np.stack([gumbel(leased.seed, prompt.stream, at, vocabulary) for at in range(len(one.token_ids))])
            for prompt, one in rows
        ]
        for suffix, (model, replay, with_margins) in checkers.items():
            replayed = None
            if replay:
                parts = [rows[at : at + REPLAYED_ROWS] for at in range(0, len(rows), REPLAYED_ROWS)]
                replayed = [logits for part in parts for logits in _replayed(model, part)]
            for i, (prompt, one) in enumerate(rows):
                logits = _prefilled(model, prompt.token_ids, one.token_ids) if replayed is None else replayed[i]
                columns[i]["score_" + suffix] = _scores(logits, one.token_ids, leased, replay)
                if with_margins:
                    columns[i]["margin_" + suffix] = _margins(logits, leased, noises[i], one.token_ids)
        for row in columns:
            record.add(**row)
        say(f"{attack}: {min(start + ROWS, count)} of {count} samples")
    return record


def load_record(file: Path) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """(ends, columns) of a saved record."""
    with np.load(file) as kept:
        return kept["ends"], {name: kept[name] for name in kept.files if name != "ends"}
