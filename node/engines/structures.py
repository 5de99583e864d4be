"""What the text of a completion must be: JSON, JSON of a schema, a regular expression, or one of several texts. Pure.

`SamplingOptions.structure` has it as JSON with one field, named as in vLLM's `StructuredOutputsParams`.
"""

from typing import Annotated, Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.engines.base import MAX_STRUCTURE

__all__ = ["Structure", "encode_structure", "read_structure"]

MAX_CHOICES: Final = 1024
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE)]


class Structure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One of these. Raises `ValueError` for none, or several."""

    json: dict[str, Any] | None = None
    """The text is JSON of this JSON schema."""
    json_object: bool = False
    """The text is a JSON object."""
    regex: Text | None = None
    """The text is matched by this regular expression, from its beginning to its end."""
    choice: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_CHOICES)] = ()
    """The text is one of these."""

    def __post_init__(self) -> None:
        given = (self.json is not None, self.json_object, self.regex is not None, bool(self.choice))
        if sum(given) != 1:
            raise ValueError("one of json, json_object, regex and choice")


_decoder: Final = msgspec.json.Decoder(Structure)


def read_structure(text: str) -> Structure:
    """The inverse of `encode_structure`. Raises `ValueError`."""
    try:
        return unpack(_decoder, text.encode(), "structure")
    except PeerError as error:
        raise ValueError(str(error)) from error


def encode_structure(structure: Structure) -> str:
    """`structure` as `SamplingOptions.structure` has it. Raises `ValueError` when it is too long."""
    text = msgspec.json.encode(structure).decode()
    if len(text) > MAX_STRUCTURE:
        raise ValueError(f"structure: at most {MAX_STRUCTURE} characters")
    return text
