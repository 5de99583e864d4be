"""Power of verification: its statistics on made-up numbers, and its command on made-up samples."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from codec.errors import UsageError
from node.verification.evidence import Evidence, Null
from node.verification.mismatches import GRID, MOST_STARTS, Tally
from node.verification.opinions import Kind
from scenarios.verification import simulate
from scenarios.verification.lives import NEEDED, Lives, ReplayLives, gains_of
from scenarios.verification.numbers import ONE_PASS, mismatches, numbers, proven_at_once
from scenarios.verification.power import ASKED, best, draw, honest_rows, main, measure
from scenarios.verification.simulate import (
    honest_lives,
    honest_replays,
    learned,
    power_at_once,
    power_of_numbers,
    power_of_replays,
)
from scenarios.verification.sources import from_steps

NULL = Null(-1.0, 2.0, 0.45)
ENDS = np.array([2, 5])


def columns(**changed: list[float]) -> dict[str, np.ndarray]:
    """Two samples, of two tokens and of three, that a checker finds exact."""
    scores = [-0.5, -2.0, -1.0, -1.5, -3.0]
    found = {"claim": scores, "score_x_v": scores, "margin_x_v": [0.0] * 5} | changed
    return {name: np.array(values) for name, values in found.items()}


def test_a_replay_differs_by_one_bit_or_by_one_draw():
    assert mismatches("x", ENDS, columns()).tolist() == [False, False]
    moved = columns()
    moved["claim"][2] = np.nextafter(np.float32(-1.0), np.float32(0.0))
    assert mismatches("x", ENDS, moved).tolist() == [False, True]
    assert mismatches("x", ENDS, columns(margin_x_v=[1e-6, 0, 0, 0, 0])).tolist() == [True, False]
    excluded = columns(score_x_v=[-0.5, -np.inf, -1.0, -1.5, -3.0])
    assert mismatches("x", ENDS, excluded).tolist() == [True, False]


def test_numbers_are_the_products_and_none_without_their_columns():
    given = columns(score_x_prev=[-0.6, -1.8, -1.0, -1.5, -3.0])
    assert numbers(Kind.STALE, "x", ENDS, given).tolist() == [0.0], "the second sample has no step"
    given["claim"][:2] = [-0.6, -1.8]
    assert numbers(Kind.STALE, "x", ENDS, given) == pytest.approx([1.0])
    assert numbers(Kind.CLAIMS, "x", ENDS, given) == pytest.approx([0.15, 0.0])
    assert numbers(Kind.DRAWN, "x", ENDS, columns(margin_x_v=[0.5, 0.25, 0, 0, 0])).tolist() == [0.75, 0.0]
    assert numbers(Kind.STALE, "x", ENDS, columns()) is None
    assert mismatches("y", ENDS, columns()) is proven_at_once("y", ENDS, columns()) is None


def test_one_sample_proves_what_is_beyond_rounding():
    ends, size = np.array([40, 80, 100]), 100
    exact = {"claim": -np.ones(size), "score_x_v": -np.ones(size), "margin_x_v": np.zeros(size)}
    assert not proven_at_once("x", ends, exact).any()
    lost = exact | {"margin_x_v": np.repeat([0.3, 0.2, 5.0], [40, 40, 20])}
    assert proven_at_once("x", ends, lost).tolist() == [True, False, False], "the last one has too few tokens"
    off = exact | {"claim": -1.0 - np.repeat([0.09, 0.11, 0.11], [40, 40, 20])}
    del off["margin_x_v"]
    assert proven_at_once("x", ends, off).tolist() == [False, True, False]


@pytest.mark.parametrize("checkers", [2, 3, 5, 8])
def test_many_lives_at_once_are_the_evidence_of_each(checkers):
    rng = np.random.default_rng(checkers)
    found = rng.normal(0.9, 0.8, (4 * checkers + 1, 3))
    many, drawn, single = Lives(3, checkers), Lives(3, checkers), [Evidence() for _ in range(3)]
    gains = gains_of(NULL, found.reshape(-1))
    for check, row in enumerate(found):
        many.add(NULL, row)
        drawn.add_drawn(gains, 3 * check + np.arange(3))
        assert drawn.log == pytest.approx(many.log)
        for life, evidence in enumerate(single):
            evidence.add(bytes([check % checkers]), NULL, float(row[life]))
        if check + 1 >= checkers:
            assert many.log == pytest.approx([max(e.log, 0.0) if checkers < 3 else e.log for e in single])


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("history", [0, 30, 2_048])
def test_many_lives_of_replays_at_once_are_the_tally_of_each(rate: float, history: int):
    rng = np.random.default_rng(7)
    many, bound, single = ReplayLives(4), ReplayLives(4, step=12), [Tally() for _ in range(4)]
    others = np.minimum(np.array([0, 1, 5, 60]), history)
    for _ in range(8):
        good = rng.geometric(rate, 4) - 1
        found, most = many.add(good, (others, history)), bound.add(good, (others, history))
        for life, tally in enumerate(single):
            for _ in range(good[life]):
                tally.add(b"c", mismatch=False, others=(int(others[life]), history))
            tally.add(b"c", mismatch=True, others=(int(others[life]), history))
        assert found == pytest.approx([tally.log for tally in single])
        assert many.numbers.tolist() == [tally.numbers for tally in single]
        assert (most >= found - 1e-9).all()
    assert len(GRID) > 12
    if history == 2_048 and rate == 1.0:
        assert found[0] >= NEEDED


def test_more_mismatches_than_the_product_keeps_are_no_less_evidence():
    many, tally = ReplayLives(1), Tally()
    for _ in range(MOST_STARTS + 20):
        found = many.add(np.array([1]), (3, 100))
        tally.add(b"c", mismatch=False, others=(3, 100))
        tally.add(b"c", mismatch=True, others=(3, 100))
    assert found[0] >= tally.log


def test_power_falls_with_the_distance_and_is_none_without_one():
    rng = np.random.default_rng(0)
    honest = rng.normal(0.3, 0.2, 400)
    settings = {"most_tokens": 4000.0, "lives": 100, "history": 1024, "checkers": 5}
    found = [power_of_numbers(Kind.STALE, honest, honest + shift, 10.0, **settings).tokens for shift in (0.5, 0.2, 0.0)]
    assert found[2] is None
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < found[1] / 2
    assert found[0] >= 30  # three checkers must have answered
    assert learned(Kind.STALE, honest, 383, 8, rng) is None
    assert power_of_numbers(Kind.STALE, honest, honest + 1, 10.0, **settings | {"history": 300}).tokens is None


@pytest.mark.parametrize(("history", "samples"), [(384, 4), (2_048, 3), (16_384, 2)])
def test_a_cheat_whose_samples_always_mismatch_is_found_within_a_few(history: int, samples: int):
    found = power_of_replays(np.zeros(50, bool), np.ones(50, bool), 8.0, most_tokens=4000.0, lives=100, history=history)
    assert found.tokens == 8.0 * samples
    assert found.curve[0] == (0.0, 0.0)
    assert found.curve[-1] == (found.tokens, 1.0)


@pytest.mark.slow
def test_fewer_mismatches_take_longer_and_those_of_honest_nodes_hide_them():
    exact, some = np.zeros(100, bool), np.arange(100) < 60
    settings = {"most_tokens": 4000.0, "lives": 200}
    often = power_of_replays(exact, some, 8.0, **settings).tokens
    seldom = power_of_replays(exact, np.arange(100) < 20, 8.0, **settings).tokens
    hidden = power_of_replays(np.arange(100) < 40, some, 8.0, **settings).tokens
    assert 24.0 < often < seldom
    assert hidden is None or hidden > 2 * often
    assert power_of_replays(exact, exact, 8.0, **settings).tokens is None
    shares = [share for _, share in power_of_replays(exact, some, 8.0, **settings).curve]
    assert shares == sorted(shares)


def test_a_sample_that_convicts_alone_is_met_sooner_or_later():
    assert power_at_once(np.ones(4, bool), 8.0, most_tokens=80.0).tokens == 8.0
    assert power_at_once(np.arange(4) < 2, 8.0, most_tokens=800.0).tokens == pytest.approx(8 * 7, abs=9)
    assert power_at_once(np.zeros(4, bool), 8.0, most_tokens=80.0).tokens is None


def test_honest_lives_are_not_accused_and_cheating_ones_would_be():
    honest = np.random.default_rng(1).normal(0.3, 0.2, 400)
    accused, most = honest_lives(Kind.STALE, honest, checks=60, lives=20_000, at_once=10_000)
    assert accused == 0
    assert most > 0.0
    spread = np.where(np.arange(400) % 2, 0.0, 0.5)  # the same machinery counts those that are over the threshold
    assert power_of_numbers(Kind.STALE, honest, honest + spread, 1.0, most_tokens=900, lives=50).tokens is not None


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1])
def test_honest_nodes_with_some_mismatches_are_not_accused(rate: float):
    accused, most = honest_replays(rate, checks=60, lives=3_000, at_once=1_000)
    assert accused == 0
    assert most < NEEDED
    if rate > 0.0:
        accused, _ = honest_replays(rate, checks=60, lives=1_000, history=1_000_000, others=0, seed=1)
        assert accused == 0, "however much is known of the others"


def test_nodes_with_more_mismatches_than_the_others_would_be_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulate, "OTHERS_SHARE", 0.0)
    accused, most = honest_replays(0.1, checks=60, lives=200, at_once=100)
    assert accused > 50
    assert most >= NEEDED


def _records(seed: int = 0) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Made-up samples of eight tokens: replays are exact for honest nodes, other checkers are off by .03."""
    rng = np.random.default_rng(seed)
    out = {}
    for attack in {asked.attack for asked in ASKED} | {asked.null for asked in ASKED}:
        count, honest = 60, attack.startswith("honest")
        size = 8 * count
        true, step = -1.0 - rng.exponential(1.0, size), rng.normal(0, 0.05, size)
        lost = np.zeros(size) if honest else np.where(rng.random(size) < 0.2, 1.0, 0.0)
        columns = {"claim": true if honest else true + step, "score_replay_v": true, "margin_replay_v": lost}
        columns |= {"score_replay_prev": true + step}
        for checker in ("bf16", "f32"):
            noise = rng.normal(0, 0.03, size)
            columns |= {f"score_{checker}_v": true + noise, f"score_{checker}_prev": true + step + noise}
            columns |= {f"margin_{checker}_v": lost + np.abs(noise)}
        out[attack] = (8 * np.arange(1, count + 1), columns)
    return out


def test_every_attack_has_a_row_and_the_best_one_is_shown(tmp_path: Path):
    rows = measure(_records(), "bf16", lives=50, history=1024, checkers=3, most_tokens=4000)
    shown = best(rows)
    assert [row["attack"] for row in shown] == [asked.label for asked in ASKED]
    assert {row["number"] for row in rows} == {"unlike", "at once", *map(str, ONE_PASS)}
    for row in shown:
        others = [other["tokens"] for other in rows if other["attack"] == row["attack"] and other["tokens"] is not None]
        assert row["tokens"] == min(others, default=None)
    assert all(row["number"] in ("unlike", "at once") for row in rows if row["checker"] == "replay")
    pytest.importorskip("matplotlib")
    draw({"rows": rows, "most_tokens": 4000}, tmp_path / "power.png")
    assert (tmp_path / "power.png").read_bytes()[:4] == b"\x89PNG"


def test_honest_rows_name_what_was_tried():
    tried = [("replay", "unlike"), ("own", "stale"), ("other", "claims"), ("own", "at once")]
    rows = honest_rows(_records(), "bf16", tried, [0.01, 0.1], lives=200, checks=12, history=1024, checkers=3)
    assert [(row["checker"], row["number"], row["rate"]) for row in rows] == [
        ("replay", "unlike", 0.01),
        ("replay", "unlike", 0.1),
        ("own", "stale", None),
        ("other", "claims", None),
    ]
    assert all(row["accused"] == 0 and row["lives"] == 200 and math.isfinite(row["most"]) for row in rows)


@pytest.mark.slow
def test_the_command_prints_what_kept_samples_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "smollm2-1e-06"
    run.mkdir()
    np.savez(run / "step_0001.npz", gaps=np.zeros(0, np.uint32), bits=np.zeros(0, np.uint16))
    records = _records()
    (tmp_path / "records").mkdir()
    from scenarios.verification.records import KINDS_OF_SAMPLES

    for kind in KINDS_OF_SAMPLES:
        ends, columns = records[kind.attack]
        np.savez(tmp_path / "records" / f"smollm2-1e-06_v1_bf16_{kind.attack}.npz", ends=ends, **columns)
    few = [
        "--lives",
        "20",
        "--most-tokens",
        "2000",
        "--honest-lives",
        "100",
        "--honest-checks",
        "6",
        "--history",
        "1024",
    ]
    assert main([str(tmp_path), *few, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["version"], result["author"], result["scenario"]) == (1, "bf16", "verification_power")
    assert main([str(tmp_path), *few]) == 0
    printed = capsys.readouterr().out
    assert all(asked.label in printed for asked in ASKED)
    assert "0 quarantined" in printed


def test_what_is_not_there_is_named_with_the_command_that_makes_it(tmp_path: Path):
    run = tmp_path / "smollm2-1e-06"
    run.mkdir()
    np.savez(run / "step_0001.npz", gaps=np.zeros(0, np.uint32), bits=np.zeros(0, np.uint16))
    assert from_steps(tmp_path, "smollm2", 1e-6, None)[:2] == ("smollm2-1e-06", 1)
    with pytest.raises(UsageError, match=r"has 1 steps, so --version is 1 to 1.*--steps 2`"):
        main([str(tmp_path), "--version", "2"])
    with pytest.raises(UsageError, match=r"no folder smollm2-3e-06\. It has smollm2-1e-06: choose .*--lr 3e-06` first"):
        main([str(tmp_path), "--lr", "3e-6"])
    with pytest.raises(UsageError, match="Run `python -m"):
        main([str(run)])
    with pytest.raises(UsageError, match="older does not exist"):
        main([str(tmp_path), "--checkpoints", str(tmp_path / "older"), str(tmp_path / "newer")])


def test_kinds_that_vllm_cannot_draw_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--author", "vllm", "--kinds", "honest", "fp8"])
    assert "--kinds fp8: not with --author vllm" in capsys.readouterr().err
