"""Which inbound connection may begin its handshake, under a virtual clock."""

import random
from dataclasses import dataclass, field

import pytest

from swarm.transport.connection import handshakes
from swarm.transport.connection.handshakes import Arrival, HandshakeRules, HandshakeTurns

RULES = HandshakeRules(
    pending=6, pending_per_address=3, busy=4, silent_s=3, turn_s=10, share=1.0, cost_s=0.1, burst_s=0.2, favoured=2
)


def arrives(gate: HandshakeTurns, address: str, now_s: float = 0.0) -> Arrival:
    arrival, _ = gate.add_arrival(address, now_s)
    assert arrival is not None
    return arrival


def speaks(gate: HandshakeTurns, address: str, now_s: float = 0.0) -> Arrival:
    arrival = arrives(gate, address, now_s)
    gate.note_first_byte(arrival, now_s)
    return arrival


def test_the_oldest_silent_one_of_an_address_makes_room_for_its_next() -> None:
    gate = HandshakeTurns(RULES)
    speaking = speaks(gate, "192.0.2.1")
    silent = [arrives(gate, "192.0.2.1") for _ in range(2)]
    newcomer, dropped = gate.add_arrival("192.0.2.1", 1)
    assert newcomer is not None
    assert dropped == [silent[0]]
    assert gate.pending == 3
    assert silent[0].is_finished
    assert not speaking.is_finished
    assert gate.made_room == 1


def test_the_address_that_occupies_most_makes_room_for_others() -> None:
    gate = HandshakeTurns(RULES)
    many = [arrives(gate, "192.0.2.1", index) for index in range(3)]
    few = [arrives(gate, f"192.0.2.{host}", 0) for host in (2, 3, 4)]
    for host, victim in ((5, many[0]), (6, many[1])):
        newcomer, dropped = gate.add_arrival(f"192.0.2.{host}", 3)
        assert newcomer is not None
        assert dropped == [victim]
    newcomer, dropped = gate.add_arrival("192.0.2.7", 3)  # each address has one: the first of them is dropped
    assert dropped == [few[0]]
    assert gate.pending == 6


def test_of_equally_large_addresses_the_one_with_most_handshakes_makes_room() -> None:
    gate = HandshakeTurns(RULES)
    for _ in range(2):
        gate.finish(speaks(gate, "192.0.2.3"))  # its handshake never began, so it does not count
    begun = speaks(gate, "192.0.2.4")
    assert gate.next_turns(0) == ([begun], [])
    gate.finish(begun)
    arrivals = {host: arrives(gate, f"192.0.2.{host}") for host in range(1, 7)}
    _, dropped = gate.add_arrival("192.0.2.9", 1)
    assert dropped == [arrivals[4]]


def test_silent_and_waiting_arrivals_expire() -> None:
    gate = HandshakeTurns(RULES)
    silent = arrives(gate, "192.0.2.1", 0)
    assert gate.wait_s(1) == 2
    assert gate.expire(2.9) == []
    assert gate.expire(3) == [silent]
    assert gate.wait_s(3) == float("inf")
    waiting, begun = (speaks(gate, f"192.0.2.{host}", 3) for host in (2, 3))
    gate._bucket.level = 0.1
    gate._bucket.at_s = 3
    assert gate.next_turns(3) == ([begun], [])
    assert gate.wait_s(3) == pytest.approx(0.1)
    assert gate.expire(12.9) == []
    assert gate.expire(13) == [waiting]
    gate.finish(waiting)  # repeated: no effect
    gate.finish(begun)
    assert gate.pending == 0


def test_handshakes_get_exactly_their_share_of_time() -> None:
    gate = HandshakeTurns(HandshakeRules())
    begun = 0
    for tick in range(1000):  # ten seconds
        for _ in range(5):
            speaks(gate, f"192.0.2.{random.randrange(256)}", tick / 100)
        turns, _ = gate.next_turns(tick / 100)
        begun += len(turns)
        for each in turns:
            gate.finish(each)
    rules = gate.rules
    spent_s = begun * rules.cost_s
    assert spent_s == pytest.approx(10 * rules.share + rules.burst_s, rel=0.01)


def test_the_address_with_the_fewest_recent_handshakes_is_next() -> None:
    gate = HandshakeTurns(RULES)
    for now_s in range(3):
        gate.finish(speaks(gate, "192.0.2.1", now_s))  # ended before its turn, so it does not count
        for each in (speaks(gate, "192.0.2.1", now_s),):
            assert gate.next_turns(now_s)[0] == [each]
            gate.finish(each)
    gate._bucket.level = 0
    busy, busier = (speaks(gate, "192.0.2.1", 3) for _ in range(2))
    new = speaks(gate, "192.0.2.2", 3)
    gate._bucket.at_s = 3
    assert gate.next_turns(3.125)[0] == [new]
    assert gate.next_turns(3.25)[0] == [busier]  # the newest of an address
    assert gate.next_turns(3.375)[0] == [busy]
    assert gate.next_turns(1000)[0] == []


def test_old_handshakes_count_less() -> None:
    gate = HandshakeTurns(RULES)
    for now_s, host, times in ((0, 1, 2), (600, 2, 1)):
        for _ in range(times):
            each = speaks(gate, f"192.0.2.{host}", now_s)
            assert gate.next_turns(now_s)[0] == [each]
            gate.finish(each)
    gate._bucket.level, gate._bucket.at_s = 0, 600
    lately, long_ago = speaks(gate, "192.0.2.2", 600), speaks(gate, "192.0.2.1", 600)
    assert gate.next_turns(600.125)[0] == [long_ago]
    assert gate.next_turns(600.25)[0] == [lately]


def test_a_members_address_goes_first_and_makes_no_room() -> None:
    gate = HandshakeTurns(RULES, {"192.0.2.9"}.__contains__)
    member = arrives(gate, "192.0.2.9")
    for index in range(12):
        newcomer, dropped = gate.add_arrival(f"192.0.2.{index % 3}", index)
        assert newcomer is not None
        assert member not in dropped
    gate._bucket.level = gate._bucket.at_s = 0
    for arrival in list(gate._silent):
        gate.note_first_byte(arrival, 0)
    assert gate.next_turns(0)[0] == [member]  # at once, although the CPU budget is used up
    assert gate.next_turns(0)[0] == []


def test_an_address_of_a_member_with_too_many_takes_its_turn() -> None:
    gate = HandshakeTurns(RULES, {"192.0.2.9"}.__contains__)
    gate._bucket.level = 0
    begun = 0
    for index in range(10):
        each = speaks(gate, "192.0.2.9", index / 1000)
        begun += len(gate.next_turns(index / 1000)[0])
        gate.finish(each)
    assert begun == RULES.favoured


def test_members_connections_are_not_dropped() -> None:
    rules = HandshakeRules(pending=2, favoured=4)
    gate = HandshakeTurns(rules, lambda host: host.startswith("192.0.2"))
    members = [arrives(gate, f"192.0.2.{host}") for host in (1, 2)]
    assert gate.add_arrival("198.51.100.1", 0) == (None, [])
    assert not any(each.is_finished for each in members)


def test_few_begin_in_one_turn_of_the_loop() -> None:
    """The rest begin in the next turns, at once while CPU time is left; members' too."""
    gate = HandshakeTurns(HandshakeRules(at_once=2, share=1.0, cost_s=0.1, burst_s=0.4), {"192.0.2.9"}.__contains__)
    members = [speaks(gate, "192.0.2.9") for _ in range(3)]
    others = [speaks(gate, f"198.51.100.{host}") for host in range(4)]
    assert gate.next_turns(0) == (members[:0:-1], [])
    assert gate.wait_s(0) == 0
    assert gate.next_turns(0) == ([members[0], others[-1]], [])
    assert gate.wait_s(0) == pytest.approx(0.1)  # three members and one other have spent it


def test_members_wait_for_the_next_turn_only() -> None:
    gate = HandshakeTurns(HandshakeRules(at_once=2, share=1.0, cost_s=0.1, burst_s=0.1), {"192.0.2.9"}.__contains__)
    gate._bucket.level = 0
    for _ in range(3):
        speaks(gate, "192.0.2.9")
    assert len(gate.next_turns(0)[0]) == 2
    assert gate.wait_s(0) == 0  # although the budget is used up


def test_slow_handshakes_make_room() -> None:
    gate = HandshakeTurns(HandshakeRules(busy=2))
    slow = [speaks(gate, f"192.0.2.{host}", host) for host in (1, 2)]
    assert gate.next_turns(2) == (slow[::-1], [])
    quick = speaks(gate, "192.0.2.3", 3)
    assert gate.next_turns(3) == ([quick], slow[1:])  # drops the first that began; the last one has had no time yet
    assert slow[1].is_finished
    again = speaks(gate, "192.0.2.3", 4)
    assert gate.next_turns(4) == ([again], slow[:1])
    more = speaks(gate, "192.0.2.4", 5)
    assert gate.next_turns(5) == ([more], [quick])  # drops one of the address with the most handshakes


def test_addresses() -> None:
    gate = HandshakeTurns(HandshakeRules(pending_per_address=1))
    for same in (("2001:db8::1", "2001:db8::ffff"), ("::ffff:192.0.2.1", "192.0.2.1"), ("relay X", "relay X")):
        first = arrives(gate, same[0])
        assert gate.add_arrival(same[1], 0)[1] == [first]
    assert gate.add_arrival("2001:db8:0:1::1", 0)[1] == []  # another /64
    assert gate.add_arrival("fe80::1%eth0", 0)[1] == []


def test_addresses_of_one_ipv6_network_share_a_turn() -> None:
    gate = HandshakeTurns(RULES)
    for host in range(2):
        each = speaks(gate, f"2001:db8:0:{host}::1")
        assert gate.next_turns(0)[0] == [each]
        gate.finish(each)
    gate._bucket.level = 0
    same, other = speaks(gate, "2001:db8:0:7::1", 1), speaks(gate, "2001:db8:1:7::1", 1)
    gate._bucket.level, gate._bucket.at_s = 0.1, 1
    assert gate.next_turns(1)[0] == [other]
    assert gate.next_turns(1.125)[0] == [same]


def test_the_table_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_MAX_HOSTS", 100)
    gate = HandshakeTurns(HandshakeRules())
    for number in range(2 * handshakes._MAX_HOSTS):
        gate.finish(arrives(gate, f"2001:{number:x}::1"))
    assert len(gate._hosts) == len(gate._networks) == handshakes._MAX_HOSTS
    assert gate.pending == 0
    assert not any(gate._by_size)


def test_any_order_of_events_leaves_no_trace() -> None:
    dice = random.Random(7)
    gate = HandshakeTurns(RULES)
    here: list[Arrival] = []
    for step in range(5000):
        now_s = step / 50
        act = dice.randrange(4)
        if act == 0:
            arrival, _ = gate.add_arrival(f"192.0.2.{dice.randrange(9)}", now_s)
            here += [arrival] if arrival else []
        elif act == 1 and here:
            gate.note_first_byte(dice.choice(here), now_s)
        elif act == 2 and here:
            gate.finish(here.pop(dice.randrange(len(here))))
        else:
            gate.next_turns(now_s)
            gate.expire(now_s)
        here = [each for each in here if not each.is_finished]
        assert gate.pending == len(here) <= RULES.pending
        assert len(gate._busy) <= RULES.busy
    for each in here:
        gate.finish(each)
    assert gate.pending == 0
    assert not gate._first
    assert not gate._waiting
    assert not any(gate._by_size)


@dataclass
class Flood:
    """Strangers from many addresses, each of which keeps as many connections as it can and connects again at once."""

    gate: HandshakeTurns
    addresses: int
    each: int
    speaking: float
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    begun: int = 0

    def step(self, now_s: float, arrivals: int) -> list[Arrival]:
        for _ in range(arrivals):
            host = self.dice.randrange(self.addresses)
            arrival, _ = self.gate.add_arrival(f"10.{host >> 8}.{host & 255}.1", now_s)
            if arrival is not None and self.dice.random() < self.speaking:
                self.gate.note_first_byte(arrival, now_s)
        self.gate.expire(now_s)
        begun, _ = self.gate.next_turns(now_s)
        self.begun += len(begun)
        return begun


@pytest.mark.parametrize("speaking", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("starts_s", [0.0, 5.0])
def test_a_newcomer_is_served_amid_ten_thousand_strangers(speaking: float, starts_s: float) -> None:
    """1,000 addresses make 2,000 connections a second. A stranger's handshake takes 3 s, the newcomer's 0.2 s."""
    gate = HandshakeTurns(HandshakeRules(), {"203.0.113.1"}.__contains__)
    flood = Flood(gate, 1000, 10, speaking)
    ends: list[tuple[float, Arrival]] = []
    came: dict[str, Arrival] = {}
    served_s: dict[str, float] = {}
    for tick in range(2000):
        now_s = tick / 100
        for each in flood.step(now_s, 20):
            ends.append((now_s + (0.2 if each in came.values() else 3), each))
        for end_s, each in ends:
            if end_s <= now_s and not each.is_finished:
                served_s |= {name: now_s - starts_s for name, other in came.items() if other is each}
                gate.finish(each)
        ends = [end for end in ends if end[0] > now_s]
        if now_s == starts_s:
            came = {"newcomer": arrives(gate, "198.51.100.1", now_s), "member": arrives(gate, "203.0.113.1", now_s)}
        for name, each in came.items():
            assert not each.is_finished or name in served_s
            if now_s == starts_s + 0.1:  # their first bytes come
                gate.note_first_byte(each, now_s)
        if len(served_s) == 2:
            break
    assert served_s["member"] <= 0.35
    assert served_s["newcomer"] <= (9.7 if starts_s == 0 else 0.4)  # each address goes before it once or never
