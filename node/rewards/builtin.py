"""The rewards that every release has. Each gives 1.0 or 0.0, and the same on every machine.

All read the expected answer from `metadata["answer"]`, a text, a number, or a list of these of which any one counts.
Without it they raise `KeyError`, so the sample comes without a reward, and with the reason.
"""

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

__all__ = ["BUILTIN", "exact_match", "json_valid", "last_number", "math_boxed"]

Metadata = Mapping[str, Any]

VERSION: Final = 1
"""Grows when one of these functions gives another number for some sample: nodes of two versions are told apart."""
MAX_DIGITS: Final = 64
"""Of a number that is compared by its value. Longer ones are compared as texts."""

_NUMBER: Final = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|(?<![\w.])-?\.\d+")
_FRACTION: Final = re.compile(r"(-?)\\[dt]?frac\{([^{}]{1,64})\}\{([^{}]{1,64})\}")
_DROPPED: Final = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\:|\\ |\\\$|\$|\\%|%|\s+")
_TEXT: Final = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_FENCE: Final = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def exact_match(prompt: str, completion: str, metadata: Metadata) -> float:
    """1.0 when the completion, without white space around it, is the answer."""
    return float(completion.strip() in [answer.strip() for answer in _answers(metadata)])


def last_number(prompt: str, completion: str, metadata: Metadata) -> float:
    """1.0 when the last number in the completion is the answer. Numbers are compared by their exact value, so `1,000`
    is `1000.0`, and `1/2` is `0.5`."""
    answers, found = _answers(metadata), _NUMBER.findall(completion)
    return float(bool(found) and any(_same(found[-1], answer) for answer in answers))


def math_boxed(prompt: str, completion: str, metadata: Metadata) -> float:
    r"""1.0 when the content of the last `\boxed{...}` in the completion is the answer.

    Both are compared as numbers (fractions of LaTeX too) where both are numbers, else as LaTeX without white space,
    `\left`, `\right`, dollar and percent signs, and with `\text{x}` as `x`, `\dfrac` and `\tfrac` as `\frac`.
    """
    answers, content = _answers(metadata), _boxed(completion)
    return float(content is not None and any(_same(content, answer) for answer in answers))


def json_valid(prompt: str, completion: str, metadata: Metadata) -> float:
    """1.0 when the completion is one JSON value, or its last fenced block is. With `metadata["required"]`, a list of
    names, it has to be an object with these names. It reads no answer."""
    blocks = _FENCE.findall(completion)
    try:
        value = json.loads(blocks[-1] if blocks else completion, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return 0.0
    required = metadata.get("required", [])
    return float(not required or (isinstance(value, dict) and all(name in value for name in required)))


BUILTIN: Final[Mapping[str, Callable[[str, str, Metadata], float]]] = {
    function.__name__: function for function in (exact_match, last_number, math_boxed, json_valid)
}
"""By name."""


def _answers(metadata: Metadata) -> list[str]:
    given = metadata["answer"]
    return [
        each if isinstance(each, str) else json.dumps(each) for each in (given if isinstance(given, list) else [given])
    ]


def _no_constant(name: str) -> None:
    """JSON has neither NaN nor Infinity, which Python's reader takes."""
    raise ValueError(name)


def _boxed(text: str) -> str | None:
    r"""The content of the complete `\boxed{...}`, with balanced braces, that begins last."""
    opened, last = list[int](), (-1, -1)
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and text.endswith("\\boxed{", 0, begin := opened.pop()):
            last = max(last, (begin, brace.start()))
    return None if last[0] < 0 else text[last[0] : last[1]]


def _same(found: str, answer: str) -> bool:
    ours, theirs = _value(found), _value(answer)
    return ours == theirs if ours is not None and theirs is not None else _plain(found) == _plain(answer)


def _plain(text: str) -> str:
    text = _TEXT.sub(r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _DROPPED.sub("", text).rstrip(".")


def _value(text: str) -> Fraction | None:
    """The exact value of a number, as a decimal or a fraction; None: it is none, or it is too long."""
    text = _FRACTION.sub(r"\1\2/\3", _plain(text)).replace(",", "")
    if len(text) > MAX_DIGITS or not re.fullmatch(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+(?:\.\d+)?)?", text):
        return None
    above, _, below = text.partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None
