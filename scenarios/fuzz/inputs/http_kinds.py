"""Kinds of HTTP requests: heads line by line, and JSON bodies of the gateway's own types."""

from typing import Any, Final

import msgspec

from node.gateway import bodies
from node.gateway.parameters import ENDPOINTS, PARAMETERS
from scenarios.fuzz.inputs.fields import Field, Kind, fields_of
from scenarios.fuzz.inputs.values import Mutation

__all__ = ["BODIES", "KEY", "body_kinds", "head_kind"]

KEY: Final = "sesame"
IMAGE: Final = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4"
"""The header of a PNG of two by two pixels."""

_SAMPLES: Final[dict[str, Any]] = {
    "model": "policy",
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "temperature": 0,
    "prompt": ["abc"],
    "messages": [{"role": "user", "content": "abc"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
    "token_ids": [1, 2, 3],
    "stop": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": False,
    "stream": False,
    "stream_options": {"include_usage": False},
    "chat_template_kwargs": {"k": 1},
    "return_routed_experts": False,
    "routed_experts_prompt_start": 0,
    "min_version": [0, 0],
    "exact_version": [0, 1],
    "echo": False,
    "response_format": {"type": "text"},
    "structured_outputs": None,
}
"""Values of parameters whose example in `PARAMETERS` does not fit together with the other examples."""


def _sample(endpoint: str) -> dict[str, Any]:
    """Return a body with every field and no value that the gateway refuses."""
    found: dict[str, Any] = {}
    for row in PARAMETERS:
        if endpoint in row.on:
            example = row.example if row.happens != "refused" else next(iter(row.nothing), None)
            found[row.name] = _SAMPLES.get(row.name, example)
    if endpoint == "generate":
        found["sampling_params"] = _sample("sampling_params")
    return _copied(found)


def _copied(sample: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sample))


BODIES: Final[dict[type, tuple[str, dict[str, Any]]]] = {
    bodies.BODIES[endpoint]: (ENDPOINTS[endpoint], _sample(endpoint))
    for endpoint in ("completions", "chat", "generate")
}

_DEEP_JSON: Final = msgspec.Raw(b"[" * 5000 + b"]" * 5000)
_JSON_ONLY: Final = (
    Mutation("a lone surrogate, escaped", lambda old, rng: msgspec.Raw(b'"\\ud800"')),
    Mutation("half an escape", lambda old, rng: msgspec.Raw(b'"\\u12"')),
    Mutation("1e999", lambda old, rng: msgspec.Raw(b"1e999")),
    Mutation("-1e999", lambda old, rng: msgspec.Raw(b"-1e999")),
    Mutation("a number of 400 digits", lambda old, rng: msgspec.Raw(b"1" * 400)),
    Mutation("a number of 5000 digits", lambda old, rng: msgspec.Raw(b"1" * 5000)),
    Mutation("NaN", lambda old, rng: msgspec.Raw(b"NaN")),
    Mutation("no text", lambda old, rng: msgspec.Raw(b'"\xff\xfe"')),
    Mutation("nested deep", lambda old, rng: _DEEP_JSON),
    Mutation("maps nested deep", lambda old, rng: msgspec.Raw(b'{"a":' * 5000 + b"1" + b"}" * 5000)),
    Mutation("a long text", lambda old, rng: "a " * 2000),
    Mutation("a long list", lambda old, rng: [1] * 5000),
    Mutation("many texts", lambda old, rng: ["abc"] * 256),
    Mutation("a text with nothing in it", lambda old, rng: "\0\n\ufeff"),
    Mutation("a template", lambda old, rng: "{{ 1/0 }}{% for %}"),
)


def _json_fields(kind: type, sample: Any, name: str) -> tuple[Field, ...]:
    """Return the fields of a JSON body, with mutations that JSON can encode and those that only JSON has."""
    return tuple(
        Field(field.name, field.path, (*(m for m in field.mutations if _json_can(m, field, sample)), *_JSON_ONLY))
        for field in fields_of(kind, sample, name)
    )


def _json_can(mutation: Mutation, field: Field, sample: Any) -> bool:
    import copy
    import random

    at = copy.deepcopy(sample)
    for step in field.path:
        at = at[step]
    try:
        value = mutation.change(at, random.Random(0))
    except (TypeError, ValueError):
        return False
    return (body := _written(value)) != b"\xc1" and len(body) < 1 << 21


def _written(value: Any) -> bytes:
    if isinstance(value, msgspec.Raw):
        return b"\xc1"
    if isinstance(value, list | dict) and any(
        isinstance(each, msgspec.Raw) for each in (value.values() if isinstance(value, dict) else value)
    ):
        return b"\xc1"
    return to_json(value)


def to_json(value: Any) -> bytes:
    """Encode as JSON; b"\\xc1" when JSON cannot express the value."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b"\xc1"


def _post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def body_kinds() -> list[Kind]:
    """Return a kind for each body of the gateway, one more for fields that no engine here supports, and one with a
    structure, which excludes other fields."""
    found: list[Kind] = []
    for cls, (path, sample) in BODIES.items():
        found.append(_body_kind(f"POST {path}", cls, path, sample))
        known = {field.name for field in found[-1].fields}
        more = _body_kind(f"POST {path}, more", cls, path, _with_more(sample))
        fields = tuple(field for field in more.fields if field.name not in known)
        found.append(Kind(more.name, fields, more.make, more.enclose, more.encode))
        found.append(_body_kind(f"POST {path}, structure", cls, path, _with_structure(sample)))
        if "messages" in sample:
            found.append(_body_kind(f"POST {path}, images", cls, path, _with_images(sample)))
    return found


def _with_more(sample: Any) -> Any:
    found = _copied(sample)
    for name, value in (("prompt", [[1, 2, 3]]), ("features", {"a": 1}), ("content_parts", [1])):
        if name in found:
            found[name] = value
    return found


def _with_images(sample: Any) -> Any:
    """A conversation with an image, without the fields that do not go with it."""
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    own = {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}, image]}]}
    return _copied(sample) | own | {"truncate_prompt_tokens": None, "truncation_side": None}


def _with_structure(sample: Any) -> Any:
    """The text of each answer is one of two, and the answer begins with the prompt."""
    found = _copied(sample)
    if "sampling_params" in found:
        return found | {"sampling_params": _with_structure(found["sampling_params"])}
    own = {"structured_outputs": {"choice": ["a", "b"]}, "echo": True}
    alone = {"min_tokens": 0, "allowed_token_ids": None, "bad_words": None}
    return found | {name: value for name, value in (own | alone).items() if name in found}


def _body_kind(name: str, cls: type, path: str, sample: Any) -> Kind:
    return Kind(
        name,
        _json_fields(cls, sample, cls.__name__),
        lambda world: _copied(sample),
        lambda world, body: _post(path, body),
        to_json,
    )


# ---------------------------------------------------------------- heads

_PARTS: Final = (
    b"POST",
    b"/v1/completions",
    b"HTTP/1.1",
    b"Host: x",
    b"Authorization: Bearer sesame",
    b"Content-Type: application/json",
    b"Content-Length: 31",
    b'{"prompt":"abc","max_tokens":4}',
)
_NAMES: Final = ("method", "target", "version", "host", "key", "type", "length", "body")
_ANY: Final = tuple(
    Mutation(name, lambda old, rng, value=value: value)
    for name, value in {
        "empty": b"",
        "a space": b" ",
        "a zero": b"\0",
        "a line end": b"\r\n",
        "only a line feed": b"\n",
        "two line ends": b"\r\n\r\n",
        "folded": b"X: a\r\n b",
        "no text": b"\xff\xfe",
        "long": b"a" * 40_000,
        "very long": b"a" * 200_000,
        "a colon": b":",
        "no name": b": x",
        "no value": b"X:",
        "many": b"X: y\r\n" * 500,
        "percent": b"/%00%ff/..%2f",
        "up": b"/v1/../../etc/passwd",
        "an absolute target": b"http://evil/v1/models",
        "a star": b"*",
        "a question": b"/v1/models?x=" + b"y" * 1000,
        "models": b"/v1/models",
        "a model": b"/v1/models/\xc3",
        "health": b"/health",
        "generate": b"/inference/v1/generate",
        "chat": b"/v1/chat/completions",
        "GET": b"GET",
        "HEAD": b"HEAD",
        "CONNECT": b"CONNECT",
        "OPTIONS": b"OPTIONS",
        "TRACE": b"TRACE",
        "old": b"HTTP/1.0",
        "older": b"HTTP/0.9",
        "newer": b"HTTP/2.0",
        "no version": b"HTTP/x",
        "chunked": b"Transfer-Encoding: chunked",
        "zipped": b"Transfer-Encoding: gzip",
        "an upgrade": b"Upgrade: h2c",
        "expect": b"Expect: 100-continue",
        "close": b"Connection: close",
        "keep": b"Connection: keep-alive",
        "origin": b"Origin: http://x",
        "a session": b"X-Session-Id: " + b"s" * 5000,
        "session bytes": b"X-Session-Id: \xff",
        "another key": b"Authorization: Bearer \xff\xfe",
        "a key with a zero": b"Authorization: Bearer \xe2\x98\x83",
        "basic": b"Authorization: Basic eDp5",
        "length 0": b"Content-Length: 0",
        "length -1": b"Content-Length: -1",
        "length 30": b"Content-Length: 30",
        "length 32": b"Content-Length: 32",
        "a huge length": b"Content-Length: " + b"9" * 30,
        "a very huge length": b"Content-Length: " + b"9" * 5000,
        "8 MiB": b"Content-Length: 8388608",
        "over 8 MiB": b"Content-Length: 8388609",
        "a hex length": b"Content-Length: 0x1f",
        "a sign": b"Content-Length: +31",
        "two lengths": b"Content-Length: 31\r\nContent-Length: 31",
        "other lengths": b"Content-Length: 31\r\nContent-Length: 30",
        "chunks": b"1f\r\n" + _PARTS[-1] + b"\r\n0\r\n\r\n",
        "a huge chunk": b"ffffffffffffffff\r\n",
        "a second request": _PARTS[-1] + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        "text": b"Content-Type: text/plain",
        "a type with more": b"Content-Type: application/json; charset=\xff",
    }.items()
)
_ALL: Final = (
    *_ANY,
    Mutation("twice", lambda old, rng: old + old),
    Mutation("cut", lambda old, rng: old[: rng.randrange(len(old) + 1)] if isinstance(old, bytes) else b""),
    Mutation("a byte of it", lambda old, rng: old[:1] + bytes([rng.randrange(256)]) + old[1:]),
)
_WHOLE: Final = (
    Mutation("one left out", lambda old, rng: (i := rng.randrange(len(old))) is not None and old[:i] + old[i + 1 :]),
    Mutation("reversed", lambda old, rng: old[::-1]),
    Mutation("twice", lambda old, rng: old + old),
    Mutation("nothing", lambda old, rng: []),
)


def _head(parts: list[Any]) -> bytes:
    """Join the lines of a request without correcting anything."""
    found = [part if isinstance(part, bytes) else b"" for part in parts]
    line, headers, body = found[:3], found[3:-1], found[-1:]
    return b" ".join(line) + b"\r\n" + b"".join(each + b"\r\n" for each in headers) + b"\r\n" + b"".join(body)


def head_kind() -> Kind:
    """Return the kind of a request whose lines are mutated."""
    fields = (
        Field("head", (), _WHOLE),
        *(Field(f"head.{name}", (i,), _ALL) for i, name in enumerate(_NAMES)),
    )
    return Kind("request", fields, lambda world: list(_PARTS), lambda world, data: data, _head)
