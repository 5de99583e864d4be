"""The content of a conversation's messages, as far as it is text. The gateway reads images before (`image_parts`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["NotText", "with_plain_content"]

MAX_TYPE: Final = 32
"""Characters of a part's type that an error repeats."""


class NotText(ValueError):
    """A part of a message is not text. The error names the part, and says what can be sent. `where`: the part, such as
    `messages[0].content[1]`."""

    def __init__(self, where: str, kind: str) -> None:
        super().__init__(
            f"{where} is {kind}: only parts of the type text can be sent here, and images (image_url) to the gateway's "
            "/v1/chat/completions."
        )
        self.where, self._kind = where, kind

    def at(self, where: str) -> "NotText":
        """The same error, of the part at `where`."""
        return NotText(where, self._kind)


def with_plain_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with content in parts joined into the one text that chat templates expect. Raises `NotText`."""
    return [
        {**message, "content": _plain(message.get("content"), f"messages[{number}].content")}
        for number, message in enumerate(messages)
    ]


def _plain(content: Any, where: str) -> Any:
    if not isinstance(content, list | tuple):
        return content
    return "".join(_text(part, f"{where}[{number}]") for number, part in enumerate(content))


def _text(part: Any, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind == "text" and isinstance(text, str):
        return text
    raise NotText(where, repr(kind[:MAX_TYPE]) if isinstance(kind, str) and kind != "text" else "no part of a message")
