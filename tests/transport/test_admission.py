from swarm.transport import admission
from swarm.transport.admission import Admission, AdmissionRules

RULES = AdmissionRules(per_s=10, burst=20, pending_per_address=30, pending=50)


def test_burst_then_rate() -> None:
    gate = Admission(RULES)

    def tries(address: str, now_s: float, count: int) -> int:
        allowed = [gate.begin(address, now_s) for _ in range(count)].count(True)
        for _ in range(allowed):
            gate.end(address)
        return allowed

    assert tries("192.0.2.1", 0, 100) == 20
    assert tries("192.0.2.1", 1, 100) == 10
    assert tries("192.0.2.1", 1.05, 100) == 0
    assert tries("192.0.2.2", 1, 100) == 20  # another address is not its neighbour's keeper
    assert tries("192.0.2.1", 1000, 100) == 20  # never more than the burst
    assert gate.refused == 80 + 90 + 100 + 80 + 80


def test_pending() -> None:
    gate = Admission(AdmissionRules(per_s=1e9, burst=10**9, pending_per_address=3, pending=5))
    assert [gate.begin("192.0.2.1", 0) for _ in range(4)] == [True, True, True, False]
    assert [gate.begin("192.0.2.2", 0) for _ in range(3)] == [True, True, False]
    gate.end("192.0.2.1")
    assert gate.begin("192.0.2.2", 0)


def test_addresses() -> None:
    gate = Admission(AdmissionRules(per_s=0.001, burst=1))
    assert gate.begin("2001:db8::1", 0)
    assert not gate.begin("2001:db8::ffff", 0)  # the same /64
    assert gate.begin("2001:db8:0:1::1", 0)
    assert gate.begin("::ffff:192.0.2.1", 0)
    assert not gate.begin("192.0.2.1", 0)
    assert gate.begin("fe80::1%eth0", 0)


def test_an_attack_from_everywhere_is_bounded() -> None:
    gate = Admission(AdmissionRules(per_s=1, burst=2))
    for number in range(2 * admission._MAX_HOSTS):
        if gate.begin(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0):
            gate.end(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(gate._hosts) == admission._MAX_HOSTS
    assert gate.begin("192.0.2.1", 10)  # the quiet ones were forgotten
