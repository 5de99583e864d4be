"""The rewards of every release: what counts as the answer, and what does not."""

import pytest

from node.rewards.builtin import BUILTIN, exact_match, json_valid, last_number, math_boxed
from node.rewards.outcome import evaluate


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Paris", "Paris", 1.0),
        ("  Paris\n", "Paris ", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("Lyon", ["Paris", "Lyon"], 1.0),
        ("42", 42, 1.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(completion: str, answer: object, reward: float) -> None:
    assert exact_match("", completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("First 3, then 4. So it is 12.", "12", 1.0),
        ("It is 12, and not 13", "12", 0.0),
        ("The total is $1,234.50", 1234.5, 1.0),
        ("#### 1,000", "1000.0", 1.0),
        ("half of it: 1/2", "0.5", 1.0),
        ("-7", "-7", 1.0),
        ("x7", "7", 0.0),
        (".5", "0.50", 1.0),
        ("no number", "7", 0.0),
        ("3.0", ["2", "3"], 1.0),
        ("1/0", "1/0", 1.0),
        ("9" * 100, "9" * 100, 1.0),
        ("9" * 100, "8" * 100, 0.0),
    ],
)
def test_last_number(completion: str, answer: object, reward: float) -> None:
    assert last_number("", completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"So \boxed{12}", "12", 1.0),
        (r"\boxed{1} or \boxed{2}", "2", 1.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4", 1.0),
        (r"\boxed{\left( x + 1 \right)^{2}}", "(x+1)^{2}", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{x^{y^{z}}}", "x^{y^{z}}", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{7} and \boxed{unfinished", "7", 1.0),
        ("12", "12", 0.0),
        (r"\boxed{}", "12", 0.0),
    ],
)
def test_math_boxed(completion: str, answer: object, reward: float) -> None:
    assert math_boxed("", completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "required", "reward"),
    [
        ('{"a": 1}', [], 1.0),
        (" [1, 2] ", [], 1.0),
        ("{'a': 1}", [], 0.0),
        ('{"a": NaN}', [], 0.0),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', ["a"], 1.0),
        ("```\n1\n```\nor\n```json\n{}\n```", ["a"], 0.0),
        ("[]", ["a"], 0.0),
        ("[" * 100_000, [], 0.0),
        ("", [], 0.0),
    ],
)
def test_json_valid(completion: str, required: list[str], reward: float) -> None:
    assert json_valid("", completion, {"required": required}) == reward


@pytest.mark.parametrize("name", ["exact_match", "last_number", "math_boxed"])
def test_without_an_answer_there_is_no_reward_but_a_reason(name: str) -> None:
    assert evaluate(BUILTIN[name], "", "1", {}) == (None, "KeyError: 'answer'", False)


def test_texts_made_to_be_slow_are_not() -> None:
    for name, function in BUILTIN.items():
        for text in ("1," * 50_000, "\\boxed{" * 20_000, "```json\n" * 20_000, "{" * 100_000, " " * 200_000):
            outcome = evaluate(function, "", text, {"answer": "1", "required": []})
            assert outcome.value in (0.0, 1.0), name
