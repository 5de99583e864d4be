"""What the seed's log says of a turn of the ledger: quarantines, and rewards about which nodes disagree."""

from collections.abc import Iterable, Mapping

from node.ledger.facts import Fact, NumbersDropped, Quarantined
from node.ledger.trust.rewards import RewardChecks
from node.settings.event_log import EventLog
from swarm.guard import Seldom
from swarm.transport.identity import peer_id

__all__ = ["TurnLog"]

_log = EventLog(__name__)


class TurnLog:
    """`rewards`: the ledger's checks of rewards, whose disputes are taken from there."""

    def __init__(self, rewards: RewardChecks) -> None:
        self._rewards = rewards
        self._differing: Mapping[str, Mapping[str, int]] = {}
        """As it was logged last."""
        self._seldom = Seldom()

    def tell(self, facts: Iterable[Fact]) -> None:
        """Log what is worth a line. `facts`: of the turn, which are durable now."""
        for fact in facts:
            match fact:
                case Quarantined(node, why):
                    _log.warning("quarantined", peer=peer_id(node), why=why)
                case NumbersDropped(None):
                    _log.warning("evidence_dropped")
        self._tell_disputes()
        self._tell_differing()

    def _tell_disputes(self) -> None:
        disputes, self._rewards.disputes = self._rewards.disputes, []
        for reward, author, other in disputes:
            if self._seldom.due("reward_disputed") is not None:
                _log.warning("reward_disputed", reward=reward, peer=peer_id(author), other=peer_id(other))

    def _tell_differing(self) -> None:
        functions = self._rewards.functions
        if (differing := functions.differing) != self._differing:
            for name, counts in differing.items():
                if counts != self._differing.get(name):
                    chosen = functions.chosen[name]
                    shares = ", ".join(f"{digest}: {count}" for digest, count in sorted(counts.items()))
                    _log.warning("rewards_differ", reward=name, chosen=chosen, nodes=shares)
            self._differing = differing
