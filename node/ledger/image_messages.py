"""The messages by which a node fetches the images of a work lease, whose sampling has only their digests."""

from typing import Annotated, Final

import msgspec

from node.engines.images import MAX_IMAGES_BYTES
from node.ledger.fields import PART_BYTES, U63, Root, WorkMessage

__all__ = ["MAX_IMAGE_PARTS", "AskImage", "ImagePart"]

MAX_IMAGE_PARTS: Final = -(-MAX_IMAGES_BYTES // PART_BYTES)
"""Parts of the largest image."""
Part = Annotated[int, msgspec.Meta(ge=0, lt=MAX_IMAGE_PARTS)]


class AskImage(WorkMessage, frozen=True, tag=25):
    """Asks for part `part` of the image with this digest, which the sampling of this lease names.

    A node asks for the parts one after another, and again when an answer was lost.
    """

    lease: U63
    digest: Root
    part: Part


class ImagePart(WorkMessage, frozen=True, tag=26):
    """Part `part` of `parts` of an encoded image. All but the last have `PART_BYTES`. Sent only to one that asked."""

    digest: Root
    part: Part
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_PARTS)]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]
