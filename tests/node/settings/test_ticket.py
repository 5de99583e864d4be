"""A ticket round-trips, or the error says what is wrong with it."""

import base64

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import UsageError
from codec.sign import Key
from node.settings.ticket import MAX_TICKET_CHARS, Ticket

KEY = Key(bytes(range(32)))
TICKET = Ticket(KEY.public, ("/ip4/203.0.113.7/tcp/4001", "/dns/box.example/tcp/4001"), bytes(range(160)), "wan")
TEXT = str(TICKET)


def spelt(body: bytes) -> str:
    """A ticket of any body, with a valid checksum."""
    framed = len(body).to_bytes(2, "big") + body
    return "swarm1" + base64.b32encode(framed + blake3(framed).digest()[:4]).decode().rstrip("=").lower()


def test_round_trip() -> None:
    assert Ticket.parse(TEXT) == TICKET
    assert TEXT.isalnum()
    assert TEXT.islower()


@given(
    key=st.binary(min_size=32, max_size=32),
    ports=st.lists(st.integers(0, 65535), min_size=1, max_size=4),
    capability=st.binary(min_size=1, max_size=1024),
    preset=st.sampled_from(["wan", "lan", "loopback"]),
)
def test_property_round_trip(key: bytes, ports: list[int], capability: bytes, preset) -> None:
    ticket = Ticket(key, tuple(f"/ip4/192.0.2.1/tcp/{port}" for port in ports), capability, preset)
    assert Ticket.parse(str(ticket)) == ticket
    assert len(str(ticket)) <= MAX_TICKET_CHARS


def test_a_ticket_survives_copy_and_paste() -> None:
    for text in (f"  {TEXT}\n", TEXT.upper(), f'"{TEXT}"', TEXT[:70] + "\n  " + TEXT[70:140] + "\r\n" + TEXT[140:]):
        assert Ticket.parse(text) == TICKET


def test_every_truncation_is_reported_as_one() -> None:
    for length in range(len("swarm1"), len(TEXT)):
        with pytest.raises(UsageError, match="cut off"):
            Ticket.parse(TEXT[:length])


def test_every_wrong_letter_is_detected() -> None:
    for place in range(len("swarm1"), len(TEXT)):
        wrong = "b" if TEXT[place] != "b" else "c"
        with pytest.raises(UsageError, match=r"damaged in copying|cut off"):
            Ticket.parse(TEXT[:place] + wrong + TEXT[place + 1 :])


@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("", "not a ticket"),
        ("hello", "not a ticket"),
        ("swarm", "not a ticket"),
        ("12D3KooWJcZXQedKnSa2yNGns3yFjca4ZPbCkD8YekCCsAQQBqGr", "peer id"),
        ("/ip4/203.0.113.7/tcp/4001", "address"),
        ("swarm2" + TEXT[6:], "version 2"),
        ("x" * 10_000, "too long"),
        (TEXT + "aaaaaaaa", "damaged"),
        (TEXT[:60] + "1" + TEXT[61:], "damaged"),
        (TEXT[:60] + "ü" + TEXT[61:], "damaged"),
    ],
)
def test_each_mistake_has_its_own_error_text(text: str, error_text: str) -> None:
    with pytest.raises(UsageError, match=error_text):
        Ticket.parse(text)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([b"short", ["/ip4/1.2.3.4/tcp/1"], b"c", "wan"]),
        msgspec.msgpack.encode([KEY.public, [], b"c", "wan"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/1"] * 5, b"c", "wan"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/01"], b"c", "wan"]),
        msgspec.msgpack.encode([KEY.public, ["\x1b[2J"], b"c", "wan"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/1"], b"", "wan"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/1"], b"c" * 1025, "wan"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/1"], b"c", "moon"]),
        msgspec.msgpack.encode([KEY.public, ["/ip4/1.2.3.4/tcp/1"], b"c", "wan", 1]),
    ],
)
def test_an_invalid_body_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        Ticket.parse(spelt(body))


@given(st.text(max_size=200))
def test_fuzz_parse_never_crashes(text: str) -> None:
    for candidate in (text, "swarm1" + text):
        with pytest.raises(UsageError):
            Ticket.parse(candidate)


def test_invalid_fields_are_refused_by_the_constructor() -> None:
    with pytest.raises(ValueError, match="addrs"):
        Ticket(KEY.public, ("box.example:4001",), b"c", "wan")
