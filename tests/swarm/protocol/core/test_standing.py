"""Where a lease stands: its age, what moves it, and what it permits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_kit import AUTHORITY, SWARM, TUNING, capability, heartbeat, key_of, report

from swarm.protocol.core.documents import AuthorityTime, heartbeat_hash
from swarm.protocol.core.standing import TRANSITIONS, Standing, standing_at
from swarm.protocol.membership.lease import LeaseBook

SOFT_S, HARD_S = TUNING.soft_ttl_s, TUNING.hard_ttl_s
PEER = key_of(0)


@pytest.mark.parametrize(
    ("age_s", "standing"),
    [
        (-1.0, Standing.FRESH),
        (0.0, Standing.FRESH),
        (SOFT_S, Standing.FRESH),
        (SOFT_S + 0.001, Standing.SOFT),
        (HARD_S, Standing.SOFT),
        (HARD_S + 0.001, Standing.DEAD),
        (1e9, Standing.DEAD),
    ],
)
def test_a_lease_ages_by_its_two_times_to_live(age_s: float, standing: Standing) -> None:
    assert standing_at(age_s, TUNING) is standing


def test_each_standing_permits_no_more_than_the_one_before() -> None:
    rights = [standing.rights for standing in (Standing.FRESH, Standing.SOFT, Standing.DEAD)]
    assert rights == sorted(rights, reverse=True)
    assert rights[0] == (True, True)
    assert rights[-1] == (False, False)


@given(st.lists(st.tuples(st.sampled_from(["join", "renew", "leave", "wait"]), st.floats(0.0, HARD_S)), max_size=30))
def test_a_lease_book_moves_leases_along_the_table_only(steps: list[tuple[str, float]]) -> None:
    book, now, counter = LeaseBook(SWARM, AUTHORITY, TUNING), 1000.0, 0
    for what, pause_s in steps:
        before = book.standing(0, AuthorityTime(now))
        sealed = heartbeat(counter + 1, time=now)
        book.beat(sealed, AuthorityTime(now))
        if what == "wait":
            now += min(pause_s, SOFT_S)  # no longer than one expiry
        elif what == "join":
            book.admit(capability(), PEER.public, AuthorityTime(now))
        elif 0 in book.leases:
            counter += 1
            serial = book.leases[0].grant.serial
            own_report = report(0, heartbeat_hash(sealed), counter, key=PEER, serial=serial, leaving=what == "leave")
            assert book.renew(own_report, AuthorityTime(now))
        after = book.standing(0, AuthorityTime(now))
        assert after is before or after in TRANSITIONS[before].values() or what == "join"
        book.expire(AuthorityTime(now))
