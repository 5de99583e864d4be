"""What nodes' engines can do beyond plain sampling, and which adapters they have; the ledger asks each node when it
comes."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import trio

from node.engines.base import ADAPTERS, EXACT_SEED, SamplingParams, needs
from node.ledger.messages import Abilities
from node.ledger.rules import Ledger
from node.ledger.session import WorkSession
from node.ledger.trust.reward_functions import PREFIX

__all__ = ["EngineAbilities"]

ASK_AGAIN_S: Final = 2.0
"""An unanswered question is repeated after this time: it or its answer may have been lost."""
GREETINGS: Final = 3
"""How often a node is asked while no work needs it. A node of an older release does not know the question."""


class EngineAbilities:
    """The abilities and adapters of all nodes that `ledger` knows. `ask(node)` and `ask_adapters(node)` send the
    questions to a node."""

    def __init__(
        self,
        ledger: Ledger,
        ask: Callable[[bytes], None],
        ask_adapters: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._ask = ask
        self._ask_adapters = ask_adapters
        self._clock = clock
        self.needed = any(needs(group.sampling) for group in ledger.groups.values())
        """There has been work that not every engine can do."""
        self.heard = trio.Event()
        """Set, and replaced, when a node answers."""

    def need(self, sampling: SamplingParams) -> None:
        """There is work with this sampling."""
        self.needed = self.needed or bool(needs(sampling))

    def hear(self, node: bytes, said: Abilities) -> bool:
        """A node's answer. False: the node is unknown."""
        found = self._ledger.nodes.get(node)
        if found is None:
            return False
        # Which digest counts for a reward's bare name is decided here (`node.ledger.trust.reward_functions`).
        names = (name for name in said.names if not name.startswith(PREFIX) or "@" in name)
        found.abilities, found.kind = frozenset(names), said.kind
        self._need_adapters(node)
        self._signal()
        return True

    def hear_adapters(self, node: bytes, names: Iterable[str]) -> bool:
        """The adapters that a node has loaded. False: that is no news, or the node is unknown."""
        found = self._ledger.nodes.get(node)
        if found is None or found.adapters_asked == -math.inf:
            return False
        adapters, found.adapters_asked = frozenset(names), math.inf
        if adapters == found.adapters:
            return False
        found.adapters = adapters
        self._signal()
        return True

    def _signal(self) -> None:
        self.heard.set()
        self.heard = trio.Event()

    def _need_adapters(self, node: bytes) -> None:
        """Ask `node` for its adapters if there are any and it can have them, unless it has answered, or was asked in
        the last `ASK_AGAIN_S`."""
        found, now = self._ledger.nodes[node], self._clock()
        can_have = self._ledger.parts.adapters and ADAPTERS in (found.abilities or ())
        if can_have and now - found.adapters_asked >= ASK_AGAIN_S:
            found.adapters_asked = now
            self._ask_adapters(node)

    def greet(self, node: bytes) -> None:
        """`node` asked for work: ask it, a few times at most unless there is work that needs it."""
        found = self._ledger.nodes.get(node)
        if found is not None:
            self._need_adapters(node)
        if self.needed or (found is not None and found.abilities_questions < GREETINGS):
            self.ask(node)

    def ask(self, node: bytes) -> None:
        """Ask `node`, unless it has answered, or was asked in the last `ASK_AGAIN_S`."""
        found, now = self._ledger.nodes.get(node), self._clock()
        if found is None or found.abilities is not None or now - found.abilities_asked < ASK_AGAIN_S:
            return
        found.abilities_asked, found.abilities_questions = now, found.abilities_questions + 1
        self._ask(node)

    def able(self, wanted: frozenset[str], adapter: str = "") -> bool | None:
        """Whether some generating node has all abilities in `wanted`, and has loaded `adapter` if that is given.

        None: unknown yet; the nodes that have not answered were asked, and `heard` signals their answers. A node of an
        older release never answers.
        """
        found = [(key, self._ledger.nodes[key]) for key in self._ledger.members if key in self._ledger.nodes]
        found = [(key, node) for key, node in found if node.capacity]
        able = [node for _, node in found if node.abilities is not None and wanted <= node.abilities]
        if any(not adapter or adapter in node.adapters for node in able):
            return True
        unknown = [key for key, node in found if node.abilities is None]
        for key in unknown:
            self.ask(key)
        return None if unknown or (adapter and able) else False

    def unmet(self, sessions: Mapping[str, WorkSession]) -> dict[str, list[str]]:
        """By session, the options of its sampling that no generating node is known to be able to do."""
        found = {
            name: dict.fromkeys(
                option for each in (session.work.sampling, *session.samplings) for option in self._unmet(each)
            )
            for name, session in sessions.items()
        }
        return {name: list(options) for name, options in found.items() if options}

    def _unmet(self, sampling: SamplingParams) -> tuple[str, ...]:
        wanted = needs(sampling)
        if not wanted or self.able(wanted, sampling.extra.adapter):
            return ()
        reward = sampling.extra.reward
        if reward is not None and self.able(wanted - {reward.ability}, sampling.extra.adapter):
            return (reward.ability,)
        if EXACT_SEED in wanted and self.able(wanted - {EXACT_SEED}):
            return ("exact",)
        return sampling.extra.asked or ("options",)

    def kind(self, node: bytes) -> str:
        """The kind of the engine of `node`; empty if it has not answered."""
        found = self._ledger.nodes.get(node)
        return "" if found is None else found.kind
