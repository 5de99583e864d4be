"""Work for adapters: who gets it, how old it may be, and that one adapter's work does not keep the others waiting."""

from collections import Counter

import pytest
import trio
from ledger_kit import ALICE, BOB, CAROL, PROMPT, SAMPLING, ask, check_places, group_id, head, ledger_at, root, sealed

from codec.errors import PeerError, UsageError
from node.engines.base import ABILITIES, ADAPTERS, OPTIONS, SamplingParams
from node.ledger.binding import Binding, KeyTaken
from node.ledger.book import Book
from node.ledger.messages import (
    Abilities,
    AskAdapters,
    LoadedAdapters,
    Reason,
    Rollout,
    VersionSpan,
    WorkLease,
    decode,
    encode,
    work_hash,
)
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.part_history import Change
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService
from node.ledger.settings import Settings

ABLE = frozenset({OPTIONS, ADAPTERS})
NAMES = [f"a{i}" for i in range(8)]


def drawn_by(adapter: str) -> SamplingParams:
    return SAMPLING.with_options(adapter=adapter)


def step(ledger: Ledger, name: str, now: float | None = None) -> list:
    """Seal a version that changes only the adapter `name`."""
    adapters = dict(ledger.parts.adapters)
    adapters[name] = adapters.get(name, 0) + 1
    change = Change(base=False, changed=frozenset({name}), adapters=adapters)
    return ledger.advance(head(ledger.head.version + 1), now, change)


def swarm(version: int = 3, *adapters: str, **settings: object) -> Ledger:
    """A ledger whose nodes have loaded these adapters, the last versions of which published one of them each."""
    ledger = ledger_at(version, groups=0, **settings)
    for name in adapters:
        step(ledger, name)
    for node in ledger.nodes.values():
        node.abilities, node.adapters = ABLE, frozenset(adapters)
    return ledger


def offer(ledger: Ledger, i: int, adapter: str, n: int = 1, session: str = "s", **more: object) -> bytes:
    ledger.offer(group_id(i), session, PROMPT, n, drawn_by(adapter), **more)  # type: ignore[arg-type]
    return group_id(i)


def lease(ledger: Ledger, node: bytes = ALICE, capacity: int = 8, version: int | None = None, now: float = 0.0):
    version = ledger.head.version if version is None else version
    return ledger.request_work(node, ask(capacity, version=version), now)


def deliver(ledger: Ledger, leased, version: int, now: float = 1.0) -> list[Reason | None]:
    verdicts = []
    for each in leased:
        group = ledger.groups[each.group]
        for sample in sorted(each.open):
            tokens = (sample + 3, len(ledger.groups) + 3, 2)
            rollout = Rollout(
                each.id, each.token, sample, work_hash(group.id, sample, PROMPT, group.sampling), pack_tokens(tokens),
                pack_floats((-0.5,) * 3), "stop", (VersionSpan(0, version, root(0, version), 3),),
            )  # fmt: skip
            verdicts.append(ledger.submit(each.node, rollout, sealed(each, rollout), now))
    return verdicts


def test_only_a_node_that_has_loaded_the_adapter_gets_its_work():
    ledger = swarm(3, "a", "b")
    offer(ledger, 0, "a")
    ledger.nodes[ALICE].adapters = frozenset({"b"})
    assert lease(ledger) is Reason.NO_WORK
    ledger.nodes[ALICE].abilities = None
    ledger.nodes[ALICE].adapters = frozenset({"a"})
    assert lease(ledger) is Reason.NO_WORK, "it has not said that it can do this"
    (leased,) = lease(ledger, BOB)
    assert ledger.groups[leased.group].adapter == "a"
    ledger.member_lost(BOB, 1.0)
    assert ledger.nodes[BOB].adapters == frozenset(), "it may return with another engine"


def test_a_sample_ages_only_by_its_own_adapter_and_the_base():
    ledger = swarm(3, "a", "b")  # the head is 5
    offer(ledger, 0, "a", max_lag=1)
    offer(ledger, 1, "", max_lag=1)
    leased = lease(ledger)
    assert {each.minimum for each in leased} == {(0, 3), (0, 2)}, "a of version 3 is a's before its only step"
    for _ in range(20):
        step(ledger, "b")
    assert deliver(ledger, leased, 5) == [None, None], "20 versions, but none that changed these"
    assert ledger.groups[group_id(0)].done[0].own == (1,)
    assert ledger.groups[group_id(1)].done[0].own == (3,)
    step(ledger, "a")
    assert ledger.groups[group_id(0)].complete, "one step of a behind"
    step(ledger, "a")
    assert not ledger.groups[group_id(0)].complete
    assert ledger.groups[group_id(1)].complete
    ledger.advance(head(ledger.head.version + 1), None, Change(adapters=ledger.parts.adapters))
    assert ledger.groups[group_id(1)].complete
    ledger.advance(head(ledger.head.version + 1), None, Change(adapters=ledger.parts.adapters))
    assert not ledger.groups[group_id(1)].complete, "two versions of the base behind"
    check_places(ledger)


def test_a_node_whose_version_is_behind_gets_what_it_may_still_do():
    ledger = swarm(3, "a", "b", max_lag=0)
    for i, name in enumerate(("", "a", "b")):
        offer(ledger, i, name)
    for _ in range(3):
        step(ledger, "a")
    leased = lease(ledger, version=5)
    assert {ledger.groups[each.group].adapter for each in leased} == {"", "b"}
    assert lease(ledger, BOB, version=5) is Reason.TOO_OLD, "for the work that is left"
    assert deliver(ledger, leased, 5) == [None, None]
    assert lease(ledger, BOB, version=2) is Reason.TOO_OLD, "the base has changed since"


def test_without_lag_only_a_version_of_its_own_part_is_waited_for():
    ledger = swarm(3, "a", "b", max_lag=0)
    for i, name in enumerate(("", "a", "b")):
        offer(ledger, i, name)
    assert deliver(ledger, lease(ledger), 5) == [None] * 3
    ledger.begin_version((0, 6), "a")
    assert [group.complete for group in ledger.groups.values()] == [True, False, True]
    ledger.abandon_version()
    ledger.begin_version((0, 6))
    assert not any(group.complete for group in ledger.groups.values()), "the base changes all"


def test_a_group_that_is_not_stale_is_handed_over_again():
    ledger = swarm(3, "a", "b")
    offer(ledger, 0, "a")
    deliver(ledger, lease(ledger), 5)
    group = ledger.hand_over("s")
    step(ledger, "b")
    assert not ledger.discard_stale(group.id, (0, 6))
    assert ledger.hand_over("s") is None
    ledger.hand_over_again(group.id)
    assert ledger.hand_over("s") is group
    step(ledger, "a")
    step(ledger, "a")
    assert ledger.discard_stale(group.id, (0, 8))


def test_a_removed_adapter_has_no_work():
    ledger = swarm(3, "a", "b")
    offer(ledger, 0, "a")
    offer(ledger, 1, "b")
    change = Change(base=False, changed=frozenset({"a"}), adapters={"b": 1})
    assert [group.id for group in ledger.advance(head(6), None, change)] == [group_id(0)]
    assert ledger.set_adapters({"b": 1}) == ledger.orphaned_groups()


@pytest.mark.parametrize("one_session", [True, False])
def test_one_adapters_flood_does_not_keep_the_others_waiting(one_session):
    """Like a gateway (one session), or trainers."""
    ledger = swarm(3, *NAMES)
    for i in range(400):
        offer(ledger, i, "a0", session="s" if one_session else "a0")
    for i, name in enumerate(NAMES[1:]):
        for j in range(8):
            offer(ledger, 1000 + 10 * i + j, name, session="s" if one_session else name)
    leased = lease(ledger, capacity=64)
    count = Counter(ledger.groups[each.group].adapter for each in leased)
    assert count == dict.fromkeys(NAMES, 8), "the same for each"
    more = lease(ledger, BOB, capacity=32)
    assert {ledger.groups[each.group].adapter for each in more} == {"a0"}, "nothing else is left"
    orders = [ledger.groups[each.group].order for each in (*leased, *more) if ledger.groups[each.group].adapter == "a0"]
    assert orders == sorted(orders), "first come, first served within one"
    check_places(ledger)


def test_each_part_may_have_its_share_offered():
    ledger = swarm(3, "a", "b")
    lease(ledger, capacity=16)
    everything = ledger.room("a", 1, "a")
    for i in range(everything):
        offer(ledger, i, "a", session="a")
    assert ledger.room("a", 1, "a") == 0
    share = ledger.room("b", 1, "b")
    assert share == everything // 2
    for i in range(share):
        offer(ledger, 1000 + i, "b", session="b")
    assert ledger.room("b", 1, "b") == 0


def test_trainers_of_two_adapters_are_paced_by_their_own_versions():
    ledger = swarm(3, "a", "b")
    for name in "ab":
        ledger.track_consumption(name, 1, 0.0, name)
    for i in range(8):
        step(ledger, "b", 10.0 * i)
    assert ledger.consumption["a"].step is None
    assert ledger.consumption["b"].step is not None
    timing = ledger.assigner.version_timing
    assert timing.interval_s("b") == pytest.approx(10.0)
    assert timing.interval_s("a") is timing.interval_s() is None
    assert timing.due_s(71.0, "b") == pytest.approx(9.0)
    assert timing.due_s(71.0) == float("inf")


def test_roots_of_versions_that_may_still_count_are_kept():
    ledger = swarm(3, "a", "b")
    for _ in range(100):
        step(ledger, "b")
    assert (0, 4) in ledger.roots
    for _ in range(30):
        ledger.advance(head(ledger.head.version + 1), None, Change(adapters=ledger.parts.adapters))
    assert len(ledger.roots) == 1 + 16


def test_a_key_is_bound_to_its_adapter():
    ledger = swarm(3, "a", "b")
    ledger.bind("key", Binding(2, drawn_by("a")))
    with pytest.raises(KeyTaken, match=r"adapter=a; now it is asked with adapter=b"):
        ledger.bind("key", Binding(2, drawn_by("b")))


def test_a_restart_continues_with_adapters(tmp_path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = swarm(3, "a", "b")
    offer(ledger, 0, "a", n=2)
    offer(ledger, 1, "")
    leased = lease(ledger)
    deliver(ledger, leased[:1], 5)
    for _ in range(6):
        step(ledger, "b")
    book.write(ledger.take_facts())
    book.prune()
    book.close()
    book = Book(tmp_path / "ledger.sqlite")
    again = book.restore(ledger.settings, ledger.head, 100.0)
    assert again.parts.adapters == {"a": 1, "b": 7}
    assert again.roots == ledger.roots
    assert again.groups[group_id(0)].adapter == "a"
    assert {sample: done.own for sample, done in again.groups[group_id(0)].done.items()} == {0: (1,), 1: (1,)}
    for part in ("", "a", "b"):
        for version in range(12):
            assert again.parts.since(part, (0, version), (0, 11)) == ledger.parts.since(part, (0, version), (0, 11))
    assert again.groups[group_id(0)].complete, "b's versions made nothing of it too old"
    count = "select count(*) from own_versions"
    assert book._db.execute(count).fetchone() == (2,)
    again.drop(group_id(0))
    book.write(again.take_facts())
    assert book._db.execute(count).fetchone() == (0,)
    book.close()


def test_the_seals_of_recorded_versions_outlive_pruning(tmp_path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = swarm(3, "a")
    for _ in range(150):
        step(ledger, "a")
    book.write(ledger.take_facts())
    book.prune()
    again = book.restore(Settings(), ledger.head, 0.0)
    assert (0, 4) in again.roots
    assert (0, 0) not in again.roots
    assert again.parts.since("", (0, 4), ledger.head.name) == 0
    book.close()


class Wired:
    """A service whose messages to nodes are collected."""

    def __init__(self, nursery: trio.Nursery, folder) -> None:
        self.sent: list = []
        self.book = Book(folder / "ledger.sqlite")
        self.ledger = self.book.restore(Settings(), head(3), trio.current_time())
        self.service = LedgerService(self.ledger, self.book, self._send, off_loop=self._inline)
        self.nursery = nursery

    async def _send(self, node: bytes, body: bytes) -> None:
        self.sent.append((node, decode(body)))

    async def _inline(self, function, *args):
        return function(*args)

    def seal(self, change: Change) -> None:
        self.service.sealed(head(self.ledger.head.version + 1), change)

    def step(self, name: str) -> None:
        adapters = dict(self.service.adapters)
        adapters[name] = adapters.get(name, 0) + 1
        self.seal(Change(base=False, changed=frozenset({name}), adapters=adapters))


async def test_a_node_is_asked_for_its_adapters_once_there_are_any(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        wired = Wired(nursery, tmp_path)
        await nursery.start(wired.service.run)
        for node, names in ((ALICE, tuple(ABILITIES)), (BOB, (OPTIONS,))):
            wired.service.member_up(node)
            wired.service.hear(node, encode(Abilities(names)))
            wired.service.hear(node, encode(ask(4)))
        wired.service.hear(CAROL, encode(LoadedAdapters(("a",))))
        await trio.sleep(1)
        assert not any(isinstance(message, AskAdapters) for _, message in wired.sent), "there are none"
        assert wired.ledger.nodes[CAROL].adapters == frozenset(), "it was not asked"
        wired.step("a")
        for node in (ALICE, BOB):
            wired.service.hear(node, encode(ask(4, version=4)))
        await trio.sleep(1)
        assert [node for node, message in wired.sent if isinstance(message, AskAdapters)] == [ALICE]
        session = wired.service.open("s", Binding(1, drawn_by("a")))
        wired.service.offer(session, group_id(1), PROMPT)
        wired.service.hear(ALICE, encode(ask(4, version=4)))
        await trio.sleep(1)
        assert not any(isinstance(message, WorkLease) for _, message in wired.sent), "it has not answered"
        assert wired.service.status().unmet == {"s": ["adapter"]}
        wired.service.hear(ALICE, encode(LoadedAdapters(("a",))))
        await trio.sleep(1)
        (leased,) = (message for _, message in wired.sent if isinstance(message, WorkLease))
        assert leased.sampling.extra.adapter == "a"
        assert wired.service.status().unmet == {}
        nursery.cancel_scope.cancel()
    wired.book.close()


async def test_work_for_an_adapter_that_there_is_not_is_refused_with_a_sentence(tmp_path, autojump_clock):
    async with trio.open_nursery() as nursery:
        wired = Wired(nursery, tmp_path)
        await nursery.start(wired.service.run)
        with pytest.raises(UsageError, match=r"no adapter 'a' \(it has: none\)"):
            wired.service.open("s", Binding(1, drawn_by("a")))
        wired.step("a")
        session = wired.service.open("s", Binding(1, drawn_by("a")))
        with pytest.raises(PeerError, match=r"no adapter 'x' \(it has: a\)"):
            wired.service.offer(session, group_id(1), PROMPT, sampling=drawn_by("x"))
        wired.service.offer(session, group_id(2), PROMPT)
        await trio.sleep(1)
        wired.service.offer(session, group_id(3), PROMPT)
        wired.seal(Change(base=False, changed=frozenset({"a"})))
        await trio.sleep(1)
        assert "removed" in session.impossible[group_id(2)]
        assert "no adapter 'a'" in session.impossible[group_id(3)], "it was not a group yet"
        assert not wired.ledger.groups
        nursery.cancel_scope.cancel()
    wired.book.close()


def test_messages_about_adapters_are_bounded():
    message = LoadedAdapters(tuple(f"{i:064}" for i in range(64)))
    assert decode(encode(message)) == message
    assert decode(encode(AskAdapters())) == AskAdapters()
    for names in (("",), ("a b",), ("a\n",), ("x" * 65,), tuple(map(str, range(65)))):
        with pytest.raises(PeerError):
            decode(encode(LoadedAdapters(names)))
