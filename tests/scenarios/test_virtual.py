"""The simulated links: how rate, distance, congestion window, queue and processor determine the time of a transfer."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from codec.sign import Key
from node.coordinator import coordinator as seed
from node.member import join
from scenarios.sim.crowd import Crowd, bound_s, gather, step
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Costs, Cpu, Link, Paths
from scenarios.sim.virtual.clock import Clock
from scenarios.sim.virtual.flow import PACKET_OVERHEAD, Flow, Frame, wire_bytes
from scenarios.sim.virtual.links import Uplinks
from swarm.protocol.core.tuning import Tuning

BODY = 64 << 10


@dataclass(eq=False)
class Host:
    """The attributes of a node that links use."""

    link: Link
    name: int
    cpu: Cpu = field(default_factory=lambda: Cpu(Costs(0, 0, 0, 0, 0)))
    alive: bool = True
    frozen: bool = False
    sent_bytes: int = 0
    socket_bytes: int = 0
    crossed_bytes: int = 0
    queued_bytes: int = 0
    down_free_at: float = 0.0

    def __post_init__(self) -> None:
        self.key = Key(bytes([self.name]) * 32)
        self.sessions: dict[bytes, int] = {}
        self.uplink, self.waiting = deque(), deque()
        self.up_s_byte = 8e-6 * PACKET_OVERHEAD / self.link.up_mbit
        self.down_s_byte = 8e-6 * PACKET_OVERHEAD / self.link.down_mbit
        self.queue_limit = self.link.queue_s * self.link.up_mbit * 125_000


def transfer(
    frames: int, link: Link, rtt_s: float, congestion: str, children: int = 1, cpu: Cpu | None = None
) -> float:
    """Return the seconds until `frames` pieces of 64 KiB have arrived at each child."""
    clock, arrived = Clock(), []

    def landed(flow: Flow, frame: Frame) -> None:
        uplinks.taken(flow, frame)
        arrived.append(clock.now)

    paths = Paths(congestion=congestion)
    uplinks = Uplinks(clock, paths, random.Random(0), landed)
    source = Host(link, 1)
    source.cpu = cpu or source.cpu
    for number in range(children):
        child = Host(Link(1000, 0.0, 1000), 2 + number)
        source.sessions[child.key.public] = 1
        flow = Flow(source, child, 1, rtt_s / 2, paths)  # type: ignore[arg-type]
        for _ in range(frames):
            uplinks.send(flow, Frame(wire_bytes(BODY), BODY, None, print, ()), pull=False)
    clock.run(1000.0)
    assert len(arrived) == frames * children
    assert source.sent_bytes == frames * children * BODY
    return arrived[-1]


def least_s(frames: int, up_mbit: float) -> float:
    return frames * wire_bytes(BODY) * 8e-6 * PACKET_OVERHEAD / up_mbit


def test_without_windows_only_rate_and_distance_count() -> None:
    took = transfer(160, Link(200.0), 0.1, "")
    assert took == pytest.approx(least_s(160, 200) + 0.05 + least_s(1, 1000), rel=1e-3)


@pytest.mark.parametrize("congestion", ["reno", "bbr"])
def test_slow_start_costs_round_trips_on_a_long_path_and_little_on_a_short_one(congestion: str) -> None:
    near = transfer(160, Link(200.0), 0.005, congestion)
    far = transfer(160, Link(200.0), 0.25, congestion)
    assert near < 1.15 * least_s(160, 200)
    assert least_s(160, 200) + 0.125 + 0.5 < far < least_s(160, 200) + 0.125 + 2.5


def test_losses_slow_a_reno_flow_down() -> None:
    clean = transfer(2560, Link(400.0), 0.08, "reno")
    lossy = transfer(2560, Link(400.0, loss=1e-3), 0.08, "reno")
    assert lossy > 1.3 * clean


def test_one_lost_packet_ends_the_slow_start_of_one_connection_of_eight() -> None:
    def windows(losses: int) -> float:
        """Return the window of a flow over 250 ms, four round trips after it lost this many packets."""
        paths = Paths(congestion="reno")
        clock = Clock()
        uplinks = Uplinks(clock, paths, random.Random(0), lambda flow, frame: uplinks.taken(flow, frame))
        source, child = Host(Link(1000.0), 1), Host(Link(1000.0), 2)
        source.sessions[child.key.public] = 1
        flow = Flow(source, child, 1, 0.125, paths)  # type: ignore[arg-type]
        for _ in range(400):
            uplinks.send(flow, Frame(wire_bytes(BODY), BODY, None, print, ()), pull=False)
        clock.run(0.4)
        for _ in range(losses):
            uplinks._lose(flow, clock.now, 0.0)
        clock.run(1.4)
        return flow.cwnd

    assert 0.5 * windows(0) < windows(1) < windows(0)
    assert windows(8) < 0.2 * windows(0)


def test_flows_that_share_a_full_uplink_all_arrive_and_waste_nothing() -> None:
    took = transfer(40, Link(100.0, queue_s=0.02), 0.01, "reno", children=8)
    assert took < 1.1 * least_s(320, 100)


def test_a_slow_processor_is_the_bottleneck() -> None:
    slow = Cpu(Costs(send_s_byte=1e-6, receive_s_byte=0, frame_s=0, verify_s=0, message_s=0))
    assert transfer(16, Link(1000.0), 0.0, "", cpu=slow) == pytest.approx(16 * wire_bytes(BODY) * 1e-6, rel=0.01)


def test_the_bound_is_the_tightest_of_three() -> None:
    def bound(trainer: float, ups: list[float], down: float = 1e6) -> float:
        return bound_s(10**6, Link(trainer), [Host(Link(up, down_mbit=down), i) for i, up in enumerate(ups)])  # type: ignore[misc]

    bits = 8 * PACKET_OVERHEAD
    assert bound(100, [100] * 4) == pytest.approx(bits / 100)
    assert bound(1000, [100] * 4) == pytest.approx(4 * bits / 1400)
    assert bound(1000, [1000] * 4, down=10) == pytest.approx(bits / 10)


@pytest.mark.slow
def test_two_steps_of_12_nodes_are_near_the_bound_and_a_seed_gives_the_same_run() -> None:
    def run(seed: int) -> tuple[str, float]:
        world = gather(Crowd(12), seed, settle_s=12.0)
        first, second = step(world, 4 << 20), step(world, 4 << 20)
        for each in (first, second):
            assert each.missing == 0
            assert each.copies < 1.06
            assert each.duplicates <= 0.02
            assert each.seconds < 3 * each.bound_s + 2
        return world.digest, second.seconds

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_the_simulator_runs_the_classes_of_nodes_and_seeds() -> None:
    world = World(Tuning.loopback())
    assert type(world.join().core) is join.Peer
    assert type(world.authority.core) is seed.Authority


@pytest.mark.long
@pytest.mark.parametrize("congestion", ["reno", "bbr"])
def test_three_steps_of_64_nodes_cost_the_trainer_one_copy_each(congestion: str) -> None:
    """With BBR, which the transport asks for, each step also meets the target of 1.15 bounds plus the longest round
    trip. A seed gives the same run each time: 1.153, 1.138 and 1.133 bounds, where the limit is 1.207."""
    crowd = Crowd(64, congestion=congestion)
    world = gather(crowd, 1 if congestion == "bbr" else 0)
    for _ in range(3):
        result = step(world, 100 << 20)
        assert result.missing == 0
        assert result.copies < 1.03
        assert result.duplicates <= 0.02
        reach_s = 1.15 * result.bound_s + crowd.round_trip_s if congestion == "bbr" else 1.4 * result.bound_s
        assert result.seconds < reach_s
        world.run(world.now + 20.0)


@pytest.mark.slow
@pytest.mark.long
def test_a_trainer_with_more_uplink_than_its_nodes_sends_one_copy() -> None:
    result = step(gather(Crowd(64, trainer_mbit=1000.0), 0), 100 << 20)
    assert result.missing == 0
    assert result.copies < 1.03
    assert result.duplicates <= 0.02
