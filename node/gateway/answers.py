"""Encodes accepted rollouts as OpenAI's clients read them: complete, or as the events of a stream.

Each choice is encoded when it is about to be sent: an answer of 256 samples repeats its prompt 256 times, and would
need hundreds of megabytes at once.

Besides OpenAI's fields, each choice has what a trainer needs: `token_ids`, `versions` (for each token, the [epoch,
version] that it was sampled from), `version_start` and `version_end` (of the first and the last token),
`prompt_token_ids`, and `routed_experts` if that is asked for; in a swarm with adapters also `own_versions` (for each
token, the own version of the adapter, or of the base).

A stream whose tokens are sent as they are drawn is made by `node.gateway.token_events`. The events of this module are
those of samples that were accepted before.
"""

import base64
import io
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from codec.errors import SwarmError
from codec.routes import read_header
from node.engines.base import Version
from node.engines.prompt_scores import PromptScore, read_scores
from node.engines.top_logprobs import PAIR, read_top
from node.gateway.choice_form import ChoiceForm, Likeliest
from node.gateway.parsed_request import ParsedRequest
from node.gateway.text import Text
from node.gateway.tool_calls import CallsInText, call_delta, find_calls
from node.ledger.messages import Rollout
from node.ledger.packing import unpack_floats, unpack_tokens
from node.ledger.route_reader import BadRoutes, Routed, read_sample
from node.ledger.state import Group

__all__ = ["DONE", "CompletionAnswer", "InvalidSample", "event", "origin_of", "prompt_text_of", "usage_of"]

DONE: Final = b"data: [DONE]\n\n"
"""The event that ends a stream."""
PROMPT_TOKEN_BYTES: Final = 48
TOKEN_BYTES: Final = 256
LOGPROB_BYTES: Final = 1024
"""Upper estimates of the memory for encoding one token, as Python objects and as JSON: of a prompt, of a sample, and in
addition for its log-probability."""
ECHO_BYTES: Final = 12
"""The same for a character of the prompt that the text repeats: in the text, as JSON, and in a copy."""
ROUTE_COPIES: Final = 6
"""Copies of a sample's routes while they are encoded: decoded, joined, as a file, as base64, and in JSON."""
CHOICE_BYTES: Final = 4096
"""The memory for encoding the rest of a choice."""


class InvalidSample(SwarmError):
    """A node's sample is not what was asked for."""


class Choice(msgspec.Struct, frozen=True):
    """One sample. `text` has no end token, and ends at the first stop text.

    Of an answer about the prompt alone it has no tokens, and the version of the scores in `versions`.
    """

    index: int
    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    prompt: Sequence[int]
    own_versions: tuple[int, ...] = ()
    """Empty in a swarm without adapters."""
    top: Sequence[Likeliest] = ()
    """One a token, or empty."""
    echo: str = ""
    """What the answer shows before `text`."""
    routes: Mapping[str, str] = MappingProxyType({})
    """Empty, or the field `routed_experts`: base64 of a .npy file, as vLLM has it."""
    scores: Sequence[PromptScore] = ()
    """Of each token of the prompt but the first, or empty."""

    @property
    def origin(self) -> dict[str, Any]:
        """The fields that say which versions the tokens are from, and which experts they took."""
        found = origin_of(self.versions, self.own_versions) | dict(self.routes)
        return found if self.token_ids else found | dict.fromkeys(found.keys() & {"versions", "own_versions"}, ())


class CompletionAnswer:
    """The answer to one request. The methods that encode a choice raise `InvalidSample`."""

    def __init__(
        self, name: str, parsed: ParsedRequest, groups: Sequence[Group], text: Text, *, chat: bool, kinds: str = ""
    ) -> None:
        """`name`: the model's. `groups`: one for each prompt of `parsed`. `kinds`: the kinds of the engines that
        generated them, if known."""
        self._parsed, self._text, self._chat, self._kinds = parsed, text, chat, kinds
        self._form = ChoiceForm(parsed, text)
        self._created = int(time.time())
        self._id = ("chatcmpl-" if chat else "cmpl-") + (parsed.request_id or groups[0].id.hex())
        self._name = name
        self._samples = [
            (p * parsed.n + sample, prompt, group.done[sample].rollout, group.done[sample].own)
            for p, (prompt, group) in enumerate(zip(parsed.prompts, groups, strict=True))
            for sample in sorted(group.done)
        ]
        self._groups = [[group.done[sample] for sample in sorted(group.done)] for group in groups]
        """The samples by prompt, for routes that several share."""
        self._encoded_tokens = 0
        """Tokens of the choices that were encoded."""

    @property
    def held_bytes(self) -> int:
        """The memory of the samples until the answer is sent."""
        return sum(
            len(one.token_ids) + len(one.logprobs) + len(one.routes) + len(one.prompt_routes) + len(one.top)
            for _, _, one, _ in self._samples
        )

    def costs(self) -> list[int]:
        """For each choice, the most memory that encoding it takes, in bytes."""
        tops = 1 + self._parsed.sampling.extra.top_logprobs
        token_bytes = TOKEN_BYTES + (LOGPROB_BYTES * tops if self._parsed.logprobs else 0)
        return [
            CHOICE_BYTES
            + PROMPT_TOKEN_BYTES * len(prompt)
            + ECHO_BYTES * max(map(len, (*self._parsed.echo, self._parsed.prompt_text or "")))
            + token_bytes * rollout.length
            + _route_bytes(prompt, rollout)
            + LOGPROB_BYTES * (len(rollout.prompt_scores) // PAIR.itemsize)
            for _, prompt, rollout, _ in self._samples
        ]

    def whole(self, i: int) -> bytes:
        """The part of the body with choice `i`. The body is all parts, encoded and joined in order."""
        head = self._head("chat.completion" if self._chat else "text_completion")
        choice = self._choice(i)
        if self._chat:
            head |= prompt_text_of(self._parsed)
            head |= self._form.prompt_logprobs(choice.prompt, choice.scores)
        return self._part(i, head, self._chat_choice(choice) if self._chat else self._completion_choice(choice))

    def tokens(self, i: int) -> bytes:
        """As `whole`, for `/inference/v1/generate`, as vLLM answers: no texts, and tokens by number."""
        choice = self._choice(i)
        head = {"request_id": self._parsed.request_id or self._id, "prompt_token_ids": tuple(choice.prompt)}
        head |= self._form.prompt_logprobs(choice.prompt, choice.scores, texts=False)
        content = [
            _by_number(token, logprob) | {"top_logprobs": [_by_number(*pair) for pair in pairs]}
            for token, logprob, pairs in zip(
                choice.token_ids, choice.logprobs, choice.top or [()] * len(choice.token_ids), strict=True
            )
        ]
        fields = {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "logprobs": {"content": content},
            "finish_reason": choice.finish_reason,
        } | choice.origin
        return self._part(i, head, fields)

    def events(self, i: int) -> bytes:
        """The events of choice `i` in a stream; for the last choice, also those that end the stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = self._choice(i)
        usage: dict[str, Any] = {"usage": None} if self._parsed.usage else {}
        if self._parsed.usage_so_far:
            usage = {"usage": usage_of(len(choice.prompt), len(choice.token_ids))}
        parts = self._deltas(choice) if self._chat else [self._completion_choice(choice)]
        first = {} if i else prompt_text_of(self._parsed)
        heads = itertools.chain([self._head(kind) | first], itertools.repeat(self._head(kind)))
        events = [event(head | {"choices": [part]} | usage) for head, part in zip(heads, parts, strict=False)]
        if i == len(self._samples) - 1:
            if self._parsed.usage:
                events.append(event(self._head(kind) | {"choices": [], "usage": self._usage()}))
            events.append(DONE)
        return b"".join(events)

    def _choice(self, i: int) -> Choice:
        index, prompt, rollout, own = self._samples[i]
        choice = _choice(self._parsed, self._text, prompt, index, rollout, own)
        echo = self._parsed.echo[index // self._parsed.n] if self._parsed.echo else ""
        routes = self._routed_experts(i, len(choice.token_ids))
        k = self._parsed.sampling.extra.prompt_logprobs
        scores = () if k is None else read_scores(rollout.prompt_scores, k)
        choice = msgspec.structs.replace(choice, routes=routes, echo=echo, scores=scores)
        self._encoded_tokens += len(choice.token_ids)
        return choice

    def _routed_experts(self, i: int, tokens: int) -> dict[str, str]:
        index, prompt, _, _ = self._samples[i]
        if self._parsed.routes_from is None:
            return {}
        group, sample = divmod(index, self._parsed.n)
        routed = [
            Routed(one.rollout.routes, one.rollout.prompt_routes, one.rollout.length, _first(one.rollout), one.node)
            for one in self._groups[group]
        ]
        try:
            routes = read_sample(routed, sample, len(prompt))[self._parsed.routes_from : len(prompt) + tokens - 1]
        except BadRoutes as error:
            raise InvalidSample("A node sent routes of experts that cannot be read. Ask again.") from error
        with io.BytesIO() as file:
            small = np.uint8 if read_header(routed[sample].routes)[0].experts <= 256 else np.uint16
            np.save(file, routes.astype(small))
            return {"routed_experts": base64.b64encode(file.getbuffer()).decode()}

    def _part(self, i: int, head: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """`choice` as JSON; the first one with `head` before it, the last one with `usage` after it."""
        before = b"," if i else msgspec.json.encode(head)[:-1] + b',"choices":['
        last = i == len(self._samples) - 1
        after = b'],"usage":' + msgspec.json.encode(self._usage()) + b"}" if last else b""
        return b"".join((before, msgspec.json.encode(choice), after))

    def _head(self, kind: str) -> dict[str, Any]:
        known = {"system_fingerprint": self._kinds} if self._kinds else {}
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name} | known

    def _usage(self) -> dict[str, int]:
        return usage_of(sum(map(len, self._parsed.prompts)), self._encoded_tokens)

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        offset = self._form.echoed_length(choice.prompt)
        sampled = self._form.completion_logprobs(choice.token_ids, choice.logprobs, offset, choice.top)
        return (
            {
                "index": choice.index,
                "text": choice.echo + choice.text,
                "logprobs": self._form.echoed_logprobs(choice.prompt, choice.scores, sampled),
                "finish_reason": choice.finish_reason,
                "prompt_token_ids": tuple(choice.prompt),
                "token_ids": choice.token_ids,
            }
            | self._form.prompt_logprobs(choice.prompt, choice.scores)
            | choice.origin
        )

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.echo + choice.text, "refusal": None}
        reason = choice.finish_reason
        if (found := self._calls(choice)).calls:
            message |= {
                "content": choice.echo + found.content or None,
                "tool_calls": [call.encode() for call in found.calls],
            }
            reason = "tool_calls" if reason == "stop" else reason
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._form.chat_logprobs(choice.token_ids, choice.logprobs, choice.top),
            "finish_reason": reason,
            "prompt_token_ids": tuple(choice.prompt),
            "token_ids": choice.token_ids,
        } | choice.origin

    def _calls(self, choice: Choice) -> CallsInText:
        if self._parsed.tools is None:
            return CallsInText(choice.text, [])
        return find_calls(choice.text, self._parsed.tools, one=self._parsed.one_call)

    def _deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        nothing = {"index": choice.index, "logprobs": None, "finish_reason": None}
        content: str | None = choice.echo + choice.text
        reason, calls = choice.finish_reason, ()
        if (found := self._calls(choice)).calls:
            content, calls = choice.echo + found.content or None, found.calls
            reason = "tool_calls" if reason == "stop" else reason
        yield nothing | {"delta": {"role": "assistant", "content": ""}}
        yield (
            nothing
            | {
                "delta": {"content": content},
                "logprobs": self._form.chat_logprobs(choice.token_ids, choice.logprobs, choice.top),
                "prompt_token_ids": tuple(choice.prompt),
                "token_ids": choice.token_ids,
            }
            | choice.origin
        )
        for i, call in enumerate(calls):
            yield nothing | {"delta": call_delta(i, call)}
        yield nothing | {"delta": {}, "finish_reason": reason}


def origin_of(versions: Sequence[Version], own_versions: Sequence[int]) -> dict[str, Any]:
    """The fields of a choice that say which versions its tokens are from, one of `versions` each."""
    own = {"own_versions": own_versions} if own_versions else {}
    return {"versions": versions, "version_start": versions[0], "version_end": versions[-1], **own}


def usage_of(prompt: int, drawn: int) -> dict[str, int]:
    """The field `usage` after so many tokens of prompts, and so many that were drawn."""
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def prompt_text_of(parsed: ParsedRequest) -> dict[str, str]:
    """The field `prompt_text` of an answer, if it has one."""
    return {} if parsed.prompt_text is None else {"prompt_text": parsed.prompt_text}


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _choice(
    parsed: ParsedRequest, text: Text, prompt: Sequence[int], index: int, rollout: Rollout, own: tuple[int, ...]
) -> Choice:
    tokens, logprobs = unpack_tokens(rollout.token_ids), unpack_floats(rollout.logprobs)
    starts = [0, *(span.end for span in rollout.spans)]
    versions = [
        version
        for span, start in zip(rollout.spans, starts, strict=False)
        for version in [(span.epoch, span.version)] * (span.end - start)
    ]
    owns = [
        each
        for value, span, start in zip(own, rollout.spans, starts, strict=False)
        for each in [value] * (span.end - start)
    ]
    if parsed.prompt_only:
        return Choice(index, "", "length", (), (), tuple(versions[:1]), prompt, tuple(owns[:1]))
    reason: str = rollout.finish_reason
    options = parsed.sampling.extra
    ended = reason == "stop" and tokens[-1] in parsed.sampling.stop_tokens
    if (found := _stop_text(parsed, text, prompt, tokens[:-1] if ended else tokens)) is not None:
        count, span = found
        tokens, reason = tokens[:count], "stop"
        shown = text.decode(prompt, tokens, special=options.special)[: span[1] if parsed.keep_stop else span[0]]
    elif reason == "stop" and not ended:
        raise InvalidSample("A node ended a sample at a stop text that is not there. Ask again.")
    else:
        kept = tokens[:-1] if ended and not parsed.keep_stop else tokens
        shown = text.decode(prompt, kept, special=parsed.show_special)
    count = len(tokens)
    top = read_top(rollout.top, options.top_logprobs)[:count] if options.top_logprobs else ()
    kept = logprobs[:count], tuple(versions[:count])
    return Choice(index, shown, reason, tokens, *kept, prompt, tuple(owns[:count]), top)


def _by_number(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}


def _first(rollout: Rollout) -> Version:
    return rollout.spans[0].epoch, rollout.spans[0].version


def _route_bytes(prompt: Sequence[int], rollout: Rollout) -> int:
    """The memory for encoding the routes of a sample: ids of two bytes, as base64, and their copies."""
    if not rollout.routes:
        return 0
    shape, tokens = read_header(rollout.routes)
    return ROUTE_COPIES * 2 * shape.layers * shape.chosen * (len(prompt) + tokens)


def _stop_text(
    parsed: ParsedRequest, text: Text, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[int, tuple[int, int]] | None:
    """The number of tokens up to the end of the first stop text, and its (start, end) in their text; None: there is
    none. Engines search in the same way."""
    options = parsed.sampling.extra
    if not options.stop_texts:
        return None
    stop = text.stop_text(prompt, options.stop_texts, special=options.special, least=options.min_tokens)
    for count, token in enumerate(tokens, 1):
        if stop.add(token):
            assert stop.span is not None
            return count, stop.span
    return None
