"""multistream-select 1.0.0: the two ends agree on a protocol. (https://github.com/multiformats/multistream-select)

Each message is a length (varint), a text and a newline. The dialer sends the header together with its first proposal,
so that agreement costs one round trip instead of two. On streams it does not wait for the answer at all (`lanes`).
"""

from collections.abc import Sequence
from typing import Final, Protocol

from codec.errors import PeerError

__all__ = ["HEADER", "Channel", "NoneSpoken", "answer", "encode", "propose"]

HEADER: Final = "/multistream/1.0.0"
_REFUSAL: Final = "na"
_LIST: Final = "ls"
_MAX_MESSAGE_BYTES: Final = 1024
_MAX_PROPOSALS: Final = 16


class NoneSpoken(PeerError):
    """The dialer proposed only protocols that we do not speak, and was told so."""


class Channel(Protocol):
    """The stream or connection to negotiate on. `read` returns at most `n` bytes, b"" at the end."""

    async def read(self, n: int | None = None, /) -> bytes: ...

    async def write(self, data: bytes, /) -> None: ...


def encode(*texts: str) -> bytes:
    """One message for each text, in order."""
    out = bytearray()
    for text in texts:
        body = text.encode() + b"\n"
        length = len(body)
        while length >= 0x80:
            out.append(length & 0x7F | 0x80)
            length >>= 7
        out.append(length)
        out += body
    return bytes(out)


async def propose(channel: Channel, protocols: Sequence[str]) -> str:
    """As the dialer, propose `protocols` in order. Returns the one that the other end accepts. Raises `PeerError` if it
    accepts none or breaks the protocol."""
    await channel.write(encode(HEADER, protocols[0]))
    await _expect_header(channel)
    for index, protocol in enumerate(protocols):
        if index:
            await channel.write(encode(protocol))
        reply = await _read(channel)
        if reply == protocol:
            return protocol
        if reply != _REFUSAL:
            raise PeerError(f"multistream: {reply!r} in answer to {protocol!r}")
    raise PeerError(f"multistream: the peer speaks none of {', '.join(protocols)}")


async def answer(channel: Channel, protocols: Sequence[str]) -> str:
    """As the listener, accept the first proposal that is one of `protocols`, and return it.

    Raises `NoneSpoken` after 16 other proposals, or when the dialer does not wait for the answer to one: what follows
    is then of the protocol that it proposed. Raises `PeerError` if the dialer breaks multistream-select otherwise.
    """
    await channel.write(encode(HEADER))
    await _expect_header(channel)
    first = ""
    for _ in range(_MAX_PROPOSALS):
        try:
            proposal = await _read(channel)
        except PeerError as error:
            if not first:
                raise
            raise NoneSpoken(f"multistream: we do not speak {first[:64]!r}") from error
        if proposal in protocols:
            await channel.write(encode(proposal))
            return proposal
        if proposal == _LIST:
            await channel.write(_listing(protocols))
        else:
            first = first or proposal
            await channel.write(encode(_REFUSAL))
    raise NoneSpoken(f"multistream: {_MAX_PROPOSALS} proposals, none of which we speak")


def _listing(protocols: Sequence[str]) -> bytes:
    inner = b"".join(encode(protocol) for protocol in protocols)
    return encode(inner.decode())


async def _expect_header(channel: Channel) -> None:
    header = await _read(channel)
    if header != HEADER:
        raise PeerError(f"multistream: {header[:40]!r} instead of {HEADER}")


async def _read(channel: Channel) -> str:
    length = shift = 0
    while True:
        (byte,) = await _read_exactly(channel, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise PeerError("multistream length: it has over three bytes")
    if not 0 < length <= _MAX_MESSAGE_BYTES:
        raise PeerError(f"multistream length: {length}")
    body = await _read_exactly(channel, length)
    if body[-1:] != b"\n":
        raise PeerError("multistream message: no newline at its end")
    try:
        return body[:-1].decode()
    except UnicodeDecodeError as error:
        raise PeerError("multistream message: not text") from error


async def _read_exactly(channel: Channel, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await channel.read(length - len(data))
        if not more:
            raise PeerError("multistream: the connection ended")
        data += more
    return data
