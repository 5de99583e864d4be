"""How the tokens of a choice are written: their texts and log-probabilities, as OpenAI's clients read them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from node.gateway.parsed_request import ParsedRequest
from node.gateway.text import Text

__all__ = ["ChoiceForm"]


class ChoiceForm:
    """Of the answer to one request."""

    def __init__(self, parsed: ParsedRequest, text: Text) -> None:
        self._parsed, self._text = parsed, text

    def token(self, token_id: int) -> str:
        """The text of a token, or its number if that is asked for."""
        return f"token_id:{token_id}" if self._parsed.tokens_as_ids else self._text.token(token_id)

    def completion_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int = 0
    ) -> dict[str, Any] | None:
        """The field `logprobs` of /v1/completions; None: it is not asked for. `offset`: characters of the tokens
        before these."""
        if not self._parsed.logprobs:
            return None
        tokens = [self.token(token) for token in token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{token: value} for token, value in zip(tokens, logprobs, strict=True)],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
        }

    def chat_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        """The field `logprobs` of /v1/chat/completions; None: it is not asked for."""
        if not self._parsed.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            token = self.token(token_id)
            content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}
