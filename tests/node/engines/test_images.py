"""The sizes of images, read from their headers, and the limits."""

import io
import random
import struct

import pytest

from node.engines.images import MAX_IMAGES_BYTES, MAX_PIXELS, check_images, digest_of, facts_of

PIL = pytest.importorskip("PIL.Image")
SIZES = [(1, 1), (2, 3), (17, 5), (640, 333)]
KINDS = [
    ("png", "PNG", {}), ("jpeg", "JPEG", {}), ("jpeg", "JPEG", {"progressive": True, "comment": b"\xff\xc0 no marker"}),
    ("webp", "WEBP", {}), ("webp", "WEBP", {"lossless": True}),
    ("webp", "WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
]  # fmt: skip


def saved(size: tuple[int, int], form: str, **more: object) -> bytes:
    out = io.BytesIO()
    PIL.new("RGB", size, (1, 200, 30)).save(out, form, **more)
    return out.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "form", "more"), KINDS)
def test_the_header_says_what_pillow_says(size: tuple[int, int], kind: str, form: str, more: dict[str, object]) -> None:
    image = saved(size, form, **more)
    assert facts_of(image) == (kind, *size)
    with PIL.open(io.BytesIO(image)) as opened:
        assert opened.size == size


def test_an_animation_is_refused() -> None:
    out = io.BytesIO()
    frames = [PIL.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 255)]
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="animated"):
        facts_of(out.getvalue())


@pytest.mark.parametrize(("kind", "form", "more"), KINDS)
def test_damaged_headers_are_errors_and_never_larger_than_pillow_reads(
    kind: str, form: str, more: dict[str, object]
) -> None:
    image, rng = saved((17, 5), form, **more), random.Random(kind)
    read = 0
    for _ in range(2000):
        broken = bytearray(image[: rng.randrange(len(image) + 1)] if rng.random() < 0.3 else image)
        for _ in range(rng.randrange(4)):
            if broken:
                broken[rng.randrange(min(len(broken), 64))] = rng.randrange(256)
        try:
            facts = facts_of(bytes(broken))
        except ValueError:
            continue
        try:
            with PIL.open(io.BytesIO(bytes(broken)), formats=("PNG", "JPEG", "WEBP")) as opened:
                assert (facts.width, facts.height) == opened.size
                read += 1
        except (OSError, PIL.DecompressionBombError, PIL.DecompressionBombWarning):
            continue
    assert read


def test_limits_hold_for_all_images_together() -> None:
    image = saved((64, 64), "PNG")
    check_images([image] * 16)
    with pytest.raises(ValueError, match="17 images; at most 16"):
        check_images([image] * 17)
    with pytest.raises(ValueError, match="bytes together"):
        check_images([image + bytes(MAX_IMAGES_BYTES // 2)] * 2)
    wide = image[:16] + struct.pack(">II", MAX_PIXELS // 4096, 4096) + image[24:]
    check_images([wide])
    with pytest.raises(ValueError, match="pixels together"):
        check_images([wide, image])
    with pytest.raises(ValueError, match="image 1: it is neither"):
        check_images([image, b"GIF89a"])
    with pytest.raises(ValueError, match="image 0: 20000 x 1 pixels"):
        check_images([image[:16] + struct.pack(">II", 20000, 1) + image[24:]])


def test_digests_differ() -> None:
    assert len(digest_of(b"a")) == 32
    assert digest_of(b"a") != digest_of(b"b")
