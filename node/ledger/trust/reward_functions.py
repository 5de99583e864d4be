"""Which function counts for each reward name, where nodes have several. Pure.

A node declares `reward:NAME@DIGEST`. Work that asks for a name alone goes to the nodes whose digest is *chosen*: the
one that most members declare, without those in quarantine. A digest that was chosen stays so while no other one has
more. A node with the chosen digest has the ability `reward:NAME` too, which the ledger adds here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from node.ledger.state import Group, Node

__all__ = ["PREFIX", "RewardFunctions", "declared_ability", "digests_of"]

PREFIX: Final = "reward:"
"""Of the ability to compute a reward."""


def digests_of(node: Node) -> dict[str, str]:
    """The digest that `node` declares, by name. Of two for one name, the last in order."""
    found: dict[str, str] = {}
    for ability in sorted(node.abilities or ()):
        if ability.startswith(PREFIX):
            name, at, digest = ability[len(PREFIX) :].partition("@")
            if at:
                found[name] = digest
    return found


def declared_ability(group: Group, node: Node) -> str:
    """The ability, with its digest, that `node` declares for the reward that `group` asks for; empty: none."""
    asked = group.sampling.extra.reward
    if asked is None:
        return ""
    name, _, pinned = asked.name.partition("@")
    digest = pinned or digests_of(node).get(name, "")
    return f"{PREFIX}{name}@{digest}" if digest else ""


class RewardFunctions:
    """`chosen`: the digest that counts, by name. `declared`: by name, how many members declare each digest."""

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}
        self.declared: dict[str, Counter[str]] = {}
        self.having: dict[str, list[bytes]] = {}
        """By ability with a digest, the members that declare it and are not in quarantine, in order."""
        self.stale = True
        """A node came, left, or declared something since the last choice."""

    def choose(self, members: Iterable[Node]) -> bool:
        """Choose anew, if `stale`, and bring the members' abilities up to date. Whether anything changed."""
        if not self.stale:
            return False
        self.stale = False
        nodes = [(node, digests_of(node)) for node in members if node.abilities is not None]
        declared: dict[str, Counter[str]] = {}
        having: dict[str, list[bytes]] = {}
        for node, digests in nodes:
            for name, digest in digests.items():
                declared.setdefault(name, Counter())[digest] += node.reputation.penalty is None
                if node.reputation.penalty is None:
                    having.setdefault(f"{PREFIX}{name}@{digest}", []).append(node.key)
        before = self.chosen
        self.declared, self.having = declared, {ability: sorted(keys) for ability, keys in having.items()}
        self.chosen = {name: _most(counts, before.get(name, "")) for name, counts in declared.items()}
        changed = before != self.chosen
        for node, digests in nodes:
            has = {PREFIX + name for name, digest in digests.items() if self.chosen[name] == digest}
            assert node.abilities is not None
            abilities = {each for each in node.abilities if not each.startswith(PREFIX) or "@" in each} | has
            changed = changed or abilities != node.abilities
            node.abilities = frozenset(abilities)
        return changed

    @property
    def differing(self) -> Mapping[str, Counter[str]]:
        """The names for which members declare more than one digest."""
        return {name: counts for name, counts in self.declared.items() if len(counts) > 1}


def _most(counts: Counter[str], before: str) -> str:
    return max(counts, key=lambda digest: (counts[digest], digest == before, digest))
