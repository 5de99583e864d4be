"""What becomes of headers and pieces that arrive: the rule that the runtime and the simulator share."""

import itertools

import pytest

from swarm.protocol.core.version import VersionId
from swarm.protocol.transfer.arrivals import Arrival, header_arrival, piece_arrival

OLD, NEW = VersionId(0, 3), VersionId(0, 4)


@pytest.mark.parametrize(
    ("version", "known", "same", "expected"),
    [
        (NEW, False, False, Arrival.NEW),
        (NEW, True, True, Arrival.DUPLICATE),
        (NEW, True, False, Arrival.STRAY),
        (OLD, False, False, Arrival.STRAY),
        (OLD, True, True, Arrival.DUPLICATE),
        (VersionId(1, 0), False, False, Arrival.NEW),
    ],
)
def test_headers(version: VersionId, known: bool, same: bool, expected: Arrival) -> None:
    assert header_arrival(version, OLD, known=known, same=same) is expected


def test_before_any_version_is_applied_nothing_is_over() -> None:
    assert header_arrival(VersionId(0, 0), None, known=False, same=False) is Arrival.NEW
    piece = piece_arrival(VersionId(0, 0), None, known=False, bodiless=False, here=False, dropped=False)
    assert piece is Arrival.WRONG


@pytest.mark.parametrize(
    ("version", "known", "bodiless", "here", "dropped", "expected"),
    [
        (NEW, True, False, False, False, Arrival.NEW),
        (NEW, True, False, True, False, Arrival.DUPLICATE),
        (NEW, True, True, False, False, Arrival.STRAY),
        (NEW, False, False, False, False, Arrival.WRONG),
        (NEW, False, False, False, True, Arrival.STRAY),
        (OLD, False, False, False, False, Arrival.STRAY),
        (OLD, True, False, False, False, Arrival.NEW),
    ],
)
def test_pieces(version: VersionId, known: bool, bodiless: bool, here: bool, dropped: bool, expected: Arrival) -> None:
    found = piece_arrival(version, OLD, known=known, bodiless=bodiless, here=here, dropped=dropped)
    assert found is expected


def test_a_peer_is_blamed_only_for_a_piece_that_nothing_explains() -> None:
    for version, known, bodiless, here, dropped in itertools.product((OLD, NEW), *[(False, True)] * 4):
        found = piece_arrival(version, OLD, known=known, bodiless=bodiless, here=here, dropped=dropped)
        assert (found is Arrival.WRONG) == (not known and not dropped and version == NEW)
