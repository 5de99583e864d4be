"""Replays: claimed tokens judged by the computation that drew them, in any batch, bit for bit."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_transformers import PROMPTS, ROOT, changed, checkpoint, engine_on

from node.engines import forced, invariance
from node.engines.arithmetic import MOST_CHARACTERS, class_label
from node.engines.base import JUDGES, REPLAYS, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.invariance import rows_alike
from node.engines.judgement import Claim
from node.engines.rows import ROW_MULTIPLE, Rows
from node.engines.sampling import draw_portable, log_probabilities, replayed
from node.engines.transformers import TransformersEngine
from node.engines.vllm.plugin.swarm_vllm.fingerprint import device_name, fingerprint
from node.verification.classes import ArithmeticClass
from node.verification.draws import MOST_MARGIN

PORTABLE = SamplingOptions(portable=True)
SAMPLINGS = {
    "plain": SamplingParams(12, seed=3, options=PORTABLE),
    "sharp": SamplingParams(12, temperature=0.7, seed=2**63 + 1, options=PORTABLE),
    "top-p": SamplingParams(12, top_p=0.95, seed=4, options=PORTABLE),
    "tight top-p": SamplingParams(12, temperature=1.3, top_p=0.5, seed=4, options=PORTABLE),
    "top-k": SamplingParams(12, seed=5, options=SamplingOptions(portable=True, top_k=5)),
    "min-p": SamplingParams(12, top_p=0.9, seed=5, options=SamplingOptions(portable=True, min_p=0.1, top_k=20)),
    "penalties": SamplingParams(
        12,
        seed=6,
        stop_tokens=(1,),
        options=SamplingOptions(
            portable=True,
            min_tokens=5,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            logit_bias=((3, 1.5),),
            banned=((2, 4), (7,)),
        ),
    ),
    "greedy": SamplingParams(12, temperature=0.0, options=PORTABLE),
    "not portable": SamplingParams(12, top_p=0.95, seed=7),
}
SAMPLED = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
ARITHMETIC = pytest.mark.parametrize("arithmetic", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])


def replaying(folder: Any, arithmetic: Any = "float32", **more: Any) -> TransformersEngine:
    engine = engine_on(folder, arithmetic) if not more else TransformersEngine(threads=1, device="cpu", **more)
    if more:
        engine.load(folder)
    engine.measure()
    return engine


def replays_of(prompts: list[Prompt], drawn: Any, sampling: SamplingParams, start: int = 0) -> list[Claim]:
    return [
        Claim(prompt.token_ids, one.token_ids, sampling, prompt.stream, start=start, replay=True)
        for prompt, one in zip(prompts, drawn, strict=True)
    ]


def assert_exact(found: Any, logprobs: tuple[float, ...], sampling: SamplingParams) -> None:
    assert not isinstance(found, Exception), found
    assert found.scores == logprobs
    assert found.margins == ((0.0,) * len(logprobs) if sampling.extra.portable else ())


# ---------------------------------------------------------------- rows


@ARITHMETIC
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_row_has_the_same_bits_in_every_batch(tied_folder, arithmetic, cached, length):
    model = engine_on(tied_folder, arithmetic)._loaded()

    @torch.inference_mode()
    def logits(texts: list[list[int]], row: int) -> torch.Tensor:
        rows = Rows(model, [text[:length] for text in texts], cached=cached)
        found = []
        for i in range(3):
            found.append(rows.read(SAMPLINGS["plain"], length)[row])
            rows.add(torch.tensor([text[length + i] for text in texts]))
        return torch.stack(found)

    mine = [(5 * i + 2) % 40 for i in range(length + 3)]
    alone = logits([mine], 0)

    @settings(max_examples=8, deadline=None)
    @given(st.data())
    def check(data: Any) -> None:
        others = data.draw(st.lists(st.lists(st.integers(0, 39), min_size=10, max_size=10), max_size=11))
        place = data.draw(st.integers(0, len(others)))
        assert torch.equal(logits([*others[:place], mine, *others[place:]], place), alone)

    check()


def test_every_batch_has_the_rows_that_kernels_need(tied_folder):
    """One row alone would be read by other kernels, and be another row's bits."""
    engine = engine_on(tied_folder)
    engine.generate(PROMPTS, SAMPLINGS["plain"])  # tries the cache, in one row
    model, seen = engine._loaded(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True)
    for prompts in (PROMPTS[2:3], [Prompt((4,))], [Prompt((1, 2), i) for i in range(6)]):
        completions = engine.generate(prompts, SamplingParams(5, seed=1, stop_tokens=tuple(range(20))))
        assert len(completions) == len(prompts)
    assert set(seen) == {ROW_MULTIPLE, 2 * ROW_MULTIPLE}
    seen.clear()
    engine.generate([Prompt((4,))], SamplingParams(3, options=SamplingOptions(exact=True)))
    assert set(seen) == {ROW_MULTIPLE}


@SAMPLED
def test_log_probabilities_do_not_depend_on_the_number_of_rows(sampling):
    logits = torch.randn(9, 2003, generator=torch.Generator().manual_seed(3)) * 3
    together = log_probabilities(logits, sampling)
    for rows in range(1, 9):
        assert torch.equal(log_probabilities(logits[:rows], sampling), together[:rows])


# ---------------------------------------------------------------- honest claims


@ARITHMETIC
@SAMPLED
def test_an_honest_claim_has_the_drawn_bits_and_margins_of_zero(tied_folder, arithmetic, sampling):
    prompts = [*PROMPTS, Prompt((9,), 9), Prompt((5, 5, 5, 5), 2**63)]
    drawn = engine_on(tied_folder, arithmetic).generate(prompts, sampling)
    checker = replaying(tied_folder, arithmetic)
    claims = replays_of(prompts, drawn, sampling)
    for found, one in zip(checker.judge(claims), drawn, strict=True):
        assert_exact(found, one.logprobs, sampling)
    for claim, one in zip(claims, drawn, strict=True):
        assert_exact(checker.judge([claim])[0], one.logprobs, sampling)


def test_claims_of_other_seeds_and_samplings_are_judged_together(tied_folder):
    engine = replaying(tied_folder)
    claims, wanted = [], []
    for i, sampling in enumerate(SAMPLINGS.values()):
        for seed in (1, 2):
            asked = msgspec.structs.replace(sampling, seed=seed, max_tokens=12 - i // 3)
            drawn = engine.generate(PROMPTS[:2], asked)
            claims += replays_of(PROMPTS[:2], drawn, asked)
            wanted += [one.logprobs for one in drawn]
    for claim, found, logprobs in zip(claims, engine.judge(claims), wanted, strict=True):
        assert_exact(found, logprobs, claim.sampling)


def test_one_batch_reads_the_claims_that_can_share_it(tied_folder, monkeypatch):
    engine = replaying(tied_folder)
    prompts = [Prompt((1, 2, 3), i) for i in range(5)] + [Prompt((1, 2), 9)]
    sampling = SAMPLINGS["plain"]
    claims, batches = replays_of(prompts, engine.generate(prompts, sampling), sampling), []
    original = forced._together
    monkeypatch.setattr(
        forced, "_together", lambda model, some, cached: batches.append(len(some)) or original(model, some, cached)
    )
    claims[0] = msgspec.structs.replace(claims[0], sampling=msgspec.structs.replace(sampling, seed=99))
    claims[5] = msgspec.structs.replace(claims[5], start=1)  # its text has three tokens, too
    assert not [found for found in engine.judge(claims) if isinstance(found, Exception)]
    assert batches == [6]


@ARITHMETIC
@SAMPLED
@pytest.mark.slow
def test_after_a_commit_within_a_sample_each_part_is_replayed_under_its_version(tied_folder, arithmetic, sampling):
    bits = checkpoint(tied_folder)
    patch, new = changed(bits, share=0.5)
    author = engine_on(tied_folder, arithmetic)
    author.begin(1, PROMPTS, sampling)
    author.stage(iter(patch))
    for _ in range(5):
        author.step()
    author.commit((0, 1), ROOT)
    done: list = []
    while not done:
        done = author.step()
    drawn = done[0][1]
    assert any(len(one.spans) == 2 for one in drawn)
    checker = replaying(tied_folder, arithmetic)
    before = [
        Claim(p.token_ids, c.token_ids[:5], sampling, p.stream, replay=True)
        for p, c in zip(PROMPTS, drawn, strict=True)
    ]
    for found, one in zip(checker.judge(before), drawn, strict=True):
        assert_exact(found, one.logprobs[:5], sampling)
    checker.stage(iter(patch))
    checker.commit((0, 1), ROOT)
    after = [(c, one) for c, one in zip(replays_of(PROMPTS, drawn, sampling), drawn, strict=True) if c.tokens > 5]
    asked = [msgspec.structs.replace(claim, start=5) for claim, _ in after]
    for found, (_, one) in zip(checker.judge(asked), after, strict=True):
        assert found.version == (0, 1)
        assert_exact(found, one.logprobs[5:], sampling)
    fresh = engine_on(tied_folder, arithmetic)
    fresh.reload(lambda name: new[name], (0, 1), ROOT)
    fresh.measure()
    assert fresh.judge(asked) == checker.judge(asked)


def test_a_replay_changes_no_sequence_that_runs_and_no_rewind_beside_it(tied_folder):
    bits = checkpoint(tied_folder)
    patch, _ = changed(bits, share=0.02)
    engine = replaying(tied_folder)
    engine.stage(patch)
    engine.commit((0, 1), ROOT)
    sampling = SAMPLINGS["top-p"]
    drawn = engine.generate(PROMPTS, sampling)
    replays = replays_of(PROMPTS, drawn, sampling)
    reads = [msgspec.structs.replace(claim, replay=False, previous=True) for claim in replays]
    read_alone = engine.judge(reads)
    engine.begin(1, PROMPTS, sampling)
    done: list = []
    while not done:
        done = engine.step()
        found = engine.judge([reads[0], replays[0], replays[1], reads[1]])
        assert [found[0], found[3]] == read_alone[:2]
        assert found[0].previous
        for i in (1, 2):
            assert_exact(found[i], drawn[i - 1].logprobs, sampling)
    assert done[0][1] == drawn


# ---------------------------------------------------------------- claims that are not honest


@ARITHMETIC
def test_weights_that_are_one_bit_older_in_one_element_give_other_bits(tied_folder, arithmetic):
    sampling = SAMPLINGS["plain"]
    drawn = engine_on(tied_folder, arithmetic).generate(PROMPTS, sampling)
    engine = replaying(tied_folder, arithmetic)
    name = "model.norm.weight"
    at = np.array([0], np.int64)
    engine.stage([(name, at, checkpoint(tied_folder)[name].reshape(-1)[at] ^ 1)])
    engine.commit((0, 1), ROOT)
    for found, one in zip(engine.judge(replays_of(PROMPTS, drawn, sampling)), drawn, strict=True):
        assert found.scores != one.logprobs


@SAMPLED
def test_a_token_that_was_not_drawn_loses_even_at_a_tie_and_at_a_border(sampling):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(50, 50).clone()
    logits[:, 7] = logits[:, 9] = logits.max() + 3
    places = [(sampling.seed, 1, 0)] * 50
    every = torch.arange(50)
    if not sampling.extra.portable:
        assert replayed(logits, every, sampling, places)[1].tolist() == [0.0] * 50
        return
    token, logprob = draw_portable(logits[:4], sampling, places[:1])
    found, margin = replayed(logits, every, sampling, places)
    assert (margin == 0.0).nonzero()[:, 0].tolist() == token.tolist()
    assert float(margin[margin > 0].min()) > 0
    assert found[int(token)] == logprob
    cut = torch.isinf(found)
    assert (margin[cut] == MOST_MARGIN).all()
    assert bool(cut.any()) == (sampling.top_p < 1.0 or bool(sampling.extra.top_k))


def test_other_draws_than_leased_are_seen(tied_folder):
    engine = replaying(tied_folder)
    sampling = SAMPLINGS["plain"]
    other = msgspec.structs.replace(sampling, seed=99)
    claims = replays_of(PROMPTS, engine.generate(PROMPTS, other), sampling)
    for found in engine.judge(claims):
        assert max(found.margins) > 0
    hot = msgspec.structs.replace(sampling, temperature=0.9)
    drawn = engine.generate(PROMPTS, hot)
    for found, one in zip(engine.judge(replays_of(PROMPTS, drawn, sampling)), drawn, strict=True):
        assert found.scores != one.logprobs


def test_a_claim_that_cannot_be_read_costs_no_other_its_answer(tied_folder, monkeypatch):
    engine = replaying(tied_folder)
    sampling = SAMPLINGS["plain"]
    good = replays_of(PROMPTS[:2], engine.generate(PROMPTS[:2], sampling), sampling)
    wanted = engine.judge(good)
    bad = [
        Claim((1, 2, 3), (40,), sampling, 0, replay=True),
        Claim((1, 99, 3), (4,), sampling, 0, replay=True),
        Claim((1, 2, 3), (2**31, 4), sampling, 0, start=1, replay=True),
        Claim((1, 2, 3), (4,), SAMPLINGS["top-k"], 0, replay=True),
    ]
    bad[3] = msgspec.structs.replace(
        bad[3], sampling=msgspec.structs.replace(sampling, options=SamplingOptions(allowed=(1, 70), portable=True))
    )
    found = engine.judge([bad[0], good[0], *bad[1:], good[1]])
    assert [found[1], found[5]] == wanted
    for i in (0, 2, 3, 4):
        assert "token id outside" in str(found[i])

    def long_texts_fail(model: Any, claims: Any, cached: bool) -> Any:
        if any(len(claim.token_ids) == 3 for claim in claims):
            raise IndexError("no such position")
        return original(model, claims, cached)

    original = forced._together
    monkeypatch.setattr(forced, "_together", long_texts_fail)
    short = Claim((1, 2, 3), (4, 5, 6), sampling, 0, replay=True)
    found = engine.judge([good[0], short, good[1]])
    assert [found[0], found[2]] == wanted
    assert isinstance(found[1], IndexError)


def test_weights_that_are_no_numbers_give_errors_and_no_bits(tied_folder):
    engine = replaying(tied_folder)
    claims = replays_of(PROMPTS[:1], engine.generate(PROMPTS[:1], SAMPLINGS["plain"]), SAMPLINGS["plain"])
    engine.stage([("model.norm.weight", np.array([0]), np.array([0x7FC0], np.uint16))])
    engine.commit((0, 1), ROOT)
    assert isinstance(engine.judge(claims)[0], ValueError)
    assert not rows_alike(engine._loaded(), cached=True)


def test_a_poisoned_engine_replays_and_measures_nothing(tied_folder):
    engine = replaying(tied_folder)
    claims = replays_of(PROMPTS, engine.generate(PROMPTS, SAMPLINGS["plain"]), SAMPLINGS["plain"])
    engine.poisoned = "half a commit"
    with pytest.raises(EngineError, match="poisoned"):
        engine.judge(claims)
    fresh = engine_on(tied_folder)
    fresh.poisoned = "half a commit"
    with pytest.raises(EngineError, match="poisoned"):
        fresh.measure()


# ---------------------------------------------------------------- what is measured and named


@ARITHMETIC
def test_an_engine_names_its_class_and_replays_after_loading(tied_folder, arithmetic):
    engine = engine_on(tied_folder, arithmetic)
    assert REPLAYS not in engine.abilities
    engine.measure()
    assert {REPLAYS, JUDGES} <= engine.abilities
    (label,) = [name for name in engine.abilities if name.startswith("class:")]
    found = ArithmeticClass.named(engine.abilities, engine.kind)
    device = torch.device("cpu")
    assert found.device == f"{device_name(device)}-{fingerprint(device, getattr(torch, arithmetic))}"
    assert (found.engine, found.dtype, found.attention, found.parallelism) == ("transformers", arithmetic, "sdpa", 1)
    assert label == f"class:{found.name}"
    engine.load(tied_folder)
    assert REPLAYS not in engine.abilities, "another model is measured anew"


def test_an_engine_whose_rows_depend_on_their_batch_cannot_replay(tied_folder, monkeypatch):
    engine, other = engine_on(tied_folder), replaying(tied_folder)
    model, claim = engine._loaded(), Claim((1, 2), (3,), SAMPLINGS["plain"], 0, replay=True)
    original = model.forward

    def sized(input_ids: torch.Tensor, **given: Any) -> Any:
        found = original(input_ids=input_ids, **given)
        return replace(found, logits=found.logits * (1 + 1e-6 * (len(input_ids) > 8)))

    sized.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", sized)
    assert not rows_alike(model, cached=True)
    engine.measure()
    assert REPLAYS not in engine.abilities
    assert "cannot replay" in str(engine.judge([claim])[0])
    classes = [ArithmeticClass.named(one.abilities, one.kind) for one in (engine, other)]
    assert classes[0] != classes[1], "its samples are never compared bit for bit"


def test_an_engine_that_keeps_its_cache_is_a_class_of_its_own(tied_folder):
    """Its samples can be replayed up to the first commit only, which the class tells."""
    engines = [replaying(tied_folder, carry=carry, arithmetic="float32") for carry in ("stale", "recompute")]
    kept, fresh = (ArithmeticClass.named(engine.abilities, engine.kind) for engine in engines)
    assert REPLAYS in engines[0].abilities
    assert kept.keeps_keys
    assert not fresh.keeps_keys


def test_a_model_that_cannot_run_is_not_alike(tied_folder, monkeypatch):
    model = engine_on(tied_folder)._loaded()
    monkeypatch.setattr(invariance, "_logits", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    assert not rows_alike(model, cached=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fingerprint_is_stable_and_tells_kernels_apart(dtype):
    device = torch.device("cpu")
    found = fingerprint(device, dtype)
    assert found == fingerprint(device, dtype)
    assert len(found) == 8
    assert int(found, 16) >= 0
    assert device_name(device).startswith("cpu-")
    original = torch.nn.functional.silu
    torch.nn.functional.silu = lambda x: original(x) * (1 + 2**-7)  # type: ignore[assignment]
    try:
        assert fingerprint(device, dtype) != found
    finally:
        torch.nn.functional.silu = original


TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(TEXT, TEXT, TEXT, TEXT, TEXT, st.integers(1, 20_000))
def test_a_class_fits_into_the_name_of_an_ability(engine, version, device, dtype, attention, ranks):
    label = class_label(engine, version, device, dtype, attention, ranks, "1f3a9c02")
    assert len(label) <= MOST_CHARACTERS
    assert label.count("/") == 5
    assert f"class:{ArithmeticClass.named([label], '').name}" == label
    assert label != class_label(engine, version, device + "x", dtype, attention, ranks, "1f3a9c02")
    assert label != class_label(engine, version, device, dtype, attention, ranks + 1, "1f3a9c02")
    assert label != class_label(engine, version, device, dtype, attention, ranks, "1f3a9c03")


def test_short_parts_are_kept_as_they_are():
    label = class_label("transformers", "5.23.0", "cpu-avx512", "float32", "sdpa", 1, "1f3a9c02")
    assert label == "class:transformers/5.23.0/cpu-avx512-1f3a9c02/float32/sdpa/tp1"
