"""Malformed documents of a member or a stranger: its session ends, without other effects."""

import msgspec
import pytest
import trio
from arena_kit import Arena, observed
from peer_kit import HostilePeer, Member, members

from codec.sign import Key
from node.engines.base import SamplingParams
from node.ledger import messages
from swarm.protocol.core.wire import Bye, HeartbeatNews, Hello, ManifestNews, Message, Reports, RosterStep, Welcome

pytestmark = [pytest.mark.slow, pytest.mark.adversary]

INVALID = b"\xff\xfe\xfd"
"""Bytes that are not UTF-8."""


def with_bytes(sealed: bytes, before: bytes, after: bytes) -> bytes:
    """`sealed` with bytes of its body replaced; its signature is no longer valid."""
    assert before in sealed[64:]
    return sealed[:64] + sealed[64:].replace(before, after)


def signed_again(key: Key, domain: bytes, body: bytes) -> bytes:
    return key.seal(domain, body)


REPORT = b"swarm-node report 1"


def bad_reports(member: Member) -> dict[str, bytes]:
    """Malformed reports, by name: each once unsigned and once validly signed by the member."""
    honest = member.report(engine="abc")
    bodies = {
        "invalid UTF-8 in engine": honest[64:].replace(b"abc", INVALID),
        "NaN where a share belongs": honest[64:].replace(msgspec.msgpack.encode(1.0), b"\xcb\x7f\xf8" + bytes(6)),
        "nested too deep": b"\xdc\x00\x15" + b"\x91" * 3000,
        "cut off": honest[64:-3],
        "two documents": honest[64:] * 2,
        "nothing": b"",
    }
    unsigned = {f"{name}, unsigned": bytes(64) + body for name, body in bodies.items()}
    return unsigned | {name: signed_again(member.key, REPORT, body) for name, body in bodies.items()} | {"short": b"x"}


async def hostile_to(arena: Arena, i: int) -> Member:
    return Member(Key(bytes([i]) + b"\x51" * 31), arena.ticket)


async def says_to_seed_and_box(arena: Arena, i: int, *messages_: Message) -> None:
    """A new member sends these messages to the seed and to the node; either may end the session."""
    member = await hostile_to(arena, i)
    async with member.running():
        assert await member.enter()
        to_box = await member.greet(arena.box_public, arena.box_port)
        for stream in (to_box, member.stream):
            await member.say(stream, *messages_)
        await trio.sleep(0.3)
        arena.unharmed()


async def test_01_report_with_invalid_utf8(shared_arena: Arena) -> None:
    probe = await hostile_to(shared_arena, 1)
    async with probe.running():
        assert await probe.enter()
        names = list(bad_reports(probe))
    for i, name in enumerate(names):
        member = await hostile_to(shared_arena, 2 + i)
        async with member.running():
            assert await member.enter()
            to_box = await member.greet(shared_arena.box_public, shared_arena.box_port)
            bad = bad_reports(member)[name]
            for stream in (member.stream, to_box):
                await member.say(stream, Reports(0, (bad,)), Bye(bad))
            await trio.sleep(0.1)
        shared_arena.unharmed(name)
    await shared_arena.works()


async def test_01_other_documents_with_invalid_utf8(shared_arena: Arena) -> None:
    """Invalid bytes in the place of grants, heartbeats, rosters and manifests, from a member and from a stranger."""
    junk = bytes(64) + b"\x9f" + b"\xa3" + INVALID
    lies: tuple[Message, ...] = (
        HeartbeatNews(junk),
        ManifestNews(junk),
        RosterStep(junk),
        Welcome(junk, junk, junk, junk),
    )
    for i, lie in enumerate(lies):
        await says_to_seed_and_box(shared_arena, 0x30 + i, lie)
    for i, lie in enumerate((Hello(junk, 0, 0, 0, 0), Bye(junk), *lies)):
        async with HostilePeer(Key(bytes([0x60 + i]) * 32)).running() as hostile:
            for peer, port in (
                (shared_arena.seed_public, shared_arena.seed_port),
                (shared_arena.box_public, shared_arena.box_port),
            ):
                stream = await hostile.dial(peer, port)
                await hostile.say(stream, lie)
    await shared_arena.works()


def rollouts(key: Key) -> list[bytes]:
    """Rollouts that `key` signed, each with one malformed field."""
    rollout = messages.Rollout(
        1, 1, 0, bytes(32), bytes(8), bytes(8), "length", (messages.VersionSpan(0, 0, bytes(32), 2),)
    )
    body = msgspec.msgpack.encode(rollout)
    bodies = [
        body.replace(b"\xa6length", b"\xa6leng" + b"\xff\xff"),
        body.replace(b"\xa6length", b"\xa6lengtx"),
        body[:-1],
        body + b"\0",
        b"\x91" * 3000,
        msgspec.msgpack.encode((2**63 - 1, 2**63 - 1, 2**32 - 1, bytes(32), b"\xff" * 7, b"\x7f" * 7, "stop", ())),
    ]
    signed = [key.seal(messages.ROLLOUT_DOMAIN, each) for each in bodies]
    nan = messages.Rollout(1, 1, 0, bytes(32), bytes(8), b"\xff\xff\xff\x7f" * 2, "stop", rollout.spans)
    return [*signed, messages.seal_rollout(key, nan), messages.seal_rollout(Key(b"\x01" * 32), rollout)]


async def test_02_rollout_with_invalid_utf8(shared_arena: Arena) -> None:
    from swarm.protocol.core.wire import Work

    sampling = SamplingParams(max_tokens=1)
    odd: list[messages.WorkMessage] = [
        messages.Renew(2**63 - 1, 2**63 - 1, 2**63 - 1),
        messages.Cannot(2**63 - 1, 2**63 - 1, "\ud7ff" * 100),
        messages.GiveBack(tuple(range(4096))),
        messages.WorkRequest(2**63 - 1, 4096, 2**32 - 1, 2**63 - 1, bytes(32), 1e9, tuple(range(4096))),
        messages.WorkAnswer(0, 0, 0, b"\xff\xff\xff\x7f" * 4),
        messages.WorkAnswer(2**63 - 1, 0, 0, b"odd"),
        messages.Timesheet(1e7, 1e7, 1e7, 1e7, (messages.Commits(2**32 - 1, 2**63 - 1, 1e7, 1e7, 1e7, 1e7),) * 16),
        messages.Ask(0, bytes(4), bytes(4), sampling, 0, 0, 2**32 - 1, 0),
        messages.Unfit(0, messages.Reason.LIED),
    ]
    bodies = [b"", b"\x01", b"\x01" + b"\x91" * 3000, b"\x01\x93\x0a\xa3" + INVALID, *map(messages.encode, odd)]
    deep = b"\x81\xa2zz" + b"\x91" * 3000  # an unknown key, whose value is nested
    bodies.append(messages.encode(odd[7]).replace(msgspec.msgpack.encode(sampling), deep))
    key = Key(b"\x52" * 32)
    rolled = [messages.encode(messages.SignedRollout(sealed)) for sealed in rollouts(key)]
    for i, body in enumerate([*rolled, *bodies]):  # each from another member, because its session may end
        member = Member(key if i < len(rolled) else Key(bytes([i]) + b"\x52" * 31), shared_arena.ticket)
        async with member.running():
            if await member.enter():
                await member.say(member.stream, Work(body))
                await trio.sleep(0.05)
        shared_arena.unharmed(f"Work {body[:60]!r}")
    await shared_arena.works()
    assert shared_arena.swarm.state("seed")["work"] is not None


async def test_05_reports_of_bytes_beyond_all_bounds(shared_arena: Arena) -> None:
    """Reports of fetched bytes are added up: 2^63 - 1, then 0, and again, must not overflow the ticket's record."""
    ticket = await trio.to_thread.run_sync(lambda: shared_arena.swarm.ticket("--nodes", "8", "--quota-gb", "100"))
    for used in (shared_arena.ticket, ticket):
        member = Member(Key(b"\x55" * 32), used)
        async with member.running():
            if not await member.enter():
                continue
            for size in (2**63 - 1, 0, 2**63 - 1, 0, 2**63 - 1):
                every = tuple((slot, size) for slot in range(8))
                await member.renew(fetched_bytes=size, gave=every, sent_bytes=size, received_bytes=size)
            await trio.sleep(0.3)
        await shared_arena.lets_in(ticket=shared_arena.ticket)
    state = await trio.to_thread.run_sync(shared_arena.swarm.state, "seed")
    assert state
    await shared_arena.works()


async def test_a_forged_heartbeat_is_dropped(shared_arena: Arena) -> None:
    """A heartbeat is signed by the swarm's key: one that a member forges has no effect."""
    async with observed(shared_arena), members(shared_arena.ticket, 1) as (member,):
        forged = bytes(64) + member.heartbeat[64:]
        await member.say(member.stream, HeartbeatNews(forged))
        assert await member.hung_up(member.stream)
    await shared_arena.works()
