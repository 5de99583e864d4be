"""Why an engine's answer cannot be one to what it was asked. Pure: the node ends such an engine."""

from collections.abc import Callable, Sequence

from node.engines.base import MAX_TOKEN, Completion, Version
from node.engines.judgement import Claim, Judgement
from node.engines.messages import Generate

__all__ = ["wrong_completions", "wrong_judgement"]


def wrong_completions(completions: Sequence[Completion], asked: Generate, held: Callable[[Version], bool]) -> str:
    """Why these cannot be the completions of `asked`; empty if they can. `held`: whether the engine held a version."""
    if len(completions) != len(asked.prompts):
        return f"{len(completions)} completions for {len(asked.prompts)} prompts"
    max_tokens = asked.sampling.max_tokens
    for completion in completions:
        if len(completion.token_ids) > max_tokens:
            return f"{len(completion.token_ids)} tokens where {max_tokens} were asked for"
        if not all(0 <= token <= MAX_TOKEN for token in completion.token_ids):
            return "token ids out of range"
        if not all(held(span.version) for span in completion.spans):
            return "tokens of a version that it never held"
    return ""


def wrong_judgement(judgement: Judgement, claim: Claim) -> str:
    """Why this cannot be the judgement of `claim`; empty if it can."""
    if len(judgement.scores) != claim.tokens:
        return f"{len(judgement.scores)} scores for {claim.tokens} tokens"
    if bool(judgement.margins) != claim.sampling.extra.portable:
        return "margins without portable draws, or none with them"
    if judgement.previous and not claim.previous:
        return "scores of the version before that nobody asked for"
    return ""
