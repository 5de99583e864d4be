"""False listeners at addresses that a member names, and false certificates that a joiner shows."""

from datetime import timedelta

import pytest
import trio
from arena_kit import Arena, observed
from peer_kit import Member
from stranger_kit import GARBAGE_KEY, certificate, closed_by_peer, context, control_stream, listening, secured, tcp

from codec.sign import Key

pytestmark = [pytest.mark.slow, pytest.mark.adversary]

PROBED_WITHIN_S = 10.0
SAME_KEY = Key(b"\x66" * 32)


async def probed(arena: Arena, behave: str, key: Key) -> None:
    """A member names an address with a listener that behaves as `behave`; the seed dials it back."""
    async with listening(behave, key) as (port, came):
        member = Member(key, arena.ticket, addrs=(f"/ip4/127.0.0.1/tcp/{port}",) * 1)
        async with member.running():
            assert await member.enter()
            with trio.fail_after(PROBED_WITHIN_S):
                while not came:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            await trio.sleep(0.5)
            arena.unharmed()


async def test_03_dial_back_finds_a_garbage_key(shared_arena: Arena) -> None:
    await probed(shared_arena, "garbage key", SAME_KEY)
    await shared_arena.works()
    # The enrolment is on disk: a restarted seed dials it again.
    async with listening("garbage key", SAME_KEY):
        await trio.to_thread.run_sync(shared_arena.swarm.signal, "seed")
        await trio.to_thread.run_sync(
            lambda: shared_arena.swarm.seed(
                shared_arena.base, "--listen", f"127.0.0.1:{shared_arena.seed_port}", **shared_arena.options
            )
        )
        await trio.sleep(4)
        shared_arena.unharmed()


@pytest.mark.parametrize("behave", ["reset", "silent", "garbage", "garbage extension", "wrong", "endless", "half"])
async def test_04_dial_back_of_a_misbehaving_listener(shared_arena: Arena, behave: str) -> None:
    async with observed(shared_arena) as observer:
        await probed(shared_arena, behave, Key.generate())
        assert observer.late_s < 1.0
    await shared_arena.works()


async def test_04_listener_that_resets_many(shared_arena: Arena) -> None:
    """Repeated `getpeername` of a socket that is already reset: each new lease causes another dial-back."""
    async with listening("reset", SAME_KEY) as (port, came):
        for i in range(12):
            addrs = tuple(f"/ip4/127.0.0.{1 + n}/tcp/{port}" for n in range(4))
            member = Member(Key(bytes([i + 1]) + b"\x67" * 31), shared_arena.ticket, addrs=addrs)
            async with member.running():
                assert await member.enter()
        await trio.sleep(1)
        assert came
    shared_arena.unharmed()
    await shared_arena.works()


@pytest.mark.parametrize(
    "wrong",
    [
        {"named": GARBAGE_KEY}, {"named": b"\x08\x01\x12\x20" + bytes(32)}, {"named": b"\x08\x00\x12\x04abcd"},
        {"extension": b"\x30\x00"}, {"extension": b"\x30\x84\xff\xff\xff\xff"}, {"signature": b"x" * 64},
    ],
    ids=["garbage key", "zero key", "rsa", "empty extension", "endless extension", "bad signature"],
)  # fmt: skip
async def test_03_joiner_with_a_bad_certificate_is_refused(shared_arena: Arena, wrong: dict) -> None:
    """The same certificates from a joiner: its connection is refused, and others are not."""
    shown = context(certificate(SAME_KEY, **wrong))
    for port in (shared_arena.seed_port, shared_arena.box_port):
        tls = await secured(port, shown)
        assert await closed_by_peer(tls, 5.0)
    shared_arena.unharmed()
    await shared_arena.lets_in()


async def test_20_unknown_critical_extension_is_refused(shared_arena: Arena) -> None:
    tls = await secured(shared_arena.seed_port, context(certificate(SAME_KEY, unknown_critical=True)))
    assert await closed_by_peer(tls, 5.0)
    proper = await secured(shared_arena.seed_port, context(certificate(SAME_KEY)))
    await proper.send_all(control_stream(b""))
    assert not await closed_by_peer(proper, 1.0)
    await trio.aclose_forcefully(proper)


async def test_22_clock_a_day_ahead_is_admitted(shared_arena: Arena) -> None:
    """A certificate with a date in the future comes from a machine with a wrong clock: only the key is checked."""
    for ahead in (timedelta(days=1), timedelta(days=400)):
        tls = await secured(shared_arena.seed_port, context(certificate(SAME_KEY, begins_in=ahead)))
        await tls.send_all(control_stream(b""))
        assert not await closed_by_peer(tls, 1.0), f"a clock {ahead} ahead is turned away"
        await trio.aclose_forcefully(tls)


async def test_bytes_that_are_not_tls_end_one_connection(shared_arena: Arena) -> None:
    """Other bytes in the place of TLS, and connections that end at every step of the handshake."""
    from stranger_kit import HEADER, TLS, negotiation

    for begun in (
        b"",
        b"\x13",
        negotiation(HEADER),
        negotiation(HEADER, "/noise"),
        TLS,
        TLS + b"\x16\x03\x01\xff\xff" + bytes(100),
    ):
        for _ in range(3):
            stream = await tcp(shared_arena.seed_port)
            await stream.send_all(begun) if begun else None
            await trio.aclose_forcefully(stream)
    shared_arena.unharmed()
    await shared_arena.lets_in()
