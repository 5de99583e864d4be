"""The trainer's own look at rewards: it computes some itself, and names samples whose nodes signed other ones."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.engines.base import RewardAsked
from node.rewards.local import LocalReward, local_reward, name_of
from node.rewards.outcome import Reward
from node.trainers.rollout_group import RolloutGroup

__all__ = ["NO_REWARDS", "OwnRewards", "RewardLie", "own_rewards"]


@dataclass(frozen=True, slots=True)
class RewardLie:
    """The sample at `index` has another reward than its node signed; `why` in words."""

    index: int
    why: str


@dataclass(frozen=True, slots=True)
class OwnRewards:
    """`name`: the reward that is asked for; empty: none. `local`: the function in this process; None: nothing is
    computed here. `share`: of the samples that another node has checked, how many are computed here too, 0 to 1.
    Samples that no other node has checked, or about which nodes disagree, always are."""

    name: str = ""
    local: LocalReward | None = None
    share: float = 0.0

    def look(self, asked: RewardAsked, group: RolloutGroup) -> RolloutGroup | RewardLie:
        """`group`, in which the samples count as checked that have the reward computed here; or the first sample that
        has another.

        Where this process gets no number, it knows nothing. A sample whose node got none gets the number of this
        process.
        """
        if self.local is None:
            return group
        found = list(group.rollouts)
        for i, rollout in enumerate(group.rollouts):
            if rollout.reward_checked and random.random() >= self.share:
                continue
            ours = self.local.outcome(group.prompt, rollout.token_ids, asked.metadata).value
            if ours is None:
                continue
            if rollout.reward is not None and rollout.reward != ours:
                return RewardLie(i, f"its reward is {ours!r}, and not {rollout.reward!r}")
            found[i] = replace(rollout, reward=ours, no_reward="", reward_checked=True)
        return replace(group, rollouts=tuple(found))


NO_REWARDS: Final = OwnRewards()


def own_rewards(reward: str | Reward | None, share: float, base: Path | None) -> OwnRewards:
    """What `Swarm.rollouts` does for these arguments. `base`: the checkpoint folder, for texts. Raises `UsageError`."""
    if not 0.0 <= share <= 1.0 or (share and reward is None):
        raise UsageError("rollouts: verify_rewards is a share, 0 to 1, and goes with reward.")
    if reward is None:
        return NO_REWARDS
    try:
        asked = RewardAsked(name_of(reward))
    except ValueError as error:
        raise UsageError(f"rollouts: {error}.") from error
    return OwnRewards(asked.name, local_reward(reward, base) if share else None, share)
