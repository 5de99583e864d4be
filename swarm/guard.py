"""Guards: stop the errors that input from outside can cause, with one guard for each source of input.

Input from a peer may end that peer's session, but never this process or the session of another peer. So each task that
handles input from outside runs under `guarded(SOURCE, who)`. The guard stops errors that are expected of a peer
(`PeerError`, a broken connection, a passed deadline) and also bugs of this program. It counts both and logs both at a
bounded rate, so that a peer cannot fill the disk. The caller then drops the peer and goes on.

A bug is logged with its traceback. With SWARM_STRICT=1, as in the tests, it is raised, so that it is noticed and fixed.
No peer can cause a `UsageError` (a full disk, for example), so it always propagates.

`tests/test_guards.py` lists the functions that read input from outside, and fails if one of them has no guard.
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
    """The sources of input from outside; the values appear in log lines."""

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
"""Expected errors that the guard of each source has stopped since the process began."""
bugs: Final[Counter[Source]] = Counter()
"""Bugs of this program that the guard of each source has stopped. Each is worth a report."""

_EXPECTED: Final = (
    SwarmError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, OSError, EOFError,
)  # fmt: skip


def strict() -> bool:
    """Whether guards raise bugs instead of stopping them: SWARM_STRICT=1."""
    return os.environ.get("SWARM_STRICT", "") not in ("", "0")


class Outcome:
    """The outcome of a guarded block."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The error that ended the block; None if it finished."""

    @property
    def why(self) -> str:
        """The reason, for log lines and for the core; empty if the block finished."""
        if self.error is None:
            return ""
        if isinstance(self.error, trio.TooSlowError):
            return "too slow"
        return str(self.error) or type(self.error).__name__

    @property
    def is_rule_broken(self) -> bool:
        """Whether the peer broke a rule, or caused a bug of this program: the caller must drop it."""
        return isinstance(self.error, PeerError) or (self.error is not None and not isinstance(self.error, _EXPECTED))


class Seldom:
    """Limits the rate of repeated log lines: the first few are written, then one every `every_s` seconds."""

    def __init__(self, first: int = 5, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._every_s, self._clock = first, every_s, clock
        self._seen: dict[
            str, tuple[int, float, int]
        ] = {}  # by key: lines written, time of the last, lines left out since

    def due(self, key: str) -> int | None:
        """Whether to write a line with this key: the number of lines left out since the last one, or None to skip it.

        The set of keys must be small: never use a key that a peer can choose.
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
    """Run a block that handles input from `who`. It raises only `UsageError`, and bugs with SWARM_STRICT.

    The `Outcome` holds the error that ended the block; the caller decides what to do about the peer. Cancellation
    passes through.
    """
    outcome = Outcome()
    try:
        yield outcome
    except BaseExceptionGroup as group:
        mine, rest = group.split(Exception)
        if mine is not None:
            outcome.error = _worst(mine)
            _count(source, who, outcome.error)
            _forget_frames(group)
        if rest is not None:  # cancellation or Ctrl-C
            raise rest from None
    except Exception as error:  # the one place in this ring that decides about unknown errors
        outcome.error = error
        _count(source, who, error)
        _forget_frames(error)


def _count(source: Source, who: bytes | str, error: BaseException) -> None:
    if isinstance(error, UsageError):
        raise error
    # A process with a log writes the peer's name from `extra`; the key is too long for a sentence.
    by, extra = ("", {"peer": who}) if isinstance(who, bytes) else (f" from {who[:64]!r}", None)
    if isinstance(error, _EXPECTED):
        dropped[source] += 1
        if isinstance(error, PeerError) and (left_out := _seldom.due(f"{source} dropped")) is not None:
            _log.warning("%s%s dropped: %s%s", source, by, str(error)[:200], _more(left_out), extra=extra)
        return
    bugs[source] += 1
    if strict():
        raise error
    if (left_out := _seldom.due(f"{source} bug")) is not None:
        _log.error("bug in swarm-node, caused by a %s%s%s", source, by, _more(left_out), exc_info=error, extra=extra)


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
    """The most important error of a group: a `UsageError`, else a bug, else a broken rule, else any other."""
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
