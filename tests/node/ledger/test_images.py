"""Images in the ledger: which nodes get such work, who may fetch an image, and that nobody judges it."""

from typing import Any

import pytest
from ledger_kit import ALICE, BOB, CAROL, KEY_OF, KEYS, PROMPT, SAMPLING, group_id, head, root

from codec.errors import PeerError
from node.engines.base import ABILITIES, IMAGES, OPTIONS, SamplingOptions, scoring_needs
from node.engines.images import digest_of
from node.ledger.binding import Binding
from node.ledger.fields import PART_BYTES
from node.ledger.image_messages import MAX_IMAGE_PARTS, AskImage, ImagePart
from node.ledger.messages import (
    Abilities,
    Cannot,
    Withdraw,
    WorkLease,
    WorkMessage,
    WorkRequest,
    decode,
    encode,
    work_hash,
)
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.trust.budgets import IMAGE_BYTES_AT_ONCE

IMAGE = b"\x89PNG" + bytes(2 * PART_BYTES)
OTHER = b"\x89PNG another"
SEEN = SAMPLING.with_options(images=(digest_of(IMAGE),))
CAN = tuple(sorted({OPTIONS, IMAGES}))


class Bench:
    """A ledger service without its task."""

    def __init__(self) -> None:
        self.now, self.serial = 100.0, 0
        self.ledger = Ledger(Settings(), head(0), bytes([1]) * 32)
        for version in range(1, 4):
            self.ledger.advance(head(version), 10.0 * version)
        self.service = LedgerService(
            self.ledger, None, None, clock=lambda: self.now,  # pyright: ignore - neither is written nor sent to here
            is_member=lambda node: node in KEY_OF,
        )  # fmt: skip
        for key in KEYS[:3]:
            self.service.member_up(key.public)
        self.session = self.service.open("volatile/test", Binding(1, SAMPLING))

    def offer(self, number: int, *images: bytes, sampling: Any = SEEN) -> None:
        self.service.images.add(group_id(number), images)
        self.service.offer(self.session, group_id(number), PROMPT, sampling=sampling)
        self.service._offers.clear()  # a turn would look the group up in the book, and there is none
        self.ledger.offer(group_id(number), self.session.name, PROMPT, 1, sampling, now=self.now)

    def hear(self, node: bytes, message: WorkMessage) -> list[Any]:
        """The messages that `node` gets in reply."""
        self.service._nodes.take_outbox()
        self.service.hear(node, encode(message))
        return [found for to, found in self.service.begin_turn().outbox if to == node]

    def leases(self, node: bytes) -> list[WorkLease]:
        self.serial += 1
        found = self.hear(node, WorkRequest(self.serial, 4, 0, 3, root(0, 3), 10.0, ()))
        return [message for message in found if isinstance(message, WorkLease)]


def test_only_a_node_that_reads_images_gets_them_and_fetches_every_part() -> None:
    bench = Bench()
    bench.offer(1, IMAGE)
    bench.hear(ALICE, Abilities((OPTIONS,)))
    assert bench.leases(ALICE) == []
    bench.hear(BOB, Abilities(CAN))
    (lease,) = bench.leases(BOB)
    assert lease.sampling.extra.images == (digest_of(IMAGE),)
    parts = []
    for number in range(3):
        (part,) = bench.hear(BOB, AskImage(lease.lease, digest_of(IMAGE), number))
        assert part == decode(encode(part))
        parts.append(part)
    assert b"".join(part.data for part in parts) == IMAGE
    assert {part.parts for part in parts} == {3}
    assert bench.hear(BOB, AskImage(lease.lease, digest_of(IMAGE), 3)) == [], "there is no such part"
    assert bench.hear(BOB, AskImage(lease.lease, digest_of(OTHER), 0)) == [], "the lease names no such image"


def test_nobody_else_gets_an_image() -> None:
    bench = Bench()
    bench.offer(1, IMAGE)
    bench.offer(2, OTHER, sampling=SAMPLING.with_options(images=(digest_of(OTHER),)))
    for node in (BOB, CAROL):
        bench.hear(node, Abilities(CAN))
    found = {lease.group: lease for node in (BOB, CAROL) for lease in bench.leases(node)}
    mine = found[group_id(1)]
    holder = bench.ledger.leases[mine.lease].node
    for node in (ALICE, BOB if holder == CAROL else CAROL):
        assert bench.hear(node, AskImage(mine.lease, digest_of(IMAGE), 0)) == [Withdraw((mine.lease,))]
    assert bench.hear(holder, AskImage(mine.lease, digest_of(OTHER), 0)) == [], "another group's image"
    bench.service.withdraw(bench.session, group_id(1))
    assert Withdraw((mine.lease,)) in bench.hear(holder, AskImage(mine.lease, digest_of(IMAGE), 0))


def test_what_a_node_can_make_the_seed_send_is_bounded() -> None:
    bench = Bench()
    bench.offer(1, IMAGE)
    bench.hear(BOB, Abilities(CAN))
    (lease,) = bench.leases(BOB)
    sent = sum(
        len(part.data)
        for _ in range(400)
        for part in bench.hear(BOB, AskImage(lease.lease, digest_of(IMAGE), 0))
        if isinstance(part, ImagePart)
    )
    assert sent <= IMAGE_BYTES_AT_ONCE
    bench.now += 1.0
    assert bench.hear(BOB, AskImage(lease.lease, digest_of(IMAGE), 0)), "an honest node goes on a moment later"


def test_a_trainer_cannot_name_an_image_that_nobody_sent() -> None:
    bench = Bench()
    with pytest.raises(PeerError, match="images can be sent only to the gateway"):
        bench.service.offer(bench.session, group_id(1), PROMPT, sampling=SEEN)
    bench.service.images.add(group_id(1), [OTHER])
    with pytest.raises(PeerError, match="images can be sent only to the gateway"):
        bench.service.offer(bench.session, group_id(1), PROMPT, sampling=SEEN)


def test_work_that_all_able_nodes_refuse_is_given_up() -> None:
    bench = Bench()
    bench.offer(1, IMAGE)
    bench.hear(ALICE, Abilities((OPTIONS,)))
    bench.leases(ALICE)  # it generates, and could not do this
    bench.hear(BOB, Abilities(CAN))
    (lease,) = bench.leases(BOB)
    bench.hear(BOB, Cannot(lease.lease, lease.token, "the images cannot be decoded"))
    assert bench.session.impossible == {group_id(1): "the images cannot be decoded"}


def test_the_work_that_is_signed_names_the_images_and_nobody_judges_it() -> None:
    hashes = {work_hash(group_id(1), 0, PROMPT, each) for each in (SAMPLING, SEEN, SEEN.with_options(images=()))}
    assert len(hashes) == 2
    assert not scoring_needs(SEEN) <= ABILITIES
    assert not SEEN.extra.reshapes


@pytest.mark.parametrize("images", [(b"short",), tuple(bytes(32) for _ in range(17)), (bytes(33),)])
def test_digests_out_of_range(images: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="images: at most 16 digests of 32 bytes"):
        SamplingOptions(images=images)


@pytest.mark.parametrize(
    "message",
    [
        AskImage(1, bytes(31), 0), AskImage(1, bytes(32), MAX_IMAGE_PARTS), ImagePart(bytes(32), 0, 0, b"x"),
        ImagePart(bytes(32), 0, 1, b""), ImagePart(bytes(32), 0, MAX_IMAGE_PARTS + 1, b"x"),
    ],
)  # fmt: skip
def test_messages_out_of_range(message: WorkMessage) -> None:
    with pytest.raises(PeerError):
        decode(encode(message))
