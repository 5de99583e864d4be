"""Routes in rollouts: who gets such work, what is refused, and rollouts that come in parts."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_kit import ALICE, BOB, PROMPT, SAMPLING, ask, draw, group_id, ledger_at, sealed, submit

from codec.errors import PeerError
from codec.routes import RouteShape, encode_routes
from codec.sign import SIGNATURE_BYTES
from node.engines.base import ABILITIES, OPTIONS, PROMPT_LOGPROBS, ROUTES, TOP_LOGPROBS, SamplingOptions, needs
from node.engines.prompt_scores import pack_scores
from node.engines.top_logprobs import pack_top
from node.ledger.assignment.draws import as_judged, in_its_place
from node.ledger.messages import (
    MAX_BODY_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Reason,
    Rollout,
    RolloutPart,
    SignedRollout,
    Verdict,
    decode,
    encode,
    open_rollout,
    work_hash,
)
from node.ledger.node_messages import NodeMessages
from node.ledger.rollout_parts import MOST_BYTES_A_NODE, PartialRollouts, bodies_of
from node.ledger.routes import layers_with_routers, route_shape_of, why_no_routes
from node.ledger.rules import Ledger
from node.ledger.state import LiveLease

SHAPE = RouteShape(2, 2, 8)
ROUTED = msgspec.structs.replace(SAMPLING, options=SamplingOptions(routes=True))


def coded(tokens: int, shape: RouteShape = SHAPE) -> bytes:
    keys = np.random.default_rng(tokens).random((tokens, shape.layers, shape.experts))
    return encode_routes(np.argsort(keys, -1)[..., : shape.chosen], shape.experts)


def routed_ledger(**settings: Any) -> tuple[Ledger, LiveLease]:
    ledger = ledger_at(groups=0, **({"portable_draws": False} | settings))
    ledger.route_shape = SHAPE
    ledger.offer(group_id(0), "s", PROMPT, 4, ROUTED)
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS, ROUTES})
    (lease,) = ledger.request_work(ALICE, ask(4), 0.0)
    assert isinstance(lease, LiveLease)
    return ledger, lease


def drawn(lease: LiveLease, sample: int, **changes: Any) -> Rollout:
    given = {
        "work": work_hash(lease.group, sample, PROMPT, ROUTED),
        "routes": coded(3),
        "prompt_routes": coded(2) if sample == 0 else b"",
    }
    return draw(lease, sample, **(given | changes))


def test_a_group_with_routes_is_complete() -> None:
    ledger, lease = routed_ledger()
    for sample in range(4):
        assert submit(ledger, lease, drawn(lease, sample), 1.0) is None
    group = ledger.hand_over("s")
    assert group is not None
    assert [bool(done.rollout.prompt_routes) for _, done in sorted(group.done.items())] == [True, False, False, False]


def test_only_nodes_that_record_routes_get_such_work() -> None:
    assert needs(ROUTED) == {OPTIONS, ROUTES}
    ledger, _ = routed_ledger()
    for abilities in (None, ABILITIES - {ROUTES}):
        ledger.nodes[BOB].abilities = abilities
        assert ledger.request_work(BOB, ask(4), 0.0) is Reason.NO_WORK


@pytest.mark.parametrize(
    "changes",
    [
        {"routes": b""},
        {"prompt_routes": b""},
        {"routes": coded(2)},
        {"prompt_routes": coded(3)},
        {"routes": coded(3, RouteShape(2, 2, 9))},
        {"routes": coded(3, RouteShape(2, 3, 8))},
        {"routes": coded(3, RouteShape(3, 2, 8))},
        {"prompt_routes": coded(2, RouteShape(2, 2, 9))},
        {"routes": b"R1"},
        {"routes": coded(3) + b"\0"},
        {"routes": coded(3)[:-1]},
    ],
)
def test_routes_of_the_wrong_shape_are_refused(changes: dict[str, bytes]) -> None:
    ledger, lease = routed_ledger()
    assert submit(ledger, lease, drawn(lease, 0, **changes), 1.0) is Reason.MALFORMED


def test_routes_that_nobody_asked_for_are_refused() -> None:
    ledger = ledger_at()
    ledger.route_shape = SHAPE
    (lease,) = ledger.request_work(ALICE, ask(4), 0.0)  # type: ignore[misc]
    assert submit(ledger, lease, draw(lease, 0, routes=coded(3), prompt_routes=coded(2)), 1.0) is Reason.MALFORMED


def test_routes_of_a_dense_model_are_refused() -> None:
    ledger, lease = routed_ledger()
    ledger.route_shape = None
    assert submit(ledger, lease, drawn(lease, 0), 1.0) is Reason.MALFORMED
    assert "no experts" in (why_no_routes(None, 3, 4) or "")


def test_samples_that_have_no_room_for_routes_are_not_asked_for() -> None:
    large = RouteShape(48, 8, 128)
    assert why_no_routes(large, 1000, 60_000) is None
    why = why_no_routes(large, 60_000, 65_536)
    assert why is not None
    assert "those of 125,536 tokens may take 30 MiB, and a sample has at most 23 MiB" in why


def test_routes_leave_it_to_the_ledger_how_tokens_are_drawn() -> None:
    ledger = ledger_at(groups=0)
    ledger.route_shape = SHAPE
    ledger.offer(group_id(0), "s", PROMPT, 1, ROUTED)
    ledger.nodes[ALICE].abilities = ABILITIES
    (lease,) = ledger.request_work(ALICE, ask(4), 0.0)  # type: ignore[misc]
    assert lease.portable
    leased = in_its_place(ROUTED)
    assert leased.extra == SamplingOptions(routes=True, portable=True)
    rollout = drawn(lease, 0, work=work_hash(lease.group, 0, PROMPT, leased))
    assert submit(ledger, lease, rollout, 1.0) is None


def test_tokens_are_judged_without_routes() -> None:
    assert as_judged(ROUTED) == SAMPLING
    assert as_judged(in_its_place(ROUTED)).extra == SamplingOptions(portable=True)
    assert as_judged(SAMPLING) is SAMPLING


def test_a_rollout_without_routes_has_the_bytes_of_older_releases() -> None:
    _, lease = routed_ledger()
    plain, full = (sealed(lease, draw(lease, 0, **more)) for more in ({}, {"routes": coded(3)}))
    assert len(msgspec.msgpack.decode(plain[SIGNATURE_BYTES:])) == 8
    assert len(msgspec.msgpack.decode(full[SIGNATURE_BYTES:])) == 10
    assert open_rollout(ALICE, plain) == draw(lease, 0)
    assert open_rollout(ALICE, full).routes == coded(3)


# ---------------------------------------------------------------- parts


def owed(sealed_rollout: bytes, lease: int = 1, sample: int = 0) -> list[RolloutPart]:
    found = [decode(body) for body in bodies_of(lease, sample, sealed_rollout)]
    assert all(isinstance(part, RolloutPart) for part in found)
    return found  # type: ignore[return-value]


def test_a_rollout_that_fits_is_one_message() -> None:
    (body,) = bodies_of(1, 0, bytes(1000))
    assert decode(body) == SignedRollout(bytes(1000))


@given(st.integers(MAX_BODY_BYTES, 4 * MAX_BODY_BYTES), st.integers(0, 2**32))
def test_parts_in_any_order_and_repeated_are_the_whole(length: int, seed: int) -> None:
    rng = random.Random(seed)
    whole = rng.randbytes(length)
    messages = owed(whole)
    told = [*messages[:-1], *rng.choices(messages[:-1], k=3)]
    rng.shuffle(told)
    parts = PartialRollouts()
    assert all(parts.add(ALICE, message) is None for message in told)
    assert parts.add(BOB, messages[-1]) is None, "of another node"
    assert parts.add(ALICE, messages[-1]) == whole
    assert parts.nbytes == len(messages[-1].data), "only what the other node sent is still there"
    parts.keep_live({2})
    assert parts.nbytes == 0


def test_a_part_that_cannot_be_is_a_fault() -> None:
    parts = PartialRollouts()
    for message in (RolloutPart(1, 0, 2, 2, b"a"), RolloutPart(1, 0, 0, 2, b"a")):
        with pytest.raises(PeerError, match="rollout part"):
            parts.add(ALICE, message)
    assert parts.nbytes == 0


def test_memory_is_bounded_whatever_a_node_sends() -> None:
    parts = PartialRollouts()
    data = bytes(PART_BYTES)
    for lease in range(100):
        for part in range(3):
            parts.add(ALICE, RolloutPart(lease, 0, part, MAX_PARTS, data))
            assert parts.nbytes <= MOST_BYTES_A_NODE
    assert parts.add(BOB, RolloutPart(1000, 0, 0, 2, data)) is None
    assert parts.add(BOB, RolloutPart(1000, 0, 1, 2, b"a")) == data + b"a", "another node is not hindered"


def test_more_parts_than_a_message_may_have_are_not_made() -> None:
    with pytest.raises(ValueError, match="is more than"):
        bodies_of(1, 0, bytes(MAX_PARTS * PART_BYTES + 1))


def test_the_ledger_puts_parts_together_and_answers_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, lease = routed_ledger()
    talk = NodeMessages(
        ledger, wake=lambda: None, give_up=lambda *_: None, is_member=lambda _: True, expel=lambda *_: None,
        clock=lambda: 1.0,
    )  # fmt: skip
    monkeypatch.setattr("node.ledger.rollout_parts.MAX_BODY_BYTES", 200)
    monkeypatch.setattr("node.ledger.rollout_parts.PART_BYTES", 100)
    whole = sealed(lease, drawn(lease, 0))
    bodies = bodies_of(lease.id, 0, whole)
    assert len(bodies) > 2
    for body in bodies:
        assert talk.take_outbox() == []
        talk.hear(ALICE, body)
    assert talk.take_outbox() == [(ALICE, Verdict(lease.id, 0, None))]
    talk.hear(ALICE, bodies[0])  # the verdict was lost, and the node sends all parts again
    assert talk.take_outbox() == [(ALICE, Verdict(lease.id, 0, None))]
    talk.hear(BOB, bodies[0])
    talk.hear(ALICE, encode(replace_lease(bodies[0], 77)))
    verdicts = [message for _, message in talk.take_outbox()]
    assert verdicts[1:] == [Verdict(77, 0, Reason.UNKNOWN_LEASE)]
    assert talk.parts.nbytes == 0


def replace_lease(body: bytes, lease: int) -> RolloutPart:
    message = decode(body)
    assert isinstance(message, RolloutPart)
    return msgspec.structs.replace(message, lease=lease)


# ---------------------------------------------------------------- a model's shape


def test_the_seed_and_the_engine_find_the_same_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from codec.checkpoint import Checkpoint
    from node.engines.routing import route_shape
    from scenarios.conformance.families import tiny

    families = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe", "jamba", "qwen3")
    for family in families:
        model: Any = AutoModelForCausalLM.from_config(tiny(family, tied=False)).to(torch.bfloat16)
        model.save_pretrained(folder := tmp_path / family)
        files = {"config.json": (folder / "config.json").read_bytes()}
        found = route_shape_of(files, Checkpoint.open(folder).layout)
        assert found == route_shape(model), family
        assert (found is None) == (family == "qwen3")


def test_other_weights_are_no_routers() -> None:
    names = ["a.gate.weight", "a.mlp.router.layer.weight", "a.gate_proj.weight", "a.shared_expert_gate.weight"]
    assert layers_with_routers([(name, (8, 32)) for name in names], 8) == 2
    assert layers_with_routers([("a.gate.weight", (9, 32)), ("a.gate.weight", (8,))], 8) == 0


@pytest.mark.parametrize(
    "config", [b"", b"[]", b'{"num_experts": -1, "num_experts_per_tok": 2}', b'{"num_experts": 4}']
)
def test_a_config_that_names_no_experts_is_a_dense_models(config: bytes) -> None:
    from codec.layout import Layout, TensorSpec

    layout = Layout((TensorSpec("a.gate.weight", "BF16", (4, 2)),))
    assert route_shape_of({"config.json": config}, layout) is None


# ---------------------------------------------------------------- likeliest tokens

TOPPED = msgspec.structs.replace(SAMPLING, options=SamplingOptions(top_logprobs=2))
TOP = pack_top(np.array([[1, 2]] * 3), np.array([[-0.25, -1.0]] * 3))


@pytest.mark.parametrize(("top", "reason"), [(TOP, None), (b"", Reason.MALFORMED), (TOP[:-8], Reason.MALFORMED)])
def test_likeliest_tokens_come_as_asked(top: bytes, reason: Reason | None) -> None:
    ledger = ledger_at(groups=0, portable_draws=False)
    ledger.offer(group_id(0), "s", PROMPT, 1, TOPPED)
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS})
    assert ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS, TOP_LOGPROBS})
    (lease,) = ledger.request_work(ALICE, ask(4), 0.0)  # type: ignore[misc]
    rollout = draw(lease, 0, work=work_hash(lease.group, 0, PROMPT, TOPPED), top=top)
    assert rollout.length == 3
    assert submit(ledger, lease, rollout, 1.0) is reason


SCORED = msgspec.structs.replace(SAMPLING, options=SamplingOptions(prompt_logprobs=1))
PLACES = len(PROMPT) // 4 - 1
SCORES = pack_scores(np.ones(PLACES), -np.ones(PLACES), np.ones((PLACES, 1)), -np.ones((PLACES, 1)))


@pytest.mark.parametrize("data", [SCORES, b"", SCORES[:-8], SCORES + SCORES])
def test_scores_of_the_prompt_come_as_asked(data: bytes) -> None:
    ledger = ledger_at(groups=0, portable_draws=False)
    ledger.offer(group_id(0), "s", PROMPT, 1, SCORED)
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS})
    assert ledger.request_work(ALICE, ask(4), 0.0) is Reason.NO_WORK
    ledger.nodes[ALICE].abilities = frozenset({OPTIONS, PROMPT_LOGPROBS})
    (lease,) = ledger.request_work(ALICE, ask(4), 0.0)  # type: ignore[misc]
    rollout = draw(lease, 0, work=work_hash(lease.group, 0, PROMPT, SCORED), prompt_scores=data)
    assert submit(ledger, lease, rollout, 1.0) is (None if data == SCORES else Reason.MALFORMED)


def test_scores_of_the_prompt_that_nobody_asked_for_are_refused() -> None:
    ledger, lease = routed_ledger()
    assert submit(ledger, lease, drawn(lease, 0, prompt_scores=SCORES), 1.0) is Reason.MALFORMED


def test_likeliest_tokens_that_nobody_asked_for_are_refused() -> None:
    ledger, lease = routed_ledger()
    assert submit(ledger, lease, drawn(lease, 0, top=TOP), 1.0) is Reason.MALFORMED


def test_a_rollout_has_the_bytes_of_older_releases_unless_it_has_more() -> None:
    _, lease = routed_ledger()
    plain, routed = draw(lease, 0), drawn(lease, 0)
    topped = msgspec.structs.replace(plain, top=TOP)
    scored = msgspec.structs.replace(plain, prompt_scores=SCORES)
    bodies = [sealed(lease, one)[SIGNATURE_BYTES:] for one in (plain, routed, topped, scored)]
    fields = [len(msgspec.msgpack.decode(body)) for body in bodies]
    assert fields == [fields[0], fields[0] + 2, fields[0] + 3, fields[0] + 5]
    assert as_judged(TOPPED) == as_judged(SCORED) == SAMPLING
