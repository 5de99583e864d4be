"""One flight of completions, asked of SGLang in the form of its `/generate` route."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from node.engines.base import MIN_LOGPROB, EngineError
from node.engines.sglang.http import Api
from node.engines.sglang.plugin.swarm_sglang.asked import ASKED, OPTIONS, OURS, Asked
from node.engines.texts import StopText, TokenizerFile
from node.engines.vllm.plugin.swarm_vllm.messages import Generate, Judge, Options, Output, Score

__all__ = ["TOKEN_WITHIN_S", "Drawn", "generate", "parameters"]

TOKEN_WITHIN_S: Final = 600.0
"""For the next tokens of a flight: requests may wait for others, or for a pause to end."""
ASK_WITHIN_S: Final = 60.0
REPORT_EVERY: Final = 16
"""Tokens of a request between two lines, unless each is told as it is drawn, or may complete a stop text."""
_SEEDS: Final = (1 << 63) - 1
_PAIR: Final = struct.Struct("<If")
_NOTHING: Final = Options()


@dataclass(slots=True)
class Drawn:
    """What SGLang has told of one completion. `finish`: empty until its last line, which has the `spans`."""

    stop: StopText | None = None
    """Looks for stop texts; None: there are none."""
    most: int = 0
    """The number of likeliest tokens that are told of each draw."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[bytes] = field(default_factory=list)
    """Of each token its part of `Output.top`; none if `most` is 0."""
    spans: tuple[tuple[str, int, int], ...] = ()
    finish: str = ""
    stopped: bool = False
    """A stop text is complete with the last of `ids`; tokens that SGLang draws after it do not count."""

    def add(self, line: dict[str, Any], *, whole: bool) -> None:
        """Take in a line of the stream. `whole`: it repeats what the lines before it had."""
        meta = line["meta_info"]
        if meta["finish_reason"] is not None:
            told = meta["weight_versions"]
            self.spans = tuple((str(one["version"]), int(one["start"]), int(one["end"])) for one in told)
            self.finish = meta["finish_reason"]["type"]
        if self.stopped:
            return
        if self.finish == "abort":
            raise EngineError(f"SGLang ended a request: {meta['finish_reason'].get('message', 'it was aborted')}")
        ids = [int(token) for token in line["output_ids"]]
        logprobs = [_logprob(entry[0]) for entry in meta["output_token_logprobs"]]
        tops = [_likeliest(row, self.most) for row in meta["output_top_logprobs"]] if self.most else [b""] * len(ids)
        if not len(ids) == len(logprobs) == len(tops):
            raise ValueError(f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
        begin = len(self.ids) if whole else 0
        for token, logprob, top in zip(ids[begin:], logprobs[begin:], tops[begin:], strict=True):
            self.ids.append(token)
            self.logprobs.append(logprob)
            self.tops.append(top)
            if self.stop is not None and self.stop.add(token):
                self.stopped = True
                return

    def output(self) -> Output:
        """Raises `EngineError` for a completion that is not over."""
        if not self.finish:
            raise EngineError("SGLang's answer is not a completion: it is not over")
        count = len(self.ids)
        spans = tuple((name, start, min(end, count)) for name, start, end in self.spans if start < count)
        finish = self.finish if self.finish in ("stop", "length") else "abort"
        reason = "stop" if self.stopped else finish
        return Output(tuple(self.ids), tuple(self.logprobs), reason, spans, top=b"".join(self.tops))


def _logprob(told: float) -> float:
    return min(0.0, max(MIN_LOGPROB, float(told)))


def _likeliest(row: Sequence[Any], most: int) -> bytes:
    """The `most` likeliest tokens of one draw, as `Output.top` has them. A token that could not be drawn is none."""
    pairs = [(int(entry[1]), _logprob(entry[0])) for entry in row[:most]]
    pairs = [(token, logprob) for token, logprob in pairs if logprob > MIN_LOGPROB]
    return b"".join(_PAIR.pack(*pair) for pair in pairs + [(0, MIN_LOGPROB)] * (most - len(pairs)))


def generate(
    api: Api,
    message: Generate,
    stopped: Callable[[], bool],
    on_line: Callable[[int, int, Sequence[Drawn]], None],
    tokenizer: TokenizerFile,
    *,
    whole: bool,
) -> tuple[Output, ...]:
    """The completions of a flight, in order. `stopped`: nobody waits for them any more; asked at each line.

    `on_line(i, begin, drawn)`: called with the index of a prompt, the number of its tokens before this line, and what
    all prompts have so far. `whole`: each line of this SGLang repeats the lines before it. Raises `EngineError`.
    """
    most = (message.options or _NOTHING).top_logprobs
    drawn = [Drawn(_stop_text(message, prompt, tokenizer), most) for prompt in message.prompts]
    body: dict[str, Any] = {  # SGLang aborts by the beginning of an id, so each ends with a point
        "rid": [f"{OURS}{message.number}-{i}." for i in range(len(drawn))],
        "input_ids": [list(prompt) for prompt in message.prompts],
        "sampling_params": [_drawing(message, i) for i in range(len(drawn))],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }
    if most:
        body["top_logprobs_num"] = most
    lines = api.stream("/generate", body, TOKEN_WITHIN_S)
    try:
        for line in lines:
            i = _index(line, len(drawn))
            one, begin = drawn[i], len(drawn[i].ids)
            was_stopped = one.stopped
            one.add(line, whole=whole)
            on_line(i, begin, drawn)
            if one.stopped and not was_stopped and not one.finish:
                api.post("/abort_request", {"rid": body["rid"][i]}, ASK_WITHIN_S)  # its last line follows
            if stopped():
                raise EngineError("it was cancelled")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang's answer is not a completion: {type(error).__name__} {error}") from error
    finally:
        lines.close()  # type: ignore[attr-defined] - a generator; closing it ends SGLang's requests
    return tuple(one.output() for one in drawn)


def _index(line: Any, many: int) -> int:
    if not isinstance(line, dict) or "error" in line:
        why = line.get("error") if isinstance(line, dict) else line
        raise EngineError(f"SGLang ended a request: {why.get('message') if isinstance(why, dict) else why}")
    i = line.get("index", 0)
    if not isinstance(i, int) or not 0 <= i < many:
        raise EngineError("SGLang answers a prompt that it was not given")
    return i


def _stop_text(message: Generate, prompt: Sequence[int], tokenizer: TokenizerFile) -> StopText | None:
    options = message.options
    if options is None or not options.stop_texts:
        return None
    if (read := tokenizer.read()) is None:
        raise EngineError("this checkpoint has no tokenizer.json, so no stop text can be found")
    return StopText(read, prompt, options.stop_texts, special=options.special, least=options.min_tokens)


def _drawing(message: Generate, i: int) -> dict[str, Any]:
    options = message.options
    one_by_one = message.streamed or (options is not None and bool(options.stop_texts))
    asked = None
    if message.streams:
        asked = Asked(len(message.prompts[i]), noise=(message.seed, message.streams[i]))
    return parameters(message, asked) | {
        "max_new_tokens": message.max_tokens,
        "sampling_seed": message.seeds[i] & _SEEDS,
        "stop_token_ids": list(message.stop_tokens),
        "stream_interval": 1 if one_by_one else REPORT_EVERY,
    }


def parameters(message: Generate | Judge | Score, asked: Asked | None) -> dict[str, Any]:
    """SGLang's parameters of a request that draws by the message's, beside what the plugin is asked for."""
    custom: dict[str, str] = {}
    if message.options is not None:
        custom[OPTIONS] = msgspec.json.encode(message.options).decode()
    if asked is not None:
        custom[ASKED] = msgspec.json.encode(asked).decode()
    more = {"custom_params": custom} if custom else {}
    return more | {"temperature": message.temperature, "top_p": message.top_p}
