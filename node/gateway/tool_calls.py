"""Finds a model's calls of tools in its text, in the syntax that its chat template teaches it. Pure.

Two syntaxes are known: JSON between `<tool_call>` and `</tool_call>` (Qwen, Hermes and others), and a text that is one
JSON object or several, separated by semicolons (Llama 3). A call that is not what the syntax says stays text.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

__all__ = [
    "CallsInText",
    "Forced",
    "ToolCall",
    "ToolSyntax",
    "call_delta",
    "find_calls",
    "held_back",
    "plain_arguments",
    "syntax_of",
]


class Forced(NamedTuple):
    """The text is calls and nothing else, by `tool_choice`. `name`: the text is the arguments of this function; None:
    it is a list of objects with `name` and `parameters`."""

    name: str | None


ToolSyntax = Literal["tags", "json"] | Forced

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MOST_CALLS: Final = 128
"""Calls that are looked for in one text."""


class ToolCall(NamedTuple):
    """`arguments`: JSON, as OpenAI's clients read it."""

    name: str
    arguments: str

    def encode(self) -> dict[str, Any]:
        """As an item of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{os.urandom(12).hex()}", "type": "function", "function": function}


class CallsInText(NamedTuple):
    """`content`: the text before the calls, and what could not be read."""

    content: str
    calls: list[ToolCall]


def call_delta(index: int, call: ToolCall) -> dict[str, Any]:
    """The delta of a stream with one call, as OpenAI's own streams have them."""
    return {"tool_calls": [{"index": index} | call.encode()]}


def syntax_of(template: str | None) -> ToolSyntax | None:
    """The syntax of calls that a chat template teaches; None: it is not one of those that are known."""
    if template is None or "tools" not in template:
        return None
    if OPEN in template:
        return None if "<function=" in template else "tags"
    return "json" if '"parameters"' in template and "<|python_tag|>" in template else None


def find_calls(text: str, syntax: ToolSyntax, *, one: bool = False) -> CallsInText:
    """The calls in the text of a whole answer. `one`: only the first one; the others are left out, as by vLLM."""
    if isinstance(syntax, Forced):
        found = _find_forced(text, syntax)
    else:
        found = _find_tagged(text) if syntax == "tags" else _find_plain(text)
    return CallsInText(found.content, found.calls[:1]) if one else found


def held_back(text: str, syntax: ToolSyntax) -> int:
    """How many characters at the end of an unfinished text may belong to a call."""
    if isinstance(syntax, Forced):
        return len(text)
    if syntax == "json":
        return len(text) if not text.strip() or text.lstrip().startswith(("{", "<")) else 0
    if (at := text.find(OPEN)) >= 0:
        return len(text) - at
    return next((length for length in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:length])), 0)


def plain_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a conversation with the arguments of its calls as objects, as chat templates expect them; clients
    send them as JSON in a text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_plain_call(call) for call in calls]}


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _object(function["arguments"])
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def _find_tagged(text: str) -> CallsInText:
    before, *rest = text.split(OPEN, MOST_CALLS)
    content, calls = before, []
    for part in rest:
        inside, closed, after = part.partition(CLOSE)
        call = _call(inside, ("arguments", "parameters"))
        if call is None:
            content += OPEN + part
        else:
            calls.append(call)
            content += after if closed else ""
    return CallsInText(content.strip() if calls else text, calls)


def _find_forced(text: str, forced: Forced) -> CallsInText:
    """Text that was cut off in a call stays text."""
    if forced.name is not None:
        whole = _object(text)
        return CallsInText("", [ToolCall(forced.name, text.strip())]) if whole is not None else CallsInText(text, [])
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    calls = [_call(json.dumps(each), ("parameters", "arguments")) for each in found] if isinstance(found, list) else []
    known = [call for call in calls if call is not None]
    return CallsInText("", known) if known and len(known) == len(calls) else CallsInText(text, [])


def _find_plain(text: str) -> CallsInText:
    whole = text.strip().removeprefix("<|python_tag|>")
    parts = whole.split(";", MOST_CALLS) if _object(whole) is None else [whole]
    calls = [_call(part, ("parameters", "arguments")) for part in parts]
    found = [call for call in calls if call is not None]
    return CallsInText("", found) if found and len(found) == len(calls) else CallsInText(text, [])


def _call(text: str, names: tuple[str, str]) -> ToolCall | None:
    """The call in a JSON object, whose arguments have one of `names`."""
    found = _object(text)
    if found is None or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = next((found[name] for name in names if name in found), {})
    if isinstance(arguments, str) and _object(arguments) is not None:
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
