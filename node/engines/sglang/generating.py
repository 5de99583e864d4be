"""One flight of completions, and one scoring, asked of SGLang in the form of its `/generate` route."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from node.engines.base import MIN_LOGPROB, EngineError
from node.engines.sglang.http import Api
from node.engines.sglang.plugin.swarm_sglang.rids import OPTIONS, OURS, scoring
from node.engines.texts import StopText, TokenizerFile
from node.engines.vllm.plugin.swarm_vllm.messages import Generate, Output, Score, Scored

__all__ = ["Drawn", "generate", "score"]

TOKEN_WITHIN_S: Final = 600.0
"""For the next tokens of a flight: requests may wait for others, or for a pause to end."""
ASK_WITHIN_S: Final = 60.0
REPORT_EVERY: Final = 16
"""Tokens of a request between two lines, unless each is told as it is drawn, or may complete a stop text."""
_SEEDS: Final = (1 << 63) - 1


@dataclass(slots=True)
class Drawn:
    """What SGLang has told of one completion. `finish`: empty until its last line, which has the `spans`."""

    stop: StopText | None = None
    """Looks for stop texts; None: there are none."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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
        ids = [int(token) for token in line["output_ids"]]
        logprobs = [min(0.0, max(MIN_LOGPROB, float(entry[0]))) for entry in meta["output_token_logprobs"]]
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
        begin = len(self.ids) if whole else 0
        for token, logprob in zip(ids[begin:], logprobs[begin:], strict=True):
            self.ids.append(token)
            self.logprobs.append(logprob)
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
        return Output(tuple(self.ids), tuple(self.logprobs), "stop" if self.stopped else finish, spans)


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
    drawn = [Drawn(_stop_text(message, prompt, tokenizer)) for prompt in message.prompts]
    body: dict[str, Any] = {  # SGLang aborts by the beginning of an id, so each ends with a point
        "rid": [f"{OURS}{message.number}-{i}." for i in range(len(drawn))],
        "input_ids": [list(prompt) for prompt in message.prompts],
        "sampling_params": [_drawing(message, seed) for seed in message.seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }
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


def _drawing(message: Generate, seed: int) -> dict[str, Any]:
    options = message.options
    one_by_one = message.streamed or (options is not None and bool(options.stop_texts))
    more = {} if options is None else {"custom_params": {OPTIONS: msgspec.json.encode(options).decode()}}
    return more | {
        "max_new_tokens": message.max_tokens,
        "temperature": message.temperature,
        "top_p": message.top_p,
        "sampling_seed": seed & _SEEDS,
        "stop_token_ids": list(message.stop_tokens),
        "stream_interval": 1 if one_by_one else REPORT_EVERY,
    }


def score(api: Api, message: Score) -> Scored:
    """The scores of a text's tokens. Raises `EngineError`."""
    text = [*message.prompt, *message.token_ids]
    greedy = message.temperature == 0.0
    body = {
        "rid": scoring(message.number, message.widest_top_p),
        "input_ids": text,
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 1.0 if greedy else message.temperature,
            "top_p": 1.0 if greedy else message.top_p,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": len(message.prompt) - 1,
    }
    answer = api.post("/generate", body, TOKEN_WITHIN_S)
    try:
        entries = answer["meta_info"]["input_token_logprobs"][-len(message.token_ids) :]
        if [entry[1] for entry in entries] != list(message.token_ids):
            raise EngineError("SGLang scored other tokens")
        (span,) = answer["meta_info"]["weight_versions"]
        logprobs = tuple(float("-inf") if entry[0] is None else float(entry[0]) for entry in entries)
        return Scored(message.number, logprobs, str(span["version"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang's answer is not scores: {type(error).__name__} {error}") from error
