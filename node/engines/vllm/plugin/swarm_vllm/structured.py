"""Texts of a structure that begin in the prompt: another engine drew the first tokens, and this one continues.

vLLM begins a request's grammar before its first drawn token. `install` lets the grammar of a request that carries
`BEGUN` take the end of the prompt first, as if this engine had drawn it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

__all__ = ["BEGUN", "install"]

BEGUN = "swarm_begun"
"""In a request's `extra_args`: how many tokens at the end of its prompt are the beginning of its text."""

_create_original = StructuredOutputManager._create_grammar


def install() -> None:
    """Change the grammars of this process. A second call does nothing."""
    StructuredOutputManager._create_grammar = _create_grammar


def _create_grammar(manager: Any, request: Any) -> Any:
    """As vLLM's. Raises `ValueError` where the prompt begins the text otherwise than the grammar allows: vLLM then ends
    this request alone."""
    grammar = _create_original(manager, request)
    begun = (getattr(request.sampling_params, "extra_args", None) or {}).get(BEGUN)
    if isinstance(begun, int) and begun > 0:
        tokens = list(request.prompt_token_ids[-begun:])
        if not grammar.accept_tokens(request.request_id, tokens):
            raise ValueError("the structure has no text that begins as the end of the prompt does")
    return grammar
