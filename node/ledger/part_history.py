"""Which parts of the model each version changed, so that lag is counted by part. Pure.

A swarm may carry adapters beside its base model (`codec.parts`). Each version of the swarm changes the base, some
adapters, or both. A token that was drawn with adapter `a` ages when a version changes the base or `a`; a token of the
base ages when a version changes the base. The lag of a token is the number of such versions after its own.

Versions that change the base and nothing else need no record, so a swarm without adapters has none, and its lags are
differences of version numbers. The newest `KEPT` versions that left the base as it was are recorded. An older one
counts as if it had changed the base: what depends on it is too old.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from node.engines.base import Version

__all__ = ["BASE", "KEPT", "WHOLE", "Change", "PartHistory", "Record", "no_adapter"]

BASE: Final = ""
"""The name of the base among parts. Adapters have names of at least one character."""
KEPT: Final = 4096
"""Versions without a change of the base that are recorded: with 64 adapters that each publish once in ten seconds,
those of ten minutes."""


class Change(NamedTuple):
    """What one version changed. `base`: the base model. `changed`: names of adapters, removed ones included.
    `adapters`: all adapters that there are after it, by name: each one's own version (`codec.AdapterConfig`)."""

    base: bool = True
    changed: frozenset[str] = frozenset()
    adapters: Mapping[str, int] = {}

    def ages(self, part: str) -> bool:
        """Whether work of `part` is one version older after it."""
        return self.base or part in self.changed


WHOLE: Final = Change()
"""The change of each version of a swarm without adapters."""


class Record(NamedTuple):
    """What is kept of a version that left the base as it was (`base` is false), or changed adapters. `adapters`: those
    that it changed, by name, each with its own version (0: it was removed)."""

    version: Version
    base: bool
    adapters: Mapping[str, int]


class PartHistory:
    """Of one ledger. Versions are noted in ascending order."""

    def __init__(self, head: Version = (0, 0)) -> None:
        """`head`: the newest version. What it and those before it changed is not known, so all count as changes of the
        base."""
        self.adapters: dict[str, int] = {}
        """The adapters at the newest version, by name: each one's own version."""
        self._epoch, self._newest = head
        self._quiet: list[int] = []
        """Numbers of the newest versions of this epoch that did not change the base, ascending."""
        self._changed: dict[str, list[int]] = {}
        """By adapter: which of these changed it."""
        self._own: dict[str, list[tuple[int, int]]] = {}
        """By adapter: (number of a version, the adapter's own version from then on; 0: it was removed)."""
        self.quiet_before = 0
        """Versions up to the newest that did not change the base; those that are not recorded any more, too."""
        self.newest: Record | None = None
        """What the book must keep of the version that was noted last."""

    @property
    def head(self) -> Version:
        """The newest version that was noted."""
        return self._epoch, self._newest

    def __len__(self) -> int:
        """The number of versions recorded."""
        return len(self._quiet)

    # ------------------------------------------------------------ taking versions in

    def note(self, version: Version, change: Change = WHOLE) -> None:
        """`version` was sealed. In a new epoch, which goes back to an older version, all parts count as changed."""
        epoch, number = version
        if version == (self._epoch, self._newest):  # noted before, or where the history begins
            self.newest = None
            return
        base = change.base or epoch != self._epoch
        if epoch != self._epoch:
            self._begin_epoch(epoch, number)
        names = {name for name in {*self.adapters, *change.adapters} if self._is_new(name, change)}
        owns = {name: change.adapters.get(name, 0) for name in sorted(names)}
        self._add(number, base=base, owns=owns)
        self.quiet_before += not base
        self.adapters = dict(change.adapters)
        self.newest = Record(version, base, owns) if owns or not base else None

    def _is_new(self, name: str, change: Change) -> bool:
        return name in change.changed or self.adapters.get(name) != change.adapters.get(name)

    def set_adapters(self, adapters: Mapping[str, int]) -> None:
        """The adapters that the newest version has, as its weights say; see `Change.adapters`."""
        for name in {*self.adapters, *adapters}:
            if self.adapters.get(name) != adapters.get(name):
                self._own.setdefault(name, []).append((self._newest, adapters.get(name, 0)))
        self.adapters = dict(adapters)

    def restore(self, head: Version, rows: Iterable[Record], adapters: Mapping[str, int], quiet: int) -> None:
        """Take in what the book kept: `rows` of any epoch, in order, the adapters, and `quiet_before`."""
        self._epoch, self._newest = head
        for row in rows:
            if row.version[0] == self._epoch and row.version <= head:
                self._add(row.version[1], base=row.base, owns=row.adapters)
        self._newest = head[1]
        self.quiet_before = quiet
        self.adapters = {name: owns[-1][1] for name, owns in self._own.items() if owns[-1][1]}
        self.set_adapters(adapters)

    def _begin_epoch(self, epoch: int, number: int) -> None:
        self.quiet_before -= _between(self._quiet, number, self._newest)
        self._epoch, self._newest = epoch, number
        self.adapters = {}
        self._quiet.clear()
        self._changed.clear()
        self._own.clear()

    def _add(self, number: int, *, base: bool, owns: Mapping[str, int]) -> None:
        self._newest = number
        for name, own in owns.items():
            known = self._own.setdefault(name, [])
            known.append((number, own))
            del known[: -2 * KEPT]
            if not base:
                self._changed.setdefault(name, []).append(number)
        if not base:
            self._quiet.append(number)
        if len(self._quiet) > KEPT:
            self._forget_before(self._quiet[-KEPT])

    def _forget_before(self, first: int) -> None:
        del self._quiet[: bisect_left(self._quiet, first)]
        for name, numbers in list(self._changed.items()):
            del numbers[: bisect_left(numbers, first)]
            if not numbers:
                del self._changed[name]
        for name, owns in list(self._own.items()):
            if owns[-1][1] == 0 and owns[-1][0] < first:  # it was removed long ago
                del self._own[name]

    # ------------------------------------------------------------ lags

    def since(self, part: str, version: Version, head: Version) -> int:
        """How many versions after `version`, up to `head` of the same epoch, changed `part` or the base. Versions after
        the newest that was noted count as changing everything."""
        low, high = version[1], head[1]
        if not self._quiet or head[0] != self._epoch:
            return high - low
        unchanged = _between(self._quiet, low, high) - _between(self._changed.get(part, []), low, high)
        return high - low - unchanged

    def changes_base(self, version: Version) -> bool:
        """Whether `version` changed the base, as far as is known."""
        return self.since(BASE, (version[0], version[1] - 1), version) > 0

    def oldest(self, part: str, head: Version, max_lag: int) -> Version:
        """The oldest version whose tokens for `part` are at most `max_lag` versions behind `head`."""
        epoch, high = head
        low, first = 0, max(0, high - max_lag)
        if not self._quiet or epoch != self._epoch:
            return epoch, first
        while low < first:  # the lag falls as the version rises
            middle = (low + first) // 2
            if self.since(part, (epoch, middle), head) <= max_lag:
                first = middle
            else:
                low = middle + 1
        return epoch, first

    def same(self, part: str, version: Version, other: Version) -> bool:
        """Whether `part` and the base have the same bits at both versions, as far as is known: they draw alike."""
        return version[0] == other[0] and not self.since(part, min(version, other), max(version, other))

    def own(self, part: str, version: Version) -> int:
        """The own version of `part` at `version`: for an adapter, the one in its configuration; for the base, how many
        versions changed it. 0: not known any more, or there was no such adapter."""
        if part == BASE:
            after = _between(self._quiet, version[1], self._newest) if version[0] == self._epoch else 0
            return max(0, version[1] - (self.quiet_before - after))
        if version[0] != self._epoch:
            return 0
        owns = self._own.get(part, [])
        at = bisect_right(owns, version[1], key=lambda entry: entry[0])
        return owns[at - 1][1] if at else 0

    def owns(self, part: str, versions: Iterable[Version]) -> tuple[int, ...]:
        """The own version of `part` at each of `versions`; empty in a swarm without adapters, as far as is known."""
        if part == BASE and not self.adapters and not self._quiet:
            return ()
        return tuple(self.own(part, version) for version in versions)


def no_adapter(name: str, adapters: Iterable[str]) -> str:
    """Why there is no work for an adapter that the swarm does not have, in a sentence."""
    there = ", ".join(sorted(adapters)) or "none"
    return f"This swarm has no adapter {name!r} (it has: {there}). Publish it first, or ask for one of these."


def _between(numbers: list[int], low: int, high: int) -> int:
    """How many of the ascending `numbers` are above `low` and at most `high`."""
    return bisect_right(numbers, high) - bisect_right(numbers, low)
