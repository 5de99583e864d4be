"""Which tokens top-k, top-p and min-p leave. Needs torch alone."""

import torch

__all__ = ["cut", "least_inside"]


def cut(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor | None = None
) -> torch.Tensor:
    """`probs` with zeros outside the cuts: (rows, vocabulary). In each row the likeliest token stays.

    `top_ks`, `top_ps`, `min_ps`: (rows,); None: no token is cut by min-p. Of tied tokens the smaller ids come first.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(ordered.shape[-1], device=probs.device)
    inside = (ranks < top_ks.view(-1, 1)) & (before < top_ps.view(-1, 1))
    if min_ps is not None:
        inside &= ordered >= ordered[:, :1] * min_ps.view(-1, 1)
    inside[:, 0] = True
    return probs * torch.zeros_like(inside).scatter_(-1, order, inside)


def least_inside(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest probability that top-p leaves in each row: (rows, 1)."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    return torch.where(before < top_p, ordered, 2.0).amin(-1, keepdim=True)
