"""How the tokens of a choice are written: their texts and log-probabilities, as OpenAI's clients read them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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
