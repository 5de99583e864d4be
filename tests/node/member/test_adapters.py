"""A node's work for adapters: what it says it has, what it draws with, and by which versions it names its tokens."""

import os
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from adapter_work_kit import AdapterEngine, AdapterSwarm, adapted
from work_kit import SAMPLING, TOKENS, collect, root

from node.engines.base import Span
from node.ledger.binding import Binding
from node.ledger.messages import Abilities, GiveBack, LoadedAdapters, WorkRequest
from node.ledger.part_history import WHOLE, Change
from node.member.engine_updater import AdapterUpdate
from node.member.held_version import HeldVersion


@pytest.fixture
async def swarm(tmp_path):
    async with trio.open_nursery() as nursery:
        yield AdapterSwarm(tmp_path, nursery)
        nursery.cancel_scope.cancel()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_work_for_an_adapter_is_drawn_with_it_and_accepted(swarm, autojump_clock):
    before = open_fds()
    service = await swarm.start_service()
    engine = await swarm.add_node(1, 0.0, engine=AdapterEngine())
    swarm.step("a")
    swarm.step("b")
    await trio.sleep(20)
    assert swarm.said(LoadedAdapters)[-1].names == ("a", "b")
    assert swarm.said(WorkRequest)[-1].version == 2, "the engine has all of it, though its base is version 0"
    groups = await collect(service, service.open("s", adapted("a")), 10)
    assert {adapter for adapter, _ in engine.drawn} == {"a"}
    assert {sampling for _, sampling in engine.drawn} == {SAMPLING}
    owns = {done.own for group in groups for done in group.done.values()}
    assert owns == {(1,)}
    spans = {(span.epoch, span.version) for g in groups for done in g.done.values() for span in done.rollout.spans}
    assert spans == {(0, 2)}, "named by what the node held, whose root the ledger knows"
    assert service.status().accepted == 20
    assert service.status().refused == {}
    assert open_fds() <= before + 8, "descriptors of weights are closed"


async def test_a_step_of_an_adapter_falls_into_its_own_samples_only(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0.0, engine=AdapterEngine(rate=20.0), capacity=8, batch=8)
    swarm.step("a")
    swarm.step("b")
    await trio.sleep(20)
    sessions = {name: service.open(f"s{name}", adapted(name)) for name in ("a", "b")}
    groups = {}

    async def take(name: str) -> None:
        groups[name] = await collect(service, sessions[name], 2, first=10 * (ord(name) - 96))

    async with trio.open_nursery() as nursery:
        for name in sessions:
            nursery.start_soon(take, name)
        await trio.sleep(4)
        swarm.step("a")
    done = {name: [done for group in found for done in group.done.values()] for name, found in groups.items()}
    spans = {
        name: {tuple((span.version, span.end) for span in each.rollout.spans) for each in found}
        for name, found in done.items()
    }
    assert ((2, 10), (3, TOKENS)) in spans["a"]
    assert all(len(found) == 1 for found in spans["b"])
    assert (1, 2) in {each.own for each in done["a"]}
    assert service.status().refused == {}


async def test_samples_that_would_be_too_old_are_cancelled_by_part(swarm, autojump_clock):
    service = await swarm.start_service()
    await swarm.add_node(1, 0.0, engine=AdapterEngine(rate=5.0), capacity=4, batch=4)
    for name in "ab":
        swarm.step(name)
    await trio.sleep(20)
    for name in "ab":
        session = service.open(name, adapted(name, max_lag=1))
        service.offer(session, name.encode() * 16, (1).to_bytes(4, "little"))
    await trio.sleep(2)
    worker = swarm.worker(1)
    assert worker.status().generating == 4
    begun = {flight.adapter: flight for flight in worker._flights}
    for _ in range(3):
        swarm.step("b")
        await trio.sleep(0.1)
    assert begun["a"] in worker._flights
    assert begun["b"] not in worker._flights, "it would be refused, and is generated again"


async def test_the_pause_and_the_lag_of_each_adapter_are_in_the_timesheet(swarm, autojump_clock):
    await swarm.start_service()
    await swarm.add_node(1, 0.0, engine=AdapterEngine())
    swarm.step("a")
    swarm.step()
    await trio.sleep(20)
    commits = [(commit.version, commit.pause_s) for commit in swarm.worker(1).commits]
    assert commits == [(1, 0.004), (2, 0.01)]
    assert swarm.worker(1).status().engine_version == (0, 2)


async def test_an_adapter_that_the_engine_refuses_is_not_served_and_the_rest_goes_on(swarm, autojump_clock):
    service = await swarm.start_service()
    engine = AdapterEngine()
    engine.refuses = "b"
    await swarm.add_node(1, 0.0, engine=engine)
    for name in "ab":
        swarm.step(name)
    await trio.sleep(20)
    assert swarm.said(LoadedAdapters)[-1].names == ("a",)
    assert swarm.said(WorkRequest)[-1].version == 2
    session = service.open("b", adapted("b"))
    service.offer(session, bytes(16), (1).to_bytes(4, "little"))
    assert len(await collect(service, service.open("s", adapted("a")), 3, first=5)) == 3
    assert service.status().unmet == {"b": ["adapter"]}


async def test_an_adapter_that_is_removed_while_it_draws_costs_the_node_nothing(swarm, autojump_clock):
    service = await swarm.start_service()
    engine = await swarm.add_node(1, 0.0, engine=AdapterEngine(rate=20.0))
    swarm.step("a")
    await trio.sleep(20)
    session = service.open("s", adapted("a"))
    service.offer(session, bytes(16), (1).to_bytes(4, "little"))
    await trio.sleep(2)
    assert engine.generating
    await engine.drop_adapter(0)
    await trio.sleep(20)
    assert swarm.said(GiveBack), "other nodes may have it"
    assert swarm.said(LoadedAdapters)[-1].names == ()
    assert not session.impossible, "that it lacks the adapter does not make the work impossible"
    swarm.step("a", removed=True, told=False)
    await trio.sleep(1)
    assert "removed" in session.impossible[bytes(16)]


async def test_a_seed_of_the_last_release_hears_nothing_of_adapters(swarm, autojump_clock):
    await swarm.start_service()
    await swarm.add_node(1, 0.0, engine=AdapterEngine())
    worker = swarm.worker(1)
    worker.update((0, 1), root(1), None, Change(base=False), adapters=[
        AdapterUpdate(0, SimpleNamespace(name="a"), os.memfd_create("weights"), bytes(32))  # type: ignore[arg-type]
    ])  # fmt: skip
    await trio.sleep(60)
    assert swarm.said(Abilities)
    assert not swarm.said(LoadedAdapters), "it was never asked"


async def test_which_adapters_it_has_is_said_again_because_messages_are_lost(swarm, autojump_clock):
    await swarm.start_service()
    await swarm.add_node(1, 0.0, engine=AdapterEngine())
    swarm.step("a")
    await trio.sleep(100)
    assert 5 <= len(swarm.said(LoadedAdapters)) <= 12


async def test_an_engine_that_was_loaded_anew_begins_nothing_before_its_adapters_follow(swarm, autojump_clock):
    """A process that restarts loads the base of the newest version, and then gets the adapters that it had before."""
    service = await swarm.start_service()
    engine = await swarm.add_node(1, 0.0, engine=AdapterEngine())
    swarm.step("a")
    await trio.sleep(20)
    engine.up = trio.Event()
    swarm.step()
    swarm.step("a")
    engine.version, engine.root = (0, 3), root(3)
    session = service.open("s", adapted("a"))
    service.offer(session, bytes(16), (1).to_bytes(4, "little"))
    service.offer(service.open("base", Binding(2, SAMPLING)), b"b" * 16, (1).to_bytes(4, "little"))
    swarm.worker(1).know((0, 3), root(3))
    held = swarm.worker(1)._held
    assert held.behind
    assert not held.has((0, 3), "a")
    assert swarm.worker(1)._next_jobs() == []
    engine.up.set()
    await trio.sleep(20)
    assert not held.behind
    (group,) = session.groups
    assert {done.own for done in group.done.values()} == {(2,)}
    assert engine.adapters == {"a": (0, 3)}
    assert service.status().refused == {}


def test_names_of_tokens_and_their_roots():
    engine = SimpleNamespace(version=(0, 1), root=b"1" * 32, adapters={"a": (0, 3)})
    held = HeldVersion(engine)  # type: ignore[arg-type]
    assert (held.version, held.root) == ((0, 1), b"1" * 32)
    for version in (2, 3, 4):
        held.coming(
            (0, version), bytes([version]) * 32, Change(base=False, changed=frozenset({"a"}), adapters={"a": 1})
        )
        held.followed((0, version))
    assert (held.version, held.root) == ((0, 4), b"\4" * 32)
    begun = held.begin()
    (span,) = held.spans((Span((0, 3), 0, 5),), begun)
    assert (span.version, span.root, span.end) == (4, b"\4" * 32, 5)
    assert held.spans((Span((0, 9), 0, 5),), begun) is None, "no root is known"
    held.coming((0, 5), b"5" * 32, WHOLE)
    found = held.spans((Span((0, 3), 0, 2), Span((0, 4), 2, 4), Span((0, 5), 4, 6)), begun)
    assert [(span.version, span.end) for span in found] == [(4, 4), (5, 6)], "of one version, one span"
    assert held.lag("a", (0, 4), (0, 5)) == held.lag("", (0, 1), (0, 5)) == 1
    assert held.lag("a", (0, 1), (0, 5)) == 4
    assert held.lag("a", (0, 1), (1, 5)) is None
    assert held.has((0, 4), "a")
    assert not held.has((0, 5), "a"), "the engine does not have it yet"
    assert not held.has((0, 2), "a"), "it has changed since"
    assert not held.has((0, 4), "b")
    assert held.has((0, 2), ""), "the base is as it was"


@pytest.mark.slow
@pytest.mark.long
async def test_eight_adapters_have_equal_shares_of_the_nodes_whatever_one_of_them_asks(swarm, autojump_clock):
    """Seven trainers that wait for each step's groups, and one that offers without end. Four nodes of 100 tokens/s."""
    service = await swarm.start_service()
    names = "abcdefgh"
    for i in range(1, 5):
        await swarm.add_node(i, 0.0, engine=AdapterEngine(rate=100.0), capacity=16, batch=8)
    for name in names:
        swarm.step(name)
    await trio.sleep(30)
    taken = Counter[str]()
    steps = Counter[str]()
    lags = Counter[str]()

    async def flood() -> None:
        session = service.open("flood", adapted("a"))
        offered = 0
        while True:
            news = session.news
            for _ in range(0 if offered else 1000):  # as a gateway: without asking for room
                service.offer(session, offered.to_bytes(16, "big"), (offered + 1).to_bytes(4, "little"))
                offered += 1
            while session.groups:
                group = session.groups.popleft()
                taken["a"] += group.n
                service.taken(group.id)
            await news.wait()

    async def train(name: str) -> None:
        session = service.open(name, adapted(name), paced=True)
        offered = got = 0
        while True:
            news = session.news
            while offered < session.allowed:
                number = (ord(name) << 32) + offered
                service.offer(session, number.to_bytes(16, "big"), (offered + 1).to_bytes(4, "little"))
                offered += 1
            while session.groups:
                group = session.groups.popleft()
                _, lag = service.lag_of(group, group.done[0])
                lags[name] = max(lags[name], lag)
                taken[name] += group.n
                got += 1
                service.taken(group.id)
                if got % 4 == 0:
                    steps[name] += 1
                    swarm.step(name)
            await news.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        for name in names[1:]:
            nursery.start_soon(train, name)
        await trio.sleep(60)
        taken.clear()
        await trio.sleep(160)
        nursery.cancel_scope.cancel()
    share = sum(taken.values()) / len(names)
    assert sum(taken.values()) * TOKENS >= 0.8 * 160 * 4 * 100, "the nodes are busy"
    assert min(taken[name] for name in names[1:]) >= 0.75 * share, taken
    assert max(taken[name] for name in names[1:]) <= 1.35 * share, taken
    assert max(lags.values()) <= 1
    assert min(steps.values()) > 5
    refused = service.status().refused
    assert sum(refused.values()) <= 0.02 * service.status().accepted, refused
