"""The egress budget: by itself, then at the authority's edges."""

import random

import pytest
from authority_kit import clock, join, renewal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from protocol_kit import AUTHORITY, TUNING, header, key_of, manifest, only, say, sends

from codec import ChunkKey
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import (
    LocalChunk,
    LocalSeal,
    PeerDown,
    SendBlob,
    SendBlock,
    SendHeader,
    SendPiece,
    Timer,
)
from swarm.protocol.core.wire import Attach, Blob, Credit, Lacks, LacksChunk, Reports, WantBlob, WantBlock, WantChunk
from swarm.protocol.startup import Boot, Budget, Saved, Site
from swarm.protocol.transfer.egress import Egress

MODEL = 10_000
SIZES = (100, 250, 250, 40)
"""The bytes of a chunk's header and pieces."""
ANNA, BEN, CARL = (key_of(name).public for name in ("anna", "ben", "carl"))


def key(version: int, seq: int) -> ChunkKey:
    return ChunkKey(0, version, 0, seq)


def test_the_first_copy_is_free_and_the_second_is_charged() -> None:
    egress = Egress(2.0, MODEL)
    egress.add_chunk(key(1, 0), 600)
    assert egress.pay_for_part(key(1, 0), -1, 100, ANNA)
    assert egress.pay_for_part(key(1, 0), 0, 500, ANNA)
    assert egress.pay_for_part(key(1, 0), -1, 100, BEN)
    assert not egress.pay_for_part(key(1, 0), 0, 500, BEN)  # of the 500 left, 300 are reserved for rescues
    egress.add_chunk(key(1, 1), 600)
    assert egress.pay_for_part(key(1, 0), 0, 500, BEN)
    status = egress.status()
    assert (status.sent_bytes, status.budget_bytes, status.refused) == (1200, 2400, 1)


def test_a_part_that_was_not_sent_is_refunded() -> None:
    egress = Egress(1.0, MODEL)
    egress.add_chunk(key(1, 0), 600)
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA)
    assert not egress.pay_for_part(key(1, 0), 0, 600, BEN)
    egress.refund_part(key(1, 0), 0, 600, ANNA)
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA)
    egress.refund_part(key(7, 7), 0, 600, ANNA)  # too long ago to be remembered
    assert egress.status().sent_bytes == 600


def test_a_part_whose_only_holder_left_may_be_sent_again() -> None:
    egress = Egress(1.1, MODEL)
    for seq in range(10):
        egress.add_chunk(key(1, seq), 600)
    assert egress.pay_for_part(key(1, 0), -1, 100, ANNA)
    assert egress.pay_for_part(key(1, 0), 0, 500, ANNA)
    assert not egress.pay_for_part(key(1, 0), 0, 500, BEN), "ANNA has it, and half of the 600 are reserved"
    egress.peer_left(ANNA)
    assert egress.pay_for_part(key(1, 0), -1, 100, BEN)
    assert egress.pay_for_part(key(1, 0), 0, 500, BEN)
    egress.refund_part(key(1, 0), 0, 500, BEN)  # it was not sent after all
    assert egress.pay_for_part(key(1, 0), -1, 100, CARL), "the header is sent again with the lost piece"
    egress.peer_connected(ANNA)
    assert not egress.pay_for_part(key(1, 0), 0, 500, CARL), "ANNA had only disconnected"
    assert egress.status().rescued_bytes == 200
    assert egress.status().sent_bytes == 600 + 200


def test_a_holder_that_asks_for_a_part_again_has_lost_it_once_in_a_session() -> None:
    egress = Egress(2.0)
    egress.add_chunk(key(1, 0), 600)
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA)
    assert not egress.pay_for_part(key(1, 0), 0, 600, BEN), "ANNA has it"
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA), "as after a power failure"
    assert egress.status().rescued_bytes == 600
    egress.add_chunk(key(2, 0), 600)
    assert not egress.pay_for_part(key(1, 0), 0, 600, ANNA), "it is believed once"
    egress.peer_left(ANNA)
    egress.peer_connected(ANNA)
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA), "what was on its way was lost with the session"


def test_holders_that_got_a_part_before_the_start_count_as_gone_until_it_is_sent_again() -> None:
    egress = Egress(2.0)
    for seq in range(2):
        egress.add_chunk(key(9, seq), 600)
    assert egress.pay_for_part(key(8, 0), -1, 100, BEN)
    assert egress.pay_for_part(key(8, 0), 0, 900, BEN), "more than what is not reserved"
    assert egress.status().rescued_bytes == 1000
    assert not egress.pay_for_part(key(8, 0), 0, 900, CARL), "BEN has it"
    egress.add_chunk(key(10, 0), 600)
    egress.add_chunk(key(10, 1), 600)
    assert egress.pay_for_part(key(8, 0), 0, 900, CARL), "the copies of old attempts are forgotten"


def test_the_models_account_pays_for_a_lost_part_when_the_versions_is_used_up() -> None:
    egress = Egress(1.0, MODEL)
    egress.add_chunk(key(1, 0), 600)
    assert egress.pay_for_part(key(1, 0), 0, 600, ANNA)
    assert not egress.pay_for_part(key(1, 0), 0, 600, BEN)
    egress.peer_left(ANNA)
    assert egress.pay_for_part(key(1, 0), 0, 600, BEN)
    status = egress.status()
    assert (status.sent_bytes, status.model_sent_bytes, status.model_left_bytes) == (600, 600, MODEL - 600)
    egress.refund_part(key(1, 0), 0, 600, BEN)
    assert (egress.status().model_sent_bytes, egress.status().model_left_bytes) == (0, MODEL)
    assert egress.pay_for_model(MODEL)
    assert not egress.pay_for_part(key(1, 0), 0, 600, BEN)
    assert egress.status().refused == 2


def test_rescues_stay_within_the_cap() -> None:
    egress = Egress(1.1)
    for seq in range(20):
        egress.add_chunk(key(1, seq), 600)
        assert egress.pay_for_part(key(1, seq), 0, 600, ANNA)
    egress.peer_left(ANNA)
    again = sum(egress.pay_for_part(key(1, seq), 0, 600, BEN) for seq in range(20))
    assert again * 600 == 0.1 * 20 * 600
    egress.add_chunk(key(2, 0), 600)
    assert not egress.pay_for_part(key(1, 19), 0, 600, CARL), "a later small version allows little"


def test_without_a_cap_all_is_counted_and_nothing_refused() -> None:
    egress = Egress()
    egress.add_chunk(key(1, 0), 600)
    assert all(egress.pay_for_part(key(1, 0), 0, 600, ANNA) for _ in range(50))
    assert all(egress.pay_for_model(MODEL) for _ in range(50))
    status = egress.status()
    assert (status.sent_bytes, status.model_sent_bytes, status.refused) == (30_000, 50 * MODEL, 0)


def test_less_than_one_copy_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="copies must be at least 1"):
        Egress(0.9, MODEL)


@settings(max_examples=30, stateful_step_count=50)
class AnyOrder(RuleBasedStateMachine):
    """Chunks are made, copies taken and refunded in any order, versions and attempts in order."""

    @initialize(copies=st.sampled_from([1.0, 1.1, 2.5]))
    def begin(self, copies: float) -> None:
        self.copies, self.egress = copies, Egress(copies, MODEL)
        self.version, self.seq = 1, 0
        self.made: dict[int, int] = {}
        self.sent = 0
        self.blocks = 0
        self.queued: list[tuple[ChunkKey, int, int, bytes]] = []
        self.chunks: list[ChunkKey] = []

    @rule()
    def make(self) -> None:
        self.egress.add_chunk(key(self.version, self.seq), sum(SIZES))
        self.made[self.version] = self.made.get(self.version, 0) + sum(SIZES)
        self.chunks.append(key(self.version, self.seq))
        self.seq += 1

    @rule()
    def seal(self) -> None:
        self.version, self.seq = self.version + 1, 0

    @rule(peer=st.sampled_from([ANNA, BEN, CARL]), back=st.booleans())
    def end(self, peer: bytes, back: bool) -> None:
        """A peer connects or disconnects."""
        (self.egress.peer_connected if back else self.egress.peer_left)(peer)

    @rule(which=st.integers(0, 1 << 30), part=st.integers(0, 3), peer=st.sampled_from([ANNA, BEN, CARL]))
    def push(self, which: int, part: int, peer: bytes) -> None:
        chunk = self.chunks[which % len(self.chunks)] if self.chunks else key(9, 9)
        before = self.egress.status().model_sent_bytes
        if self.egress.pay_for_part(chunk, part - 1, SIZES[part], peer):
            self.queued.append((chunk, part - 1, SIZES[part], peer))
            of_model = self.egress.status().model_sent_bytes - before
            self.blocks += of_model
            self.sent += SIZES[part] - of_model

    @rule(which=st.integers(0, 1 << 30))
    def lose(self, which: int) -> None:
        """Refund any copy, since edges end in any order. A refund for a dropped version does not count, here either."""
        if self.queued:
            chunk, index, size, peer = self.queued.pop(which % len(self.queued))
            before = sum(account.sent for account in self.egress._accounts.values())
            model = self.egress.status().model_sent_bytes
            self.egress.refund_part(chunk, index, size, peer)
            self.sent -= before - sum(account.sent for account in self.egress._accounts.values())
            self.blocks -= model - self.egress.status().model_sent_bytes

    @rule(size=st.integers(1, 3000))
    def give(self, size: int) -> None:
        if self.egress.pay_for_model(size):
            self.blocks += size

    @invariant()
    def the_cap_holds(self) -> None:
        accounts = self.egress._accounts
        for (_, version, _), account in accounts.items():
            assert account.sent <= self.copies * self.made[version] + 1e-6
            assert 0 <= account.rescued <= account.sent
        assert self.sent + self.blocks <= self.copies * (sum(self.made.values()) + MODEL) + 1e-6


TestAnyOrder = AnyOrder.TestCase


# ---------------------------------------------------------------- at the authority


def an_authority(copies: float) -> Authority:
    core = Authority(
        AUTHORITY, TUNING, random.Random(1), Boot(1, clock), Saved(manifest(0, 0)), Site(("/sim/authority",)),
        Budget(Egress(copies, MODEL), lambda want: 4000),
    )  # fmt: skip
    core.start(0.0)
    return core


def with_members(copies: float, count: int) -> Authority:
    core = an_authority(copies)
    for slot in range(count):
        join(core, slot, 1.0 + slot)
        say(core, slot, Reports(0, (renewal(core, slot, 1),)), 1.0 + slot)
    return core


def payload(core: Authority, effects: list, sizes: tuple[int, ...]) -> int:
    return 100 * len(only(effects, SendHeader)) + sum(sizes[e.index] for e in only(effects, SendPiece))


@given(
    copies=st.sampled_from([1.0, 1.3, 2.0, 3.7]), members=st.integers(1, 4), chunks=st.integers(1, 6), data=st.data()
)
@settings(max_examples=40, deadline=None)
def test_the_cap_holds_for_children_that_attach_and_pull(
    copies: float, members: int, chunks: int, data: st.DataObject
) -> None:
    """Members attach to every stripe, leave, return and pull chunks, as if there were no planned trees."""
    core, sent, now, sizes = with_members(copies, members), 0, 10.0, (1000,) * 4
    whole = 0
    for seq in range(chunks):
        effects = core.apply(LocalChunk(header(1, seq, stripe=None)), now)
        whole += 4100
        for slot in range(members):
            word = data.draw(st.sampled_from(["attach", "lose", "pull", "credit", "none"]))
            if word == "attach":
                stripe = data.draw(st.integers(0, 1))
                effects += say(core, slot, Attach(stripe, 0, 0, 1 << 20, ()), now)
            elif word == "pull":
                effects += say(core, slot, WantChunk(0, 1, 0, data.draw(st.integers(0, seq)), b""), now)
            elif word == "credit":
                effects += say(core, slot, Credit(0, 1 << 22, 0), now)
            elif word == "lose":
                core.state.exchange.detached(key_of(slot).public, None)
        sent += payload(core, effects, sizes)
        now += 0.1
        sent += payload(core, core.apply(Timer("tick"), now), sizes)
        assert sent <= copies * whole + 1e-6
    ids = manifest(1, chunks)
    sent += payload(core, core.apply(LocalSeal(ids), now), sizes)
    assert sent <= copies * whole + 1e-6


def test_of_two_children_one_waits_with_a_single_copy() -> None:
    core = with_members(1.0, 2)
    first = say(core, 0, Attach(0, 0, 0, 1 << 20, ()), 5.0)
    second = say(core, 1, Attach(0, 0, 0, 1 << 20, ()), 5.0)
    assert only(first + second, SendPiece) == []
    effects = core.apply(LocalChunk(header(1, 0, stripe=None)), 6.0)
    assert len(only(effects, SendHeader)) == 1, "the other child's children get it from the first"
    assert len(only(effects, SendPiece)) == 4
    (lucky,) = {e.peer for e in only(effects, SendPiece)}
    other = next(peer for peer in core.book.slot_of if peer != lucky)
    effects = say(core, other, WantChunk(0, 1, 0, 0, b""), 7.0)
    assert only(effects, SendPiece) == []
    assert len(sends(effects, LacksChunk)) == 1
    assert core.egress.status().refused > 0


def test_parts_not_yet_sent_to_a_lost_root_child_go_to_the_next_for_free() -> None:
    core = with_members(1.1, 2)
    say(core, 0, Attach(0, 0, 0, 150, ()), 5.0)  # credit for the header only
    effects = core.apply(LocalChunk(header(1, 0, stripe=None)), 6.0)
    (lucky,) = {e.peer for e in only(effects, SendHeader)}
    other = next(peer for peer in core.book.slot_of if peer != lucky)
    core.apply(PeerDown(lucky), 6.5)
    effects = say(core, other, Attach(0, 0, 0, 1 << 20, ()), 7.0)
    assert len(only(effects, SendPiece)) == 4
    assert core.egress.status().sent_bytes == 100 + 4100
    assert core.egress.status().rescued_bytes == 100, "its header was sent to the lost child, which was its only holder"


def test_parts_that_only_a_lost_root_child_had_are_pulled_again() -> None:
    core = with_members(1.2, 3)
    for slot in range(2):
        say(core, slot, Attach(0, 0, 0, 1 << 20, ()), 5.0)
    given_to: dict[int, bytes] = {}
    for seq in range(20):
        effects = core.apply(LocalChunk(header(1, seq, stripe=None)), 6.0)
        given_to |= {e.key.seq: e.peer for e in only(effects, SendPiece)}
    dead = given_to[0]
    failovers = [peer for peer in core.book.slot_of if peer != dead]
    core.apply(PeerDown(dead), 7.0)
    lost = [seq for seq, peer in given_to.items() if peer == dead]
    effects = say(core, failovers[1], WantChunk(0, 1, 0, lost[-1], b""), 7.5)  # pulled
    assert {e.key.seq for e in only(effects, SendPiece)} == {lost[-1]}
    effects = say(core, failovers[0], Attach(0, 0, 0, 1 << 22, ()), 8.0)  # the next root child, in its place
    again = {e.key.seq for e in only(effects, SendPiece)}
    assert again <= set(lost) - {lost[-1]}
    assert again
    status = core.egress.status()
    assert status.rescued_bytes >= 2 * 4100, "half of the second copy is reserved for rescues"
    assert status.sent_bytes <= status.budget_bytes


def test_the_model_has_as_many_copies_as_a_version() -> None:
    core = with_members(1.0, 1)
    given_away = [
        *only(say(core, 0, WantBlob(1, Blob.HASHES, bytes(32), 0), 5.0), SendBlob),
        *only(say(core, 0, WantBlock(2, 0), 5.0), SendBlock),
    ]
    assert len(given_away) == 2
    effects = say(core, 0, WantBlock(3, 1), 5.0)
    assert only(effects, SendBlock) == []
    assert sends(effects, Lacks) == [Lacks(3)]
    assert core.egress.status().model_left_bytes == MODEL - 8000
