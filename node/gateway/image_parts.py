"""The images in a chat request: parts of the type `image_url` whose URL has the image itself, in base64.

An address is never fetched: neither the seed nor a node may be made to send requests where a client wants.
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from node.engines.images import MAX_IMAGES_BYTES, check_images, facts_of
from node.gateway.parameters import BadRequest
from node.gateway.text import Text
from node.ledger.message_content import NotText, with_plain_content

__all__ = ["Conversation", "check_places", "read_messages"]

_DATA: Final = re.compile(r"data:image/(png|jpeg|webp);base64,", re.ASCII)
_FIELDS: Final = ({"url"}, {"url", "detail"})
_DETAILS: Final = (None, "auto", "low", "high")
"""OpenAI's values of `detail`. The model's own image processor decides the size."""
_HOW: Final = "send it as data:image/png;base64,... (or jpeg, webp)"
MOST_CHARACTERS: Final = 4 * MAX_IMAGES_BYTES // 3 + 64
"""Of the URL of an image."""


class Conversation(NamedTuple):
    """`messages`: as chat templates expect them: content with images is a list of parts, {"type": "text", "text": ...}
    and {"type": "image"}; other content is one text. `images`: encoded, in the order of their parts."""

    messages: list[dict[str, Any]]
    images: tuple[bytes, ...]


def read_messages(messages: Sequence[Mapping[str, Any]], most: int) -> Conversation:
    """The messages and their images, of which a request may have `most`.

    Raises `BadRequest`, which names the part, and `NotText` for parts of other types.
    """
    found: list[dict[str, Any]] = []
    images: list[bytes] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if not (isinstance(content, list) and any(map(_is_image, content))):
            found += _plain(message, number)
            continue
        parts: list[dict[str, Any]] = []
        for place, part in enumerate(content):
            where = f"messages[{number}].content[{place}]"
            if not _is_image(part):
                (one,) = _plain({"content": [part]}, number, place)
                parts.append({"type": "text", "text": one["content"]})
                continue
            if len(images) >= most:
                raise BadRequest(_too_many(most), where)
            images.append(_image(part, where))
            if sum(map(len, images)) > MAX_IMAGES_BYTES:
                raise BadRequest(f"{where}: the images have more than {MAX_IMAGES_BYTES:,} bytes together.", where)
            parts.append({"type": "image"})
        found.append({**message, "content": parts})
    try:
        check_images(images)
    except ValueError as error:
        raise BadRequest(f"messages: {error}.", "messages") from error
    return Conversation(found, tuple(images))


def check_places(body: Any, text: Text, prompt: Sequence[int], count: int) -> None:
    """Raises `BadRequest` unless the model reads images, and the prompt has as many places for them as there are."""
    if not text.reads_images:
        raise BadRequest("messages: this model reads text alone, and no images.", "messages")
    for name in ("truncate_prompt_tokens", "return_routed_experts", "prompt_logprobs"):
        if getattr(body, name) not in (None, False):
            raise BadRequest(f"{name}: not with images, which take other places than their tokens.", name)
    if (places := text.images_in(prompt)) != count:
        raise BadRequest(
            f"messages: the chat template and the texts have {places} places for {count} images. Leave out the model's "
            "own image tokens; without them, its template writes no place for an image.",
            "messages",
        )


def _too_many(most: int) -> str:
    if not most:
        return "messages: this gateway takes no images (swarm-node gateway --images)."
    return f"messages: at most {most} images in a request (swarm-node gateway --images)."


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def _plain(message: Mapping[str, Any], number: int, place: int = 0) -> list[dict[str, Any]]:
    """The message with text alone. Raises `NotText`, which names the part by its place in the request."""
    try:
        return with_plain_content([message])
    except NotText as error:
        part = int(error.where.rpartition("[")[2].removesuffix("]")) + place
        raise error.at(f"messages[{number}].content[{part}]") from None


def _image(part: Mapping[str, Any], where: str) -> bytes:
    """The encoded image of a part. Raises `BadRequest`."""
    asked = part.get("image_url")
    if not isinstance(asked, Mapping) or set(asked) not in _FIELDS or set(part) != {"type", "image_url"}:
        raise BadRequest(f'{where}: an image is {{"type": "image_url", "image_url": {{"url": ...}}}}.', where)
    url = asked["url"]
    if asked.get("detail") not in _DETAILS:
        raise BadRequest(f"{where}: detail is auto, low or high.", where)
    if not isinstance(url, str):
        raise BadRequest(f"{where}: the URL of an image is a text; {_HOW}.", where)
    if url[:8].lower().startswith(("http:", "https:")):
        raise BadRequest(
            f"{where}: no address is fetched for a client, so the image must be in the URL; {_HOW}.", where
        )
    if len(url) > MOST_CHARACTERS:
        raise BadRequest(f"{where}: the images have more than {MAX_IMAGES_BYTES:,} bytes together.", where)
    begin = _DATA.match(url)
    if begin is None:
        raise BadRequest(f"{where}: only PNG, JPEG and WebP in base64 can be read; {_HOW}.", where)
    try:
        image = binascii.a2b_base64(url[begin.end() :], strict_mode=True)
    except ValueError as error:
        raise BadRequest(f"{where}: its data is no base64.", where) from error
    try:
        facts = facts_of(image)
    except ValueError as error:
        raise BadRequest(f"{where}: {error}.", where) from error
    if facts.kind != begin[1]:
        raise BadRequest(f"{where}: its URL says {begin[1]}, and its data is {facts.kind}.", where)
    return image
