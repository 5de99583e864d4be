"""What the text of a completion must be: JSON, JSON of a schema, a regular expression, one of several texts, or
a text of a grammar. Pure.

`SamplingOptions.structure` has it as JSON with one field, named as in vLLM's `StructuredOutputsParams`.
"""

from typing import Annotated, Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.engines.base import MAX_LENGTH, MAX_STRUCTURE

__all__ = ["Structure", "begun_by", "encode_structure", "read_structure"]

MAX_CHOICES: Final = 1024
MAX_GRAMMAR: Final = 8192
"""Characters. Reading a grammar of twice the length may take an engine four times as long."""
BEGUN_ROOM: Final = 32
"""Characters that `Structure.begun` may add to a structure that was asked for."""
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
    grammar: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR)] | None = None
    """The text is one of this grammar, in the notation of GBNF (`root ::= ...`) or Lark (`start: ...`)."""
    begun: Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)] = 0
    """So many tokens at the end of the prompt are the beginning of the text."""

    def __post_init__(self) -> None:
        texts = (self.json, self.regex, self.grammar)
        if sum(each is not None for each in texts) + self.json_object + bool(self.choice) != 1:
            raise ValueError("one of json, json_object, regex, choice and grammar")


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
    most = MAX_STRUCTURE - (0 if structure.begun else BEGUN_ROOM)
    if len(text) > most:
        raise ValueError(f"structure: at most {most} characters")
    return text


def begun_by(text: str, tokens: int) -> str:
    """`text`, which `encode_structure` made, of a text whose first `tokens` tokens are in the prompt already."""
    return encode_structure(msgspec.structs.replace(read_structure(text), begun=tokens))
