"""Encodes the tokens of samples that are still being drawn as the events of a stream.

The text of a choice's events is the text of its accepted sample: characters in which a stop text may begin wait until
it is known whether it does. The last event of a choice has the fields that are known only then: why it ended, and the
versions of all its tokens.
"""

import time
from collections.abc import Sequence
from typing import Any

from node.engines.base import Version
from node.engines.texts import Continuation
from node.engines.top_logprobs import read_top
from node.gateway.answers import (
    CHOICE_BYTES,
    DONE,
    ECHO_BYTES,
    LOGPROB_BYTES,
    PROMPT_TOKEN_BYTES,
    TOKEN_BYTES,
    InvalidSample,
    event,
    origin_of,
    prompt_text_of,
    usage_of,
)  # fmt: skip
from node.gateway.choice_form import ChoiceForm
from node.gateway.followed_sample import Ending, Piece
from node.gateway.parsed_request import ParsedRequest
from node.gateway.text import Text
from node.gateway.tool_calls import ToolCall, ToolSyntax, call_delta, find_calls, held_back

__all__ = ["ChoiceEvents", "TokenEvents"]


class TokenEvents:
    """The events of one answer. `choices` has an encoder for each of its samples, in the order of their numbers."""

    def __init__(
        self, name: str, answer_id: str, parsed: ParsedRequest, text: Text, *, chat: bool, created: int = 0
    ) -> None:
        """`name`: the model's. `created`: seconds since 1970; 0: now."""
        self._parsed, self._chat = parsed, chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + (parsed.request_id or answer_id),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created or int(time.time()),
            "model": name,
        }
        prompts = [prompt for prompt in parsed.prompts for _ in range(parsed.n)]
        form = ChoiceForm(parsed, text)
        self.choices = [ChoiceEvents(i, prompt, parsed, text, form, chat) for i, prompt in enumerate(prompts)]
        self.begun = not chat
        """The client has the first part of each choice of a chat, or this is none."""

    def encode(self, parts: Sequence[dict[str, Any]], kinds: str = "") -> bytes:
        """Events with these parts of choices. `kinds`: the kinds of the engines, if known.

        All choices of a chat begin with the first part of any of them, in the order of their numbers: `stream` of
        OpenAI's client keeps them in a list in the order in which they come.
        """
        first: dict[str, Any] = {}
        if not self.begun:
            parts, self.begun = [*(_begins(i) for i in range(len(self.choices))), *parts], True
            first = prompt_text_of(self._parsed)
        known = {"system_fingerprint": kinds} if kinds else {}
        events = [self._head | known | {"choices": [part]} | self._usage(part["index"]) for part in parts]
        return b"".join(event(each if i else each | first) for i, each in enumerate(events))

    def _usage(self, index: int) -> dict[str, Any]:
        """The field `usage` of an event of choice `index`."""
        if self._parsed.usage_so_far:
            prompt = len(self._parsed.prompts[index // self._parsed.n])
            return {"usage": usage_of(prompt, self.choices[index].sent)}
        return {"usage": None} if self._parsed.usage else {}

    def end(self) -> bytes:
        """The events after the last part of the last choice."""
        if not self._parsed.usage:
            return DONE
        prompts = sum(map(len, self._parsed.prompts))
        drawn = sum(choice.sent for choice in self.choices)
        return event(self._head | {"choices": [], "usage": usage_of(prompts, drawn)}) + DONE


class ChoiceEvents:
    """The events of one choice."""

    def __init__(
        self, index: int, prompt: Sequence[int], parsed: ParsedRequest, text: Text, form: ChoiceForm, chat: bool
    ) -> None:
        self._index, self._prompt, self._parsed, self._form, self._chat = index, prompt, parsed, form, chat
        self._text: Continuation | None = text.continuation(prompt, special=parsed.show_special)
        self._held = max(map(len, parsed.sampling.extra.stop_texts), default=1) - 1
        """Characters at the end of the text in which a stop text may begin."""
        self._tail = ""
        """The text of tokens that were sent, which was not sent, because a stop text may begin in it."""
        self._calls = ""
        """The text after that, which was not sent because it may be a call of a tool."""
        self._shown = self._offset = 0
        """Characters that were sent; characters of the tokens that were sent, as `logprobs` counts them."""
        self.sent = 0
        """Tokens that were sent."""
        self._echo = parsed.echo[index // parsed.n] if parsed.echo else ""

    def cost(self, piece: Piece) -> int:
        """The most memory that encoding `piece` takes, in bytes."""
        texts = len(self._echo) + len(self._parsed.prompt_text or "")
        prompt = 0 if piece.begin else PROMPT_TOKEN_BYTES * len(self._prompt) + ECHO_BYTES * texts
        tops = 1 + self._parsed.sampling.extra.top_logprobs
        token_bytes = TOKEN_BYTES + (LOGPROB_BYTES * tops if self._parsed.logprobs else 0)
        versions = 0 if piece.ending is None else PROMPT_TOKEN_BYTES * (piece.begin + len(piece.tokens))
        return CHOICE_BYTES + prompt + versions + token_bytes * len(piece.tokens)

    def parts(self, piece: Piece, own_versions: Sequence[int] = ()) -> list[dict[str, Any]]:
        """The parts of a choice for `piece`, which begins where the last one ended. `own_versions`: of a sample that
        has ended, one a token, if there are any. Raises `InvalidSample`."""
        ending, tokens = piece.ending, piece.tokens
        if ending is None and not tokens:
            return []
        shown = self._decode(tokens[: len(tokens) - self._hidden(piece)])
        if ending is not None:
            shown = self._last_text(shown, ending)
        elif self._held:
            text = self._tail + shown
            shown, self._tail = text[: -self._held], text[-self._held :]
        self._shown += len(shown)
        self.sent += len(tokens)
        calls: list[ToolCall] = []
        if self._parsed.tools is not None:
            shown, calls = self._without_calls(shown, self._parsed.tools, last=ending is not None)
        fields: dict[str, Any] = {"token_ids": tokens}
        if not piece.begin:
            shown = self._echo + shown
            fields = {"prompt_token_ids": list(self._prompt), "version_start": piece.versions[0][0]} | fields
        last = None if ending is None else "tool_calls" if calls and ending.reason == "stop" else ending.reason
        origin = {} if ending is None else origin_of(_each(piece), own_versions)
        return self._form_parts(shown, piece, fields, last, origin, calls)

    def _form_parts(
        self,
        shown: str,
        piece: Piece,
        fields: dict[str, Any],
        last: str | None,
        origin: dict[str, Any],
        calls: Sequence[ToolCall],
    ) -> list[dict[str, Any]]:
        """`last`: the finish reason, if these are the last tokens."""
        found: list[dict[str, Any]] = []
        tokens, logprobs, count = piece.tokens, piece.logprobs, self._parsed.sampling.extra.top_logprobs
        top = read_top(piece.top, count) if count else ()
        if not self._chat:
            written = self._form.completion_logprobs(tokens, logprobs, self._offset, top)
            self._offset += sum(map(len, written["tokens"])) if written else 0
            return [{"index": self._index, "text": shown, "logprobs": written, "finish_reason": last} | fields | origin]
        nothing: dict[str, Any] = {"index": self._index, "logprobs": None, "finish_reason": None}
        if tokens or shown:
            logs = self._form.chat_logprobs(tokens, logprobs, top)
            found.append(nothing | {"delta": {"content": shown}, "logprobs": logs} | fields)
        found += [nothing | {"delta": call_delta(i, call)} for i, call in enumerate(calls)]
        if last is not None:
            found.append(nothing | {"delta": {}, "finish_reason": last} | origin)
        return found

    def _without_calls(self, shown: str, syntax: ToolSyntax, *, last: bool) -> tuple[str, list[ToolCall]]:
        """(the text to send, the calls): all calls come at the end. `shown`: the text that is new."""
        text = self._calls + shown
        if last:
            self._calls = ""
            found = find_calls(text, syntax, one=self._parsed.one_call)
            return found.content, found.calls
        held = held_back(text, syntax)
        self._calls = text[len(text) - held :]
        return text[: len(text) - held], []

    def _hidden(self, piece: Piece) -> int:
        """1 if the last token is a stop token that the text does not show; otherwise 0."""
        ending = piece.ending
        if ending is None or ending.stop is not None or ending.reason != "stop":
            return 0
        if not piece.tokens or piece.tokens[-1] not in self._parsed.sampling.stop_tokens:
            raise InvalidSample("A node ended a sample at a stop text that is not there. Ask again.")
        return 0 if self._parsed.keep_stop else 1

    def _last_text(self, shown: str, ending: Ending) -> str:
        """What of the text was not sent yet, up to its end."""
        text = self._tail + shown
        if ending.stop is None:
            return text
        begin, end = ending.stop
        return text[: max(0, (end if self._parsed.keep_stop else begin) - self._shown)]

    def _decode(self, tokens: Sequence[int]) -> str:
        return "" if self._text is None else "".join(self._text.add(token) for token in tokens)


def _begins(index: int) -> dict[str, Any]:
    """The first part of a choice of a chat."""
    return {"index": index, "logprobs": None, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}


def _each(piece: Piece) -> list[Version]:
    """The version of each token."""
    found: list[Version] = []
    for version, end in piece.versions:
        found += [version] * (end - len(found))
    return found
