"""What counts as a reward, and when two are the same."""

import math
import random

import numpy as np
import pytest

from node.rewards.outcome import MAX_WHY, Outcome, evaluate, outcome_of


@pytest.mark.parametrize(
    "returned", [1, True, 1.0, np.float32(1), np.float64(1), np.int64(1), np.array([1.0]), np.bool_(True)]
)
def test_numbers_and_truth_values_are_rewards(returned: object) -> None:
    assert outcome_of(returned) == (1.0, "", False)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "a value of type NoneType, not a number"),
        ("1", "a value of type str"),
        (1j, "a value of type complex"),
        ([1.0], "a value of type list"),
        (np.ones(2), "a value of type ndarray"),
        (math.nan, "it returned nan"),
        (math.inf, "it returned inf"),
        (-math.inf, "it returned -inf"),
        (10**400, "it returned inf"),
    ],
)
def test_anything_else_is_none(returned: object, why: str) -> None:
    outcome = outcome_of(returned)
    assert outcome.value is None
    assert why in outcome.why


def test_rewards_are_compared_by_their_bits() -> None:
    assert outcome_of(0.1 + 0.2).bits != outcome_of(0.3).bits
    assert outcome_of(-0.0).bits == outcome_of(0).bits
    assert Outcome.without("a").bits == Outcome.without("b", lost=True).bits == b""


def test_whatever_a_function_raises_is_a_reason_of_one_short_line() -> None:
    def function(prompt: str, completion: str, metadata: object) -> float:
        raise ValueError("first\nsecond\x07" + "x" * 10_000)

    outcome = evaluate(function, "", "", {})
    assert outcome.value is None
    assert outcome.why.startswith("ValueError: first second?x")
    assert len(outcome.why) == MAX_WHY


def test_an_error_whose_text_cannot_be_read_is_a_reason_too() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def function(prompt: str, completion: str, metadata: object) -> float:
        raise Odd

    assert evaluate(function, "", "", {}).why == "Odd: its text cannot be read"


def test_pythons_random_numbers_begin_anew_at_each_call() -> None:
    def function(prompt: str, completion: str, metadata: object) -> float:
        return random.random()

    assert evaluate(function, "", "", {}) == evaluate(function, "", "", {})


def test_a_lack_of_memory_is_this_machines_own() -> None:
    def function(prompt: str, completion: str, metadata: object) -> float:
        raise MemoryError

    assert evaluate(function, "", "", {}).lost
