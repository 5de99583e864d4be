"""Where input from outside ends when our code cannot deal with it: one guard for each source.

Whatever a peer sends may end its own session, and nothing else: not this process, not another peer's session. So each
task that takes input from outside runs under `guarded(SOURCE, who)`. An error that is expected of a peer (`PeerError`,
a connection that broke, a deadline that passed) and an error that is our own bug both stop there. Both are counted,
and logged seldom enough that nobody can fill a disk with them; the caller drops the peer and goes on.

A bug is different in one way: it is logged with its traceback, and with SWARM_STRICT=1, as in our tests, it is raised,
so that it is mended and not survived. `UsageError` (a full disk, say) is no peer's doing and always goes on up.

`tests/test_guards.py` lists the functions that read what others send, and fails when one of them has no guard.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

import trio

from codec.errors import PeerError, SwarmError, UsageError

__all__ = ["Outcome", "Seldom", "Source", "bugs", "dropped", "guarded", "strict"]

_log = logging.getLogger(__name__)


class Source(StrEnum):
    """Where input from outside comes in."""

    CONTROL = "control message"
    BULK = "bulk frame"
    CORE = "event of the core"
    GOSSIP = "announcement"
    HANDSHAKE = "handshake"
    CONNECTION = "connection"
    STREAM = "stream"
    PROBE = "dial-back"
    PUNCH = "hole punching"
    CIRCUIT = "circuit"
    WORK = "work message"
    HTTP = "gateway request"
    TRAINER = "trainer's socket"
    ENGINE = "engine's socket"
    STATUS = "status socket"


dropped: Final[Counter[Source]] = Counter()
"""How often the guard of a source stopped something that a peer can be expected to do. Since the process began."""
bugs: Final[Counter[Source]] = Counter()
"""How often it stopped a bug of ours that a peer found. Each is worth a report."""

_EXPECTED: Final = (
    SwarmError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, OSError, EOFError,
)  # fmt: skip


def strict() -> bool:
    """Whether a bug is to be raised, and not survived: SWARM_STRICT=1."""
    return os.environ.get("SWARM_STRICT", "") not in ("", "0")


class Outcome:
    """What became of the guarded block."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """What ended it; None: it came to its end."""

    @property
    def why(self) -> str:
        """For a log line, and for the core: what was wrong; empty if nothing was."""
        if self.error is None:
            return ""
        if isinstance(self.error, trio.TooSlowError):
            return "too slow"
        return str(self.error) or type(self.error).__name__

    @property
    def is_rule_broken(self) -> bool:
        """The peer broke a rule, or found a bug of ours: whoever it is, it is to be dropped."""
        return isinstance(self.error, PeerError) or (self.error is not None and not isinstance(self.error, _EXPECTED))


class Seldom:
    """Says of repeated log lines which are to be written: the first few, then one in `every_s`."""

    def __init__(self, first: int = 5, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._every_s, self._clock = first, every_s, clock
        self._seen: dict[str, tuple[int, float, int]] = {}  # by key: written, when last, left out since

    def due(self, key: str) -> int | None:
        """How many lines of this key were left out since the last that was written; None: leave this one out too.

        Keys are ours and few: never anything that a peer can choose.
        """
        written, at, left_out = self._seen.get(key, (0, 0.0, 0))
        now = self._clock()
        if written >= self._first and now - at < self._every_s:
            self._seen[key] = written, at, left_out + 1
            return None
        self._seen[key] = written + 1, now, 0
        return left_out


_seldom = Seldom()


@contextmanager
def guarded(source: Source, who: bytes | str = b"") -> Iterator[Outcome]:
    """Run a block that takes input from `who`: no `Exception` leaves it but `UsageError`, and with SWARM_STRICT bugs.

    What ended it stands in the `Outcome`; what to do about the peer is the caller's to decide.
    """
    outcome = Outcome()
    try:
        yield outcome
    except BaseExceptionGroup as group:
        mine, rest = group.split(Exception)
        if mine is not None:
            outcome.error = _worst(mine)
            _judge(source, who, outcome.error)
            _forget_frames(group)
        if rest is not None:  # cancellation, or Ctrl-C: not a peer's
            raise rest from None
    except Exception as error:  # the policy point of this ring
        outcome.error = error
        _judge(source, who, error)
        _forget_frames(error)


def _judge(source: Source, who: bytes | str, error: BaseException) -> None:
    if isinstance(error, UsageError):
        raise error
    name = who.hex()[:8] if isinstance(who, bytes) else who[:64]
    if isinstance(error, _EXPECTED):
        dropped[source] += 1
        if isinstance(error, PeerError) and (left_out := _seldom.due(f"{source} dropped")) is not None:
            _log.warning("%s from %r dropped: %s%s", source, name, str(error)[:200], _more(left_out))
        return
    bugs[source] += 1
    if strict():
        raise error
    if (left_out := _seldom.due(f"{source} bug")) is not None:
        _log.error("a bug of ours, found by a %s from %r%s", source, name, _more(left_out), exc_info=error)


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of a stopped error, of those inside it and of those it came from.

    The caller keeps the error in its `Outcome`, and the error's traceback would keep the caller's frame, and with it
    every frame of the session that ended: its buffers, some megabytes, until Python collects garbage.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _more(left_out: int) -> str:
    return f" (and {left_out} like it that are not shown)" if left_out else ""


def _worst(group: BaseExceptionGroup) -> BaseException:
    """Of several that came together: what the user can mend, then a bug, then a broken rule, then the rest."""
    leaves: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        else:
            leaves.append(error)

    collect(group)

    def rank(error: BaseException) -> int:
        if isinstance(error, UsageError):
            return 0
        if not isinstance(error, _EXPECTED):
            return 1
        return 2 if isinstance(error, PeerError) else 3

    return min(leaves, key=rank)
