"""Which functions a machine has, by what the operator names and what packages register, and how they are told apart."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.engines.base import RewardAsked
from node.rewards.builtin import BUILTIN
from node.rewards.functions import GROUP, MAX_REWARDS, built_in, digest_of, load, parse_given


def test_what_is_built_in_is_there_without_being_asked_for() -> None:
    rewards, unusable = load((), ())
    assert rewards.keys() == BUILTIN.keys()
    assert unusable == ()
    assert len({reward.digest for reward in rewards.values()}) == len(rewards)


def test_an_ability_is_a_name_that_work_may_ask_for() -> None:
    for reward in built_in().values():
        assert re.fullmatch(r"[0-9a-f]{16}", reward.digest)
        assert RewardAsked(f"{reward.name}@{reward.digest}").ability == reward.ability
        assert len(reward.ability) <= 64


def test_functions_of_a_file_and_of_a_module(functions: Path) -> None:
    rewards, _ = load([f"length={functions}:length", "dumps=json:dumps"], ())
    assert rewards["length"].function("", "abc", {}) == 3
    assert rewards["dumps"].name == "dumps"
    assert rewards["length"].digest == load([f"other={functions}:length"], ())[0]["other"].digest


def test_a_given_one_takes_the_name_of_one_that_is_built_in(functions: Path) -> None:
    rewards, _ = load([f"exact_match={functions}:length"], ())
    assert rewards["exact_match"].digest != built_in()["exact_match"].digest


def test_a_digest_is_of_the_version_or_else_of_the_modules_source(tmp_path: Path) -> None:
    text = "def f(prompt, completion, metadata):\n    return {}\n"
    digests = []
    for name, body in (("one", text.format(1)), ("same", text.format(1)), ("two", text.format(2))):
        (tmp_path / f"{name}.py").write_text(body)
        digests.append(load([f"f={tmp_path}/{name}.py:f"], ())[0]["f"].digest)
    assert digests[0] == digests[1] != digests[2]
    for name, body in (("three", text.format(3)), ("four", text.format(4))):
        (tmp_path / f"{name}.py").write_text(body + "f.swarm_version = 'v1'\n")
        digests.append(load([f"f={tmp_path}/{name}.py:f"], ())[0]["f"].digest)
    assert digests[3] == digests[4]


def test_a_function_without_source_needs_a_version() -> None:
    with pytest.raises(UsageError, match="swarm_version"):
        digest_of(len)


@pytest.mark.parametrize(
    "text", ["", "name", "name=", "name=module", "=m:f", "na me=m:f", "n=m:1f", "x" * 33 + "=m:f", "n=:f"]
)
def test_what_is_not_written_as_it_should_be(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=MODULE:FUNCTION"):
        parse_given(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f=no_such_module:f", "No module named 'no_such_module'"),
        ("f=json:no_such", "no attribute 'no_such'"),
        ("f=json:__name__", "type str, and not a function"),
        ("f=/no/such/file.py:f", "No such file"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load([text], ())


def test_a_packages_reward_that_cannot_be_used_stops_nobody() -> None:
    points = [EntryPoint("good", "json:dumps", GROUP), EntryPoint("bad", "no_such_module:f", GROUP)]
    rewards, unusable = load((), points)
    assert "good" in rewards
    assert len(unusable) == 1
    assert "no_such_module" in unusable[0]


def test_a_node_has_a_bounded_number_of_rewards(functions: Path) -> None:
    with pytest.raises(UsageError, match=f"can have {MAX_REWARDS}"):
        load([f"r{i}={functions}:length" for i in range(MAX_REWARDS)], ())
