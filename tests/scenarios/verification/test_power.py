"""The measurement of verification: its statistics on made-up numbers, and its samples from a tiny random model."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import UsageError
from node.verification.evidence import Evidence, Null
from scenarios.verification.lives import Lives, false_accusations, gains_of, power
from scenarios.verification.numbers import NUMBERS, nearer, per_sample, unlike, unreplayed
from scenarios.verification.power import ASKED, best, draw, honest_rows, main, measure
from scenarios.verification.sources import from_steps

NULL = Null(-1.0, 2.0, 0.45)
vectors = st.lists(st.floats(-20, 0, allow_subnormal=False), min_size=3, max_size=3)


@given(vectors, vectors, vectors)
def test_nearer_is_bounded_whatever_is_claimed(claimed, scored, alternative):
    found = nearer(np.array(claimed), np.array(scored), np.array(alternative))
    assert found is None or -1.0 - 1e-6 <= found <= 1.0 + 1e-6


def test_nearer_tells_exact_claims_apart_and_says_nothing_without_a_step():
    scored, other = np.array([-1.0, -2.0, -0.5]), np.array([-1.1, -1.8, -0.5])
    assert nearer(scored, scored, other) == -1.0
    assert nearer(other, scored, other) == 1.0
    assert nearer((scored + other) / 2, scored, other) == pytest.approx(0.0)
    assert nearer(scored, scored, scored) is None


def test_a_replay_differs_by_one_bit_or_by_one_draw():
    scored = np.array([-1.0, -2.0, -0.5, -3.0])
    moved = scored.copy()
    moved[2] = np.nextafter(moved[2], 0.0)
    won, lost = np.zeros(4), np.array([0.0, 0.0, 1e-12, 0.0])
    assert (unlike(scored, scored), unlike(moved, scored)) == (0.0, 0.25)
    assert (unreplayed(scored, scored, won), unreplayed(moved, scored, won)) == (0.0, 1.0)
    assert unreplayed(scored, scored, lost) == 1.0


def test_a_record_without_the_columns_of_a_number_has_none_of_it():
    ends = np.array([2, 5])
    columns = {"claim": np.array([0.0, 0.0, -1.0, -1.0, -1.0]), "score_x_v": np.array([0.0, 0.0, -1.0, -2.0, -1.0])}
    assert per_sample("slope", "x", ends, columns) is None
    assert per_sample("unlike", "y", ends, columns) is None
    found = per_sample("unlike", "x", ends, columns)
    assert found is not None
    assert found.tolist() == [0.0, pytest.approx(1 / 3)]


@pytest.mark.parametrize("checkers", [2, 3, 5, 8])
def test_many_lives_at_once_are_the_evidence_of_each(checkers):
    rng = np.random.default_rng(checkers)
    numbers = rng.normal(0.9, 0.8, (4 * checkers + 1, 3))
    many, drawn, single = Lives(3, checkers), Lives(3, checkers), [Evidence() for _ in range(3)]
    gains = gains_of(NULL, numbers.reshape(-1))
    for check, row in enumerate(numbers):
        many.add(NULL, row)
        drawn.add_drawn(gains, 3 * check + np.arange(3))
        assert drawn.log == pytest.approx(many.log)
        for life, evidence in enumerate(single):
            evidence.add(bytes([check % checkers]), NULL, float(row[life]))
        if check + 1 >= checkers:
            assert many.log == pytest.approx([max(e.log, 0.0) if checkers < 3 else e.log for e in single])


def test_power_falls_with_the_distance_and_is_none_without_one():
    rng = np.random.default_rng(0)
    honest = rng.normal(0.3, 0.2, 400)
    found = [
        power(honest, honest + shift, 10.0, 1.0, most_tokens=4000.0, lives=100, history=1024).tokens
        for shift in (1.0, 0.3, 0.0)
    ]
    assert found[2] is None
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < found[1] / 2
    assert found[0] >= 30  # three checkers must have answered


def test_the_curve_ends_where_all_are_convicted():
    found = power(np.zeros(50), np.ones(50), 8.0, 1.0, most_tokens=4000.0, lives=100)
    assert found.curve[0] == (0.0, 0.0)
    assert found.curve[-1] == (found.tokens, 1.0)
    shares = [share for _, share in found.curve]
    assert shares == sorted(shares)


def test_honest_lives_are_not_accused_and_cheating_ones_would_be():
    honest = np.random.default_rng(1).normal(0.3, 0.2, 400)
    accused, most = false_accusations(honest, 1.0, checks=60, lives=20_000, at_once=10_000)
    assert accused == 0
    assert most > 0.0
    spread = np.where(np.arange(400) % 2, 0.0, 1.0)  # the same machinery counts those that are over the threshold
    assert power(honest, honest + spread, 1.0, 1.0, most_tokens=500, lives=50).tokens is not None


def _records(seed: int = 0) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Made-up samples of eight tokens: replays are exact for honest nodes, other checkers are off by .03."""
    rng = np.random.default_rng(seed)
    out = {}
    for attack in {asked.attack for asked in ASKED} | {asked.null for asked in ASKED}:
        count, honest = 60, attack.startswith("honest")
        size = 8 * count
        true, step = -rng.exponential(1.0, size), rng.normal(0, 0.05, size)
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
    rows = measure(_records(), "bf16", lives=50, history=512, checkers=3, most_tokens=4000)
    shown = best(rows)
    assert [row["attack"] for row in shown] == [asked.label for asked in ASKED]
    assert {row["number"] for row in rows} == set(NUMBERS)
    for row in shown:
        others = [other["tokens"] for other in rows if other["attack"] == row["attack"] and other["tokens"] is not None]
        assert row["tokens"] == min(others)
    pytest.importorskip("matplotlib")
    draw({"rows": rows, "most_tokens": 4000}, tmp_path / "power.png")
    assert (tmp_path / "power.png").read_bytes()[:4] == b"\x89PNG"


def test_honest_rows_name_what_was_tried():
    tried = [("replay", "unreplayed"), ("own", "slope"), ("other", "margins"), ("own", "nearer")]
    rows = honest_rows(_records(), "bf16", tried, lives=200, checks=12, history=256, checkers=3)
    assert [(row["checker"], row["number"]) for row in rows] == tried
    assert all(row["accused"] == 0 and row["lives"] == 200 for row in rows)


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
        "256",
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
    with pytest.raises(UsageError, match="It has no run, or run"):
        main([str(run)])
    with pytest.raises(UsageError, match="older does not exist"):
        main([str(tmp_path), "--checkpoints", str(tmp_path / "older"), str(tmp_path / "newer")])
