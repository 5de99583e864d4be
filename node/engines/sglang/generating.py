"""One flight of completions, and one scoring, asked of SGLang in the form of its `/generate` route."""

from collections.abc import Callable
from typing import Any, Final

from node.engines.base import MIN_LOGPROB, EngineError
from node.engines.sglang.http import Api
from node.engines.sglang.plugin.swarm_sglang.rids import OURS, scoring
from node.engines.vllm.plugin.swarm_vllm.messages import Generate, Output, Score, Scored

__all__ = ["generate", "score"]

TOKEN_WITHIN_S: Final = 600.0
"""For the next tokens of a flight: requests may wait for others, or for a pause to end."""
REPORT_EVERY: Final = 16
"""Tokens of a request between two reports. SGLang repeats everything drawn so far in each."""
_SEEDS: Final = (1 << 63) - 1


def generate(
    api: Api, message: Generate, stopped: Callable[[], bool], on_counts: Callable[[list[int]], None]
) -> tuple[Output, ...]:
    """The completions of a flight, in order. `stopped`: nobody waits for them any more; asked at each report.

    `on_counts`: called with the tokens of each prompt so far. Raises `EngineError`.
    """
    many = len(message.prompts)
    last: list[dict[str, Any]] = [{} for _ in range(many)]
    counts = [0] * many
    body = {
        "rid": [f"{OURS}{message.number}-{i}" for i in range(many)],
        "input_ids": [list(prompt) for prompt in message.prompts],
        "sampling_params": [_drawing(message, seed) for seed in message.seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }
    lines = api.stream("/generate", body, TOKEN_WITHIN_S)
    try:
        for line in lines:
            i = _index(line, many)
            last[i] = line
            counts[i] = len(line["output_ids"])
            on_counts(counts)
            if stopped():
                raise EngineError("it was cancelled")
    except (KeyError, TypeError) as error:
        raise EngineError(f"SGLang's answer is not a completion: it lacks {error}") from error
    finally:
        lines.close()  # type: ignore[attr-defined] - a generator; closing it ends SGLang's requests
    return tuple(_output(line) for line in last)


def _index(line: Any, many: int) -> int:
    if not isinstance(line, dict) or "error" in line:
        why = line.get("error") if isinstance(line, dict) else line
        raise EngineError(f"SGLang ended a request: {why.get('message') if isinstance(why, dict) else why}")
    i = line.get("index", 0)
    if not isinstance(i, int) or not 0 <= i < many:
        raise EngineError("SGLang answers a prompt that it was not given")
    return i


def _drawing(message: Generate, seed: int) -> dict[str, Any]:
    return {
        "max_new_tokens": message.max_tokens,
        "temperature": message.temperature,
        "top_p": message.top_p,
        "sampling_seed": seed & _SEEDS,
        "stop_token_ids": list(message.stop_tokens),
        "stream_interval": REPORT_EVERY,
    }


def _output(line: dict[str, Any]) -> Output:
    """Raises `EngineError` for an answer that is not a whole completion."""
    try:
        meta = line["meta_info"]
        ids = tuple(int(token) for token in line["output_ids"])
        logprobs = tuple(min(0.0, max(MIN_LOGPROB, float(entry[0]))) for entry in meta["output_token_logprobs"])
        finish = meta["finish_reason"]["type"]
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in meta["weight_versions"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang's answer is not a completion: {type(error).__name__} {error}") from error
    return Output(ids, logprobs, finish if finish in ("stop", "length") else "abort", spans)


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
