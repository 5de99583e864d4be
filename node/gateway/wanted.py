"""What a client asks for, in OpenAI's words, checked: a request body -> prompts and how to sample them.

What is not known is ignored, as every server of this kind does; but what would change the samples and cannot be done
is refused with a sentence, because samples of another distribution than asked for are worse than none.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from node.engines.base import SamplingParams
from node.gateway.text import BadText, Text
from node.ledger.messages import MAX_TOKENS

__all__ = ["BadRequest", "Chat", "Completion", "Generate", "Wanted", "want_chat", "want_completion", "want_tokens"]

MAX_PROMPTS: Final = 256
MAX_SAMPLES: Final = 256
"""Of one request, over all its prompts."""
MAX_MESSAGES: Final = 8192
"""Of a conversation: a template is a program, and takes some ten microseconds for each."""
MAX_STOPS: Final = 16
MAX_SESSION: Final = 256
"""Characters of a session's name."""

Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BadRequest(ValueError):
    """The client can mend it; the message says how."""


class _Body(msgspec.Struct, kw_only=True):
    """What both kinds of request may say."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    # Only their neutral values are possible.
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None


class Completion(_Body, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class Chat(_Body, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Generate(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`: vLLM's endpoint for clients that make their own tokens."""

    token_ids: list[int]
    sampling_params: _Body
    model: str = ""
    features: dict[str, Any] | None = None
    content_parts: list[Any] | None = None


class Wanted(msgspec.Struct, frozen=True):
    """One request, understood. Each of `prompts` is sampled `n` times. `stops`: texts to cut the answers at.
    `affinity`: of its session, or empty."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool
    """Of a stream: end with what was used."""
    affinity: bytes


def want_completion(body: Completion, text: Text, session: str = "") -> Wanted:
    """Raises `BadRequest`. `session`: as a header named it."""
    if body.echo or body.suffix:
        raise BadRequest("echo and suffix are not offered.")
    if (body.logprobs or 0) > 1:
        raise BadRequest("logprobs: only those of the sampled tokens are known; ask for 1.")
    given = body.prompt
    if isinstance(given, str):
        prompts = [text.encode(given)]
    elif given and all(isinstance(part, int) for part in given):
        prompts = [tuple(part for part in given if isinstance(part, int))]
    elif not given or len(given) > MAX_PROMPTS:
        raise BadRequest(f"prompt: a text, token ids, or a list of 1 to {MAX_PROMPTS} of these.")
    else:
        prompts = [_tokens(part, text) for part in given]
    return _wanted(body, prompts, body.max_tokens or 16, body.logprobs is not None, text, session)


def want_chat(body: Chat, text: Text, session: str = "") -> Wanted:
    """Raises `BadRequest`, `BadText`. `session`: as a header named it."""
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise BadRequest(f"messages: 1 to {MAX_MESSAGES}.")
    if (body.top_logprobs or 0) > 0:
        raise BadRequest("top_logprobs: only those of the sampled tokens are known; leave it out.")
    messages = [message | {"content": _flat(message.get("content"))} for message in body.messages]
    more = {"add_generation_prompt": True} | (body.chat_template_kwargs or {})
    if {"messages", "tools"} & set(more):
        raise BadRequest("chat_template_kwargs: messages and tools have their own places.")
    rendered = text.render(messages, body.tools, **more)
    prompts = [text.encode(rendered, special=False)]
    most = body.max_completion_tokens or body.max_tokens
    return _wanted(body, prompts, most, bool(body.logprobs), text, session)


def want_tokens(body: Generate, text: Text, session: str = "") -> Wanted:
    """Raises `BadRequest`. Without `max_tokens`: as many as the model reads."""
    if body.features or body.content_parts:
        raise BadRequest("features, content_parts: only tokens can be read.")
    body.sampling_params.model, body.sampling_params.stream = body.model, False
    if not body.token_ids:
        raise BadRequest("token_ids: at least one.")
    prompts = [tuple(body.token_ids)]
    return _wanted(body.sampling_params, prompts, body.sampling_params.max_tokens, True, text, session)


def _wanted(
    body: _Body, prompts: Sequence[tuple[int, ...]], most: int | None, logprobs: bool, text: Text, session: str
) -> Wanted:
    _refuse_others(body)
    n = 1 if body.n is None else body.n
    if not 1 <= n * len(prompts) <= MAX_SAMPLES:
        raise BadRequest(f"n: 1 to {MAX_SAMPLES} samples in one request.")
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise BadRequest("prompt: at least one token.")
    if not all(0 <= token < 1 << 32 for prompt in prompts for token in prompt):
        raise BadRequest("prompt: token ids are whole numbers from 0.")
    room = min(text.context, MAX_TOKENS) - longest
    most = room if most is None else most
    if not 1 <= most <= room:
        raise BadRequest(
            f"The model reads {text.context} tokens; the prompt has {longest}, and {most} more were asked for."
        )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS or len(body.stop_token_ids or ()) > MAX_STOPS:
        raise BadRequest(f"stop, stop_token_ids: at most {MAX_STOPS}.")
    ends = () if body.ignore_eos else text.stop_tokens
    name = session or body.session_id or body.prompt_cache_key or body.user or ""
    try:
        sampling = SamplingParams(
            max_tokens=most,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 63),
            stop_tokens=tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ())))),
        )
    except ValueError as error:
        raise BadRequest(f"{error}.") from error
    return Wanted(
        model=body.model,
        prompts=tuple(prompts),
        n=n,
        sampling=sampling,
        stops=tuple(stop for stop in stops if stop),
        logprobs=logprobs,
        stream=bool(body.stream),
        usage=bool((body.stream_options or {}).get("include_usage")),
        affinity=blake3(name[:MAX_SESSION].encode()).digest(16) if name else b"",
    )


def _refuse_others(body: _Body) -> None:
    neutral: dict[str, tuple[Any, ...]] = {
        "presence_penalty": (None, 0.0),
        "frequency_penalty": (None, 0.0),
        "repetition_penalty": (None, 1.0),
        "logit_bias": (None, {}),
        "top_k": (None, 0, -1),
        "min_p": (None, 0.0),
        "min_tokens": (None, 0),
        "best_of": (None, 1, body.n),
        "response_format": (None, {"type": "text"}),
    }
    for name, values in neutral.items():
        if getattr(body, name) not in values:
            raise BadRequest(f"{name} is not offered: samples would not be those asked for.")


def _tokens(part: int | str | list[int], text: Text) -> tuple[int, ...]:
    if isinstance(part, str):
        return text.encode(part)
    if isinstance(part, int):
        raise BadRequest("prompt: token ids, or a list of texts and lists of token ids, but not both.")
    return tuple(part)


def _flat(content: Any) -> Any:
    """Content in parts, where all are text, as the one text that chat templates expect."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    said = [text for text in texts if isinstance(text, str)]
    if len(said) != len(content):
        raise BadText("messages: only text can be read.")
    return "".join(said)
