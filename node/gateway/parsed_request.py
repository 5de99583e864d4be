"""Turns a request body in OpenAI's or vLLM's format into prompts and sampling parameters.

`node.gateway.parameters` lists what happens with each field, and refuses those that are not offered. This module gives
the others their effect.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from blake3 import blake3

from node.engines.base import (
    ADAPTERS,
    EXACT_SEED,
    IMAGES,
    MAX_IMAGES,
    MAX_STOP_TEXTS,
    PROMPT_LOGPROBS,
    ROUTES,
    STRUCTURES,
    TOP_LOGPROBS,
    SamplingOptions,
    SamplingParams,
)
from node.engines.images import digest_of
from node.engines.prompt_scores import scores_bytes
from node.gateway.image_parts import check_places, read_messages
from node.gateway.logprob_fields import Logprobs, of_chat, of_completion, of_prompt, of_tokens
from node.gateway.parameters import BadRequest
from node.gateway.structure_fields import Asked, asked_structure, forced_calls
from node.gateway.text import BadText, Text
from node.gateway.tool_calls import ToolSyntax, plain_arguments
from node.gateway.wanted_version import WantedVersion
from node.ledger.message_content import NotText
from node.ledger.messages import MAX_TOKENS
from node.ledger.model_limits import ModelLimits
from node.ledger.packing import pack_tokens

__all__ = ["BadRequest", "ParsedRequest", "parse_chat", "parse_completion", "parse_tokens"]

MAX_PROMPTS: Final = 256
"""Prompts of one request: each has a sample at least."""
MAX_SAMPLES: Final = 256
"""Samples of one request, over all its prompts."""
MAX_MESSAGES: Final = 8192
"""Messages of a conversation: a template is a program, and takes some ten microseconds for each."""
MAX_BAD_WORDS: Final = 128
MAX_SCORES_BYTES: Final = 64 << 20
"""Of the scores of the prompts of all samples of one request: 4,000,000 tokens with the likeliest one each."""
MAX_NAME: Final = 256
"""Characters of the name of a session or a request."""
LEAST_TEMPERATURE: Final = 0.01
"""The lowest temperature other than 0: vLLM would sample at this one if a lower one was asked for."""
DEFAULT_MAX_TOKENS: Final = 4096
"""The default of `max_tokens` where neither the request nor the model's config.json bounds an answer."""
_NOT_READ: Final = "the model's chat template does not read it, so it would change nothing."


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed request: each of `prompts` (token ids) is sampled `n` times."""

    model: str
    prompts: tuple[Sequence[int], ...]
    n: int
    sampling: SamplingParams
    logprobs: bool
    stream: bool
    usage: bool
    """End a stream with the numbers of tokens."""
    usage_so_far: bool
    """Give them with each event of a stream, too: those of its choice so far."""
    affinity: bytes
    """A hash of its session's name, or empty."""
    asked: tuple[str, ...] = ()
    """The fields that only some engines can do."""
    keep_stop: bool = False
    """The text includes the stop text or stop token."""
    show_special: bool = False
    """The text includes special tokens."""
    tokens_as_ids: bool = False
    """Tokens with log-probabilities are written by number."""
    request_id: str = ""
    """The client's name for this request, or empty."""
    tools: ToolSyntax | None = None
    """The syntax in which calls of tools are found in the text; None: they are not looked for."""
    wanted: WantedVersion | None = None
    """The versions that tokens may be from; None: those that the gateway's `max_lag` allows."""
    echo: tuple[str, ...] = ()
    """What the text of an answer begins with: one for each prompt; empty: with its first token."""
    echo_logprobs: int | None = None
    """`logprobs` begins with the prompt's tokens, with so many of the likeliest tokens beside each; None: it begins
    with the first token that was drawn."""
    prompt_logprobs: int | None = None
    """As `SamplingOptions.prompt_logprobs`, for the field of that name in the answer; None: it has no such field."""
    prompt_only: bool = False
    """The answer is about the prompt. It has none of the tokens that are drawn."""
    prompt_text: str | None = None
    """The field of that name in the answer; None: it has none."""
    stream_interval: int = 1
    """Tokens of each event of a stream, at least, except a choice's first and last event."""
    one_call: bool = False
    """An answer has at most one call of a tool."""
    routes_from: int | None = None
    """The token of the prompt from which on the answer has routes; None: it has none."""
    images: tuple[bytes, ...] = ()
    """The encoded images of the prompt, whose digests the sampling has."""
    again: bool = False
    """A seed that ended has let it in: it is not refused because others came before it to the next one."""

    def field_for(self, ability: str) -> str | None:
        """The field that needs `ability` of an engine."""
        fields = {EXACT_SEED: "seed", ADAPTERS: "model", ROUTES: "return_routed_experts", IMAGES: "messages"}
        several = {
            TOP_LOGPROBS: ("top_logprobs", "logprobs"),
            PROMPT_LOGPROBS: ("prompt_logprobs", "echo"),
            STRUCTURES: ("tool_choice", "structured_outputs", "response_format"),
        }
        if ability in several:
            return next(name for name in several[ability] if name in self.asked)
        return fields.get(ability) or next(iter(self.asked), None)

    @property
    def scores_bytes(self) -> int:
        """The memory of the scores of the prompts in all samples."""
        k = self.sampling.extra.prompt_logprobs
        return self.n * sum(scores_bytes(len(prompt), k) for prompt in self.prompts)


def parse_completion(body: Any, text: Text, session: str = "", *, exact: bool = True) -> ParsedRequest:
    """The request in the body of /v1/completions. `session`: its name in a header. `exact`: a seed must give the same
    tokens every time. Raises `BadRequest`."""
    most = 16 if body.max_tokens is None else body.max_tokens
    prompt_only = bool(body.echo) and most == 0  # as OpenAI and vLLM: the texts are scored, not continued
    logprobs = of_completion(body, prompt_only=prompt_only)
    special = body.add_special_tokens is not False
    with _about("prompt"):
        prompt = body.prompt
        if isinstance(prompt, str):
            prompts = [text.encode(prompt, special=special)]
        elif prompt and all(isinstance(part, int) for part in prompt):
            prompts = [tuple(part for part in prompt if isinstance(part, int))]
        elif not prompt or len(prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt: a text, token ids, or a list of 1 to {MAX_PROMPTS} of these.")
        else:
            prompts = [_tokens(part, text, special) for part in prompt]
    parsed = _parse_common(body, prompts, 1 if prompt_only else most, logprobs, text, session, exact)
    if not body.echo:
        return parsed
    return msgspec.structs.replace(parsed, echo=_echo(body, text, parsed), prompt_only=prompt_only)


def _echo(body: Any, text: Text, parsed: ParsedRequest) -> tuple[str, ...]:
    """The texts of the prompts: as they were given, or those of their tokens."""
    given = body.prompt if isinstance(body.prompt, list) and isinstance(body.prompt[0], str | list) else [body.prompt]
    cut = body.truncate_prompt_tokens is not None
    return tuple(
        one if isinstance(one, str) and not cut else text.decode((), prompt, special=parsed.show_special)
        for one, prompt in zip(given, parsed.prompts, strict=True)
    )


def parse_chat(
    body: Any, text: Text, session: str = "", *, exact: bool = True, most_images: int = MAX_IMAGES
) -> ParsedRequest:
    """The request in the body of /v1/chat/completions; see `parse_completion`. `most_images`: that it may have. Raises
    `BadRequest`, `BadText`."""
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_tokens != most:
        raise BadRequest("max_completion_tokens: max_tokens says another number.", "max_completion_tokens")
    with _about("messages"):
        if not 1 <= len(body.messages) <= MAX_MESSAGES:
            raise BadRequest(f"messages: 1 to {MAX_MESSAGES}.")
        messages, images = read_messages([plain_arguments(message) for message in body.messages], most_images)
    open_ended = bool(body.continue_final_message)
    variables = _variables(body, text)
    with _about("messages"):
        rendered = text.render(messages, open_ended=open_ended, **variables)
        prompts = [text.encode(rendered, special=bool(body.add_special_tokens))]
    if images:
        check_places(body, text, prompts[0], len(images))
    logprobs = of_chat(body)
    one_call = body.parallel_tool_calls is False
    forced = forced_calls(body.tool_choice, variables.get("tools") or (), one=one_call)
    if forced is not None and asked_structure(body) is not None:
        raise BadRequest("tool_choice: response_format says what the text must be; give one of them.", "tool_choice")
    structure = None if forced is None else forced[0]
    parsed = _parse_common(body, prompts, most, logprobs, text, session, exact, structure=structure)
    if images:
        sampling = parsed.sampling.with_options(images=tuple(map(digest_of, images)))
        asked = (*parsed.asked, "messages")
        parsed = msgspec.structs.replace(parsed, sampling=sampling, asked=asked, images=images)
    tools = None if "tools" not in variables else text.tool_syntax if forced is None else forced[1]
    last = messages[-1] if body.echo else {}
    echo = last["content"] if last.get("role") == "assistant" and isinstance(last.get("content"), str) else ""
    more: dict[str, Any] = {"tools": tools, "echo": (echo,) if echo else (), "one_call": one_call}
    if body.return_prompt_text:
        cut = body.truncate_prompt_tokens is not None
        more["prompt_text"] = text.decode((), parsed.prompts[0], special=True) if cut else rendered
    return msgspec.structs.replace(parsed, **more)


def parse_tokens(body: Any, text: Text, session: str = "", *, exact: bool = True) -> ParsedRequest:
    """The request in the body of /inference/v1/generate; see `parse_completion`. Raises `BadRequest`."""
    if not body.token_ids:
        raise BadRequest("token_ids: at least one.", "token_ids")
    sampling = body.sampling_params
    logprobs = of_tokens(sampling)
    prompts = [tuple(body.token_ids)]
    try:
        return _parse_common(sampling, prompts, sampling.max_tokens, logprobs, text, session, exact, outer=body)
    except BadRequest as error:
        here = error.param in {field.name for field in msgspec.structs.fields(sampling)}
        raise BadRequest(str(error), f"sampling_params.{error.param}" if here else error.param) from error


@contextmanager
def _about(param: str) -> Iterator[None]:
    """Names this field in the errors of the block that name none."""
    try:
        yield
    except NotText as error:
        raise BadRequest(str(error), error.where) from error
    except BadText as error:
        raise BadRequest(str(error), param) from error
    except BadRequest as error:
        raise BadRequest(str(error), error.param or param) from error


def _variables(body: Any, text: Text) -> dict[str, Any]:
    """The variables for the chat template, besides the messages."""
    given: dict[str, Any] = {}
    if body.tools and body.tool_choice != "none":
        given["tools"] = body.tools
    for name in ("documents", "reasoning_effort", "add_generation_prompt"):
        if getattr(body, name) is not None:
            given[name] = getattr(body, name)
    for name in given:
        is_default = name == "add_generation_prompt" and given[name]
        if not is_default and not text.reads(name):
            raise BadRequest(f"{name}: {_NOT_READ}", name)
    more = body.chat_template_kwargs or {}
    for name in more:
        if name in given or name in ("messages", "tools", "documents"):
            raise BadRequest(f"chat_template_kwargs: {name[:64]} has a field of its own.", "chat_template_kwargs")
        if not text.reads(name):
            raise BadRequest(f"chat_template_kwargs: {name[:64]}: {_NOT_READ}", "chat_template_kwargs")
    found = {"add_generation_prompt": not body.continue_final_message} | given | more
    if body.continue_final_message and found["add_generation_prompt"]:
        why = "the last message cannot be continued after a generation prompt: set add_generation_prompt to false."
        raise BadRequest(f"continue_final_message: {why}", "continue_final_message")
    return found


def _parse_common(
    body: Any,
    prompts: Sequence[tuple[int, ...]],
    most: int | None,
    logprobs: Logprobs,
    text: Text,
    session: str,
    exact: bool,
    outer: Any = None,
    structure: Asked | None = None,
) -> ParsedRequest:
    """Parses the fields that all endpoints share. `body` has those of the sampling, and `outer` the others, if they are
    in another object. `structure`: what `tool_choice` asks for."""
    outer = body if outer is None else outer
    n = 1 if body.n is None else body.n
    if not 1 <= n * len(prompts) <= MAX_SAMPLES:
        raise BadRequest(f"n: 1 to {MAX_SAMPLES} samples in one request.", "n")
    where = next(name for name in ("prompt", "messages", "token_ids") if hasattr(outer, name))
    if not min(map(len, prompts)):
        raise BadRequest(f"{where}: at least one token.", where)
    if not all(0 <= token < 1 << 32 for prompt in prompts for token in prompt):
        raise BadRequest(f"{where}: token ids are whole numbers from 0 to 2^32 - 1.", where)
    prompts, most = _fitted(body, prompts, most, text.limits, where)
    options, asked = _options(body, text, exact)
    routes_from = _routes_from(body, min(map(len, prompts)))
    if routes_from is not None:
        options, asked = msgspec.structs.replace(options, routes=True), (*asked, "return_routed_experts")
    if (structure := structure or asked_structure(body)) is not None:
        _check_alone(body, structure.field)
        options = msgspec.structs.replace(options, structure=structure.structure)
        asked = (*asked, structure.field)
    if logprobs.top:
        options, asked = msgspec.structs.replace(options, top_logprobs=logprobs.top), (*asked, logprobs.field)
    if (scored := of_prompt(body, outer, logprobs)) is not None:
        options = msgspec.structs.replace(options, prompt_logprobs=scored)
        asked = (*asked, "echo" if body.prompt_logprobs is None else "prompt_logprobs")
    stop_ids = tuple(body.stop_token_ids or ())
    name = session or _own(outer, "session_id") or _own(outer, "prompt_cache_key") or _own(outer, "user") or ""
    try:
        sampling = SamplingParams(
            max_tokens=most,
            temperature=_temperature(body.temperature),
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 63),
            stop_tokens=tuple(dict.fromkeys((*(() if body.ignore_eos else text.stop_tokens), *stop_ids))),
            options=options if asked else msgspec.UNSET,
        )
    except ValueError as error:
        raise _out_of_range(str(error)) from error
    parsed = ParsedRequest(
        model=outer.model or "",
        prompts=tuple(prompts),
        n=n,
        sampling=sampling,
        logprobs=logprobs.sampled,
        stream=bool(_own(outer, "stream")),
        usage=_usage(outer),
        usage_so_far=bool((_own(outer, "stream_options") or {}).get("continuous_usage_stats")),
        stream_interval=_interval(outer),
        affinity=blake3(name[:MAX_NAME].encode()).digest(16) if name else b"",
        asked=asked,
        keep_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        tokens_as_ids=bool(_own(outer, "return_tokens_as_token_ids")),
        request_id=(outer.request_id or "")[:MAX_NAME],
        routes_from=routes_from,
        echo_logprobs=logprobs.echoed,
        prompt_logprobs=body.prompt_logprobs,
    )
    if parsed.scores_bytes > MAX_SCORES_BYTES:
        why = f"the log-probabilities of these prompts take {parsed.scores_bytes >> 20} MiB, and those of one request "
        why += f"at most {MAX_SCORES_BYTES >> 20} MiB: send fewer prompts or samples at once."
        raise BadRequest(f"{asked[-1]}: {why}", asked[-1])
    return parsed


def _check_alone(body: Any, field: str) -> None:
    """Raises `BadRequest` for what could leave no token to draw beside a structure, or never end its text."""
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise BadRequest(
                f"{name}: not with {field}, which decides which tokens may come, and when the text ends.", name
            )


def _routes_from(body: Any, shortest: int) -> int | None:
    """See `ParsedRequest.routes_from`. `shortest`: tokens of the shortest prompt."""
    start = body.routed_experts_prompt_start or 0
    if not body.return_routed_experts:
        if start:
            why = "nothing begins there without return_routed_experts."
            raise BadRequest(f"routed_experts_prompt_start: {why}", "routed_experts_prompt_start")
        return None
    if not 0 <= start <= shortest:
        raise BadRequest(f"routed_experts_prompt_start: 0 to {shortest}.", "routed_experts_prompt_start")
    return start


def _fitted(
    body: Any, prompts: Sequence[tuple[int, ...]], most: int | None, limits: ModelLimits, where: str
) -> tuple[Sequence[tuple[int, ...]], int]:
    """The prompts, truncated if that is asked for, and `max_tokens`. `where`: the field of the prompts.

    Raises `BadRequest` for what is beyond `limits`, which also hold for `rollouts`.
    """
    field = "max_tokens" if _own(body, "max_completion_tokens") is None else "max_completion_tokens"
    reads = 2 * MAX_TOKENS if limits.context is None else limits.context
    prompts = _truncated(body, prompts, min(reads - (most or 1), MAX_TOKENS))
    longest = max(map(len, prompts))
    if longest > MAX_TOKENS:
        raise BadRequest(f"{where}: it has {longest:,} tokens; at most {MAX_TOKENS:,} can be sent.", where)
    room = min(reads - longest, MAX_TOKENS)
    if most is None:
        most = room if limits.context is not None else DEFAULT_MAX_TOKENS
    if most < 1 and room >= 1:
        raise BadRequest(f"{field}: at least 1{', or 0 with echo' if where == 'prompt' else ''}.", field)
    if most > MAX_TOKENS:
        raise BadRequest(f"{field}: at most {MAX_TOKENS:,}.", field)
    for prompt in prompts:
        if (lacks := limits.why_not(pack_tokens(prompt), max(1, most))) is not None:
            fits = limits.why_not(pack_tokens(prompt), 1) is None
            raise BadRequest(lacks if fits else f"{where}: {lacks}", field if fits else where)
    return prompts, most


def _own(body: Any, name: str) -> Any:
    """The value of a field that not every endpoint has."""
    return getattr(body, name, None)


def _options(body: Any, text: Text, exact: bool) -> tuple[SamplingOptions, tuple[str, ...]]:
    """The options that only some engines can do, and the names of the fields that ask for them."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOP_TEXTS:
        raise BadRequest(f"stop: at most {MAX_STOP_TEXTS} texts.", "stop")
    if stops and not text.has_tokenizer:
        raise BadRequest("stop: this model's base has no tokenizer.json, and so no text. Use stop_token_ids.", "stop")
    given = {
        "min_tokens": body.min_tokens or 0,
        "top_k": 0 if body.top_k in (None, -1) else body.top_k,
        "min_p": body.min_p or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": 1.0 if body.repetition_penalty is None else body.repetition_penalty,
        "logit_bias": _biases(body.logit_bias or {}),
        "allowed_token_ids": tuple(sorted(set(body.allowed_token_ids or ()))),
        "bad_words": _banned(body.bad_words or [], text),
        "stop": stops,
        "seed": body.seed is not None,
    }
    if body.allowed_token_ids == []:
        raise BadRequest("allowed_token_ids: at least one, or nothing could be drawn.", "allowed_token_ids")
    plain = SamplingOptions()
    names = {"allowed_token_ids": "allowed", "bad_words": "banned", "stop": "stop_texts", "seed": "seeded"}
    values = {names.get(name, name): value for name, value in given.items()}
    asked = tuple(name for name in given if values[names.get(name, name)] != getattr(plain, names.get(name, name)))
    try:
        special = bool(stops) and body.skip_special_tokens is False
        return SamplingOptions(**values, special=special, exact=exact and given["seed"]), asked
    except ValueError as error:
        raise _out_of_range(str(error)) from error


def _out_of_range(why: str) -> BadRequest:
    """Replaces the field names of `SamplingParams` and `SamplingOptions`, which begin their errors."""
    name, _, rest = why.partition(":")
    name = {"allowed": "allowed_token_ids", "banned": "bad_words", "stop_tokens": "stop_token_ids"}.get(name, name)
    return BadRequest(f"{name}:{rest}.", name)


def _temperature(given: float | None) -> float:
    if given is not None and 0.0 < given < LEAST_TEMPERATURE:
        raise BadRequest(f"temperature: 0, or at least {LEAST_TEMPERATURE}.", "temperature")
    return 1.0 if given is None else given


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        found = {int(token): bias for token, bias in given.items() if token.isascii() and token.isdigit()}
    except ValueError:  # more digits than Python reads
        found = {}
    if len(found) != len(given):
        raise BadRequest("logit_bias: its keys are token ids, each once.", "logit_bias")
    return tuple(sorted(found.items()))


def _banned(words: Sequence[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """As vLLM: the tokens of each word, and those after a space if these begin with another token."""
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest(f"bad_words: at most {MAX_BAD_WORDS}.", "bad_words")
    found: list[tuple[int, ...]] = []
    with _about("bad_words"):
        for word in words:
            alone = text.encode(word.lstrip(), special=False)
            if not alone:
                raise BadRequest("bad_words: each needs at least one token.")
            found.append(alone)
            spaced = text.encode(" " + word.lstrip(), special=False)
            if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
                found.append(spaced)
    return tuple(dict.fromkeys(found))


def _truncated(body: Any, prompts: Sequence[tuple[int, ...]], room: int) -> Sequence[tuple[int, ...]]:
    kept = _own(body, "truncate_prompt_tokens")
    if kept is None:
        if _own(body, "truncation_side") is not None:
            raise BadRequest("truncation_side: nothing is cut off without truncate_prompt_tokens.", "truncation_side")
        return prompts
    if kept == -1:
        kept = max(1, room)
    if not 1 <= kept <= MAX_TOKENS:
        raise BadRequest("truncate_prompt_tokens: at least 1, or -1.", "truncate_prompt_tokens")
    if body.truncation_side == "right":
        return [prompt[:kept] for prompt in prompts]
    return [prompt[-kept:] for prompt in prompts]


def _usage(body: Any) -> bool:
    options = _own(body, "stream_options") or {}
    if any(options.values()) and not _own(body, "stream"):
        raise BadRequest("stream_options: only of a stream.", "stream_options")
    known = ("include_usage", "continuous_usage_stats")
    if unknown := [name for name, value in options.items() if name not in known and value]:
        raise BadRequest(f"stream_options: {unknown[0][:64]} is not offered.", "stream_options")
    if options.get("continuous_usage_stats") and not options.get("include_usage"):
        raise BadRequest("stream_options: continuous_usage_stats only with include_usage.", "stream_options")
    return bool(options.get("include_usage"))


def _interval(body: Any) -> int:
    interval = _own(body, "stream_interval")
    if interval is not None and not 1 <= interval <= MAX_TOKENS:
        raise BadRequest(f"stream_interval: 1 to {MAX_TOKENS:,} tokens.", "stream_interval")
    return interval or 1


def _tokens(part: int | str | list[int], text: Text, special: bool) -> tuple[int, ...]:
    if isinstance(part, str):
        return text.encode(part, special=special)
    if isinstance(part, int):
        raise BadRequest("prompt: token ids, or a list of texts and lists of token ids, but not both.")
    return tuple(part)
