"""Fetches the images of the node's leases from the seed, and keeps each once for all leases that have it.

One part is fetched at a time, for the oldest lease that lacks an image, so a lease begins as soon as its own images are
there. Images that no lease has any more stay until others need their memory.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from node.engines.base import SamplingParams
from node.engines.host import EngineLost
from node.engines.images import check_images, digest_of
from node.ledger.fields import PART_BYTES
from node.ledger.image_messages import AskImage, ImagePart
from node.ledger.messages import WorkLease, encode
from node.settings.event_log import EventLog

__all__ = ["ImageQueue"]

MOST_BYTES: Final = 256 << 20
"""Memory of all images: those of forty of the largest prompts."""
AGAIN_S: Final = 3.0
"""A part that has not come after this time is asked for again: any message may be lost."""

_log = EventLog(__name__)


class ImageQueue:
    """The images of one node. `send(body)` hands a message to the seed, and may lose it."""

    def __init__(
        self,
        leases: Callable[[], Iterable[WorkLease]],
        send: Callable[[bytes], Awaitable[None]],
        complete: Callable[[], None],
        most: int = MOST_BYTES,
    ) -> None:
        """`leases()`: those with samples that are not finished, oldest first. `complete()`: an image is here. `most`:
        see `MOST_BYTES`."""
        self._leases, self._send, self._complete, self._most = leases, send, complete, most
        self._images: OrderedDict[bytes, bytes] = OrderedDict()
        """By digest, those that were used longest ago first."""
        self._parts: list[bytes] = []
        """Of the image that is being fetched."""
        self._fetched = b""
        """Its digest; empty: none is."""
        self._refused = False
        """What came last is not the image."""
        self._news = trio.Event()

    @property
    def nbytes(self) -> int:
        """The memory of all whole images."""
        return sum(map(len, self._images.values()))

    def has(self, sampling: SamplingParams) -> bool:
        """Whether all images that this sampling names are here."""
        return all(digest in self._images for digest in sampling.extra.images)

    def of(self, sampling: SamplingParams) -> tuple[bytes, ...]:
        """The images that this sampling names. Raises `EngineLost` when one is gone, because its lease has ended."""
        if not self.has(sampling):
            raise EngineLost("the images of this work are not here any more")
        for digest in sampling.extra.images:
            self._images.move_to_end(digest)
        return tuple(self._images[digest] for digest in sampling.extra.images)

    def look(self) -> None:
        """A lease with images came."""
        self._wake()

    def hear(self, message: ImagePart) -> None:
        """A part came. One that was not asked for is dropped."""
        whole = message.part == message.parts - 1
        if message.digest != self._fetched or message.part != len(self._parts):
            return
        if not (whole or len(message.data) == PART_BYTES):
            return
        self._parts.append(message.data)
        if whole:
            self._take(message.digest, b"".join(self._parts))
            self._parts, self._fetched = [], b""
        self._wake()

    def _take(self, digest: bytes, image: bytes) -> None:
        try:
            if digest_of(image) != digest:
                raise ValueError("it has another digest")
            check_images([image])
        except ValueError as error:
            _log.warning("image_refused", why=str(error))
            self._refused = True
            return
        self._images[digest] = image
        self._complete()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def run(self) -> None:
        """Fetch until cancelled."""
        while True:
            news, wanted = self._news, self._next()
            if wanted is None:
                full = self.nbytes > self._most
                with trio.move_on_after(AGAIN_S if full else math.inf):  # a lease that ends is no news
                    await news.wait()
                continue
            lease, digest = wanted
            if digest != self._fetched:
                self._fetched, self._parts = digest, []
            asked_for = len(self._parts)
            await self._send(encode(AskImage(lease, digest, asked_for)))
            with trio.move_on_after(AGAIN_S):
                while self._fetched == digest and len(self._parts) == asked_for:
                    news = self._news
                    await news.wait()
            if self._refused:
                self._refused = False
                await trio.sleep(AGAIN_S)

    def _next(self) -> tuple[int, bytes] | None:
        """(lease, digest) of the next image to fetch; None: none is missing, or there is no memory for it."""
        leases = [lease for lease in self._leases() if lease.sampling.extra.images]
        needed = {digest for lease in leases for digest in lease.sampling.extra.images}
        for digest in [digest for digest in self._images if digest not in needed]:
            if self.nbytes <= self._most:
                break
            del self._images[digest]
        if self.nbytes > self._most:
            return None
        missing = (
            (lease.lease, digest)
            for lease in leases
            for digest in lease.sampling.extra.images
            if digest not in self._images
        )
        return next(missing, None)
