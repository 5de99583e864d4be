"""Sampling options in the ledger: what older nodes receive, which nodes get such work, and which results count."""

import msgspec
import pytest
from ledger_kit import ALICE, BOB, KEY_OF, PROMPT, SAMPLING, ask, group_id, ledger_at, root

from node.engines.base import EXACT_SEED, OPTIONS, SCORE_OPTIONS, SamplingOptions, SamplingParams
from node.ledger.messages import (
    Abilities,
    AskAbilities,
    Reason,
    Rollout,
    VersionSpan,
    decode,
    encode,
    seal_rollout,
    stream_of,
    work_hash,
)
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.state import Group
from node.ledger.trust.acceptance import judge


class OldParams(msgspec.Struct, frozen=True):
    """`SamplingParams` as releases before options have them."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()


def with_options(**options: object) -> SamplingParams:
    return msgspec.structs.replace(SAMPLING, options=SamplingOptions(**options))  # type: ignore[arg-type]


def test_sampling_without_options_is_encoded_as_before():
    old = OldParams(SAMPLING.max_tokens, seed=SAMPLING.seed, stop_tokens=SAMPLING.stop_tokens)
    assert msgspec.msgpack.encode(SAMPLING) == msgspec.msgpack.encode(old)
    shaped = with_options(top_k=3, logit_bias=((1, 2.0),), banned=((1, 2),))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(shaped), type=SamplingParams)
    assert again == shaped
    assert work_hash(group_id(1), 0, PROMPT, again) == work_hash(group_id(1), 0, PROMPT, shaped)
    assert work_hash(group_id(1), 0, PROMPT, shaped) != work_hash(group_id(1), 0, PROMPT, SAMPLING)


def test_messages_about_abilities_round_trip():
    for message in (AskAbilities(), Abilities((EXACT_SEED, OPTIONS), "vllm/0.32.0/gpu")):
        assert decode(encode(message)) == message


def test_work_with_options_goes_only_to_nodes_that_know_them():
    ledger = ledger_at(groups=0)
    ledger.offer(group_id(0), "s", PROMPT, 2, with_options(top_k=3, seeded=True, exact=True))
    for abilities in (None, frozenset(), frozenset({OPTIONS}), frozenset({EXACT_SEED})):
        ledger.nodes[ALICE].abilities = abilities
        assert ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    ledger.nodes[BOB].abilities = frozenset({OPTIONS, EXACT_SEED})
    leases = ledger.request_work(BOB, ask(4), 0.0)
    assert isinstance(leases, list)
    assert [lease.samples for lease in leases] == [(0, 1)]
    ledger.member_lost(BOB, 1.0)
    ledger.member_up(BOB)
    assert ledger.nodes[BOB].abilities is None, "it may return with another release"


def rollout(
    sampling: SamplingParams, tokens: tuple[int, ...], finish: str, lease: int = 1, group: int = 0, sample: int = 0
) -> Rollout:
    work = work_hash(group_id(group), sample, PROMPT, sampling)
    spans = (VersionSpan(0, 3, root(0, 3), len(tokens)),)
    return Rollout(lease, lease, sample, work, pack_tokens(tokens), pack_floats((-20.0,) * len(tokens)), finish, spans)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "tokens", "finish", "counts"),
    [
        ({"stop_texts": ("x",)}, (5, 6), "stop", True),
        ({}, (5, 6), "stop", False),
        ({"stop_texts": ("x",)}, (5, 6), "length", False),
        ({"stop_texts": ("x",), "min_tokens": 2}, (5, 6), "stop", False),
        ({"min_tokens": 2}, (5, 2), "stop", False),
        ({"min_tokens": 2}, (5, 6, 2), "stop", True),
        ({"allowed": (5, 6)}, (5, 6, 5, 6), "length", True),
        ({"allowed": (5, 6)}, (5, 6, 5, 7), "length", False),
    ],
)
def test_results_that_violate_their_options_are_malformed(options, tokens, finish, counts):
    sampling = with_options(**options)
    ledger = ledger_at()
    group = Group(group_id(0), "s", 0, PROMPT, 1, sampling)
    wanted = None if counts else Reason.MALFORMED
    assert (
        judge(rollout(sampling, tokens, finish), group, ledger.head, ledger.roots, (sampling,), ledger.parts) is wanted
    )


@pytest.mark.parametrize(
    ("options", "first", "second", "copied"),
    [
        ({"top_k": 5}, (0, 0), (1, 0), True),
        ({"seeded": True}, (0, 0), (1, 0), False),  # the same random stream in every group
        ({"seeded": True}, (0, 0), (1, 1), True),
    ],
)
def test_equal_samples_are_copies_unless_their_random_stream_is_the_same(options, first, second, copied):
    sampling = with_options(**options)
    ledger = ledger_at(groups=0, copy_surprise=0.5, check_share=0.0)
    for i in range(2):
        ledger.offer(group_id(i), "s", PROMPT, 2, sampling)
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS})
    leases = {lease.group: lease for lease in ledger.request_work(ALICE, ask(4), 0.0)}  # type: ignore[union-attr]
    streams, verdicts = set(), []
    for group, sample in (first, second):
        lease = leases[group_id(group)]
        made = rollout(sampling, (5, 6, 7, 8), "length", lease.id, group, sample)
        streams.add(stream_of(group_id(group), sample, sampling))
        verdicts.append(ledger.submit(ALICE, made, seal_rollout(KEY_OF[ALICE], made), 1.0))
    assert verdicts == [None, Reason.COPIED if copied else None]
    assert (len(streams) == 2) is copied


def test_checks_of_samples_with_options_go_only_to_nodes_that_can_score_them():
    ledger = ledger_at(groups=0, check_share=1.0)
    sampling = with_options(top_k=3)
    ledger.offer(group_id(0), "s", PROMPT, 1, sampling)
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS})
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)  # type: ignore[misc]
    made = rollout(sampling, (5, 6, 7, 8), "length", lease.id)
    assert ledger.submit(ALICE, made, seal_rollout(KEY_OF[ALICE], made), 1.0) is None
    ledger.request_work(BOB, ask(1), 1.0)
    for abilities in (None, frozenset({OPTIONS})):
        ledger.nodes[BOB].abilities = abilities
        assert ledger.quarantine.next_check(BOB, 2.0) is None, "a score without the options would be wrong"
    ledger.nodes[BOB].abilities = frozenset({SCORE_OPTIONS})
    assert ledger.quarantine.next_check(BOB, 2.0) is not None
