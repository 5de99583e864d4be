"""Accepted samples as OpenAI's clients read them: whole, or as the events of a stream.

Beside what they know, each choice has `token_ids` and `versions` (for each token the [epoch, version] that drew it),
and a completion `prompt_token_ids`: what a trainer needs. A stream begins when the sample was accepted, so it never
holds a token that the swarm takes back.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec

from node.gateway.text import Text
from node.gateway.wanted import Wanted
from node.ledger.messages import Rollout, unpack_floats, unpack_tokens
from node.ledger.state import Group

__all__ = ["DONE", "Answer", "event"]

DONE: Final = b"data: [DONE]\n\n"


class Choice(msgspec.Struct, frozen=True):
    """One sample. `text`: without its end token, cut at the first stop text."""

    index: int
    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    prompt: tuple[int, ...]


class Answer:
    """To one request: `groups`, one for each of its prompts."""

    def __init__(self, name: str, wanted: Wanted, groups: Sequence[Group], text: Text, *, chat: bool) -> None:
        self._wanted, self._text, self._chat = wanted, text, chat
        self._created = int(time.time())
        self._id = ("chatcmpl-" if chat else "cmpl-") + groups[0].id.hex()
        self._name = name
        self._choices = [
            _choice(wanted, text, prompt, p * wanted.n + sample, group.done[sample].rollout)
            for p, (prompt, group) in enumerate(zip(wanted.prompts, groups, strict=True))
            for sample in sorted(group.done)
        ]

    def whole(self) -> dict[str, Any]:
        """The body of the answer."""
        choices = [self._chat_choice(c) if self._chat else self._completion_choice(c) for c in self._choices]
        return self._head("chat.completion" if self._chat else "text_completion") | {
            "choices": choices,
            "usage": self._usage(),
        }

    def tokens(self) -> dict[str, Any]:
        """The body of an answer to `/inference/v1/generate`, in vLLM's words: no texts, and tokens by number."""
        choices = [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
                    ]
                },
                "finish_reason": choice.finish_reason,
                "versions": choice.versions,
            }
            for choice in self._choices
        ]
        prompt = self._wanted.prompts[0]
        return {"request_id": self._id, "choices": choices, "prompt_token_ids": prompt, "usage": self._usage()}

    def events(self) -> Iterator[bytes]:
        """The events of a stream, the last one included."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._wanted.usage else {}
        for choice in self._choices:
            for part in self._deltas(choice) if self._chat else [self._completion_choice(choice)]:
                yield event(self._head(kind) | {"choices": [part]} | usage)
        if self._wanted.usage:
            yield event(self._head(kind) | {"choices": [], "usage": self._usage()})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    def _usage(self) -> dict[str, int]:
        read = sum(map(len, self._wanted.prompts))
        made = sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        tokens = [self._text.token(token) for token in choice.token_ids] if self._wanted.logprobs else []
        offsets = list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else []
        logprobs = {
            "tokens": tokens,
            "token_logprobs": choice.logprobs,
            "top_logprobs": [{token: value} for token, value in zip(tokens, choice.logprobs, strict=False)],
            "text_offset": offsets,
        }
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs if self._wanted.logprobs else None,
            "finish_reason": choice.finish_reason,
            "prompt_token_ids": choice.prompt,
            "token_ids": choice.token_ids,
            "versions": choice.versions,
        }

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._chat_logprobs(choice),
            "finish_reason": choice.finish_reason,
            "prompt_token_ids": choice.prompt,
            "token_ids": choice.token_ids,
            "versions": choice.versions,
        }

    def _deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        nothing = {"index": choice.index, "logprobs": None, "finish_reason": None}
        yield nothing | {"delta": {"role": "assistant", "content": ""}}
        yield nothing | {
            "delta": {"content": choice.text},
            "logprobs": self._chat_logprobs(choice),
            "prompt_token_ids": choice.prompt,
            "token_ids": choice.token_ids,
            "versions": choice.versions,
        }
        yield nothing | {"delta": {}, "finish_reason": choice.finish_reason}

    def _chat_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._wanted.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
            token = self._text.token(token_id)
            content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _choice(wanted: Wanted, text: Text, prompt: tuple[int, ...], index: int, rollout: Rollout) -> Choice:
    tokens, logprobs = unpack_tokens(rollout.token_ids), unpack_floats(rollout.logprobs)
    starts = [0, *(span.end for span in rollout.spans)]
    versions = [
        (span.epoch, span.version)
        for span, start in zip(rollout.spans, starts, strict=False)
        for _ in range(start, span.end)
    ]
    reason: str = rollout.finish_reason
    said = text.decode(tokens[:-1] if reason == "stop" else tokens)
    if (cut := _first_stop(said, wanted.stops)) is not None:
        kept = _tokens_until(text, tokens, said[: cut + 1])
        tokens, said, reason = tokens[:kept], said[:cut], "stop"
    count = len(tokens)
    return Choice(index, said, reason, tokens, logprobs[:count], tuple(versions[:count]), prompt)


def _first_stop(said: str, stops: Sequence[str]) -> int | None:
    found = [at for stop in stops if (at := said.find(stop)) >= 0]
    return min(found, default=None)


def _tokens_until(text: Text, tokens: Sequence[int], wanted: str) -> int:
    """The fewest tokens whose text is at least as long as `wanted`, by halving: texts only grow with their tokens."""
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(text.decode(tokens[:middle])) >= len(wanted):
            high = middle
        else:
            low = middle + 1
    return low
