"""A relay's circuits for strangers: a joiner gets one while others attack. Memory streams, and a clock that jumps."""

import trio
import trio.testing

from codec.sign import Key
from swarm.transport.base import PeerKey
from swarm.transport.nat.circuit import HopMessage, Status, StopMessage, peer_in, read_message, write_message
from swarm.transport.nat.relay import Relay, RelayRules
from swarm.transport.nat.relay_strangers import StrangerCircuit, StrangerCircuits, StrangerRules

SEED = Key(bytes([99]) * 32).public
RULES = StrangerRules()


def key(number: int) -> PeerKey:
    return Key(number.to_bytes(32, "little")).public


def stranger(number: int, address: str, ended: list[int] | None = None, target: PeerKey = SEED) -> StrangerCircuit:
    return StrangerCircuit(
        number.to_bytes(32, "little"), address, target, lambda: ended.append(number) if ended is not None else None
    )


def circuits(members: set[PeerKey] | None = None, rules: StrangerRules = RULES) -> StrangerCircuits:
    return StrangerCircuits(members.__contains__ if members is not None else lambda peer: False, rules)


def test_one_key_gets_few_circuits_and_not_often() -> None:
    table = circuits()
    first = [stranger(1, "a") for _ in range(3)]
    assert [table.add_circuit(each, 0.0) for each in first] == [True, True, False]
    table.remove_circuit(first[0])
    assert not table.add_circuit(stranger(1, "a"), 0.1)
    assert table.add_circuit(stranger(1, "a"), RULES.key_every_s + 0.1)


def test_one_address_gets_few_circuits_and_not_often() -> None:
    table = circuits()
    circuits_of_one = [stranger(number, "a") for number in range(20)]
    assert sum(table.add_circuit(each, 0.0) for each in circuits_of_one) == RULES.from_address
    for each in circuits_of_one:
        table.remove_circuit(each)
    assert not table.add_circuit(stranger(30, "a"), 0.1)
    assert table.add_circuit(stranger(30, "a"), RULES.address_every_s + 0.1)


def test_the_oldest_circuit_of_the_address_with_most_makes_room() -> None:
    ended: list[int] = []
    table = circuits(rules=StrangerRules(to_one=4))
    for number, address in enumerate(["quiet", "loud", "loud", "loud"]):
        assert table.add_circuit(stranger(number, address, ended), float(number))
    assert not table.add_circuit(stranger(5, "new", ended), 5.9)  # the loud address's circuits are too young
    assert table.add_circuit(stranger(6, "new", ended), 6.0)
    assert ended == [1]
    assert not table.add_circuit(stranger(7, "loud", ended), 100.0)  # no circuit makes room for an equal address
    assert ended == [1]


def test_a_new_member_keeps_its_circuit_which_counts_no_more() -> None:
    ended: list[int] = []
    members: set[PeerKey] = set()
    table = circuits(members, StrangerRules(to_one=1))
    joined = stranger(1, "a", ended)
    assert table.add_circuit(joined, 0.0)
    members.add(joined.peer)
    assert table.add_circuit(stranger(2, "b", ended), 60.0)
    assert ended == []
    table.remove_circuit(joined)
    assert table.count == 1


def test_other_targets_share_half_of_all_circuits_and_no_more() -> None:
    table = circuits(rules=StrangerRules(in_all=5))
    wanted = [stranger(n, f"a{n}", target=bytes([n])) for n in range(6)]
    assert [table.add_circuit(each, 0.0) for each in wanted] == [True] * 5 + [False]


def test_buckets_of_invented_keys_are_forgotten() -> None:
    table = circuits()
    for number in range(20_000):
        circuit = stranger(number, f"a{number % 5000}")
        if table.add_circuit(circuit, number * 0.01):
            table.remove_circuit(circuit)
    assert len(table._buckets) <= 4096


class World:
    """A relay, a seed that holds a reservation, and callers; no sockets."""

    def __init__(self, rules: RelayRules | None = None) -> None:
        self.members = {SEED}
        self.seen: dict[PeerKey, str] = {}
        self.relay = Relay(rules or RelayRules(), self.members.__contains__, self._open, self.seen.get)
        self.nursery: trio.Nursery
        self.closed: set[PeerKey] = set()

    async def start(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        near, far = trio.testing.memory_stream_pair()
        nursery.start_soon(self.relay.serve_hop, SEED, far)
        await write_message(near, HopMessage(type=HopMessage.RESERVE))
        assert (await read_message(near, HopMessage)).status == Status.OK

    async def _open(self, peer: PeerKey, protocol: str) -> trio.abc.HalfCloseableStream:
        """The seed accepts every circuit, and waits for it to end."""
        near, far = trio.testing.memory_stream_pair()

        async def answer() -> None:
            await read_message(far, StopMessage)
            await write_message(far, StopMessage(type=StopMessage.STATUS, status=Status.OK))
            while await far.receive_some():
                pass
            await far.aclose()

        self.nursery.start_soon(answer)
        return near

    async def call(self, caller: PeerKey, address: str) -> trio.abc.HalfCloseableStream | None:
        """Ask for a circuit to the seed; None if it is refused."""
        self.seen[caller] = f"/ip4/{address}/tcp/5"
        near, far = trio.testing.memory_stream_pair()

        async def serve() -> None:
            async with far:
                await self.relay.serve_hop(caller, far)
            self.closed.add(caller)

        self.nursery.start_soon(serve)
        await write_message(near, HopMessage(type=HopMessage.CONNECT, peer=peer_in(SEED, None)))
        answer = await read_message(near, HopMessage)
        return near if answer.status == Status.OK else None


async def attack(world: World, keys: int, addresses: int) -> None:
    """Each key asks for a circuit as often as it can, and keeps the ones it gets."""

    async def one(number: int) -> None:
        while True:
            await world.call(key(number), f"203.0.113.{number % addresses}")
            await trio.sleep(3.0)

    async with trio.open_nursery() as nursery:
        for number in range(keys):
            nursery.start_soon(one, 1000 + number)


async def joins(keys: int, addresses: int) -> None:
    """While the attack runs, joiners come from other addresses, and a member holds a circuit."""
    world = World()
    member = key(500)
    world.members.add(member)
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
            assert await world.call(member, "198.51.100.1")
            nursery.start_soon(attack, world, keys, addresses)
            await trio.sleep(30)
            for number in range(8):
                joiner = await world.call(key(number), f"192.0.2.{number}")
                assert joiner is not None
                await trio.sleep(4)  # as long as a join takes
                assert key(number) not in world.closed
                await joiner.aclose()
                await trio.sleep(3)
            assert member not in world.closed
            nursery.cancel_scope.cancel()


async def test_two_keys_do_not_keep_joiners_out(autojump_clock: trio.testing.MockClock) -> None:
    """Regression: two keys with 16 circuits each, renewed each minute, kept every joiner from a seed behind NAT."""
    await joins(keys=2, addresses=1)


async def test_ten_keys_on_five_addresses_do_not_keep_joiners_out(autojump_clock: trio.testing.MockClock) -> None:
    await joins(keys=10, addresses=5)


async def test_dozens_of_keys_on_six_addresses_do_not_keep_joiners_out(autojump_clock: trio.testing.MockClock) -> None:
    """They hold all circuits; the oldest of them makes room."""
    await joins(keys=48, addresses=6)


async def test_a_circuit_that_makes_room_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    world = World(RelayRules(strangers=StrangerRules(to_one=2)))
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
            first = await world.call(key(1), "203.0.113.1")
            assert first
            assert await world.call(key(2), "203.0.113.1")
            assert await world.call(key(3), "192.0.2.1") is None
            await trio.sleep(6)
            assert await world.call(key(4), "192.0.2.2")
            assert await first.receive_some() == b""
            assert world.relay.circuits == world.relay.strangers.count == 2
            nursery.cancel_scope.cancel()
