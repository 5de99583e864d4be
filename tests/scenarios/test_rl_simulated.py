"""Small training runs on the simulator: a step takes the calculated time, and the scenarios report what they
document."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.engines.base import Prompt, SamplingParams
from scenarios.rl import bandwidth, wan
from scenarios.sim.virtual.clock import Clock
from scenarios.sim.virtual.compute import PUBLISHED, Compute
from scenarios.sim.virtual.engine import ModelledEngine, empty_patch
from scenarios.sim.virtual.training import Wan, train
from scenarios.sim.virtual.trio_time import VirtualTime, pass_time

SMALL = {
    "samples_step": 32, "group_n": 4, "rollout_s": 20.0, "waves": 2, "extract_s": 2.0, "trainer_flops": 8e12,
    "params": 2e9, "full_bytes": 64e6, "delta_bytes": 1e6, "nodes": 4, "trainer_gpus": 1, "tokens_s": 96.0,
    "published_tokens_s": 90.0, "step_s": None,
}  # fmt: skip
"""A step of 20 s, of which training takes 10 s, on 4 nodes. A delta has 1/64 of the size of the weights."""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The published file, with a model added that is cheap to simulate."""
    lines: list[str] = []
    skipping = False
    for line in PUBLISHED.read_text().splitlines():
        if line.startswith("[models."):
            skipping = line != "[models.8b]"
        elif line.startswith("["):
            skipping = False
        if skipping:
            continue
        key = line.split(" ")[0]
        if key in SMALL:
            line = f'{key} = {{ value = {SMALL[key]}, from = "made up for a test" }}'
        lines.append(line.replace("[models.8b]", "[models.tiny]"))
    path = tmp_path / "small.toml"
    path.write_text("\n".join(lines))
    return path


# ---------------------------------------------------------------- the input file


def test_every_number_of_the_published_file_has_a_source() -> None:
    compute = Compute()
    for model, figures in compute.models.items():
        run = compute.run(model)
        assert run.ideal_tokens_s == pytest.approx(figures["tokens_s"])
        assert run.tokens * run.grain * run.samples / figures["tokens_s"] == pytest.approx(
            figures.get("step_s", compute.job["rollout_s"]), rel=0.02
        )
        assert all(figures.source(key) for key in ("tokens_s", "delta_bytes", "nodes"))
    assert compute.run("8b", payload="swarm").delta_bytes < compute.run("8b").delta_bytes


def test_a_number_without_a_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text("[job]\nrollout_s = 45.0\n")
    with pytest.raises(UsageError, match=r"\[job\] rollout_s"):
        Compute(path)
    path.write_text('[job]\nrollout_s = { value = 45.0, from = "" }\n')
    with pytest.raises(UsageError, match="from"):
        Compute(path)


def test_an_unknown_model_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no model 70b: 4b, 8b"):
        Compute().run("70b")


# ---------------------------------------------------------------- trio in virtual time


def test_trio_tasks_and_simulated_events_share_one_clock() -> None:
    clock, story = Clock(), []

    async def main() -> None:
        bell = trio.Event()

        def ring() -> None:
            story.append(("rings", clock.now))
            bell.set()
            clock.halt()

        def last() -> None:
            story.append(("later", clock.now))
            clock.halt()

        async def sleeper() -> None:
            await trio.sleep(5.0)
            story.append(("slept", trio.current_time()))
            clock.at(7.5, ring)
            clock.at(7.6, last)
            await bell.wait()
            story.append(("heard", trio.current_time()))

        clock.at(3.0, lambda: story.append(("event", clock.now)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            assert await pass_time(clock, lambda: len(story) == 5, 100.0)
            assert not await pass_time(clock, lambda: False, 1000.0)

    trio.run(main, clock=VirtualTime(clock))
    assert story == [("event", 3.0), ("slept", 5.0), ("rings", 7.5), ("heard", 7.5), ("later", 7.6)]
    assert clock.now == pytest.approx(1007.6)


def test_an_engine_takes_time_pauses_for_a_commit_and_reports_the_version_of_each_token() -> None:
    clock = Clock()

    async def main() -> None:
        engine = ModelledEngine(10.0, 40, 0.0, stage_s=0.5, pause_s=1.0, root=bytes(32))
        await engine.wait_ready()
        found = []

        async def draw() -> None:
            found.extend(await engine.generate([Prompt((5,), 1), Prompt((6,), 2)], SamplingParams(40)))

        async def commit() -> None:
            await trio.sleep(1.0)
            descriptor = empty_patch()
            assert await engine.stage(descriptor, (0, 1)) == 0.5
            assert (await engine.commit((0, 1), bytes(32))).pause_s == 1.0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(draw)
            nursery.start_soon(commit)
            assert await pass_time(clock, lambda: len(found) == 2, 100.0)
        completions, seconds = found
        assert seconds == pytest.approx(5.0)
        assert engine.drawn == 80
        for completion in completions:
            assert [(span.version, span.end) for span in completion.spans] == [((0, 0), 15), ((0, 1), 40)]
        assert completions[0].token_ids != completions[1].token_ids

    trio.run(main, clock=VirtualTime(clock))


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_synchronous_step_is_the_sum_of_its_phases(small: Path) -> None:
    compute = Compute(small)
    run = compute.run("tiny", grain=1)
    free = train(run, Wan(None), max_lag=0, steps=2, warm=1)
    drawing_s = run.tokens * run.samples / (run.nodes * run.rows) / run.tokens_s
    computing_s = drawing_s + run.train_s + run.extract_s + run.stage_s + run.pause_s
    assert free.step_s == pytest.approx(computing_s, rel=0.03)
    assert (free.worst_lag, free.worst_lag_trained) == (0, 0)
    slow = train(run, Wan(1.0, (0.05,)), max_lag=0, steps=2, warm=1)
    assert slow.step_s == pytest.approx(computing_s + slow.transfer_s, rel=0.05)
    assert slow.transfer_s > 8 * run.delta_bytes / 1e6 - run.extract_s
    full = train(run, Wan(10.0, (0.05,)), "relayed", max_lag=0, steps=1, warm=1)
    assert full.transfer_s == pytest.approx(8 * run.full_bytes / 10e6 * 1.048, rel=0.01)


@pytest.mark.slow
def test_one_step_ahead_hides_the_transfer_of_a_delta(small: Path) -> None:
    compute = Compute(small)
    run = compute.run("tiny", grain=1)
    free = train(run, Wan(None), steps=3, warm=2)
    ours = train(run, Wan(2.0, (0.05, 0.1)), steps=3, warm=2)
    assert free.tokens_s == pytest.approx(run.ideal_tokens_s, rel=0.05)
    assert ours.tokens_s > 0.97 * free.tokens_s
    assert ours.sent_copies < 1.1
    assert ours.transfer_s > 1.0
    assert free.worst_lag == ours.worst_lag == 1
    assert 1 <= ours.worst_lag_trained <= 2
    assert train(run, Wan(2.0, (0.05, 0.1)), steps=3, warm=2) == ours, "the same seed gives the same run"


@pytest.mark.slow
def test_status_shows_the_share_of_useful_time_that_the_engines_count(small: Path) -> None:
    run = Compute(small).run("tiny", grain=1)
    waiting = train(run, Wan(2.0, (0.05, 0.1)), max_lag=0, steps=2, warm=1)
    assert waiting.useful == pytest.approx(20 / waiting.step_s, rel=0.05)
    assert waiting.useful_reported == pytest.approx(waiting.useful, abs=0.02)
    pausing = train(replace(run, pause_s=2.0), Wan(2.0, (0.05, 0.1)), steps=2, warm=1)
    assert pausing.useful == pytest.approx(1 - 2.0 / pausing.step_s, abs=0.01)
    assert pausing.useful_reported == pytest.approx(pausing.useful, abs=0.02)


@pytest.mark.slow
def test_continuous_batching_leaves_no_row_idle_when_lengths_differ(small: Path) -> None:
    run = replace(Compute(small).run("tiny", grain=1), spread=0.5)
    continuous = train(run, Wan(None), steps=2, warm=2)
    batches = train(replace(run, continuous_batching=False), Wan(None), steps=2, warm=2)
    assert continuous.tokens_s / (1 - continuous.wasted) > 0.98 * run.ideal_tokens_s
    assert batches.tokens_s / (1 - batches.wasted) < 0.9 * run.ideal_tokens_s


@pytest.mark.slow
@pytest.mark.long
def test_rl_wan_reports_its_comparisons(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--compute", str(small), "--size", "tiny", "--gbit", "0.02", "--regions", "1", "--regions", "4"]
    plot = tmp_path / "wan.png"
    assert wan.main([*words, "--steps", "4", "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    near, far = report["rows"]
    assert near["lost_to_regions"] == 0
    for row in report["rows"]:
        assert row["share"] == pytest.approx(row["tokens_s"] / row["free_tokens_s"])
        full = {carrier: found["at_best"] for carrier, found in row["full_tokens_s"].items()}
        assert row["tokens_s"] > full["relayed"] > full["star"]
        assert all(row["full_tokens_s"][c]["in_turn"] <= full[c] for c in ("relayed", "regions"))
        assert row["sync"]["worst_lag"] == 0
        assert row["sync_share"] == pytest.approx(row["sync"]["tokens_s"] / row["sync_free"]["tokens_s"])
    assert near["full_tokens_s"]["regions"] == pytest.approx(near["full_tokens_s"]["relayed"])
    assert far["full_tokens_s"]["regions"]["in_turn"] < far["full_tokens_s"]["relayed"]["in_turn"]
    assert [(verdict["what"], verdict["reach"]) for verdict in report["reach"]] == [("lost from 1 to 4 regions", 0.03)]
    assert plot.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.long
def test_rl_bandwidth_brackets_the_lowest_sufficient_rate(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--compute", str(small), "--model", "tiny", "--rows", "sync-published", "--rows", "full-sync"]
    assert bandwidth.main([*words, "--within", "0.3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    delta, full = report["rows"]
    for row in report["rows"]:
        enough = [gbit for gbit, share in row["tries"] if share >= report["keep"]]
        too_little = [gbit for gbit, share in row["tries"] if share < report["keep"]]
        assert row["gbit"] == min(enough)
        assert max(too_little) < row["gbit"] <= 1.31 * max(too_little)
    assert full["gbit"] > 10 * delta["gbit"]
    assert math.isfinite(full["gbit"])
