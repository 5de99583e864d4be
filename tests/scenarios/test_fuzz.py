"""Typed fuzzing: runs every target for a few seconds, and checks that the fuzzer finds planted bugs.

`make fuzz` runs a million cases of each target.
"""

import random
from typing import Annotated, Any

import msgspec
import pytest

from codec.errors import PeerError
from codec.unpack import unpack
from scenarios.fuzz.inputs.fields import Kind, fields_of, names_of, plain
from scenarios.fuzz.run import Result, deck_of, fuzz, lines, replay
from scenarios.fuzz.signatures import cheap
from scenarios.fuzz.tables import sizes_of
from scenarios.fuzz.target import Target, World
from scenarios.fuzz.targets import TARGETS, target_of

SECONDS = 2.5
LEAST = 150
"""Distinct (kind, field, mutation) that each target must try in that time, even on a busy machine."""


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Ignore what the product logs about hostile input."""
    caplog.set_level(100)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_escapes(name: str, quiet: None) -> None:
    result = fuzz(target_of(name), cases=1_000_000, seed=1, seconds=SECONDS)
    assert result.escape is None, "\n".join(lines(result))
    assert len(result.tried) >= min(LEAST, len(result.deck) // 2)


@pytest.mark.parametrize("name", TARGETS)
def test_every_message_and_every_field_is_fuzzed(name: str) -> None:
    """Fails when a message or field was added to a protocol and no kind has it."""
    target = target_of(name)
    kinds = {kind.name: kind for kind in target.kinds}
    assert len(kinds) == len(target.kinds)
    everything = {field.name for kind in target.kinds for field in kind.fields}
    for kind, cls in target.types().items():
        fuzzed = {field.name for field in kinds[kind].fields} | everything
        prefix = min((field.name for field in kinds[kind].fields), key=len)
        assert names_of(cls, prefix) <= fuzzed, f"{kind}: {sorted(names_of(cls, prefix) - fuzzed)}"


@pytest.mark.parametrize("name", TARGETS)
def test_an_unmutated_message_is_accepted(name: str, quiet: None) -> None:
    """Otherwise a mutated one would be refused for another reason than its mutation."""
    target = target_of(name)
    with cheap():
        world = target.world(random.Random(1))
        try:
            refused = []
            for kind in target.kinds:
                world.turn(random.Random(2))
                data = kind.enclose(world, kind.encode(kind.make(world)))
                if "malformed" in (outcome := world.give(kind, data)) or "not decoded" in outcome:
                    refused.append(f"{kind.name}: {outcome}")
            assert not refused
        finally:
            world.close()


# ---------------------------------------------------------------- the fuzzer finds planted bugs


class Thing(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A sample message."""

    name: Annotated[str, msgspec.Meta(max_length=8)]
    count: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    links: tuple[tuple[int, float], ...]


_decoder = msgspec.msgpack.Decoder(Thing)


class Room(World):
    """A world that decodes `Thing` messages. `bug` names its planted bug."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.table: dict[bytes, int] = {}
        self.total = 0

    def give(self, kind: Kind, data: bytes) -> str:
        try:
            thing = _decoder.decode(data) if self.bug == "text" else unpack(_decoder, data, "thing")
        except (PeerError, msgspec.DecodeError) as error:
            return str(error)
        if self.bug == "index":
            return str([0] * 100 if thing.count < 1 << 62 else [][thing.count])
        if self.bug == "sum":
            self.total += thing.count
            self.total.to_bytes(8, "little")
        if self.bug == "table":
            self.table[data] = 1
        return "taken"

    def sizes(self) -> dict[str, int]:
        return {"table": len(self.table)}


class Rooms(Target):
    """A target with one planted bug."""

    name = "rooms"
    about = "a test"
    episode = 500
    most_entries = 100

    def __init__(self, bug: str) -> None:
        self.bug = bug
        sample = plain(Thing("a", 1, ((1, 1.0),)))
        self.kinds = [Kind("Thing", fields_of(Thing, sample), lambda w: plain(Thing("a", 1, ((1, 1.0),))), _as_it_is)]

    def world(self, rng: random.Random) -> World:
        return Room(self.bug)


def _as_it_is(world: Any, body: bytes) -> bytes:
    return body


def run(bug: str, cases: int = 6000) -> Result:
    return fuzz(Rooms(bug), cases=cases, seed=1)


@pytest.mark.parametrize(
    ("bug", "error", "field"),
    [("text", "UnicodeDecodeError", "Thing.name"), ("index", "IndexError", "Thing.count")],
)
def test_a_bug_is_found_reduced_and_reproduced(bug: str, error: str, field: str) -> None:
    escape = run(bug).escape
    assert escape is not None
    assert escape.error.startswith(error)
    assert escape.alone
    assert len(escape.labels) == 1
    assert field in escape.labels[0] or "encoded" in escape.labels[0]
    again = replay(Rooms(bug), escape.replay.removeprefix("rooms:"))
    assert again is not None
    assert again.error.startswith(error)
    assert replay(Rooms(""), escape.replay.removeprefix("rooms:")) is None


def test_a_bug_that_takes_several_messages_is_found_and_reproduced() -> None:
    escape = run("sum").escape
    assert escape is not None
    assert escape.error.startswith("OverflowError")
    again = replay(Rooms("sum"), escape.replay.removeprefix("rooms:"))
    assert again is not None
    assert again.error.startswith("OverflowError")


def test_a_table_that_grows_is_found() -> None:
    target = Rooms("table")
    target.episode = 1 << 30  # type: ignore[misc]
    escape = fuzz(target, cases=6000, seed=1).escape
    assert escape is not None
    assert "table has" in escape.error


def test_no_escape_without_a_bug() -> None:
    result = run("")
    assert result.escape is None
    assert result.cases == 6000
    assert len(result.tried) == len(result.deck) == len(deck_of(Rooms("").kinds))
    assert "6,000 cases" in next(iter(lines(result)))


def test_every_field_of_a_type_has_a_name() -> None:
    assert names_of(Thing) == {
        "Thing", "Thing.name", "Thing.count", "Thing.links", "Thing.links[]", "Thing.links[][0]", "Thing.links[][1]",
    }  # fmt: skip
    assert {field.name for field in Rooms("").kinds[0].fields} == names_of(Thing)


def test_tables_are_counted_by_path() -> None:
    room = Room("")
    room.table = {bytes([i]): i for i in range(9)}
    outer = {"a": [1, 2, 3]}
    assert sizes_of(outer, "x") == {"x": 1, "x[]": 3}


def test_cheap_signatures_refuse_the_same_forgeries_as_real_ones() -> None:
    from codec.sign import open_sealed
    from scenarios.fuzz.inputs.scene import key_of

    with cheap():
        key = key_of("signer")
        sealed = key.seal(b"domain", b"body")
        assert open_sealed(key.public, b"domain", sealed) == b"body"
        for public, domain, data in (
            (key_of("other").public, b"domain", sealed),
            (key.public, b"another", sealed),
            (key.public, b"domain", sealed + b"x"),
            (key.public, b"domain", b"\0" + sealed[1:]),
        ):
            with pytest.raises(PeerError, match="signature"):
                open_sealed(public, domain, data)
    with pytest.raises(PeerError, match="signature"):
        open_sealed(key.public, b"domain", sealed)
