"""A reward that the trainer computes itself, to compare what nodes have signed with it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codec.errors import UsageError
from node.engines.base import REWARD_NAME
from node.rewards.functions import load
from node.rewards.outcome import Outcome, Reward, evaluate
from node.rewards.texts import Texts

__all__ = ["LocalReward", "local_reward", "name_of"]


class LocalReward:
    """`function`, with the texts of the checkpoint folder `base`."""

    def __init__(self, function: Reward, base: Path) -> None:
        self._function = function
        self._texts = Texts(base)

    def outcome(self, prompt: Sequence[int], token_ids: Sequence[int], metadata: bytes) -> Outcome:
        """The outcome for one sample. `metadata`: a JSON object. Raises `UsageError` without a tokenizer."""
        try:
            texts = self._texts.of(prompt, token_ids)
        except UsageError as error:
            raise UsageError(f"verify_rewards: {error}.") from error
        return evaluate(self._function, *texts, json.loads(metadata))


def name_of(reward: Any) -> str:
    """The name of a reward that is given as a name or as a function. Raises `UsageError`."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", "")
    if not callable(reward) or not REWARD_NAME.fullmatch(name):
        raise UsageError(
            f"reward is of type {type(reward).__name__}: give the name of a reward that nodes have, or a function "
            "of that name (__name__)."
        )
    return name


def local_reward(reward: Any, base: Path | None) -> LocalReward:
    """The function in this process for `reward`, a function or a name. Raises `UsageError` when there is none."""
    if base is None:
        raise UsageError("verify_rewards needs the texts of samples: give Swarm.attach the base folder.")
    if not isinstance(reward, str):
        return LocalReward(reward, base)
    name, _, digest = reward.partition("@")
    found = load(())[0].get(name)
    if found is None or digest not in ("", found.digest):
        raise UsageError(
            f"verify_rewards needs the reward {reward!r} in this process, which has no function of that name: give the "
            "function itself (reward=function), or install the package that registers it."
        )
    return LocalReward(found.function, base)
