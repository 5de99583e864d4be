"""Estimates of uplinks and regions from what neighbours report, and what false reports can do to them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from protocol_kit import TUNING, book_with, header, only, version

from swarm.protocol.core.documents import UNTIMED, Link
from swarm.protocol.core.events import Send
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.topology.rates import TRIPS_KEPT, Rates, Regions
from swarm.protocol.transfer.links import Links


def received(slot: int, mbit: float, short: int = 0, rtt_ms: int = 0) -> Link:
    return Link(slot, int(mbit * 1000), short, rtt_ms)


def report_version(rates: Rates, giver: int, by: dict[int, tuple[float, int]], offered: float = 200.0) -> float:
    """Report a version. `by` maps each receiver to the Mbit/s that it got from `giver`, and to how many percent that
    was less than its part. Returns the estimate."""
    for receiver, (mbit, short) in by.items():
        rates.hear(receiver, [received(giver, mbit, short)])
    rates.update_estimates({giver: offered}, lambda slot: set())
    return rates.uplink(giver, offered, 200.0)


def test_an_unmeasured_offer_is_believed_within_limits() -> None:
    rates = Rates()
    assert rates.uplink(1, 300.0, typical=200.0) == 300.0
    assert rates.uplink(1, 10_000.0, typical=200.0) == 800.0
    assert rates.uplink(1, 10_000.0, typical=0.0) == 10_000.0


def test_an_overstated_uplink_lasts_one_version() -> None:
    """A member offers 10 Gbit/s and has 20 Mbit/s: its receivers get less than their part, which becomes the
    estimate."""
    rates = Rates()
    assert report_version(
        rates, 1, {2: (5, 60), 3: (5, 70), 4: (5, 60), 5: (5, 50)}, offered=10_000.0
    ) == pytest.approx(20)


def test_a_member_that_was_not_the_bottleneck_keeps_its_offer() -> None:
    rates = Rates()
    assert report_version(rates, 1, {2: (20, 0), 3: (20, 0)}) == 200.0


def test_an_estimate_falls_as_far_as_receivers_were_short_and_recovers() -> None:
    rates = Rates()
    assert report_version(rates, 1, {2: (50, 50), 3: (50, 50)}) == pytest.approx(100)
    assert report_version(rates, 1, {2: (5, 60), 3: (5, 60)}) == pytest.approx(40)
    worth = 0.0
    for _ in range(20):
        worth = report_version(rates, 1, {2: (20, 0), 3: (20, 0)})
    assert worth == 200.0


def test_a_member_without_children_is_tried_again_less_and_less_often() -> None:
    rates = Rates()

    def versions_until_tried() -> int:
        report_version(rates, 1, {2: (5, 90), 3: (5, 90)})
        return next(n for n in range(1000) if report_version(rates, 1, {}) == 200.0)

    report_version(rates, 1, {2: (20, 0), 3: (20, 0)})
    first, second, third = [versions_until_tried() for _ in range(3)]
    assert 10 < first < 20
    assert second == pytest.approx(2 * first, abs=2)
    assert third == pytest.approx(4 * first, abs=4)
    assert report_version(rates, 1, {2: (20, 0), 3: (20, 0)}) == 200.0  # it was not the cause
    assert versions_until_tried() == first


def test_an_estimate_never_exceeds_the_offer() -> None:
    rates = Rates()
    assert report_version(rates, 1, {2: (500, 0), 3: (500, 0)}) == 200.0
    assert report_version(rates, 1, {2: (500, 50), 3: (500, 50)}) == 200.0


def test_one_receiver_cannot_raise_an_estimate_alone() -> None:
    rates = Rates()
    worth = report_version(rates, 1, {2: (9_000, 60), 3: (10, 60), 4: (10, 60)}, offered=10_000.0)
    assert worth == pytest.approx(40)


def test_one_receiver_cannot_lower_an_estimate_alone() -> None:
    rates = Rates()
    assert report_version(rates, 1, {2: (1, 100), 3: (25, 0), 4: (25, 0)}) == 200.0


def test_a_child_of_a_slow_node_is_not_found_slow() -> None:
    """Node 1 is slow; node 2, its child, could not pass on what it did not get."""
    rates = Rates()
    for receiver in (3, 4, 5):
        rates.hear(receiver, [received(1, 5, 80), received(2, 5, 80)])
    rates.update_estimates({1: 200.0, 2: 200.0}, {1: set(), 2: {1}}.__getitem__)
    assert rates.uplink(1, 200.0, 200.0) == pytest.approx(15)
    assert rates.uplink(2, 200.0, 200.0) == 200.0


def measured(*came: tuple[int, float]) -> Link:
    """The report of a neighbour from which so many bytes came at these times."""
    session = SimpleNamespace(peer=b"anna", rtt_s=0.1)
    roster = SimpleNamespace(stripes=8, member_of=lambda peer: SimpleNamespace(slot=1))
    links = Links(
        cast(
            Any,
            SimpleNamespace(
                sessions=[session], roster=roster, exchange=SimpleNamespace(parents=SimpleNamespace(edges={}))
            ),
        )
    )
    for size, at in came:
        links.count_bytes(b"anna", size, at)
    (link,) = links.take_measurements()
    return link


def test_one_small_chunk_proves_a_newcomer_but_measures_no_uplink() -> None:
    assert measured().kbit_s == 0
    link = measured((16 << 10, 5.0), (16 << 10, 5.001), (16 << 10, 5.002), (16 << 10, 5.003))
    assert link.kbit_s == UNTIMED
    rates = Rates()
    assert rates.hear(2, [link]) == [1]
    rates.update_estimates({1: 200.0}, lambda slot: set())
    assert rates.uplink(1, 200.0, 200.0) == 200.0


def test_a_newcomer_that_was_tried_is_reported_once() -> None:
    newcomer = SimpleNamespace(slot=1, leaf=True, up_mbit=100.0)
    book, _ = book_with([header(1, 0)])
    outbox = Outbox()
    state = SimpleNamespace(
        sessions=[SimpleNamespace(peer=b"anna", rtt_s=0.1)],
        roster=SimpleNamespace(stripes=1, member_of=lambda peer: newcomer),
        exchange=SimpleNamespace(parents=SimpleNamespace(edges={}), children={0: {b"anna": None}}),
        grant=object(), held=version(1), chunks=book, tuning=TUNING, outbox=outbox,
    )  # fmt: skip
    links = Links(cast(Any, state))
    links.count_bytes(b"anna", 1000, 4.0)
    assert not links.take_answered()
    links.take_measurements()
    links.try_newcomers(5.0)
    assert [effect.peer for effect in only(outbox.take(), Send)] == [b"anna"]
    links.count_bytes(b"anna", 1000, 5.5)
    assert links.take_answered()
    for _ in range(2):  # it goes on sending after each account
        links.take_measurements()
        links.count_bytes(b"anna", 1000, 6.0)
        assert not links.take_answered()


def test_a_large_transfer_is_timed() -> None:
    link = measured(*[(64 << 10, 5.0 + 0.01 * i) for i in range(9)])
    assert link.kbit_s == pytest.approx(8 * 65536 * 8 / 80, rel=0.01)  # the first piece begins the clock


@pytest.mark.parametrize(
    ("far_s", "lasted_s", "judged"), [(0.01, 0.4, False), (0.01, 0.6, True), (0.1, 1.9, False), (0.1, 2.1, True)]
)
def test_a_parent_is_judged_by_versions_that_lasted(far_s: float, lasted_s: float, judged: bool) -> None:
    """One of two parents brought next to nothing. Connections start slowly, and slower over long round trips, so short
    versions do not judge it."""
    sessions = [SimpleNamespace(peer=b"anna", rtt_s=0.01), SimpleNamespace(peer=b"ben", rtt_s=far_s)]
    slots = {b"anna": SimpleNamespace(slot=1), b"ben": SimpleNamespace(slot=2)}
    roster = SimpleNamespace(stripes=2, member_of=slots.__getitem__)
    parents = {stripe: SimpleNamespace(peer=peer) for stripe, peer in enumerate(slots)}
    exchange = SimpleNamespace(parents=SimpleNamespace(edges=parents))
    links = Links(cast(Any, SimpleNamespace(sessions=sessions, roster=roster, exchange=exchange)))
    for i in range(101):
        links.count_bytes(b"ben" if i % 10 == 0 else b"anna", 64 << 10, 5.0 + lasted_s * i / 100)
    short = {link.slot: link.short_percent for link in links.take_measurements()}
    assert (short[2] > 50) is judged
    assert short[1] == 0


def test_a_members_own_report_does_not_raise_its_estimate() -> None:
    rates = Rates()
    assert rates.hear(1, [received(1, 500)]) == []
    assert rates.hear(2, [received(1, 500), received(3, 0)]) == [1]


def test_a_slot_with_a_new_holder_starts_without_an_estimate() -> None:
    rates = Rates()
    report_version(rates, 1, {2: (5, 50)})
    rates.forget(1)
    assert rates.uplink(1, 200.0, 200.0) == 200.0


# ---------------------------------------------------------------- regions


def mesh(regions: Regions, rtt_ms: dict[tuple[int, int], int]) -> None:
    for _ in range(3):
        for (a, b), rtt in rtt_ms.items():
            regions.hear(a, [received(b, 0, 0, rtt)])
            regions.hear(b, [received(a, 0, 0, rtt)])
        regions.update()


def test_two_continents_are_two_regions() -> None:
    regions = Regions()
    mesh(regions, {(a, b): 20 if a % 2 == b % 2 else 150 for a in range(10) for b in range(a)})
    assert len({regions.of(s) for s in range(0, 10, 2)}) == 1
    assert len({regions.of(s) for s in range(1, 10, 2)}) == 1
    assert regions.of(0) != regions.of(1)


def test_a_named_region_extends_to_members_near_by() -> None:
    regions = Regions()
    regions.tell(0, "eu")
    mesh(regions, {(0, 1): 10, (1, 2): 10, (2, 3): 200})
    assert [regions.of(s) for s in range(3)] == ["eu"] * 3
    assert regions.of(3) == ""


def test_a_named_region_is_kept() -> None:
    regions = Regions()
    regions.tell(0, "eu")
    regions.tell(1, "us")
    mesh(regions, {(0, 1): 1})
    assert [regions.of(0), regions.of(1)] == ["eu", "us"]


def test_members_that_are_equally_far_apart_are_one_region() -> None:
    regions = Regions()
    mesh(regions, {(a, b): 80 + a % 3 for a in range(6) for b in range(a)})
    assert len({regions.of(s) for s in range(6)}) == 1


def test_a_member_far_from_all_is_a_region_of_its_own() -> None:
    regions = Regions()
    mesh(regions, {(1, 2): 5, (0, 1): 100, (0, 2): 100, (0, 3): 100})
    assert regions.of(0) == "~0"
    regions.forget(0)
    assert regions.of(0) == ""


def test_a_swarm_that_has_measured_all_its_pairs_keeps_a_bounded_part_of_them_and_the_same_regions() -> None:
    regions, slots = Regions(), 3 * TRIPS_KEPT
    trips = {(a, b): 20 + (a + b) % 5 if a % 2 == b % 2 else 150 for a in range(slots) for b in range(a)}
    mesh(regions, trips)
    assert all(len(known) == TRIPS_KEPT for known in regions._rtt_ms.values())
    assert len({regions.of(s) for s in range(0, slots, 2)}) == 1
    assert len({regions.of(s) for s in range(1, slots, 2)}) == 1
    assert regions.of(0) != regions.of(1)
    regions.forget(5)
    assert not any(5 in known for known in regions._rtt_ms.values())


def test_members_that_only_one_crowded_member_is_near_to_stay_in_its_region() -> None:
    """It keeps the shortest round trips, and they keep theirs to it."""
    regions = Regions()
    mesh(regions, {(other, 0): 10 + other // 50 for other in range(1, 2 * TRIPS_KEPT)})
    assert len(regions._rtt_ms[0]) == TRIPS_KEPT
    assert len({regions.of(s) for s in range(2 * TRIPS_KEPT)}) == 1
