"""Reads the fields of a request that say what the text of an answer must be: `response_format`, `structured_outputs`
and `tool_choice`. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from node.engines.structures import Structure, encode_structure
from node.gateway.parameters import BadRequest
from node.gateway.tool_calls import Forced

__all__ = ["Asked", "asked_structure", "forced_calls"]

_OFFERED = ("json", "json_object", "regex", "choice", "grammar")


class Asked(NamedTuple):
    """`structure`: as `SamplingOptions.structure`. `field`: of the request."""

    structure: str
    field: str


def asked_structure(body: Any) -> Asked | None:
    """What `response_format` or `structured_outputs` ask for. Raises `BadRequest`."""
    outputs = _read("structured_outputs", _outputs, body.structured_outputs)
    form = _read("response_format", _form, getattr(body, "response_format", None))
    if outputs is not None and form is not None:
        raise BadRequest(
            "structured_outputs: response_format says what the text must be; give one of them.", "structured_outputs"
        )
    return outputs or form


def forced_calls(choice: Any, tools: Sequence[Any], *, one: bool = False) -> tuple[Asked, Forced] | None:
    """What a `tool_choice` other than auto and none asks for, and how the calls are written. `one`: at most one call.
    Raises `BadRequest`."""
    if choice in (None, "auto", "none"):
        return None
    functions = [_function(tool) for tool in tools]
    by_name = {function["name"]: function for function in functions}
    if choice == "required" and by_name:
        calls = [_call_schema(function) for function in functions]
        schema = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        schema |= {"maxItems": 1} if one else {}
        return _json("tool_choice", schema), Forced(None)
    chosen = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = chosen.get("name") if isinstance(chosen, Mapping) else None
    if not isinstance(name, str) or name not in by_name:
        raise BadRequest("tool_choice: auto, none, required, or the function of one of the tools.", "tool_choice")
    return _json("tool_choice", _parameters(by_name[name])), Forced(name)


def _read(field: str, read: Any, value: Any) -> Asked | None:
    try:
        return None if value is None else read(field, value)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadRequest):
            raise
        raise BadRequest(f"{field}: {error}.", field) from error


def _outputs(field: str, value: Any) -> Asked:
    if not isinstance(value, Mapping):
        raise ValueError("an object with json, json_object, regex, choice or grammar")
    given = {name: each for name, each in value.items() if each not in (None, False)}
    if others := [str(name) for name in given if name not in _OFFERED]:
        raise ValueError(f"{others[0][:64]} is not offered; json, json_object, regex, choice or grammar")
    if isinstance(given.get("json"), str):
        given["json"] = json.loads(given["json"])
    return Asked(encode_structure(msgspec.convert(given, Structure)), field)


def _form(field: str, value: Any) -> Asked | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Asked(encode_structure(Structure(json_object=True)), field)
    schema = value.get("json_schema") if kind == "json_schema" else None
    inner = schema.get("schema") if isinstance(schema, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ValueError("a type of text, json_object, or json_schema with its json_schema.schema")
    return _json(field, inner)


def _json(field: str, schema: Mapping[str, Any]) -> Asked:
    try:
        return Asked(encode_structure(Structure(json=dict(schema))), field)
    except ValueError as error:
        raise BadRequest(f"{field}: {error}.", field) from error


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("tools: each needs a function with a name.", "tools")
    return function


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) and found else {"type": "object"}


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": dict(_parameters(function))}
    return {"type": "object", "properties": fields, "required": ["name", "parameters"], "additionalProperties": False}
