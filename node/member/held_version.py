"""Which version of the swarm a node's engine holds, and by which versions its samples are named.

An engine names tokens by the version that last changed what drew them: the base, or the base and an adapter. A version
of the swarm that changes another adapter leaves that name as it was. The ledger knows the roots of recent versions
only, so this node names its tokens by the version that it held when it began them, or by a newer one that came since.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from node.engines.base import Span, Version
from node.ledger.messages import VersionSpan
from node.ledger.part_history import WHOLE, Change, PartHistory
from node.member.engine_client import EngineClient

__all__ = ["HeldVersion"]

ROOTS: Final = 4096
"""Versions whose roots are remembered: those that may come while one sample is generated."""


class HeldVersion:
    """Of one engine. `coming` is called before the engine gets a version, `followed` when it has all of it."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._roots: OrderedDict[Version, bytes] = OrderedDict()
        self._followed: Version = engine.version
        self._history = PartHistory(engine.version)

    @property
    def version(self) -> Version:
        """The newest version that the engine has all of: of the base, and of each adapter."""
        return max(self._followed, self._engine.version)

    @property
    def root(self) -> bytes:
        """The root of `version`, over all parts."""
        return self._roots.get(self.version, self._engine.root)

    def know(self, version: Version, root: bytes) -> None:
        """`version` of the swarm has this root, over all parts."""
        self._roots[version] = root
        self._roots.move_to_end(version)
        while len(self._roots) > ROOTS:
            self._roots.popitem(last=False)

    def begin(self) -> Version:
        """Samples are begun now. Returns the version that they are begun at."""
        version = self.version
        self.know(version, self.root)
        return version

    def coming(self, version: Version, root: bytes, change: Change = WHOLE) -> None:
        """The engine gets `version` now, which makes `change`."""
        self.know(version, root)
        if version > self._history.head:
            self._history.note(version, change)

    def followed(self, version: Version) -> None:
        """The engine has all of `version`."""
        self._followed = max(self._followed, version)

    def lag(self, adapter: str, version: Version, head: Version) -> int | None:
        """How many versions after `version`, up to `head`, changed what draws with `adapter` (empty: the base alone);
        None: `head` is of another epoch."""
        return None if version[0] != head[0] else self._history.since(adapter, version, head)

    def has(self, version: Version, adapter: str) -> bool:
        """Whether what draws with `adapter` (empty: the base alone) has the bits that it had at `version`."""
        if adapter and adapter not in self._engine.adapters:
            return False
        named = max(self._engine.version, self._engine.adapters[adapter]) if adapter else self._engine.version
        return named <= version <= self.version

    def spans(self, spans: Sequence[Span], begun: Version) -> tuple[VersionSpan, ...] | None:
        """The spans of a sample that was begun at `begun`, as they are signed. None: a version's root is not known, so
        the engine was loaded anew while it generated."""
        found: list[VersionSpan] = []
        for span in spans:
            version = max(span.version, begun)
            if (root := self._roots.get(version)) is None:
                return None
            if found and (found[-1].epoch, found[-1].version) == version:
                found.pop()
            found.append(VersionSpan(*version, root, span.end))
        return tuple(found)
