"""The settings of a node about its rewards."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from node.cli.app import app
from node.rewards.builtin import BUILTIN
from node.rewards.functions import MAX_REWARDS, parse_given
from node.settings.config import JoinConfig
from node.settings.rewards import MAX_GIVEN
from node.settings.sources import explain


@pytest.mark.parametrize("text", ["r=module:f", "r=package.module:f", "a.b-c_1=/srv/a b/rewards.py:f", "r=~/r.py:f_1"])
def test_a_function_is_named_with_its_place(text: str) -> None:
    config = JoinConfig(reward=[text])  # type: ignore[arg-type]
    assert config.reward == (text,)
    name, source, function = parse_given(text)
    assert f"{name}={source}:{function}" == text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"reward": ("r",)}, "--reward r: write NAME=MODULE:FUNCTION"),
        ({"reward": ("r=module",)}, "write NAME=MODULE:FUNCTION"),
        ({"reward": ("r=m:f", "r=m:g")}, "each name once"),
        ({"reward": tuple(f"r{i}=m:f" for i in range(MAX_GIVEN + 1))}, f"at most {MAX_GIVEN}"),
        ({"reward": ("r=m:f",), "engine": "none"}, "leave out --engine none"),
        ({"reward_within": "2h"}, "0.1s to 1h"),
        ({"reward_within": "ten"}, "not a duration"),
        ({"reward_memory_mb": 16}, "256 to 1000000"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(settings: dict, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        JoinConfig(**settings)


def test_what_may_be_given_fits_beside_what_is_built_in() -> None:
    assert MAX_GIVEN + len(BUILTIN) <= MAX_REWARDS


def test_a_file_of_settings_may_list_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swarm.toml").write_text('[join]\nreward = ["r=my.module:f", "q=m:g"]\nreward_within = "30s"\n')
    monkeypatch.chdir(tmp_path)
    found = explain(app, "join")
    assert found["reward"]["value"] == ["r=my.module:f", "q=m:g"]
    assert found["reward_within"]["value"] == "30s"
