"""Tokens that were drawn before, by this engine or another one: scored in one pass, or replayed. Asked of SGLang in the
form of its `/generate` route."""

from typing import Any, Final

from node.engines.base import MIN_LOGPROB, EngineError
from node.engines.sglang.generating import TOKEN_WITHIN_S, parameters
from node.engines.sglang.http import Api
from node.engines.sglang.plugin.swarm_sglang.asked import MARK, OURS, Asked, Scoring
from node.engines.vllm.plugin.swarm_vllm.messages import Judge, Judged, Score, Scored
from node.verification.draws import MOST_MARGIN

__all__ = ["judge", "score"]

_MOST: Final = MARK + MOST_MARGIN


def score(api: Api, message: Score) -> Scored:
    """The scores of a text's tokens. Raises `EngineError`."""
    scores, _, version = _read(api, message, None)
    return Scored(message.number, scores, version)


def judge(api: Api, message: Judge) -> Judged:
    """The judgement of a claim, without scores under the version before. Raises `EngineError`."""
    if message.replay:
        return _replay(api, message)
    scores, margins, version = _read(api, message, message.noise)
    return Judged(message.number, version, scores, (), () if message.noise is None else margins)


def _read(
    api: Api, message: Score | Judge, noise: tuple[int, int] | None
) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """(scores, margins, the version) of one pass over the text."""
    tightest = message.tightest_top_p if isinstance(message, Judge) else 1.0
    by = Scoring(message.temperature, message.top_p, message.widest_top_p, tightest)
    asked = Asked(len(message.prompt), noise, by, stops=message.stop_tokens)
    drawing = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "ignore_eos": True}
    answer = _ask(api, message, asked, drawing, [*message.prompt, *message.token_ids])
    try:
        meta, count = answer["meta_info"], len(message.token_ids)
        entries, tops = meta["input_token_logprobs"][-count:], meta["input_top_logprobs"][-count:]
        # SGLang says 0 in the place of a vocabulary's last token.
        if not all(entry[1] in (0, token) for entry, token in zip(entries, message.token_ids, strict=True)):
            raise EngineError("SGLang scored other tokens")
        scores = tuple(float("-inf") if entry[0] is None else min(0.0, float(entry[0])) for entry in entries)
        margins = tuple(_margin(top) for top in tops)
        if len(margins) != count:
            raise ValueError("not one margin a token")
        return scores, margins, _version(meta)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang's answer is not scores: {type(error).__name__} {error}") from error


def _replay(api: Api, message: Judge) -> Judged:
    """The log-probabilities and margins of the tokens from `start` on, as they would have been drawn."""
    claimed = message.token_ids[message.start :]
    asked = Asked(len(message.prompt), message.noise, None, claimed, message.stop_tokens)
    drawing = {"max_new_tokens": len(claimed), "ignore_eos": True}
    answer = _ask(api, message, asked, drawing, [*message.prompt, *message.token_ids[: message.start]])
    try:
        meta = answer["meta_info"]
        if tuple(answer["output_ids"]) != claimed:
            raise EngineError("SGLang drew other tokens than it was to replay")
        scores = tuple(min(0.0, max(MIN_LOGPROB, float(entry[0]))) for entry in meta["output_token_logprobs"])
        margins = tuple(_margin(top) for top in meta["output_top_logprobs"])
        return Judged(message.number, _version(meta), scores, (), margins if message.portable else ())
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang's answer is not a replay: {type(error).__name__} {error}") from error


def _ask(api: Api, message: Score | Judge, asked: Asked, drawing: dict[str, Any], text: list[int]) -> Any:
    body = {
        "rid": f"{OURS}{message.number}-judged.",
        "input_ids": text,
        "sampling_params": parameters(message, asked) | drawing,
        "return_logprob": True,
        "logprob_start_len": -1 if asked.scoring is None else len(message.prompt) - 1,
        "top_logprobs_num": 1,
    }
    return api.post("/generate", body, TOKEN_WITHIN_S)


def _margin(top: Any) -> float:
    told = float(top[0][0])
    if told < MARK:
        raise EngineError("SGLang's plugin did not judge the tokens: install it again (docs/sglang.md)")
    if told > _MOST:
        raise EngineError("the engine became another version while it read the text")
    return told - MARK


def _version(meta: Any) -> str:
    spans = meta["weight_versions"]
    if meta["finish_reason"]["type"] == "abort" or len(spans) != 1:
        raise EngineError("the engine was stopped, or became another version, while it read the text")
    return str(spans[0]["version"])
