"""The generations and scorings that run in a vLLM. Its API server answers; callbacks run in the receiving thread."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from codec.routes import encode_routes
from node.engines.base import BASE_VERSION, Completion, DrawnTokens, EngineError, Prompt, SamplingParams, Span, Version
from node.engines.interface import FlightDone, FlightDraws, JudgeDone, ScoreDone
from node.engines.judgement import Claim, Judgement
from node.engines.vllm.links import PluginLink, wait
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Forget,
    Generate,
    Generated,
    Judge,
    Judged,
    Options,
    Output,
    Score,
    Scored,
    Told,
)

__all__ = ["Flights", "begin_judge", "begin_score"]


@dataclass(slots=True)
class _Flight:
    future: Future[Any]
    counts: list[int]


class Flights:
    """The generations that run. One thread begins and cancels them."""

    def __init__(self) -> None:
        self._flights: dict[int, _Flight] = {}

    def begin(
        self,
        front: PluginLink,
        flight: int,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        done: FlightDone,
        adapter: int = 0,
        draws: FlightDraws | None = None,
        version: Callable[[], Version] = lambda: BASE_VERSION,
    ) -> None:
        """Start one completion for each prompt. `done(flight, outcome)` and `draws` are called from another thread.
        `adapter`: its id in vLLM; 0: none. `version()`: what the engine holds, for `draws`.

        Raises `EngineError` when vLLM is gone, or its plugin is too old for the options.
        """
        ids = tuple(prompt.token_ids for prompt in prompts)
        seeds = tuple(_seed(sampling.seed, prompt.stream) for prompt in prompts)
        counts = [0] * len(prompts)

        held = version()

        def on_progress(message: Told) -> None:
            nonlocal held
            counts[:] = message.counts
            if draws is not None and message.drawn:
                with contextlib.suppress(EngineError):  # the adapter is gone: its sequences fail
                    held = version()
                tops = message.tops or (b"",) * len(message.drawn)
                parts = zip(message.drawn, tops, strict=True)
                draws(flight, [(i, DrawnTokens(at, ids, logs, held, top)) for (i, at, ids, logs), top in parts])

        def finish(future: Future[Any]) -> None:
            if self._flights.pop(flight, None) is not None:
                done(flight, _completions(future, prompts, getattr(front.hello, "experts", 0) if routes else 0))

        how = sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop_tokens, _options(front, sampling)
        noise: tuple[int, tuple[int, ...]] = (0, ())
        if sampling.extra.portable and sampling.temperature > 0.0:
            if not getattr(front.hello, "portable", False):
                raise EngineError("this vLLM cannot draw portably: it drafts tokens, or its plugin is old")
            noise = sampling.seed, tuple(prompt.stream for prompt in prompts)
        routes: tuple[int, ...] = ()
        if sampling.extra.routes:
            if not getattr(front.hello, "experts", 0):
                raise EngineError("this vLLM cannot tell routes: its model has no experts, or its plugin is old")
            routes = tuple(0 if prompt.routes else len(prompt.token_ids) - 1 for prompt in prompts)
        images = prompts[0].images  # all are of one sampling, which names them
        if images and not getattr(front.hello, "images", False):
            raise EngineError("this vLLM cannot read images: its model is of text alone, or its plugin is old")
        streamed = draws is not None and bool(getattr(front.hello, "tells", False))
        future = front.ask(
            lambda n: Generate(n, flight, ids, seeds, *how, *noise, adapter, routes, streamed, images),
            on_progress=on_progress,
        )
        self._flights[flight] = _Flight(future, counts)
        future.add_done_callback(finish)

    def cancel(self, front: PluginLink | None, flight: int) -> None:
        """Drop a flight. Does nothing for an unknown one."""
        if self._flights.pop(flight, None) is not None and front is not None:
            front.ask(lambda n: Forget(n, flight))

    def counts(self) -> dict[int, list[int]]:
        """Tokens so far of each prompt, by flight."""
        return {number: list(flight.counts) for number, flight in list(self._flights.items())}


def begin_score(
    front: PluginLink,
    version: str,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams,
    done: ScoreDone,
    adapter: int = 0,
) -> None:
    """Score `token_ids` after `prompt` under `version`, which the engine holds now (see `interface.ScoringEngine`). It
    is named as in the plugin's `Output`. `adapter`: as in `Flights.begin`.

    `done(outcome)` is called from another thread; with an `EngineError` when a commit fell into the scoring, because
    some tokens may have been read by the older weights and some by the newer.
    """
    ids = tuple(prompt), tuple(token_ids)
    how = sampling.temperature, sampling.top_p, sampling.widest_top_p, sampling.stop_tokens, _options(front, sampling)
    future = front.ask(lambda n: Score(n, *ids, *how, adapter))
    future.add_done_callback(lambda future: done(_scores(future, len(token_ids), version)))


def begin_judge(front: PluginLink, claim: Claim, done: JudgeDone, adapter: int = 0) -> None:
    """Judge a claim (see `interface.BackgroundEngine`). `done(outcome)` is called from another thread; with
    `PluginFailed` when the engine stopped in a rewind. `adapter`: as in `Flights.begin`."""
    if not getattr(front.hello, "replays" if claim.replay else "judges", False):
        raise EngineError("vLLM's plugin is older than this node: install it anew (docs/vllm.md)")
    sampling = claim.sampling
    borders = sampling.top_p, sampling.widest_top_p, sampling.tightest_top_p
    how = sampling.temperature, *borders, sampling.stop_tokens, _options(front, sampling)
    noise = (sampling.seed, claim.stream) if sampling.extra.portable else None
    more = claim.previous, claim.start, claim.replay, sampling.extra.portable
    future = front.ask(lambda n: Judge(n, claim.prompt, claim.token_ids, *how, noise, *more, adapter))
    future.add_done_callback(lambda future: done(_judgement(future, claim)))


def _judgement(future: Future[Any], claim: Claim) -> Judgement | EngineError:
    try:
        answer = wait(future, Judged, 0.0)
        given = claim.tokens if claim.replay else len(claim.token_ids)
        if len(answer.scores) != given:
            return EngineError(f"{len(answer.scores)} scores for {given} tokens")
        parts = (found[-claim.tokens :] for found in (answer.scores, answer.previous, answer.margins))
        return Judgement(_version(answer.version), *parts)
    except ValueError as error:
        return EngineError(f"the engine's answer is not a judgement: {error}")
    except EngineError as error:
        return error


def _completions(future: Future[Any], prompts: Sequence[Prompt], experts: int) -> list[Completion] | EngineError:
    """`experts`: of each layer, if routes were asked for; otherwise 0."""
    try:
        answer = wait(future, Generated, 0.0)
        if len(answer.outputs) != len(prompts):
            return EngineError(f"{len(answer.outputs)} completions for {len(prompts)} prompts")
        found = [_completion(output) for output in answer.outputs]
        if not experts:
            return found
        return [
            msgspec.structs.replace(completion, **_routes(output, prompt, experts))
            for completion, output, prompt in zip(found, answer.outputs, prompts, strict=True)
        ]
    except EngineError as error:
        return error


def _scores(future: Future[Any], count: int, version: str) -> tuple[float, ...] | EngineError:
    try:
        answer = wait(future, Scored, 0.0)
        if answer.version != version:
            return EngineError(f"the engine became {answer.version} while tokens were scored under {version}")
        if len(answer.logprobs) != count:
            return EngineError(f"{len(answer.logprobs)} scores for {count} tokens")
        return answer.logprobs
    except EngineError as error:
        return error


def _options(front: PluginLink, sampling: SamplingParams) -> Options | None:
    """The options for the plugin. Raises `EngineError` for an older plugin, which would ignore them."""
    if sampling.options is msgspec.UNSET:
        return None
    if not getattr(front.hello, "options", False):
        raise EngineError("vLLM's plugin is older than this node: install it anew (docs/vllm.md)")
    given = {name: getattr(sampling.options, name) for name in Options.__struct_fields__}
    return Options(**given)


def _version(text: str) -> Version:
    """The version that a name of the plugin's `Output` stands for: the newer one of the base's and the adapter's."""
    found = []
    for name in text.split("/"):
        epoch, _, v = name.partition(".")
        if not (epoch.isdigit() and v.isdigit()):
            raise EngineError(f"the engine names a version {text!r}: another program changes its weights")
        found.append((int(epoch), int(v)))
    return max(found)


def _seed(seed: int, stream: int) -> int:
    """One seed from the sampling's seed and the prompt's stream. vLLM takes 63 bits."""
    words = np.random.SeedSequence((seed, stream)).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def _completion(output: Output) -> Completion:
    """Raises `EngineError` for a request that was aborted, or an answer that is not a completion."""
    if output.finish not in ("stop", "length"):
        raise EngineError(f"the engine ended a request with {output.finish!r}")
    spans = tuple(Span(_version(text), start, end) for text, start, end in output.spans)
    try:
        reason = "stop" if output.finish == "stop" else "length"
        return Completion(output.token_ids, output.logprobs, reason, spans, top=output.top, prompt_scores=output.scores)
    except ValueError as error:
        raise EngineError(f"the engine's answer is not a completion: {error}") from error


def _routes(output: Output, prompt: Prompt, experts: int) -> dict[str, bytes]:
    """The routes of a completion, coded. Raises `EngineError` where vLLM did not tell all of them."""
    before = len(prompt.token_ids) - 1 if prompt.routes else 0
    rows = before + len(output.token_ids)
    width = len(output.routes) // max(1, rows * output.layers * output.chosen)
    if not output.routes or width not in (1, 2) or width * rows * output.layers * output.chosen != len(output.routes):
        raise EngineError("vLLM did not tell which experts each token took")
    ids = np.frombuffer(output.routes, f"<u{width}").reshape(rows, output.layers, output.chosen)
    try:
        coded = [encode_routes(part, experts) for part in (ids[before:], ids[:before])]
    except ValueError as error:
        raise EngineError(f"the engine's answer is not routes: {error}") from error
    return {"routes": coded[0], "prompt_routes": coded[1] if prompt.routes else b""}
