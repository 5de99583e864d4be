"""Hostile answers at the other end of a circuit, and private addresses that a remote member names."""

import sys
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm" / "transport"))
from relay_kit import world

from swarm.protocol.core.wire import Join
from swarm.protocol.membership.enrolment import Enrolment
from swarm.transport.base import Lane
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.nat.punch import PUNCH_ID

pytestmark = [pytest.mark.slow, pytest.mark.adversary]


def answers(token: bytes) -> dict[str, bytes]:
    """False answers to a hole punching request with this token, by name, each without its length prefix."""

    def meeting(*addrs: bytes) -> bytes:
        texts = b"".join(bytes([0xA0 | len(a)]) + a for a in addrs)
        return b"\x92\xc4\x10" + token + bytes([0x90 | len(addrs)]) + texts

    return {
        "no UTF-8": meeting(b"\xff\xfe/ip4"),
        "no address": meeting(b"nowhere", b"/ip4/300.1.1.1/tcp/9"),
        "another token": meeting()[:3] + bytes(16) + b"\x90",
        "nested": b"\x91" * 1500,
        "nothing": b"",
        "too long": b"\xc1" * 2040,
    }


@pytest.mark.parametrize("which", list(answers(b"")))
async def test_06_hole_punch_answer_with_invalid_utf8(which: str) -> None:
    """The dialer's transport continues, and the circuit still carries data."""
    asked = trio.Event()
    async with world() as made:

        async def follow(connection: MuxedConnection, stream: trio.abc.HalfCloseableStream) -> None:
            request = b""
            while len(request) < 21:
                request += await stream.receive_some(4096)
            found = request.index(b"\x92\xc4\x10")
            body = answers(request[found + 3 : found + 19])[which]
            head = request[:found]  # the length prefix, in the same form as the request
            await stream.send_all(len(body).to_bytes(len(head), "little" if request[0] else "big") + body)
            asked.set()
            await trio.sleep(1)

        made.hidden._serves[PUNCH_ID] = follow
        await made.call()
        await asked.wait()
        await trio.sleep(0.3)
        stream = await made.caller.open_stream(made.hidden.key, Lane.CONTROL)
        await stream.send_all(b"still here")
        assert await stream.receive_some(10)


@pytest.mark.parametrize(
    "address",
    [
        "/dns4/metadata.internal/tcp/80", "/dns/localhost/tcp/5432", "/dns6/localhost/tcp/9", "/ip4/127.0.0.1/tcp/22",
        "/ip4/10.0.0.1/tcp/80", "/ip4/169.254.169.254/tcp/80", "/ip4/192.168.1.1/tcp/80", "/ip6/::1/tcp/22",
        "/ip6/fd00::1/tcp/22", "/ip6/::ffff:127.0.0.1/tcp/22", "/ip6/::ffff:10.0.0.1/tcp/22",
        "/ip4/100.64.0.1/tcp/80", "/ip4/224.0.0.1/tcp/80", "/ip4/255.255.255.255/tcp/80", "/ip4/0.1.2.3/tcp/80",
        "/ip6/64:ff9b::7f00:1/tcp/22", "/ip6/2002:7f00:1::/tcp/22", "/dns4/127.0.0.1.nip.io/tcp/80",
    ],
)  # fmt: skip
def test_14_private_addresses_of_a_remote_member_are_not_dialed(address: str) -> None:
    """The seed dials back only public addresses of a member on the internet, also if it came through a relay."""
    join = Join(b"", (address,), "", "", 0.0, 0.0, False)
    assert Enrolment(join, "/ip4/8.8.8.8/tcp/4001").claims() == ()
    assert Enrolment(join, "/ip4/8.8.4.4/tcp/4001/p2p-circuit").claims() == ()
    assert Enrolment(join, None).claims() == ()
