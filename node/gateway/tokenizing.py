"""The endpoints /tokenize and /detokenize, with vLLM's fields: text to token ids, and back."""

from typing import Annotated, Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.gateway.parameters import BadRequest
from node.gateway.text import BadText, Text
from node.gateway.tool_calls import plain_arguments
from node.ledger.fields import MAX_TOKENS
from node.ledger.message_content import NotText, with_plain_content

__all__ = ["TOKENIZING"]

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Tokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=8192)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class _Detokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]


_tokenize: Final = msgspec.json.Decoder(_Tokenize)
_detokenize: Final = msgspec.json.Decoder(_Detokenize)


def _to_tokens(data: bytes | bytearray, text: Text) -> dict[str, Any]:
    """The answer of /tokenize. Raises `BadRequest`, `BadText`."""
    body = _read(_tokenize, data)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt: either this or messages.", "prompt")
    special = body.add_special_tokens
    if body.prompt is not None:
        tokens = text.encode(body.prompt, special=special is not False)
    else:
        if body.continue_final_message and body.add_generation_prompt:
            why = "set add_generation_prompt to false to continue the last message."
            raise BadRequest(f"continue_final_message: {why}", "continue_final_message")
        try:
            messages = with_plain_content([plain_arguments(message) for message in body.messages])
        except NotText as error:
            raise BadRequest(str(error), error.where) from error
        more = {"add_generation_prompt": body.add_generation_prompt}
        rendered = text.render(messages, body.tools, open_ended=body.continue_final_message, **more)
        tokens = text.encode(rendered, special=bool(special))
    names = [text.token(token) for token in tokens] if body.return_token_strs else None
    context = text.limits.context
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": names}


def _to_text(data: bytes | bytearray, text: Text) -> dict[str, Any]:
    """The answer of /detokenize. Raises `BadRequest`, `BadText`."""
    body = _read(_detokenize, data)
    if not text.has_tokenizer:
        raise BadText("This model's base has no tokenizer.json, and so no text.")
    return {"prompt": text.decode((), body.tokens, special=True)}


TOKENIZING: Final = {"/tokenize": _to_tokens, "/detokenize": _to_text}
"""By path: the answer to a body."""


def _read(decoder: "msgspec.json.Decoder[Any]", data: bytes | bytearray) -> Any:
    try:
        return unpack(decoder, memoryview(data), "The body cannot be read")
    except PeerError as error:
        raise BadRequest(f"{error}.") from error
