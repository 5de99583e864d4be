"""Nodes that send the ledger what no honest node sends. The ledger continues, they gain little by it, and invalid
messages cost them their session."""

import contextlib
import dataclasses
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_kit import ALICE, BOB, KEY_OF, KEYS, PROMPT, SAMPLING, group_id, head, root

from codec.errors import PeerError
from codec.sign import Key
from node.engines.base import OPTIONS, PORTABLE_DRAWS, SamplingParams
from node.ledger import messages
from node.ledger.assignment.fair_share import fill_rooms
from node.ledger.messages import (
    MAX_CAPACITY,
    ROLLOUT_DOMAIN,
    Abilities,
    Ask,
    Cannot,
    Commits,
    GiveBack,
    JudgeRequest,
    Reason,
    Renew,
    Rollout,
    SignedRollout,
    Timesheet,
    Verdict,
    VersionSpan,
    WorkAnswer,
    WorkLease,
    WorkRequest,
    decode,
    encode,
    open_rollout,
    seal_rollout,
    work_hash,
)
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.rules import STRANGERS, Ledger
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.trust import budgets
from node.ledger.trust.budgets import MessageBudgets
from swarm import guard

U63 = (1 << 63) - 1


class LedgerBench:
    """A ledger service without its task: tests read its outbox and set its clock."""

    def __init__(self, groups: int = 8, n: int = 2, sampling: SamplingParams = SAMPLING, **chosen: Any) -> None:
        self.now = 100.0
        self.ledger = Ledger(Settings(**chosen), head(0), bytes([1]) * 32)
        for version in range(1, 4):
            self.ledger.advance(head(version), 10.0 * version)
        for i in range(groups):
            self.ledger.offer(group_id(i), "s", PROMPT, n, sampling)
        self.expelled: list[tuple[bytes, str]] = []
        self.service = LedgerService(
            self.ledger, None, None, clock=lambda: self.now,  # pyright: ignore - neither is written nor sent to here
            is_member=lambda node: node in KEY_OF, expel=lambda node, why: self.expelled.append((node, why)),
        )  # fmt: skip
        for key in KEYS:
            self.service.member_up(key.public)

    def hear(self, node: bytes, message: messages.WorkMessage | bytes) -> list[Any]:
        """Return the messages that the service sends to `node` in reply."""
        self.service._nodes.take_outbox()
        self.service.hear(node, message if isinstance(message, bytes) else encode(message))
        turn = self.service.begin_turn()
        assert self.service._sleep_s() >= 0.0
        return [message for to, message in turn.outbox if to == node]


def rollout(lease: WorkLease, **other: Any) -> Rollout:
    tokens = tuple(range(10, 10 + lease.sampling.max_tokens))
    made = Rollout(
        lease=lease.lease,
        token=lease.token,
        sample=lease.samples[0],
        work=work_hash(lease.group, lease.samples[0], lease.prompt, lease.sampling),
        token_ids=pack_tokens(tokens),
        logprobs=pack_floats([-1.0] * len(tokens)),
        finish_reason="length",
        spans=(VersionSpan(0, 3, root(0, 3), len(tokens)),),
    )
    return msgspec.structs.replace(made, **other)


def request(serial: int = 1, capacity: int = 4, **other: Any) -> WorkRequest:
    return msgspec.structs.replace(WorkRequest(serial, capacity, 0, 3, root(0, 3), 10.0, ()), **other)


# ---------------------------------------------------------------- malformed bodies


def bad_utf8(rolled: Rollout) -> bytes:
    body = msgspec.msgpack.encode(rolled).replace(b"\xa6length", b"\xa6l\xff\xfegth")
    assert b"\xff\xfe" in body
    return body


def test_a_malformed_rollout_with_a_valid_signature():
    """Row 2 of the audit: text that is not UTF-8, under a valid signature."""
    bench = LedgerBench()
    (lease, *_) = bench.hear(ALICE, request())
    sealed = KEY_OF[ALICE].seal(ROLLOUT_DOMAIN, bad_utf8(rollout(lease)))
    with pytest.raises(PeerError, match="rollout"):
        open_rollout(ALICE, sealed)
    with pytest.raises(PeerError, match="signature"):
        open_rollout(BOB, sealed)
    assert bench.hear(ALICE, SignedRollout(sealed)) == []
    nested = KEY_OF[ALICE].seal(ROLLOUT_DOMAIN, b"\x91" * 100_000)
    assert bench.hear(ALICE, SignedRollout(nested)) == []
    assert bench.ledger.nodes[ALICE].refused[Reason.BAD_SIGNATURE] == 2
    (verdict,) = bench.hear(ALICE, SignedRollout(seal_rollout(KEY_OF[ALICE], rollout(lease))))
    assert verdict == Verdict(lease.lease, lease.samples[0], None), "the next valid one counts"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01",
        b"\x02\x91\x01",
        b"\x01" + b"\x91" * 5000,
        b"\x01\x94\x0a\x01\x02\xa2\xff\xfe",
        b"\x01\xc1",
        b"\x01\x90",
    ],
)
def test_malformed_bodies_are_dropped_and_then_their_node_is_expelled(body: bytes):
    bench = LedgerBench()
    for _ in range(int(budgets.MALFORMED_AT_ONCE)):
        assert bench.hear(ALICE, body) == []
    assert bench.expelled == []
    bench.hear(ALICE, body)
    ((node, why),) = bench.expelled
    assert node == ALICE
    assert why.startswith("work message")
    assert bench.hear(BOB, request()) != [], "other nodes are not affected"


def test_a_body_that_meets_a_bug_ends_only_its_nodes_session(monkeypatch: pytest.MonkeyPatch):
    bench = LedgerBench()
    monkeypatch.setattr(bench.ledger, "renew", lambda *_: 1 / 0)
    before = guard.bugs[guard.Source.WORK]
    with pytest.raises(ZeroDivisionError):
        bench.hear(ALICE, Renew(1, 1, 1))
    monkeypatch.delenv("SWARM_STRICT")
    assert bench.hear(ALICE, Renew(1, 1, 1)) == []
    assert [node for node, _ in bench.expelled] == [ALICE]
    assert guard.bugs[guard.Source.WORK] == before + 2
    assert bench.hear(BOB, request()) != []


def test_malformed_bodies_cause_few_log_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Row 16 of the audit: 33,569 such bodies in ten seconds."""
    monkeypatch.setattr(guard, "_seldom", guard.Seldom())
    bench = LedgerBench()
    for _ in range(3000):
        bench.now += 0.01
        bench.service.hear(ALICE, b"\x01\xc1")
    assert 1 <= len(caplog.records) <= 10


# ---------------------------------------------------------------- too much


def test_a_flood_is_dropped_unread(monkeypatch: pytest.MonkeyPatch):
    bench, read = LedgerBench(), 0

    def count(body: bytes) -> messages.WorkMessage:
        nonlocal read
        read += 1
        return decode(body)

    monkeypatch.setattr("node.ledger.node_messages.decode", count)
    body = encode(Renew(1, 1, 1))
    for _ in range(20_000):
        bench.now += 1e-4
        bench.service.hear(ALICE, body)
    assert read <= budgets.BURST + 2 * budgets.RATE + 2
    assert bench.service._nodes.budgets.left_out == 20_000 - read
    large = encode(SignedRollout(bytes(messages.MAX_BODY_BYTES - 100)))
    bench.now += 60.0
    read = 0
    for _ in range(200):
        bench.service.hear(BOB, large)
    assert read <= 16, "a large body counts as several messages"


def test_the_message_budget_suffices_for_the_fastest_honest_node():
    """4,096 leases that are renewed every three seconds, and a hundred results per second, each with a request and a
    timesheet: none of these messages is dropped."""
    held = MessageBudgets(lambda node: MAX_CAPACITY)
    now = 0.0
    for _ in range(600):
        now += 0.1
        for _ in range(round(MAX_CAPACITY / 30)):
            assert held.allow_message(ALICE, 32, now)
        for length in (2500, 60, 80) * 10:
            assert held.allow_message(ALICE, length, now)
    few = MessageBudgets(lambda node: 64)
    for _ in range(64):  # a batch of long samples that end together
        assert few.allow_message(BOB, 8 * 32_768 + 300, now)


def test_a_node_that_keeps_returning_work_gets_none_for_a_while():
    bench = LedgerBench(groups=256, n=1)
    taken = 0
    for serial in range(1, 400):
        bench.now += 0.05
        message = bench.hear(ALICE, request(serial, capacity=64))
        leases = [lease for lease in message if isinstance(lease, WorkLease)]
        taken += len(leases)
        bench.hear(ALICE, GiveBack(tuple(lease.lease for lease in leases)))
    assert taken <= budgets.RETURNS_AT_ONCE + 20 * budgets.RETURNS + 256
    assert any(isinstance(message, WorkLease) for message in bench.hear(BOB, request(capacity=64)))


def test_requests_beyond_the_budget_wait_and_the_newest_is_served():
    bench = LedgerBench(groups=0)
    for serial in range(1, 700):
        bench.hear(ALICE, request(serial))
    bench.ledger.offer(group_id(1), "s", PROMPT, 2, SAMPLING)
    for _ in range(50):
        bench.now += bench.service._sleep_s() or 0.01
        if any(isinstance(message, WorkLease) for _, message in bench.service.begin_turn().outbox):
            break
    else:
        raise AssertionError("it was forgotten")


def test_tables_that_a_node_can_grow_are_bounded():
    bench = LedgerBench()
    for i in range(3 * STRANGERS):
        bench.ledger.member_up(node := i.to_bytes(32, "little"))
        bench.ledger.member_lost(node, bench.now)
    bench.service.begin_turn()
    assert len(bench.ledger.nodes) <= STRANGERS + 2 * len(KEYS)
    assert set(KEY_OF) <= set(bench.ledger.nodes)
    for i in range(200):
        bench.hear(
            ALICE, Timesheet(1.0, 1.0, 1.0, 1.0, tuple(Commits(0, 16 * i + k, 1.0, 1.0, 1.0, 1.0) for k in range(16)))
        )
    assert set(bench.service.commit_stats._versions) <= set(bench.ledger.roots)
    stranger = Key(b"\x77" * 32).public
    assert bench.hear(stranger, request()) == []
    assert stranger not in bench.ledger.nodes


def test_a_check_is_sent_once_to_a_node_without_the_version():
    """A request of a hundred bytes must not send half a megabyte each time."""
    bench = LedgerBench(check_share=1.0)
    (lease, *_) = bench.hear(ALICE, request())
    assert bench.hear(ALICE, SignedRollout(seal_rollout(KEY_OF[ALICE], rollout(lease))))[0].refused is None
    asks = 0
    for serial in range(1, 6):
        for message in bench.hear(BOB, request(serial)):
            if isinstance(message, messages.Ask):
                asks += 1
                bench.hear(BOB, WorkAnswer(message.check, 0, 2, pack_floats([-1.0])))
    assert asks == 1


def test_a_large_request_is_answered_over_several_turns():
    bench = LedgerBench(groups=1000, n=1)
    first = [message for message in bench.hear(ALICE, request(capacity=MAX_CAPACITY)) if isinstance(message, WorkLease)]
    assert len(first) >= 256
    for _ in range(8):
        bench.service.begin_turn()
    assert bench.ledger.nodes[ALICE].outstanding == 1000


# ---------------------------------------------------------------- numbers


def test_every_float_of_a_message_is_bounded():
    """Every float that a node can send has both bounds, which exclude NaN."""
    found = 0
    for kind in (WorkRequest, Timesheet, Commits, messages.Renewed, messages.WorkLease, SamplingParams):
        for field in msgspec.inspect.type_info(kind).fields:
            if isinstance(field.type, msgspec.inspect.FloatType) and kind is not SamplingParams:
                found += 1
                assert field.type.ge is not None
                assert field.type.le is not None
    assert found == 11
    for field in ("temperature", "top_p"):
        for value in (float("nan"), float("inf"), -1.0, 1e300):
            body = msgspec.msgpack.encode({"max_tokens": 1, field: value})
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(body, type=SamplingParams)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.1e4, -3e38, 1.0])
def test_impossible_log_probabilities_are_refused(value: float):
    bench = LedgerBench()
    (lease, *_) = bench.hear(ALICE, request())
    wrong = rollout(lease, logprobs=pack_floats([-1.0, value, -1.0, -1.0]))
    (verdict,) = bench.hear(ALICE, SignedRollout(seal_rollout(KEY_OF[ALICE], wrong)))
    assert verdict.refused is Reason.MALFORMED


@given(
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=12),
    st.lists(st.integers(0, 4096), min_size=12, max_size=12),
)
def test_fill_rooms_uses_all_room(amounts: list[float], rooms: list[int]):
    rooms = rooms[: len(amounts)]
    got = fill_rooms(amounts, rooms)
    assert all(
        0.0 <= share <= room * (1 + 1e-9) or share <= amount
        for share, room, amount in zip(got, rooms, amounts, strict=True)
    )
    wanted = [room for room, amount in zip(rooms, amounts, strict=True) if amount > 0]
    if any(amount > room for amount, room in zip(amounts, rooms, strict=True)):
        assert sum(got) == pytest.approx(min(sum(amounts), sum(wanted)), rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------- any messages

EDGES = [0, 1, 2, 3, 7, 64, 4095, 4096, 65_535, 65_536, (1 << 32) - 1, U63 - 1, U63]
NUMBERS = st.sampled_from(EDGES) | st.integers(0, 40)
SMALL = st.sampled_from([0, 1, 2, 3, 4, (1 << 32) - 1])
FLOATS = st.sampled_from([0.0, 5e-324, 1e-300, 1e-3, 0.1, 1.0, 9.9e6])
PACKED = st.sampled_from([
    b"", b"\0", struct.pack("<4f", -1, -1, -1, -1), struct.pack("<4f", *[float("nan")] * 4), b"\xff" * 16,
    struct.pack("<I", 2), struct.pack("<4I", 7, 8, 9, 2), bytes(4 * 65_536),
])  # fmt: skip
LEASES = st.lists(NUMBERS, max_size=6).map(tuple) | st.just(tuple(range(MAX_CAPACITY)))
ROOTS = st.sampled_from([root(0, v) for v in range(5)])
SPANS = st.lists(st.builds(VersionSpan, SMALL, NUMBERS, ROOTS, SMALL), min_size=1, max_size=4).map(tuple)
ROOM = st.sampled_from([0, 1, 4, 64, 4096])
VERSIONS = st.sampled_from([1, 2, 3, 4, U63])
COMMITS = st.lists(st.builds(Commits, SMALL, NUMBERS, FLOATS, FLOATS, FLOATS, FLOATS), max_size=3).map(tuple)
FINISH = st.sampled_from(["stop", "length"])
MESSAGES = st.one_of(
    st.builds(WorkRequest, NUMBERS, ROOM, st.just(0), VERSIONS, ROOTS, FLOATS, LEASES),
    st.builds(WorkRequest, st.just(U63), ROOM, st.just(0), st.just(3), st.just(root(0, 3)), FLOATS, LEASES),
    st.builds(Renew, NUMBERS, NUMBERS, NUMBERS),
    st.builds(GiveBack, LEASES),
    st.builds(Cannot, NUMBERS, NUMBERS, st.text(max_size=20)),
    st.builds(WorkAnswer, NUMBERS, SMALL, NUMBERS, PACKED),
    st.builds(Timesheet, FLOATS, FLOATS, FLOATS, FLOATS, COMMITS),
    st.builds(Rollout, NUMBERS, NUMBERS, SMALL, st.just(bytes(32)), PACKED, PACKED, FINISH, SPANS),
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A rollout for a lease that the node really has, with some fields replaced."""

    index: int
    other: dict[str, Any]


REPLIES = st.builds(
    Reply,
    st.integers(0, 8),
    st.fixed_dictionaries({}, optional={
        "token": NUMBERS, "sample": SMALL, "token_ids": PACKED, "logprobs": PACKED, "finish_reason": FINISH,
        "spans": SPANS, "work": st.just(bytes(32)),
    }),
)  # fmt: skip
NODES = st.sampled_from([key.public for key in KEYS])
STEPS = st.lists(st.tuples(NODES, MESSAGES | REPLIES, st.sampled_from([0.0, 0.001, 0.5, 9.0, 700.0])), max_size=30)


@given(STEPS, st.booleans())
def test_the_ledger_survives_whatever_nodes_send(steps: list[tuple[bytes, Any, float]], advance: bool):
    """Messages are well-formed but extreme, repeated, reordered, stale, or about other nodes' leases. The guard is
    strict here, so any exception but `PeerError` fails the test. Every sample stays in exactly one place."""
    bench = LedgerBench(check_share=0.5, judged_window=1 << 16, bad_least=1 << 16, lapsed_least=1 << 16)
    known: list[WorkLease] = []
    for i, (node, step, seconds) in enumerate(steps):
        bench.now += seconds
        message = step
        if isinstance(step, Reply):
            if not known:
                continue
            message = rollout(known[step.index % len(known)], **step.other)
        if isinstance(message, Rollout):
            message = SignedRollout(seal_rollout(KEY_OF[node], message))
        message = bench.hear(node, message)
        known += [lease for lease in message if isinstance(lease, WorkLease)]
        if advance and i % 10 == 9:
            bench.service.sealed(head(4 + i // 10))
        msgspec.json.encode(bench.service.status())
    pool = bench.ledger.pool
    groups = list(pool.groups.values())
    for group in groups:
        places = [*group.free, *group.leased, *group.done]
        assert sorted(places) == list(range(group.n))
    assert pool.wanted == sum(len(group.free) + len(group.leased) for group in groups)
    assert pool.samples() == sum(group.n for group in groups if not group.complete)
    assert pool.samples("s") == sum(group.n for group in groups)
    assert +pool.lags == pool.lags


@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda data: b"\x01" + data))
def test_random_bytes_are_refused(data: bytes):
    for read in (decode, lambda body: open_rollout(ALICE, KEY_OF[ALICE].seal(ROLLOUT_DOMAIN, body))):
        with contextlib.suppress(PeerError):
            read(data)


def test_the_worst_message_costs_little(tmp_path: Path):
    """Counts groups instead of measuring time: how many of 20,000 groups that do not fit one request examines."""
    bench = LedgerBench(groups=20_000, n=1)
    looked = 0
    fits = bench.ledger.assigner._fits

    def count(*asked: Any) -> bool:
        nonlocal looked
        looked += 1
        return fits(*asked)

    bench.ledger.assigner._fits = count  # pyright: ignore
    for group in bench.ledger.groups.values():
        group.refusers.add(ALICE)
    bench.hear(ALICE, request(capacity=MAX_CAPACITY))
    assert 0 < looked <= 2 * 256
    assert [message for message in bench.hear(BOB, request()) if isinstance(message, WorkLease)]


@pytest.mark.parametrize("names", [(), (OPTIONS, PORTABLE_DRAWS)])
def test_nodes_that_cannot_judge_get_the_messages_of_today(names):
    bench = LedgerBench(check_share=1.0)
    bench.hear(ALICE, request())
    bench.hear(ALICE, Abilities(names, "old"))
    sent = bench.hear(ALICE, request())
    assert not any(isinstance(message, JudgeRequest) for message in sent)
    assert all(message.sampling.options is msgspec.UNSET for message in sent if isinstance(message, WorkLease | Ask))
