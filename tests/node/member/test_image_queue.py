"""A node fetches the images of its leases: parts lost, damaged or out of order, and a bounded memory."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from node.engines.base import SamplingOptions, SamplingParams
from node.engines.host import EngineLost
from node.engines.images import digest_of
from node.ledger.fields import PART_BYTES
from node.ledger.held_images import HeldImages
from node.ledger.image_messages import AskImage, ImagePart
from node.ledger.messages import WorkLease, decode
from node.ledger.packing import pack_tokens
from node.member import image_queue
from node.member.image_queue import ImageQueue

GROUP = bytes(16)
HEADER = struct.pack(">I", 13) + b"IHDR" + struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0)


def image(shade: int, size: int = 100) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + HEADER + struct.pack(">I", zlib.crc32(HEADER)) + bytes([shade]) * size


def lease(number: int, *images: bytes) -> WorkLease:
    options = SamplingOptions(images=tuple(map(digest_of, images)))
    return WorkLease(number, 1, GROUP, (0,), pack_tokens((5,)), SamplingParams(4, options=options), 60.0, 0, 0, 1)


class Seed:
    """Answers a queue's questions; `lose(question)`: which answers are lost, `spoil`: what becomes of the others."""

    def __init__(self, *images: bytes) -> None:
        self.held = HeldImages()
        self.held.add(GROUP, images)
        self.asked: list[AskImage] = []
        self.lose: Callable[[AskImage], bool] = lambda question: False
        self.spoil: Callable[[ImagePart], ImagePart] = lambda part: part
        self.queue: Any = None

    async def send(self, body: bytes) -> None:
        await trio.lowlevel.checkpoint()
        question = decode(body)
        assert isinstance(question, AskImage)
        self.asked.append(question)
        part = self.held.part(GROUP, question.digest, question.part)
        if part is not None and not self.lose(question):
            self.queue.hear(self.spoil(part))


async def run(seed: Seed, leases: list[WorkLease], until: Callable[[ImageQueue], bool], **more: int) -> ImageQueue:
    queue = seed.queue = ImageQueue(lambda: leases, seed.send, lambda: None, **more)
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.run)
            while not until(queue):  # noqa: ASYNC110 - nothing signals it
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert until(queue)
    return queue


async def test_parts_come_one_after_another_and_once_for_all_leases() -> None:
    large, small = image(1, 2 * PART_BYTES), image(2)
    seed, leases = Seed(large, small), [lease(1, large), lease(2, small, large)]
    queue = await run(seed, leases, lambda queue: all(queue.has(each.sampling) for each in leases))
    assert queue.of(leases[1].sampling) == (small, large)
    assert [(each.digest == digest_of(large), each.part) for each in seed.asked] == [
        (True, 0), (True, 1), (True, 2), (False, 0)
    ]  # fmt: skip


async def test_lost_parts_are_asked_for_again(autojump_clock: Any) -> None:
    large, seen = image(1, 2 * PART_BYTES), set[int]()
    seed, leases = Seed(large), [lease(1, large)]
    seed.lose = lambda question: question.part not in seen and not seen.add(question.part)
    queue = await run(seed, leases, lambda queue: queue.has(leases[0].sampling))
    assert queue.of(leases[0].sampling) == (large,)
    assert [each.part for each in seed.asked] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("what", ["other bytes", "no image", "another part", "short"])
async def test_what_is_not_the_image_is_not_taken(what: str, autojump_clock: Any) -> None:
    good = image(1, PART_BYTES) if what in ("another part", "short") else image(1)
    bad = b"not an image" if what == "no image" else good
    seed, leases = Seed(bad), [lease(1, bad)]
    changes = {"other bytes": {"data": image(9)}, "another part": {"part": 1}, "short": {"data": good[:50]}}
    seed.spoil = lambda part: replace(part, **changes.get(what, {}))
    queue = await run(seed, leases, lambda queue: len(seed.asked) >= 3)
    assert not queue.has(leases[0].sampling)
    assert queue.nbytes == 0
    with pytest.raises(EngineLost):
        queue.of(leases[0].sampling)


async def test_memory_is_bounded_and_the_oldest_lease_comes_first(autojump_clock: Any) -> None:
    images = [image(shade, 1000) for shade in range(5)]
    seed, leases = Seed(*images), [lease(number, each) for number, each in enumerate(images)]
    queue = await run(seed, leases, lambda queue: queue.nbytes > 2000, most=2000)
    assert [queue.has(each.sampling) for each in leases] == [True, True, False, False, False]
    del leases[0]
    queue = await run(seed, leases, lambda queue: queue.has(leases[1].sampling), most=2000)
    assert queue.nbytes < 2000 + 1200


def test_groups_share_a_copy_which_goes_with_the_last() -> None:
    held, one, two = HeldImages(), image(1), image(2)
    held.add(b"a", [one, two])
    held.add(b"b", [one])
    assert held.nbytes == len(one) + len(two)
    assert held.part(b"b", digest_of(two), 0) is None, "another group's image"
    assert held.part(b"a", digest_of(one), 1) is None, "there is no such part"
    held.remove(b"a")
    held.remove(b"a")
    assert held.nbytes == len(one)
    assert held.has(b"b", [digest_of(one)])
    held.remove(b"b")
    assert held.nbytes == 0


def test_the_module_names_its_limits() -> None:
    assert image_queue.MOST_BYTES >= 2 * 6 << 20, "more than the largest prompt's images, or none could begin"
