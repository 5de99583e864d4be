"""multistream-select: the two ends agree, or each knows why they do not."""

import pytest
import trio
import trio.testing

from codec.errors import PeerError
from swarm.transport.connection.multistream import HEADER, NoneSpoken, answer, encode, propose

OURS, THEIRS = "/ours/1", "/theirs/2"


class End:
    """One end of a memory stream as a `multistream.Channel`."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream

    async def read(self, n: int | None = None, /) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def write(self, data: bytes, /) -> None:
        await self.stream.send_all(data)


def two_ends() -> tuple[End, End]:
    dialer, listener = trio.testing.memory_stream_pair()
    return End(dialer), End(listener)


async def test_both_ends_agree_on_a_protocol() -> None:
    dialer, listener = two_ends()
    agreed: list[str] = []

    async def accept() -> None:
        agreed.append(await answer(listener, [OURS]))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            assert await propose(dialer, [THEIRS, OURS]) == OURS
    assert agreed == [OURS]


@pytest.mark.parametrize(
    "after", [b"", b"\0\1\2 the first message of the other protocol", encode("no", "more")[:-3]], ids=repr
)
async def test_a_dialer_that_does_not_wait_is_told_that_its_protocol_is_not_spoken(after: bytes) -> None:
    dialer, listener = two_ends()
    with trio.fail_after(5):
        await dialer.write(encode(HEADER, THEIRS) + after)
        await dialer.stream.send_eof()
        with pytest.raises(NoneSpoken, match=THEIRS):
            await answer(listener, [OURS])
        await listener.stream.send_eof()
        assert (await dialer.read()).startswith(encode(HEADER, "na"))


async def test_proposals_have_an_end() -> None:
    dialer, listener = two_ends()
    with trio.fail_after(5):
        await dialer.write(encode(HEADER, *[THEIRS] * 20))
        with pytest.raises(NoneSpoken, match="16 proposals"):
            await answer(listener, [OURS])


async def test_bytes_that_are_no_multistream_are_not_a_proposal() -> None:
    dialer, listener = two_ends()
    with trio.fail_after(5):
        await dialer.write(encode(HEADER) + b"\0")
        with pytest.raises(PeerError, match="length") as caught:
            await answer(listener, [OURS])
    assert not isinstance(caught.value, NoneSpoken)
