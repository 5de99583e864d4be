"""Decodes the body of a request by the list of its fields, `node.gateway.parameters`."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.gateway.parameters import ENDPOINTS, PARAMETERS, BadRequest, Parameter

__all__ = ["BODIES", "parse"]

G: Final = "generate"
S: Final = "sampling_params"
_REQUIRED: Final = ("prompt", "messages", "token_ids", "sampling_params")


def _body(endpoint: str) -> type[msgspec.Struct]:
    rows = [row for row in PARAMETERS if endpoint in row.on]
    fields = [(row.name, row.kind) if row.name in _REQUIRED else (row.name, row.kind | None, None) for row in rows]
    return msgspec.defstruct(f"{endpoint.title()}Body", fields, kw_only=True, forbid_unknown_fields=True)


BODIES: Final = {endpoint: _body(endpoint) for endpoint in ("completions", "chat", S)}
"""The type of a body, by endpoint; see `parse`."""
_of_generate = _body(G)
BODIES[G] = msgspec.defstruct(
    "GenerateBody", [("sampling_params", BODIES[S])], bases=(_of_generate,), kw_only=True, forbid_unknown_fields=True
)
_DECODERS: Final = {endpoint: msgspec.json.Decoder(body) for endpoint, body in BODIES.items()}
_ROWS: Final[Mapping[str, tuple[Parameter, ...]]] = {
    endpoint: tuple(row for row in PARAMETERS if endpoint in row.on and row.happens == "refused")
    for endpoint in ENDPOINTS
}


def parse(endpoint: str, data: bytes | bytearray | memoryview) -> Any:
    """The body of a request to `endpoint`: one of `BODIES`, with None for missing fields. Raises `BadRequest`."""
    try:
        body: Any = unpack(_DECODERS[endpoint], memoryview(data), "The body cannot be read")
    except PeerError as error:
        raise _unreadable(str(error)) from error
    _refuse(endpoint, body)
    if endpoint == G:
        _refuse(S, body.sampling_params)
    return body


def _refuse(endpoint: str, body: Any) -> None:
    """Raises `BadRequest` for a refused field that asks for something."""
    for row in _ROWS[endpoint]:
        value = getattr(body, row.name)
        if value is None or value in row.nothing or (row.name == "best_of" and value == body.n):
            continue
        name = f"{S}.{row.name}" if endpoint == S else row.name
        raise BadRequest(f"{name} is not offered: {row.says}", name)


def _unreadable(error: str) -> BadRequest:
    """Names the field that an error of msgspec is about."""
    inside = f"{S}." if f"at `$.{S}" in error else ""
    if unknown := re.search(r"unknown field `([^`]{1,64})`", error):
        name = inside + unknown[1]
        return BadRequest(f"{name} is no field of this endpoint; docs/parameters.md lists those that are.", name)
    at = rf"- at `\$\.{inside}(\w{{1,64}})" if inside else r"- at `\$\.(\w{1,64})"
    found = re.search(at, error) or re.search(r"required field `(\w{1,64})", error)
    return BadRequest(f"{error}.", (inside + found[1] if found else inside.rstrip(".")) or None)
