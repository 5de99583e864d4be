"""How the tokens of a choice are written: their texts and log-probabilities, as OpenAI's clients read them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from node.engines.prompt_scores import PromptScore
from node.gateway.parsed_request import ParsedRequest
from node.gateway.text import Text

__all__ = ["ChoiceForm", "Likeliest"]

Likeliest = Sequence[tuple[int, float]]
"""Of one draw: the likeliest tokens with their log-probabilities, the likeliest first."""


class ChoiceForm:
    """Of the answer to one request."""

    def __init__(self, parsed: ParsedRequest, text: Text) -> None:
        self._parsed, self._text = parsed, text

    def token(self, token_id: int) -> str:
        """The text of a token, or its number if that is asked for."""
        return f"token_id:{token_id}" if self._parsed.tokens_as_ids else self._text.token(token_id)

    def completion_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int = 0, top: Sequence[Likeliest] = ()
    ) -> dict[str, Any] | None:
        """The field `logprobs` of /v1/completions; None: it is not asked for. `offset`: characters of the tokens
        before these. `top`: one a token, or empty."""
        if not self._parsed.logprobs:
            return None
        tokens = [self.token(token) for token in token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": [
                {self.token(other): at for other, at in reversed(pairs)} | {token: value}
                for token, value, pairs in zip(tokens, logprobs, top or [()] * len(tokens), strict=True)
            ],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
        }

    def echoed_logprobs(
        self, prompt: Sequence[int], scores: Sequence[PromptScore], sampled: dict[str, Any] | None
    ) -> Any:
        """The field `logprobs` of /v1/completions that begins with the prompt's tokens, of which the first has none.
        `scores`: of the others. `sampled`: as `completion_logprobs` gives it, with the offset `echoed_length`."""
        count = self._parsed.echo_logprobs
        if count is None or sampled is None:
            return sampled
        tokens = [self.token(token) for token in prompt]
        tops = [
            {self.token(other): at for other, at in reversed(score.top[:count])} | {token: score.logprob}
            for token, score in zip(tokens[1:], scores, strict=True)
        ]
        before = {
            "tokens": tokens,
            "token_logprobs": [None, *(score.logprob for score in scores)],
            "top_logprobs": [None, *tops],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
        }
        return {name: [*values, *sampled[name]] for name, values in before.items()}

    def echoed_length(self, prompt: Sequence[int]) -> int:
        """Characters of the prompt's tokens, if the answer has their log-probabilities; otherwise 0."""
        return 0 if self._parsed.echo_logprobs is None else sum(len(self.token(token)) for token in prompt)

    def prompt_logprobs(
        self, prompt: Sequence[int], scores: Sequence[PromptScore], *, texts: bool = True
    ) -> dict[str, Any]:
        """The field `prompt_logprobs`, as vLLM has it, or nothing if it is not asked for. `texts`: with those of the
        tokens."""
        count = self._parsed.prompt_logprobs
        if count is None:
            return {}

        def entry(token: int, rank: int, logprob: float) -> dict[str, Any]:
            return {"logprob": logprob, "rank": rank, "decoded_token": self._text.token(token) if texts else None}

        rows = [
            {token: entry(token, score.rank, score.logprob)}
            | {other: entry(other, i, at) for i, (other, at) in enumerate(score.top[:count], 1) if other != token}
            for token, score in zip(prompt[1:], scores, strict=True)
        ]
        return {"prompt_logprobs": [None, *rows]}

    def chat_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Likeliest] = ()
    ) -> dict[str, Any] | None:
        """The field `logprobs` of /v1/chat/completions; None: it is not asked for. `top`: one a token, or empty."""
        if not self._parsed.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token_id, logprob, pairs in zip(token_ids, logprobs, top or [()] * len(token_ids), strict=True):
            others = [self._entry(*pair) for pair in pairs]
            content.append(self._entry(token_id, logprob) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.token(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
