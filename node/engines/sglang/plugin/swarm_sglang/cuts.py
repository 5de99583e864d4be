"""Which tokens top-k, top-p and min-p leave. Needs torch alone."""

import torch

__all__ = ["inside", "nucleus"]


def inside(
    logprobs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor | None = None
) -> torch.Tensor:
    """Whether each token can be drawn: (rows, vocabulary). In each row the likeliest token can.

    `logprobs`: log-probabilities, (rows, vocabulary). `top_ks`, `top_ps`, `min_ps`: (rows,); None: no token is cut by
    min-p. Of tied tokens the smaller ids come first.
    """
    ordered, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(ordered.shape[-1], device=logprobs.device)
    kept = (ranks < top_ks.view(-1, 1)) & (before < top_ps.view(-1, 1))
    if min_ps is not None:
        kept &= ordered >= ordered[:, :1] * min_ps.view(-1, 1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """`logprobs` with -inf outside the nucleus of what they leave: (rows, vocabulary).

    The same tensor if `top_p` is 1.
    """
    if top_p == 1.0:
        return logprobs
    ordered, order = logprobs.log_softmax(-1).exp().sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    return logprobs.masked_fill(~torch.zeros_like(kept).scatter_(-1, order, kept), -torch.inf)
