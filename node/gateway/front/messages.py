"""What a front and a seed tell each other about requests, over a socket pair; see `node.ipc.framing`.

    Ask ---> Taken, Answer with a body                  or, for an answer in parts:
    Ask ---> Taken, Answer, Part, Part, ..., End
    Delivered ---> (the client has read parts: the seed may send more)
    Over ---> (the client has the answer, or is gone)

Each frame has a list of messages, so that the tokens of many streams take one system call.
"""

from typing import Annotated, Final

import msgspec

__all__ = ["WINDOW_BYTES", "Answer", "Ask", "Delivered", "End", "Over", "Part", "Taken", "ToFront", "ToSeed"]

WINDOW_BYTES: Final = 64 << 10
"""A seed sends no further part of an answer while the front has this much of it that the client has not read."""

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Status = Annotated[int, msgspec.Meta(ge=200, le=599)]
HeaderName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9-]+$", max_length=64)]
HeaderValue = Annotated[str, msgspec.Meta(pattern="^[!-~]([ -~]*[!-~])?$", max_length=1024)]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A client's request. `headers`: by lower-case name. `before`: the notes of the parts that the client has already,
    in order, from a seed that ended; None: no seed had this request before."""

    id: int
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    before: list[bytes] | None = None


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """The client has read so many more bytes of the answer."""

    id: int
    count: Bytes


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Nothing more of the answer is needed."""

    id: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The body of the request has left the seed's memory."""

    id: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`body`: None: it comes in parts."""

    id: int
    status: Status
    content_type: HeaderValue
    headers: list[tuple[HeaderName, HeaderValue]]
    body: bytes | None = None


class Part(msgspec.Struct, frozen=True, tag="part"):
    """The next part of an answer. `note`: what another seed needs to go on after this part, empty if it needs nothing
    more than before; None: no other seed can go on."""

    id: int
    data: bytes
    note: bytes | None = None


class End(msgspec.Struct, frozen=True, tag="end"):
    """`whole`: the answer has come to its end; otherwise its connection must be closed."""

    id: int
    whole: bool


class ToSeed(msgspec.Struct, frozen=True, tag="to_seed"):
    """A frame to the seed."""

    messages: list[Ask | Delivered | Over]


class ToFront(msgspec.Struct, frozen=True, tag="to_front"):
    """A frame to the front."""

    messages: list[Taken | Answer | Part | End]
