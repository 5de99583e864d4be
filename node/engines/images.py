"""The images of a prompt: their limits, their digests, and what their first bytes say of them. Pure.

An image of a few kilobytes can decode to gigabytes, so its size is read from its header, and compared with the limits,
before anything decodes it. The gateway does so when a client sends it, a node when the seed sends it, and vLLM's
process once more before it decodes it.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from blake3 import blake3

from node.engines.base import DIGEST_BYTES, MAX_IMAGES

__all__ = ["MAX_IMAGES_BYTES", "MAX_PIXELS", "ImageFacts", "check_images", "digest_of", "facts_of"]

MAX_IMAGES_BYTES: Final = 6 << 20
"""Of all images of a prompt together, encoded: what a body of 8 MiB has room for in base64."""
MAX_PIXELS: Final = 1 << 24
"""Width times height of all images of a prompt together: 48 MiB when they are decoded."""
_MAX_SIDE: Final = 1 << 14
"""Pixels of one side: the largest of WebP."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_NO_SIZE: Final = frozenset({0xC4, 0xC8, 0xCC})
"""Markers of JPEG from 0xC0 to 0xCF that do not begin a frame, and so have no size."""
_BARE: Final = frozenset({0x01, *range(0xD0, 0xDA)})
"""Markers of JPEG without a segment after them; 0xDA is followed by the picture itself."""


class ImageFacts(NamedTuple):
    """What an image's header says. `width`, `height`: in pixels."""

    kind: Literal["png", "jpeg", "webp"]
    width: int
    height: int


def digest_of(image: bytes) -> bytes:
    """The BLAKE3 digest of an encoded image (32 bytes), which names it everywhere."""
    return blake3(image).digest(DIGEST_BYTES)


def facts_of(image: bytes) -> ImageFacts:
    """What the header of an encoded image says. Nothing is decoded. Raises `ValueError` for what is none."""
    try:
        if image.startswith(_PNG):
            return ImageFacts("png", *_png_size(image))
        if image.startswith(b"\xff\xd8"):
            return ImageFacts("jpeg", *_jpeg_size(image))
        if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
            return ImageFacts("webp", *_webp_size(image))
    except IndexError:
        raise ValueError("its header is cut off") from None
    raise ValueError("it is neither PNG, JPEG nor WebP")


def check_images(images: Sequence[bytes]) -> None:
    """Raises `ValueError`, which names the image, unless all are within the limits together."""
    if len(images) > MAX_IMAGES:
        raise ValueError(f"{len(images)} images; at most {MAX_IMAGES} can be sent with a prompt")
    if (length := sum(map(len, images))) > MAX_IMAGES_BYTES:
        raise ValueError(f"the images have {length:,} bytes together; at most {MAX_IMAGES_BYTES:,} can be sent")
    pixels = 0
    for number, image in enumerate(images):
        try:
            facts = facts_of(image)
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error
        if not (1 <= facts.width <= _MAX_SIDE and 1 <= facts.height <= _MAX_SIDE):
            raise ValueError(f"image {number}: {facts.width} x {facts.height} pixels; a side has 1 to {_MAX_SIDE:,}")
        pixels += facts.width * facts.height
    if pixels > MAX_PIXELS:
        raise ValueError(f"the images have {pixels:,} pixels together; at most {MAX_PIXELS:,} can be sent")


def _png_size(image: bytes) -> tuple[int, int]:
    """W3C PNG (third edition), 11.2.1: the chunk IHDR comes first."""
    if image[8:16] != b"\0\0\0\rIHDR" or len(image) < 24:
        raise ValueError("its PNG header is damaged")
    return int.from_bytes(image[16:20]), int.from_bytes(image[20:24])


def _jpeg_size(image: bytes) -> tuple[int, int]:
    """ITU T.81, B.2.2: the size is in the only frame header, before the first scan."""
    for marker, at in _jpeg_segments(image):
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            if at + 7 > len(image):
                break
            return int.from_bytes(image[at + 5 : at + 7]), int.from_bytes(image[at + 3 : at + 5])
    raise ValueError("its JPEG header has no size")


def _jpeg_segments(image: bytes) -> Iterator[tuple[int, int]]:
    """(marker, place of its segment's length) of each segment before the first scan."""
    at = 2
    while True:
        if image[at] != 0xFF:
            raise ValueError("its JPEG header is damaged")
        marker, at = image[at + 1], at + 1
        if marker == 0xFF:  # fill bytes
            continue
        at += 1
        if marker == 0xDA:
            return
        if marker in _BARE:
            continue
        length = int.from_bytes(image[at : at + 2])
        if length < 2:
            raise ValueError("its JPEG header is damaged")
        yield marker, at
        at += length


def _webp_size(image: bytes) -> tuple[int, int]:
    """RFC 9649, 2.5 to 2.7: the size is in the first chunk."""
    first, data = image[12:16], image[20:30]
    if first == b"VP8X" and len(data) == 10:
        if data[0] & 0x02:
            raise ValueError("it is animated, and only still images can be read")
        return 1 + int.from_bytes(data[4:7], "little"), 1 + int.from_bytes(data[7:10], "little")
    if first == b"VP8 " and data[3:6] == b"\x9d\x01\x2a" and len(data) == 10:
        return int.from_bytes(data[6:8], "little") & 0x3FFF, int.from_bytes(data[8:10], "little") & 0x3FFF
    if first == b"VP8L" and data[:1] == b"\x2f" and len(data) >= 5:
        bits = int.from_bytes(data[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise ValueError("its WebP header is damaged")
