"""Judging claims: scores under two versions in one rewind, its failures, and margins of portable draws."""

import queue
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_transformers import PROMPTS, ROOT, changed, checkpoint, engine_on, layout_of

from node.engines import cohort, transformers, undo
from node.engines.base import JUDGES, EngineError, SamplingOptions, SamplingParams
from node.engines.generation import GATHER_S, SteppedGeneration
from node.engines.interface import JudgingEngine
from node.engines.judgement import Claim, Judgement
from node.engines.messages import Commit, Failed, Generate, Judge, Judged
from node.engines.worker import Worker
from node.verification import draws
from node.verification.noise import gumbel

SAMPLING = SamplingParams(max_tokens=12, temperature=0.8, seed=3, options=SamplingOptions(portable=True))
SHARP = SamplingParams(max_tokens=12, seed=3)


def at_version_two(folder: Any, arithmetic: Any = "float32") -> Any:
    """(an engine that committed two versions, one that committed only the first, the bits of both versions)."""
    bits = checkpoint(folder)
    engine, older = engine_on(folder, arithmetic), engine_on(folder, arithmetic)
    first, bits_1 = changed(bits, seed=1, share=0.02)
    second, bits_2 = changed(bits_1, seed=2, share=0.02, small=False)
    for each in (engine, older):
        each.stage(first)
        each.commit((0, 1), ROOT)
    for values in second:
        values[2][:] = (values[2] & 0x3FFF) | 0x3000  # no infinities and NaN
    bits_2 = {name: new.copy() for name, new in bits_1.items()}
    for name, at, new in second:
        bits_2[name].reshape(-1)[at] = new
    engine.stage(second)
    engine.commit((0, 2), ROOT)
    return engine, older, bits_1, bits_2


def claims_of(engine: Any, sampling: SamplingParams, previous: bool = True) -> list[Claim]:
    found = engine.generate(PROMPTS, sampling)
    return [Claim(p.token_ids, c.token_ids, sampling, p.stream, previous) for p, c in zip(PROMPTS, found, strict=True)]


def live_bits(engine: Any) -> bytes:
    """All live parameters and buffers, whether a checkpoint has them or not."""
    state = engine._loaded().state_dict()
    return b"".join(state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(state))


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "float16"])
def test_scores_under_both_versions_and_then_the_same_bits(tied_folder, arithmetic):
    engine, older, _, _ = at_version_two(tied_folder, arithmetic)
    assert isinstance(engine, JudgingEngine)
    assert JUDGES in engine.abilities
    claims = claims_of(engine, SAMPLING)
    before = live_bits(engine)
    for _ in range(2):
        for claim, found in zip(claims, engine.judge(claims), strict=True):
            asked = claim.prompt, claim.token_ids, claim.sampling
            assert found.version == (0, 2)
            assert found.scores == engine.score(*asked)
            assert found.previous == older.score(*asked) != found.scores
        assert live_bits(engine) == before
        assert engine.poisoned is None


def test_running_sequences_are_not_changed_by_a_rewind(tied_folder):
    engine, _, _, _ = at_version_two(tied_folder)
    claims = claims_of(engine, SAMPLING)
    wanted = engine.generate(PROMPTS, SHARP)
    engine.begin(1, PROMPTS, SHARP)
    done: list = []
    while not done:
        done = engine.step()
        engine.judge(claims[:2])
    assert done[0][1] == wanted


def test_only_what_is_asked_for_is_answered(tied_folder):
    engine, _, _, _ = at_version_two(tied_folder)
    (plain,) = engine.judge(claims_of(engine, SHARP, previous=False)[:1])
    assert plain.previous == plain.margins == ()
    good = claims_of(engine, SAMPLING)[0]
    bad = Claim((1, 2), (99,), SAMPLING, 0, True)
    found = engine.judge([bad, good])
    assert isinstance(found[0], ValueError)
    assert found[1] == engine.judge([good])[0]
    for prompt, tokens in (((), (1,)), ((1,), ())):
        with pytest.raises(ValueError, match="claim"):
            Claim(prompt, tokens, SAMPLING, 0)


def test_the_version_before_is_unknown_after_a_reload_and_after_a_large_step(tied_folder, monkeypatch):
    engine, _, _, bits = at_version_two(tied_folder)
    (claim, *_) = claims_of(engine, SAMPLING)
    assert engine.judge([claim])[0].previous
    assert 0 < engine._undo.nbytes <= undo.MOST_SHARE * engine._live.nbytes
    engine.reload(lambda name: bits[name], (0, 2), ROOT)
    assert engine.judge([claim])[0].previous == ()
    patch, bits = changed(bits, seed=3, share=0.5)
    engine.stage(patch)
    engine.commit((0, 3), ROOT)
    assert engine._undo is None
    assert engine.judge([claim])[0].previous == ()
    patch, bits = changed(bits, seed=4, share=0.01)
    engine.stage(patch)  # before the reload: what it would lead back to is not what the commit replaces
    staged, old = engine._staged, engine._staged_undo
    engine.reload(lambda name: bits[name], (0, 3), ROOT)
    engine._staged, engine._staged_undo = staged, old
    engine.commit((0, 4), ROOT)
    assert engine.judge([claim])[0].previous == ()


def test_a_second_rewind_is_of_the_last_commit_alone(tied_folder):
    engine, _, _, bits_2 = at_version_two(tied_folder)
    patch, _ = changed(bits_2, seed=9, share=0.02)
    engine.stage(patch)
    engine.commit((0, 3), ROOT)
    other = engine_on(tied_folder, "float32")
    other.reload(lambda name: bits_2[name], (0, 2), ROOT)
    (claim, *_) = claims_of(engine, SAMPLING)
    found = engine.judge([claim])[0]
    assert found.previous == other.score(claim.prompt, claim.token_ids, claim.sampling)


class Torn(Exception):
    pass


def torn(*_: Any, **__: Any) -> Any:
    raise Torn("the accelerator fell off the bus")


@pytest.mark.parametrize("where", ["scoring", "undoing", "restoring", "wrong bits"])
def test_a_failure_in_a_rewind_poisons_the_engine_until_it_is_reloaded(tied_folder, monkeypatch, where):
    engine, _, _, bits = at_version_two(tied_folder)
    claims, before = claims_of(engine, SAMPLING), live_bits(engine)
    wanted = engine.judge(claims)
    parts, write, calls = len(engine._undo._parts), undo._write, []

    def fail_at(number: int, then: Any) -> Any:
        def failing(part: Any, values: Any) -> None:
            calls.append(part)
            then(part, values) if len(calls) == number else write(part, values)

        return failing

    with monkeypatch.context() as patched:
        if where == "scoring":
            patched.setattr(transformers, "score", torn)
        elif where == "undoing":
            patched.setattr(undo, "_write", fail_at(3, torn))
        elif where == "restoring":
            patched.setattr(undo, "_write", fail_at(parts + 3, torn))
        else:
            patched.setattr(undo, "_write", fail_at(parts + 3, lambda part, values: write(part, values ^ 1)))
        with pytest.raises(EngineError if where == "wrong bits" else Torn):
            engine.judge(claims)
    assert engine.poisoned is not None
    assert (live_bits(engine) == before) == (where in ("scoring", "undoing"))
    for call in (lambda: engine.judge(claims), lambda: engine.generate(PROMPTS, SHARP), lambda: engine.stage([])):
        with pytest.raises(EngineError, match="poisoned"):
            call()
    engine.reload(lambda name: bits[name], (0, 2), ROOT)
    assert live_bits(engine) == before
    assert [found.scores for found in engine.judge(claims)] == [found.scores for found in wanted]


def test_readers_of_live_bits_wait_for_the_end_of_a_rewind(tied_folder, monkeypatch):
    """A block that is read back, and the old bits of a patch that is staged, are never those of the version before."""
    engine, _, _, bits = at_version_two(tied_folder)
    layout, claims = layout_of(bits), claims_of(engine, SAMPLING)
    window, read = np.zeros(16 << 20, np.uint8), threading.Event()
    before = live_bits(engine)
    patch, _ = changed(bits, seed=5, share=0.02)
    threads: list[threading.Thread] = []

    def reads() -> None:
        engine.read_blocks([0], window)
        read.set()

    def score(*args: Any) -> Any:
        if not threads:
            threads.extend(threading.Thread(target=call) for call in (reads, lambda: engine.stage(patch)))
            for thread in threads:
                thread.start()
        assert not read.wait(0.05)
        assert live_bits(engine) != before
        return cohort.score(*args)

    monkeypatch.setattr(transformers, "score", score)
    engine.judge(claims)
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    name = layout.block(0).name
    np.testing.assert_array_equal(window.view(np.uint16)[: bits[name].size], bits[name].reshape(-1))
    wanted = [found.scores for found in engine.judge(claims)]
    engine.commit((0, 3), ROOT)
    assert [found.previous for found in engine.judge(claims)] == wanted


def test_scores_that_are_not_numbers_are_refused(tied_folder):
    engine, _, _, bits = at_version_two(tied_folder)
    (claim, *_) = claims_of(engine, SAMPLING)
    broken = [("model.norm.weight", np.array([3]), np.array([0x7FC0], np.uint16))]
    repair = [("model.norm.weight", np.array([3]), bits["model.norm.weight"][3:4])]
    engine.stage(broken)
    engine.commit((0, 3), ROOT)
    assert isinstance(engine.judge([claim])[0], ValueError)
    engine.stage(repair)
    engine.commit((0, 4), ROOT)
    assert isinstance(engine.judge([claim])[0], ValueError), "the version before has them"
    assert isinstance(engine.judge([replace_previous(claim)])[0], Judgement)
    assert engine.poisoned is None


def replace_previous(claim: Claim) -> Claim:
    return msgspec.structs.replace(claim, previous=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"scores": (float("nan"),)},
        {"scores": (0.5,)},
        {"scores": ()},
        {"previous": (-1.0, -2.0)},
        {"previous": (float("nan"),)},
        {"margins": (-0.1,)},
        {"margins": (9.0,)},
        {"margins": (float("nan"),)},
        {"version": (-1, 0)},
        {"version": (0, 1 << 63)},
    ],
)
def test_a_judgement_that_cannot_be_one_is_refused_from_a_process_too(fields: dict[str, Any]):
    good: dict[str, Any] = {"version": (0, 1), "scores": (-1.0,), "previous": (-1.5,), "margins": (0.0,)}
    assert Judgement(**good | {"scores": (float("-inf"),)}).margins == (0.0,)
    with pytest.raises(ValueError, match="judgement"):
        Judgement(**good | fields)
    with pytest.raises(msgspec.ValidationError, match="judgement"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good | fields), type=Judgement)


# ---------------------------------------------------------------- margins

HOW = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_p": {"top_p": 0.7, "temperature": 1.2},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "both": {"top_k": 9, "top_p": 0.8, "temperature": 0.9},
    "penalty": {"presence_penalty": 1.5, "repetition_penalty": 1.3},
}


def sampling_of(how: dict[str, Any], **more: Any) -> SamplingParams:
    options = {name: value for name, value in how.items() if name not in ("temperature", "top_p")}
    fields = {name: value for name, value in how.items() if name in ("temperature", "top_p")} | more
    return SamplingParams(24, seed=11, options=SamplingOptions(portable=True, **options), **fields)


@pytest.mark.parametrize("how", HOW)
def test_margins_are_zero_for_honest_tokens_and_large_for_others(tied_folder, how):
    engine = engine_on(tied_folder, "float32")
    sampling = sampling_of(HOW[how])
    claims = [msgspec.structs.replace(claim, sampling=sampling) for claim in claims_of(engine, sampling, False)]
    for claim in claims:
        (found,) = engine.judge([claim])
        assert max(found.margins) < 1e-4
        (other,) = engine.judge([msgspec.structs.replace(claim, stream=claim.stream + 77)])
        assert np.mean(other.margins) > 0.2
        (seeded,) = engine.judge([replace_seed(claim)])
        assert np.mean(seeded.margins) > 0.2


def replace_seed(claim: Claim) -> Claim:
    return msgspec.structs.replace(claim, sampling=msgspec.structs.replace(claim.sampling, seed=12))


def test_margins_find_other_sampling_than_leased(tied_folder):
    """Each is drawn with the right noise. A best of two, by contrast, is a draw with other noise."""
    engine = engine_on(tied_folder, "float32")
    leased = sampling_of({"temperature": 1.0})
    for other in ({"temperature": 0.7}, {"top_p": 0.6}, {"top_k": 2}):
        used = sampling_of({"temperature": 1.0} | other)
        claims = [msgspec.structs.replace(claim, sampling=leased) for claim in claims_of(engine, used, False)]
        assert np.mean([found.margins for found in engine.judge(claims)]) > 0.02, other


def test_margins_are_those_of_the_definition(tied_folder):
    engine = engine_on(tied_folder, "float32")
    sampling = sampling_of({"temperature": 0.7})
    claim = Claim((1, 2, 3), tuple(range(4, 20)), sampling, 6)
    text = torch.tensor([[*claim.prompt, *claim.token_ids]])
    with torch.inference_mode():
        logits = engine._loaded()(input_ids=text).logits[0, 2:-1].numpy()
    noise = np.stack([gumbel(11, 6, at, logits.shape[-1]) for at in range(16)])
    wanted = draws.margins(draws.kept_logprobs(logits, 0.7), noise, np.array(claim.token_ids))
    np.testing.assert_allclose(engine.judge([claim])[0].margins, wanted, atol=1e-5)
    greedy = msgspec.structs.replace(claim, sampling=sampling_of({"temperature": 0.0}))
    logprobs = draws.kept_logprobs(logits, 1.0)
    wanted = draws.margins(logprobs, np.zeros_like(noise), np.array(claim.token_ids))
    np.testing.assert_allclose(engine.judge([greedy])[0].margins, wanted, atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.75}])
def test_a_token_at_a_border_loses_by_its_margin_and_one_far_outside_by_the_most(tied_folder, options):
    """Logits that another engine rounded put the third token just outside, or inside."""
    from node.engines.sampling import margins

    sampling = sampling_of(options)
    logits = torch.tensor([[2.0, 1.5, 0.8, 0.79, -9.0, -9.5]]).repeat(40, 1)
    noise = np.stack([gumbel(11, 5, at, 6) for at in range(40)])
    for shift in (-0.02, 0.02):
        rounded = logits.clone()
        rounded[:, 2] += shift
        kept = draws.kept_logprobs(rounded.numpy(), 1.0, top_k=options.get("top_k", 0), top_p=options.get("top_p", 1.0))
        if "min_p" in options:
            kept = np.where(kept < kept.max(-1, keepdims=True) + np.log(options["min_p"]), -np.inf, kept)
        drawn = torch.from_numpy(draws.draw(kept, noise))
        assert float(margins(logits, drawn, sampling, 5).max()) <= 2 * abs(shift)
    assert (margins(logits, torch.full((40,), 5), sampling, 5) == draws.MOST_MARGIN).all()


# ---------------------------------------------------------------- the process


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any, **_: Any) -> None:
        self.sent.append(message)


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


def drive(engine: Any, messages: list[Any], then: Any = None) -> list[Any]:
    """What the engine's process answers to these messages, which are there before it looks; `then(tasks, worker)` may
    add more while it works."""
    channel = Channel()
    worker = Worker(engine, channel)  # type: ignore[arg-type]
    for message in messages:
        worker._tasks.put(lambda message=message: worker._answer(message, []))
    if then is not None:
        then(worker)
    with pytest.raises(Stop):
        worker._generation.run(worker._tasks)
    return channel.sent


def test_claims_that_wait_share_one_rewind_and_a_commit_waits_for_its_end(tied_folder, monkeypatch):
    engine, older, _, bits = at_version_two(tied_folder)
    claims = claims_of(engine, SAMPLING)
    patch, _ = changed(bits, seed=7, share=0.02)
    engine.stage(patch)
    rewinds: list[int] = []
    original = engine._score_before

    def counted(model: Any, undo: Any, some: Any) -> Any:
        rewinds.append(len(some))
        if len(rewinds) == 1:
            worker._staged = (0, 3)
            worker._tasks.put(lambda: worker._answer(Commit(50, (0, 3), ROOT), []))
            worker._tasks.put(lambda: worker._answer(Judge(51, claims[0]), []))
        found = original(model, undo, some)
        assert engine.version == (0, 2 if len(rewinds) == 1 else 3)
        return found

    worker: Any = None

    def then(made: Any) -> None:
        nonlocal worker
        worker = made
        send = worker._generation._send

        def sending(answer: Any) -> None:
            send(answer)
            if answer.number == 51:
                worker._tasks.put(stop)

        worker._generation._send = sending

    monkeypatch.setattr(engine, "_score_before", counted)
    sent = drive(engine, [Judge(i, claim) for i, claim in enumerate(claims)], then)
    assert rewinds[:2] == [len(claims), 1]
    assert [answer.number for answer in sent] == [0, 1, 2, 3, 50, 51]
    for i, claim in enumerate(claims):
        assert isinstance(sent[i], Judged)
        assert sent[i].judgement.version == (0, 2)
        assert sent[i].judgement.previous == older.score(claim.prompt, claim.token_ids, claim.sampling)
    assert sent[-1].judgement.version == (0, 3)
    assert sent[-1].judgement.previous == sent[0].judgement.scores


def test_while_sequences_run_claims_are_gathered(tied_folder, monkeypatch):
    """A claim alone is judged after `GATHER_S`, and eight at once."""
    engine, _, _, _ = at_version_two(tied_folder)
    claims = claims_of(engine, SAMPLING)
    clock, batches = [0.0], []
    monkeypatch.setattr("node.engines.generation.time.perf_counter", lambda: clock[0])
    judge = engine.judge

    def counted(some: Any) -> Any:
        batches.append((len(some), clock[0]))
        return judge(some)

    monkeypatch.setattr(engine, "judge", counted)
    step = engine.step

    def slow_step() -> Any:
        clock[0] += GATHER_S / 4
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    channel = Channel()
    generation = SteppedGeneration(engine, channel.send)
    tasks: queue.Queue = queue.Queue()
    generation.generate(Generate(1, tuple(PROMPTS), SamplingParams(max_tokens=40, seed=3)))
    generation.judge(Judge(2, claims[0]))

    def more() -> None:
        if len(batches) == 1 and not generation._claims:
            for i in range(9):
                generation.judge(Judge(10 + i, claims[i % len(claims)]))
        if not generation._began_at and not generation._claims:
            raise Stop

    original = generation._judge_waiting
    monkeypatch.setattr(generation, "_judge_waiting", lambda: (original(), more()))
    with pytest.raises(Stop):
        generation.run(tasks)
    assert [count for count, _ in batches[:2]] == [1, 8]
    assert batches[0][1] == GATHER_S
    assert batches[1][1] == GATHER_S + GATHER_S / 4
    assert sum(count for count, _ in batches) == 10
    assert sum(isinstance(answer, Judged) for answer in channel.sent) == 10


def test_a_failed_rewind_fails_its_claims_and_the_sequences_that_run(tied_folder, monkeypatch):
    engine, _, _, _ = at_version_two(tied_folder)
    claims = claims_of(engine, SAMPLING)
    monkeypatch.setattr(transformers, "score", torn)
    channel = Channel()
    generation = SteppedGeneration(engine, channel.send)
    generation.generate(Generate(1, tuple(PROMPTS), SHARP))
    for i, claim in enumerate(claims[:2]):
        generation.judge(Judge(2 + i, claim))
    generation._claims_since -= GATHER_S
    tasks: queue.Queue = queue.Queue()
    tasks.put(generation._judge_waiting)
    tasks.put(generation._step)
    tasks.put(stop)
    with pytest.raises(Stop):
        generation.run(tasks)
    assert [(answer.number, answer.poisoned) for answer in channel.sent if isinstance(answer, Failed)] == [
        (2, True), (3, True), (1, True),
    ]  # fmt: skip
    assert not [answer for answer in channel.sent if not isinstance(answer, Failed)]


def test_an_engine_that_cannot_judge_says_so():
    sent: list[Any] = []
    generation = SteppedGeneration(type("Plain", (), {"poisoned": None})(), sent.append)  # type: ignore[arg-type]
    generation.judge(Judge(1, Claim((1,), (2,), SHARP, 0)))
    generation._judge_waiting()
    assert (sent[0].number, "cannot judge" in sent[0].why) == (1, True)
