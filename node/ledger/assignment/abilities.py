"""What nodes' engines can do beyond plain sampling; the ledger asks each node when it comes."""

from collections.abc import Callable, Mapping
from typing import Final

import trio

from node.engines.base import EXACT_SEED, SamplingParams, needs
from node.ledger.messages import Abilities
from node.ledger.rules import Ledger
from node.ledger.session import WorkSession

__all__ = ["EngineAbilities"]

ASK_AGAIN_S: Final = 2.0
"""An unanswered question is repeated after this time: it or its answer may have been lost."""
GREETINGS: Final = 3
"""How often a node is asked while no work needs it. A node of an older release does not know the question."""


class EngineAbilities:
    """The abilities of all nodes that `ledger` knows. `ask(node)` sends the question to a node."""

    def __init__(self, ledger: Ledger, ask: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._ask = ask
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
        found.abilities, found.kind = frozenset(said.names), said.kind
        self.heard.set()
        self.heard = trio.Event()
        return True

    def greet(self, node: bytes) -> None:
        """`node` asked for work: ask it, a few times at most unless there is work that needs it."""
        found = self._ledger.nodes.get(node)
        if self.needed or (found is not None and found.abilities_questions < GREETINGS):
            self.ask(node)

    def ask(self, node: bytes) -> None:
        """Ask `node`, unless it has answered, or was asked in the last `ASK_AGAIN_S`."""
        found, now = self._ledger.nodes.get(node), self._clock()
        if found is None or found.abilities is not None or now - found.abilities_asked < ASK_AGAIN_S:
            return
        found.abilities_asked, found.abilities_questions = now, found.abilities_questions + 1
        self._ask(node)

    def able(self, wanted: frozenset[str]) -> bool | None:
        """Whether some generating node has all abilities in `wanted`.

        None: unknown yet; the nodes that have not answered were asked, and `heard` signals their answers. A node of an
        older release never answers.
        """
        found = [(key, self._ledger.nodes[key]) for key in self._ledger.members if key in self._ledger.nodes]
        found = [(key, node) for key, node in found if node.capacity]
        if any(node.abilities is not None and wanted <= node.abilities for _, node in found):
            return True
        unknown = [key for key, node in found if node.abilities is None]
        for key in unknown:
            self.ask(key)
        return None if unknown else False

    def unmet(self, sessions: Mapping[str, WorkSession]) -> dict[str, list[str]]:
        """By session, the options of its sampling that no generating node is known to be able to do."""
        found = {name: self._unmet(session.work.sampling) for name, session in sessions.items()}
        return {name: list(options) for name, options in found.items() if options}

    def _unmet(self, sampling: SamplingParams) -> tuple[str, ...]:
        wanted = needs(sampling)
        if not wanted or self.able(wanted):
            return ()
        if EXACT_SEED in wanted and self.able(wanted - {EXACT_SEED}):
            return ("exact",)
        return sampling.extra.asked or ("options",)

    def kind(self, node: bytes) -> str:
        """The kind of the engine of `node`; empty if it has not answered."""
        found = self._ledger.nodes.get(node)
        return "" if found is None else found.kind
