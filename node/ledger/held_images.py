"""The images of the request groups that are open, in the seed's memory: one copy of each, however many groups have it.

They are not in the book. Images come only through the gateway, whose groups end with the seed's process; then the front
(`node.gateway.front`) sends each request to the next seed again, with its images.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from node.engines.images import digest_of
from node.ledger.fields import PART_BYTES
from node.ledger.image_messages import ImagePart

__all__ = ["HeldImages"]


class HeldImages:
    """The images by digest. Whoever adds them bounds their memory."""

    def __init__(self) -> None:
        self._images: dict[bytes, bytes] = {}
        self._uses: Counter[bytes] = Counter()
        """By digest: the groups that have it."""
        self._groups: dict[bytes, frozenset[bytes]] = {}
        """By group: the digests of its images."""

    @property
    def nbytes(self) -> int:
        """The memory of all images."""
        return sum(map(len, self._images.values()))

    def add(self, group: bytes, images: Sequence[bytes]) -> None:
        """Hold the images of a group until `remove`."""
        by_digest = {digest_of(image): image for image in images}
        self.remove(group)
        if by_digest:
            self._groups[group] = frozenset(by_digest)
            for digest, image in by_digest.items():
                self._images.setdefault(digest, image)
                self._uses[digest] += 1

    def remove(self, group: bytes) -> None:
        """Nobody waits for this group any more. Does nothing for a group without images."""
        for digest in self._groups.pop(group, ()):
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest], self._images[digest]

    def has(self, group: bytes, digests: Iterable[bytes]) -> bool:
        """Whether all these images were added for this group."""
        return self._groups.get(group, frozenset()).issuperset(digests)

    def part(self, group: bytes, digest: bytes, number: int) -> ImagePart | None:
        """A part of an image of this group; None: it has no such image or part."""
        image = self._images.get(digest, b"")
        parts = -(-len(image) // PART_BYTES)
        if number >= parts or not self.has(group, (digest,)):
            return None
        return ImagePart(digest, number, parts, image[number * PART_BYTES : (number + 1) * PART_BYTES])
