"""Samples of honest nodes and of nodes that cheat, drawn for real, with everything that a checker finds about them.

A checker reads a sample twice: under the version that the node claims, and under the one before. So a record has, for
each token, the log-probability that the node claims, those that each checker computes, and the margin by which the
token loses against the winner of the leased noise.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.engines.base import Completion, Prompt, SamplingOptions, SamplingParams
from node.engines.cohort import Cohort, score
from node.verification.draws import kept_logprobs, margins
from node.verification.noise import gumbel
from scenarios.verification.models import CLASSES, FORMATS, Versions

__all__ = ["ATTACKS", "LEASED_TOP_P", "Record", "collect"]

LEASED_TOP_P: Final = 0.95
"""Of the lease in the attack `top_p`, in which the node draws from all tokens instead."""
SLACK: Final = 0.05
"""See `node.verification.draws.kept_logprobs`: the border of top-p is raised by this for the claimed token."""
MOST_TOKENS: Final = 48
OTHER: Final = 1 << 40
"""Added to a stream: noise that nobody leased."""

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
        np.savez(scratch, ends=self.ends, **{name: np.concatenate(parts) for name, parts in self.columns.items()})
        scratch.replace(file)


def _sampling(task: Any, attack: str, seed: int) -> SamplingParams:
    options = SamplingOptions(portable=True, min_tokens=MOST_TOKENS if attack == "no_end" else 0)
    return SamplingParams(
        max_tokens=MOST_TOKENS,
        temperature=0.9 if attack == "temperature" else 1.0,
        top_p=LEASED_TOP_P if attack == "honest_top_p" else 1.0,
        seed=seed,
        stop_tokens=task.stop_tokens,
        options=options,
    )


def _leased(task: Any, attack: str, seed: int) -> SamplingParams:
    """What the lease of an attacked sample says."""
    top_p = LEASED_TOP_P if attack in ("top_p", "honest_top_p") else 1.0
    return SamplingParams(max_tokens=MOST_TOKENS, top_p=top_p, seed=seed, stop_tokens=task.stop_tokens)


def _drawn(model: Any, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
    """Completions in the prompts' order; prompts of one length are a batch, as in the transformers engine."""
    out: dict[int, Completion] = {}
    lengths = {len(prompt.token_ids) for prompt in prompts}
    for length in sorted(lengths):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt.token_ids) == length]
        cohort = Cohort(model, [prompts[i] for i in rows], sampling)
        while not cohort.done:
            cohort.step((0, 0))
        out.update(zip(rows, cohort.completions(), strict=True))
    return [out[i] for i in range(len(prompts))]


@torch.inference_mode()
def _logits(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    ids = torch.tensor([[*prompt, *tokens]])
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float().numpy()


def _margins(logits: NDArray[np.float32], leased: SamplingParams, stream: int, tokens: tuple[int, ...]) -> Any:
    vocabulary = logits.shape[1]
    noise = np.stack([gumbel(leased.seed, stream, at, vocabulary) for at in range(len(tokens))])
    kept = kept_logprobs(logits, leased.temperature, top_p=leased.top_p)
    wide = kept if leased.top_p == 1.0 else kept_logprobs(logits, leased.temperature, top_p=leased.top_p, slack=SLACK)
    return margins(kept, noise, np.array(tokens), wide)


def collect(
    versions: Versions, task: Any, version: int, author: str, attack: str, count: int, checkers: dict[str, Any],
    *, seed: int, with_margins: str | None, say: Any = lambda line: None,
) -> Record:
    """Draw `count` samples as `attack` does in the class `author`, and score them.

    `checkers`: by column suffix, models of checkers, as {"bf16_v": ..., "bf16_prev": ...}. `with_margins`: the suffix
    of the checker that computes margins, or None.
    """
    dtype, threads = CLASSES[author]
    torch.set_num_threads(threads)
    form = attack if attack in FORMATS else None
    model = versions.model(version - (attack == "stale"), dtype, form)
    other = versions.model(version - 1, dtype) if attack == "claims" else None
    rng = np.random.default_rng((seed, version))
    prompts = [Prompt(ids, stream) for stream, ids in enumerate(task.prompts(version, count, rng))]
    sampling, leased = _sampling(task, attack, seed), _leased(task, attack, seed)
    torch.set_num_threads(threads)
    record = Record()
    for at in range(0, count, 32):
        some = prompts[at : at + 32]
        drawn = _drawn(model, some, sampling)
        if attack in ("best_of_two", "replayed"):
            again = _drawn(model, [Prompt(p.token_ids, p.stream + OTHER) for p in some], sampling)
            drawn = again if attack == "replayed" else [
                max(pair, key=lambda one: task.score(prompt.token_ids, one.token_ids))
                for prompt, pair in zip(some, zip(again, drawn, strict=True), strict=True)
            ]
        claims = []
        for prompt, one in zip(some, drawn, strict=True):
            if attack in ("temperature", "top_p", "claims"):
                claims.append(score(other or model, prompt.token_ids, one.token_ids, leased))
            else:
                claims.append(one.logprobs)
        torch.set_num_threads(1)
        for prompt, one, claimed in zip(some, drawn, claims, strict=True):
            columns: dict[str, Any] = {"claim": np.array(claimed)}
            for suffix, checker in checkers.items():
                logits = _logits(checker, prompt.token_ids, one.token_ids)
                columns["score_" + suffix] = _scores(logits, one.token_ids, leased)
                if suffix == with_margins:
                    columns["margin_" + suffix] = _margins(logits, leased, prompt.stream, one.token_ids)
            record.add(**columns)
        torch.set_num_threads(threads)
        say(f"{attack}: {min(at + 32, count)} of {count} samples")
    torch.set_num_threads(1)
    return record


def _scores(logits: NDArray[np.float32], tokens: tuple[int, ...], leased: SamplingParams) -> NDArray[np.float32]:
    from node.engines.sampling import scores

    return scores(torch.from_numpy(logits), leased).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
