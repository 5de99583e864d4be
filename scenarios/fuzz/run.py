"""Drives a target: chooses mutations, gives messages, times them, and reports how to reproduce an escape.

A case is determined by (seed, number) and the state of its world. A world exists for one episode: to reproduce case
7,321 of a target with episodes of 5,000 cases, run cases 5,000 to 7,321.
"""

import gc
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from scenarios.fuzz.inputs.fields import ENCODED, Field, Kind
from scenarios.fuzz.inputs.values import Mutation
from scenarios.fuzz.signatures import CHECK_S, cheap, checked
from scenarios.fuzz.target import FOREVER, Target, World

__all__ = ["Escape", "Result", "Triple", "deck_of", "fuzz", "replay"]

CHECK_EVERY: Final = 100
SIZES_EVERY: Final = 2500
COLLECT_EVERY: Final = 4000
"""Cases between garbage collections, which are off while a message is timed."""
FOCUS: Final = 3
"""Fields that an episode tries more often."""
TWO_OF: Final = 6
"""One case in this many changes two fields."""
WHEN: Final = ("repeated", "stale", "reordered")
"""Give the message three times; give an earlier message of its kind instead; give it after the next message."""


class Triple(NamedTuple):
    """A mutation of one field of one kind. `field` None: a mutation of the encoded message."""

    kind: Kind
    field: Field | None
    mutation: Mutation

    @property
    def label(self) -> str:
        return f"{self.kind.name}: {self.field.name if self.field else 'encoded'} = {self.mutation.name}"


def deck_of(kinds: Sequence[Kind]) -> list[Triple]:
    """Return every triple once."""
    found = [Triple(kind, field, mutation) for kind in kinds for field in kind.fields for mutation in field.mutations]
    found += [Triple(kind, None, mutation) for kind in kinds for mutation in ENCODED]
    same = Mutation("", lambda data, rng: data)
    return found + [Triple(kind, None, same._replace(name=name)) for kind in kinds for name in WHEN]


@dataclass
class Slowest:
    """The event that took the most CPU time."""

    seconds: float = 0.0
    label: str = ""
    number: int = -1


@dataclass
class Result:
    """The statistics and escapes of one run."""

    target: str
    cases: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    tried: set[int] = field(default_factory=set)
    """Indices into the deck."""
    deck: list[Triple] = field(default_factory=list)
    outcomes: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    """Counts of outcomes by kind and field."""
    slow: dict[tuple[str, str], Slowest] = field(default_factory=dict)
    """Events over the target's time limit, by kind and field."""
    slowest: Slowest = field(default_factory=Slowest)
    sizes: dict[str, int] = field(default_factory=dict)
    """The largest size of each table."""
    escapes: "dict[str, Escape]" = field(default_factory=dict)
    """Escapes by the place that raised them."""

    @property
    def escape(self) -> "Escape | None":
        """The first escape."""
        return next(iter(self.escapes.values()), None)

    @property
    def rate(self) -> float:
        """Cases per CPU second, which other load on the machine does not change."""
        return self.cases / self.cpu_s if self.cpu_s else 0.0


@dataclass
class Escape:
    """An exception or broken property. `replay`: the argument of `--replay`."""

    target: str
    seed: int
    number: int
    labels: list[str]
    error: str
    data: bytes
    trace: str = ""
    alone: bool = False
    """It also happens as the first message in a new world, with only the mutation that `labels` then names."""
    only: int | None = None

    @property
    def replay(self) -> str:
        end = "" if not self.alone else ":alone" if self.only is None else f":alone:{self.only}"
        return f"{self.target}:{self.seed}:{self.number}{end}"


class _Case(NamedTuple):
    triples: tuple[Triple, ...]
    rng: random.Random


class _Chooser:
    """Chooses the triples of each case.

    Every second case takes the next triple of the deck, which is shuffled anew for each round. The others try a few
    fields on which the episode focuses, to find failures that take several such messages. Some cases have a second
    mutation.
    """

    def __init__(self, deck: list[Triple], seed: int, episode: int) -> None:
        self.deck, self.seed = deck, seed
        self._episode = episode
        self._focused: tuple[int, list[int]] = (-1, [])
        self._round = -1
        self._order: list[int] = []
        self._by_kind: dict[str, list[Triple]] = {}
        self._by_field: dict[tuple[str, str], list[int]] = {}
        for i, triple in enumerate(deck):
            if triple.field is not None:
                self._by_kind.setdefault(triple.kind.name, []).append(triple)
            self._by_field.setdefault((triple.kind.name, triple.field.name if triple.field else ""), []).append(i)

    def case(self, number: int) -> tuple[int, _Case]:
        """Return the index into the deck, and the case."""
        rng = random.Random(self.seed << 40 | number)
        focused = number % 2 == 1 and self._episode < FOREVER
        index = rng.choice(self._focus(number)) if focused else self._next(number)
        first = self.deck[index]
        if first.field is not None and rng.randrange(TWO_OF) == 0:
            return index, _Case((first, rng.choice(self._by_kind[first.kind.name])), rng)
        return index, _Case((first,), rng)

    def _next(self, number: int) -> int:
        turn, at = divmod(number // 2 if self._episode < FOREVER else number, len(self.deck))
        if turn != self._round:
            self._round, self._order = turn, list(range(len(self.deck)))
            random.Random(f"{self.seed} {turn}").shuffle(self._order)
        return self._order[at]

    def _focus(self, number: int) -> list[int]:
        episode = number // self._episode
        if self._focused[0] != episode:
            fields = random.Random(f"{self.seed} focus {episode}").sample(sorted(self._by_field), FOCUS)
            self._focused = episode, [i for each in fields for i in self._by_field[each]]
        return self._focused[1]


def _built(world: World, case: _Case, only: int | None = None) -> bytes:
    """Return the bytes of a case. `only`: apply only the mutation with this index."""
    kind = case.triples[0].kind
    tree = kind.make(world)
    last: Mutation | None = None
    for i, (_, place, mutation) in enumerate(case.triples):
        if only is not None and i != only:
            continue
        if place is None:
            last = mutation
            continue
        with suppress(
            TypeError, ValueError, IndexError, KeyError, AttributeError
        ):  # the first mutation removed this place
            tree = place.put(tree, mutation, case.rng)
    try:
        body = kind.encode(tree)
    except (TypeError, OverflowError, ValueError, RecursionError):  # no encoding for these two mutations together
        body = b"\xc1"
    if last is not None and last in ENCODED:
        body = last.change(body, case.rng)
    return kind.enclose(world, body)


class _Player:
    """Plays cases in the worlds of a target."""

    def __init__(self, target: Target, chooser: _Chooser, result: Result, *, cheap: bool) -> None:
        self._target, self._chooser, self._result, self.cheap = target, chooser, result, cheap
        self.world: World | None = None
        self._sent: dict[str, bytes] = {}
        self._held: tuple[Kind, bytes] | None = None
        self.data = b""

    def fresh(self, number: int) -> None:
        """Create a new world for the episode of this case."""
        self.close()
        self.world = self._target.world(random.Random(f"{self._chooser.seed} {number // self._target.episode}"))
        self._sent.clear()
        self._held = None

    def close(self) -> None:
        if self.world is not None:
            self.world.close()
            self.world = None

    def play(self, number: int) -> tuple[int, _Case]:
        """Play and time one case. Any exception that it raises is an escape."""
        world = self.world
        assert world is not None
        index, case = self._chooser.case(number)
        world.turn(case.rng)
        kind = case.triples[0].kind
        data = self.data = _built(world, case)
        when = case.triples[0].mutation.name if case.triples[0].field is None else ""
        if when == "stale":
            data = self._sent.get(kind.name, data)
        given = [(kind, data)] * (3 if when == "repeated" else 1)
        if when == "reordered" and self._held is None:
            self._held = given[0]
            return index, case
        if self._held is not None:
            given, self._held = [*given, self._held], None
        for each, body in given:
            self.data = body
            self._give(world, each, body, case, number)
        if case.triples[0].mutation.name == "valid":
            self._sent[kind.name] = data
        return index, case

    def _give(self, world: World, kind: Kind, data: bytes, case: _Case, number: int) -> None:
        world.off_loop_s = 0.0
        began, checks = time.thread_time(), checked[0]
        outcome = world.give(kind, data)
        took = time.thread_time() - began - world.off_loop_s + (checked[0] - checks) * (CHECK_S if self.cheap else 0.0)
        result = self._result
        first = case.triples[0]
        key = kind.name, first.field.name if first.field is not None and first.kind is kind else "encoded"
        result.outcomes.setdefault(key, Counter())[_short(outcome)] += 1
        if took > result.slowest.seconds:
            result.slowest = Slowest(took, first.label, number)
        if took > self._target.slow_s and took > result.slow.setdefault(key, Slowest()).seconds:
            result.slow[key] = Slowest(took, " + ".join(t.label for t in case.triples), number)


@lru_cache(maxsize=4096)
def _short(outcome: str) -> str:
    """Replace numbers and names in an outcome, so that few distinct outcomes remain."""
    return re.sub(r"'[^']*'|`[^`]*`|[0-9a-f]{8,}|-?\d[\d.e+]*", "#", outcome)[:80]


Say = Callable[[Result], None]


def fuzz(
    target: Target,
    *,
    cases: int,
    seed: int,
    seconds: float = float("inf"),
    start: int = 0,
    most_escapes: int = 1,
    signatures: bool = False,
    say: Say = lambda result: None,
) -> Result:
    """Play `cases` cases against `target`, or as many as `seconds` allow.

    Ends after `most_escapes` escapes from different lines. `signatures`: use real signatures. `say` is called about
    every 10 s with the result so far.
    """
    with cheap(not signatures), _strict():
        return _fuzz(target, cases, seed, seconds, start, most_escapes, not signatures, say)


@contextmanager
def _strict() -> Iterator[None]:
    """Make guards raise the exceptions that they otherwise only log, so that the fuzzer sees them."""
    before = os.environ.get("SWARM_STRICT")
    os.environ["SWARM_STRICT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SWARM_STRICT"]
        else:
            os.environ["SWARM_STRICT"] = before


def _fuzz(
    target: Target, cases: int, seed: int, seconds: float, start: int, most_escapes: int, cheaply: bool, say: Say
) -> Result:
    result = Result(target.name, deck=deck_of(target.kinds))
    player = _Player(target, _Chooser(result.deck, seed, target.episode), result, cheap=cheaply)
    began, reported_at, began_cpu_s = time.monotonic(), time.monotonic(), time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection would count against a random message
    try:
        for number in range(start, start + cases):
            try:
                if player.world is None or number % target.episode == 0:
                    player.fresh(number)
                if number % COLLECT_EVERY == 0:
                    gc.collect()
                index, _ = player.play(number)
                if number % CHECK_EVERY == 0 and player.world is not None:
                    player.world.check()
                if number % SIZES_EVERY == SIZES_EVERY - 1 and player.world is not None:
                    _measure(target, player.world, result)
            except Exception as error:  # an escape
                place = _place(error)
                if place not in result.escapes:
                    result.escapes[place] = _escaped(target, seed, number, error, player)
                if len(result.escapes) >= most_escapes:
                    break
                player.close()
                continue
            result.tried.add(index)
            result.cases += 1
            if number % 64 == 0:
                now = time.monotonic()
                result.seconds, result.cpu_s = now - began, time.process_time() - began_cpu_s
                if now - reported_at > 10:
                    reported_at = now
                    say(result)
                if now - began > seconds:
                    break
    finally:
        player.close()
        if was_enabled:
            gc.enable()
    result.seconds, result.cpu_s = time.monotonic() - began, time.process_time() - began_cpu_s
    return result


def _place(error: BaseException) -> str:
    """Return the line of our code that raised the error; escapes of the same line count as one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "scenarios/fuzz" not in f.filename and "site-packages" not in f.filename]
    last = (ours or frames)[-1]
    return f"{type(error).__name__} {last.filename}:{last.lineno}" + ("" if ours else f" {str(error)[:40]}")


def _measure(target: Target, world: World, result: Result) -> None:
    for name, size in world.sizes().items():
        result.sizes[name] = max(size, result.sizes.get(name, 0))
        assert size <= target.most_entries, f"{name} has {size} entries"


def _escaped(target: Target, seed: int, number: int, error: Exception, player: _Player) -> Escape:
    _, case = _Chooser(deck_of(target.kinds), seed, target.episode).case(number)
    labels = [triple.label for triple in case.triples]
    escape = Escape(
        target.name, seed, number, labels, _named(error), player.data, traceback.format_exc(limit=-6, chain=False)
    )
    return _smaller(target, escape) or escape


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _smaller(target: Target, escape: Escape) -> Escape | None:
    """Reproduce the escape in a new world, with a single mutation if that suffices. None: it needs earlier messages."""
    choices: list[int | None] = [*range(len(escape.labels)), None] if len(escape.labels) > 1 else [None]
    for only in choices:
        labels = escape.labels if only is None else [escape.labels[only]]
        found = _alone(target, escape.seed, escape.number, only)
        if found is not None and found[0].split(":")[0] == escape.error.split(":")[0]:
            error, data, trace = found
            return Escape(escape.target, escape.seed, escape.number, labels, error, data, trace, alone=True, only=only)
    return None


def _alone(target: Target, seed: int, number: int, only: int | None) -> tuple[str, bytes, str] | None:
    """Play one case in a new world; return error, bytes and trace, or None when nothing escapes."""
    _, case = _Chooser(deck_of(target.kinds), seed, target.episode).case(number)
    data = b""
    world = target.world(random.Random(f"{seed} {number // target.episode}"))
    try:
        world.turn(case.rng)
        data = _built(world, case, only)
        world.give(case.triples[0].kind, data)
        world.check()
    except Exception as error:  # an escape, as in `_fuzz`
        return _named(error), data, traceback.format_exc(limit=-6, chain=False)
    finally:
        world.close()
    return None


def replay(target: Target, rest: str) -> Escape | None:
    """Reproduce an escape. `rest`: `Escape.replay` without the target's name. None: nothing escapes any more."""
    seed, number, *how = rest.split(":")
    if how and how[0] == "alone":
        only = int(how[1]) if len(how) > 1 else None
        with cheap(), _strict():
            found = _alone(target, int(seed), int(number), only)
        if found is None:
            return None
        return Escape(target.name, int(seed), int(number), [], *found, alone=True, only=only)
    first = int(number) // target.episode * target.episode
    return fuzz(target, cases=int(number) - first + 1, seed=int(seed), start=first).escape


def lines(result: Result, *, table: bool = False) -> Iterator[str]:
    """Format the result as text lines."""
    distinct = sum(len(found) for found in result.outcomes.values())
    yield (
        f"{result.target:<12} {result.cases:>9,} cases in {result.seconds:.0f} s ({result.rate:,.0f} a CPU second); "
        f"{len(result.tried):,} of {len(result.deck):,} (kind, field, mutation); {distinct:,} distinct outcomes of "
        f"{len(result.outcomes):,} fields; slowest {1000 * result.slowest.seconds:.1f} ms ({result.slowest.label})"
    )
    for slow in sorted(result.slow.values(), key=lambda s: -s.seconds)[:10]:
        yield f"  slow: {1000 * slow.seconds:.0f} ms, case {slow.number}: {slow.label}"
    if result.sizes:
        largest = sorted(result.sizes.items(), key=lambda item: -item[1])[:4]
        yield "  tables: " + ", ".join(f"{name} {size:,}" for name, size in largest)
    if table:
        for (kind, name), found in sorted(result.outcomes.items()):
            yield f"  {kind} | {name} | " + ", ".join(f"{what}: {n}" for what, n in found.most_common(6))
    for escape in result.escapes.values():
        yield from _escape_lines(escape)


def _escape_lines(escape: Escape) -> Iterator[str]:
    yield f"ESCAPE from {escape.target}, seed {escape.seed}, case {escape.number}: {escape.error}"
    for label in escape.labels:
        yield f"  {label}"
    yield f"  bytes ({len(escape.data)}): {escape.data[:400].hex()}{'...' if len(escape.data) > 400 else ''}"
    yield f"  again: {os.path.basename(sys.executable)} -m scenarios.fuzz --replay '{escape.replay}'"
    yield from ("  " + line for line in escape.trace.rstrip().splitlines())
