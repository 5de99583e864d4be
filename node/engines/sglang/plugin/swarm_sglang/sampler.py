"""SGLang's sampler as the swarm needs it.

A token's log-probability is that of the distribution that it was drawn from, after temperature and the cuts. SGLang's
own samplers tell it before the cuts. Each request draws by a seed of its own (`drawing`), so a draw does not depend on
the batch; and a replay's tokens are put in the place of drawn ones.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from swarm_vllm.noise import draw, exact_noise, places

from .asked import MARK
from .cuts import inside
from .options import GREEDY, reshape_rows
from .running import asked_of, begun_otherwise, requests, text_of
from .scores import OTHERWISE, most_margin

__all__ = ["SwarmSampler"]

_SEEDS = (1 << 64) - 1
"""SGLang's seeds have a sign."""


class SwarmSampler(Sampler):
    """See the module. What it does not know (masks of what could be drawn, watermarks) is SGLang's own."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        asked = return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        if sampling_info.sampling_mask_batch_indices is not None or more.get("logprob_logits") is not None:
            return super().forward(logits_output, sampling_info, *asked, **more)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        reshape_rows(logits, sampling_info.temperatures)
        logprobs = _distributions(logits, sampling_info)
        rows = _places(sampling_info, positions).to(logprobs.device)
        greedy = sampling_info.top_ks.view(-1) == GREEDY
        tokens = torch.where(greedy, logprobs.argmax(-1), draw(logprobs, rows))
        tokens, lost = _replayed(tokens, logprobs, rows, greedy)
        if return_logprob:
            told = self.output_logprob_processor.compute_logprobs(
                logprobs.clone(), top_logprobs_nums, token_ids_logprobs, tokens
            )
            for row, (margin, sound) in lost.items():
                told.top_logprobs_val[row] = torch.tensor(
                    [MARK + margin if sound else OTHERWISE], device=logprobs.device
                )
            told.write_output_to(logits_output)
        tokens = tokens.to(torch.int32)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _distributions(logits: torch.Tensor, info: Any) -> torch.Tensor:
    """What each row is drawn from: log-probabilities, float32, (rows, vocabulary). A greedy row's has no cuts."""
    logprobs = (logits.float() / info.temperatures).log_softmax(-1)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return logprobs
    top_ks, top_ps = info.top_ks.view(-1), info.top_ps.view(-1)
    min_ps = info.min_ps.view(-1) if info.need_min_p_sampling else None
    whole = (top_ks >= logits.shape[-1]) & (top_ps >= 1.0)
    if min_ps is not None:
        whole &= min_ps <= 0.0
    whole |= top_ks == GREEDY
    kept = inside(logprobs, top_ks, top_ps, min_ps)
    return torch.where(whole.view(-1, 1), logprobs, logprobs.masked_fill(~kept, -torch.inf).log_softmax(-1))


def _places(info: Any, positions: torch.Tensor) -> torch.Tensor:
    """Where the noise of each row's next token is: of portable draws by seed, stream and number of the token, of others
    by their seed and the position in the text."""
    rows = [(seed & _SEEDS, 0, at) for seed, at in zip(info.sampling_seed.tolist(), positions.tolist())]  # noqa: B905 - Python 3.10
    for row, request in enumerate(requests(len(rows))):
        asked = asked_of(request)
        if asked is not None and asked.noise is not None:
            rows[row] = (*asked.noise, len(text_of(request)[1]))
    return places(rows)


def _replayed(
    tokens: torch.Tensor, logprobs: torch.Tensor, rows: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, dict[int, tuple[float, bool]]]:
    """(the tokens with those of replays replaced; by row of a replay: by how many nats its token loses, and whether all
    of its text was read under the live weights)."""
    lost: dict[int, tuple[float, bool]] = {}
    for row, request in enumerate(requests(len(tokens))):
        asked = asked_of(request)
        if asked is None or len(request.output_ids) >= len(asked.claimed):
            continue
        token = asked.claimed[len(request.output_ids)]
        margin = _lost(logprobs[row], int(tokens[row]), token, None if greedy[row] else rows[row : row + 1])
        tokens[row], lost[row] = token, (margin, not begun_otherwise(request))
    return tokens, lost


def _lost(logprobs: torch.Tensor, winner: int, claimed: int, noise: torch.Tensor | None) -> float:
    """Nats by which the claimed token loses against the winner: 0 only if it is the winner."""
    if winner == claimed:
        return 0.0
    pair = torch.tensor([[winner, claimed]], dtype=torch.int64, device=logprobs.device)
    value = logprobs[pair].double()
    if noise is not None:
        value = value + exact_noise(noise, pair)
    return most_margin(float(value[0, 0] - value[0, 1]))
