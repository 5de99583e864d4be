"""The kinds of images' headers, part by part."""

from typing import Any, Final

from scenarios.fuzz.inputs.binary import fields_of_values
from scenarios.fuzz.inputs.fields import Kind

__all__ = ["image_kinds"]

_HEADERS: Final[dict[str, dict[str, bytes]]] = {
    "png": {
        "signature": b"\x89PNG\r\n\x1a\n", "length": b"\0\0\0\r", "chunk": b"IHDR", "width": b"\0\0\0\2",
        "height": b"\0\0\0\2", "rest": b"\x08\0\0\0\0",
    },
    "jpeg": {
        "begin": b"\xff\xd8", "comment": b"\xff\xfe", "comment length": b"\0\4", "text": b"ab", "frame": b"\xff\xc0",
        "frame length": b"\0\x0b", "precision": b"\x08", "height": b"\0\2", "width": b"\0\2", "rest": b"\1\1\x11\0",
    },
    "webp": {
        "riff": b"RIFF", "length": b"\x16\0\0\0", "form": b"WEBP", "chunk": b"VP8X", "chunk length": b"\n\0\0\0",
        "flags": b"\0\0\0\0", "width": b"\1\0\0", "height": b"\1\0\0",
    },
}  # fmt: skip


def image_kinds() -> list[Kind]:
    """Return a kind for the header of each format that is read."""
    return [
        Kind(
            f"image/{kind}",
            fields_of_values(f"image/{kind}", list(parts.values()), list(parts)),
            lambda scene, parts=parts: list(parts.values()),
            lambda scene, body: body,
            _joined,
        )
        for kind, parts in _HEADERS.items()
    ]


def _joined(values: list[Any]) -> bytes:
    """The parts in order; what is no part is left out."""
    return b"".join(value for value in values if isinstance(value, bytes))
