"""The coder of routes: which experts each layer of a mixture of experts chose for each token.

A choice is coded as a *set*. The order of a router's experts follows from their weights, and a trainer that replays a
route computes the weights with its own router. There are two forms, and the encoder takes the shorter one:

- *even*: every set is as likely, and costs log2 C(n, k) bits: 242 bytes a token for 8 of 128 experts in 48 layers;
- *learned*: per layer, the probability of each expert is learned from the tokens before, and so is how much likelier
  the experts of the token before are. Both sides learn the same, by integer arithmetic.

The bytes: `MAGIC`, then as LEB128 the form (0 even, 1 learned), n experts, k of them, layers, tokens, bytes of the
code; then the code of `codec.kernels.routes`. Each form of given routes has exactly one code, and the decoder accepts
no other bytes.
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.errors import PeerError
from codec.varint import Reader, Writer

__all__ = [
    "MAX_EXPERTS",
    "MAX_TOKENS",
    "RouteShape",
    "Routes",
    "decode_routes",
    "encode_routes",
    "most_bytes",
    "read_header",
]

MAGIC: Final = b"R1"
MAX_EXPERTS: Final = 1024
"""Experts of one layer. The largest models have 512."""
MAX_CHOSEN: Final = 64
MAX_LAYERS: Final = 512
MAX_TOKENS: Final = 1 << 18
MAX_IDS: Final = 1 << 28
"""Ids of one text: 512 MiB when decoded."""
HEADER_BYTES: Final = 16
"""The longest header: two bytes, a form of one byte, and numbers of 2, 1, 2, 3 and 5 bytes."""

Routes = NDArray[np.uint16]
"""(tokens, layers, k): the ids of the chosen experts, ascending."""


class RouteShape(NamedTuple):
    """What a model's routes look like: `layers` that have experts, `chosen` of `experts` in each."""

    layers: int
    chosen: int
    experts: int

    @property
    def bits(self) -> float:
        """The bits of one token's routes if every set is as likely."""
        return self.layers * _set_bits(self.experts, self.chosen)

    @property
    def possible(self) -> bool:
        """Whether the numbers are within this format's bounds."""
        return (
            1 <= self.layers <= MAX_LAYERS
            and 1 <= self.chosen <= min(self.experts, MAX_CHOSEN)
            and self.experts <= MAX_EXPERTS
        )


@lru_cache(maxsize=64)
def _set_bits(experts: int, chosen: int) -> float:
    return math.log2(math.comb(experts, chosen))


def most_bytes(shape: RouteShape, tokens: int) -> int:
    """The most bytes that coded routes of this shape have; `encode_routes` writes no more, and the decoder reads none.

    An even set costs its bits, and at most a thousandth more, because probabilities have 16 bits.
    """
    return HEADER_BYTES + 16 + math.ceil(tokens * (shape.bits * 1.001 + 0.01 * shape.layers) / 8)


def encode_routes(ids: NDArray[np.integer], experts: int) -> bytes:
    """The coded form of `ids`: integers, (tokens, layers, k), in any order within a set.

    Raises `ValueError` for another number of dimensions, a shape out of bounds, an id that is not below `experts`, or a
    set with an expert twice.
    """
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError("routes: integers of shape (tokens, layers, k)")
    tokens, layers, chosen = ids.shape
    shape = RouteShape(layers, chosen, experts)
    if not shape.possible or tokens > MAX_TOKENS or ids.size > MAX_IDS:
        raise ValueError(f"routes: {tokens} tokens, {layers} layers, {chosen} of {experts} experts are out of bounds")
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < experts):
        raise ValueError(f"routes: an expert outside 0 to {experts - 1}")
    sets = np.sort(ids.astype(np.uint16), axis=-1)
    if bool((sets[..., 1:] == sets[..., :-1]).any()):
        raise ValueError("routes: an expert twice for one token and layer")
    learned = _encode(sets, experts, True)
    if len(learned) * 8 < tokens * shape.bits:
        return learned
    return min(_encode(sets, experts, False), learned, key=len)


def decode_routes(data: bytes, shape: RouteShape, tokens: int) -> Routes:
    """The routes in `data`, which must be of this shape and number of tokens.

    Raises `PeerError`. Time and memory are bounded by `shape` and `tokens`, which the caller knows from elsewhere.
    """
    learned, found, count, body = _open(data)
    if found != shape:
        raise PeerError(f"routes: {_words(found)}, and the model has {_words(shape)}")
    if count != tokens:
        raise PeerError(f"routes: of {count} tokens, and there are {tokens}")
    from codec.kernels.routes import (
        decode_sets,  # loads the compiler, which processes that only read headers do not need
    )

    ids = np.empty((tokens, shape.layers, shape.chosen), np.uint16)
    state = _state(shape)
    if decode_sets(np.frombuffer(body, np.uint8), shape.experts, learned, ids, *state) < 0:
        raise PeerError("routes: the code is cut short, or was not written by the encoder")
    return ids


def read_header(data: bytes) -> tuple[RouteShape, int]:
    """(shape, tokens) that `data` claims. Raises `PeerError` for an invalid header, and for bytes beyond the bound."""
    _, shape, tokens, _ = _open(data)
    return shape, tokens


def _open(data: bytes) -> tuple[bool, RouteShape, int, bytes]:
    reader = Reader(data, "routes")
    if reader.raw("magic", len(MAGIC)) != MAGIC:
        raise reader.fail("magic", "not routes, or of another release")
    learned = reader.uint("form", 1)
    experts = reader.uint("experts", MAX_EXPERTS)
    chosen = reader.uint("chosen", MAX_CHOSEN)
    shape = RouteShape(reader.uint("layers", MAX_LAYERS), chosen, experts)
    tokens = reader.uint("tokens", MAX_TOKENS)
    if not shape.possible or tokens * shape.layers * shape.chosen > MAX_IDS:
        raise PeerError(f"routes: {_words(shape)} for {tokens} tokens are out of bounds")
    body = reader.raw("code", reader.uint("length", most_bytes(shape, tokens)))
    reader.end()
    return bool(learned), shape, tokens, body


def _words(shape: RouteShape) -> str:
    return f"{shape.chosen} of {shape.experts} experts in {shape.layers} layers"


def _state(shape: RouteShape) -> tuple[NDArray[np.generic], ...]:
    """The arrays in which a kernel keeps what it has learned."""
    layers, n = shape.layers, shape.experts
    averages = np.zeros((layers, n), np.int32), np.zeros((layers, n), np.int32), np.zeros((layers, 2), np.int32)
    return *averages, np.zeros(n, np.int64), np.zeros((layers, n), np.uint8), np.zeros(n, np.uint8)


def _encode(sets: Routes, experts: int, learned: bool) -> bytes:
    from codec.kernels.routes import NO_ROOM, encode_sets

    tokens, layers, chosen = sets.shape
    shape = RouteShape(layers, chosen, experts)
    writer = Writer(MAGIC)
    for number in (int(learned), experts, chosen, layers, tokens):
        writer.uint(number)
    # An expert that was never chosen before costs 11 bits; the learned form may be longer than the even one.
    words = np.empty((most_bytes(shape, tokens) * 2 + 64) // 4, np.uint32)
    count, length, last = encode_sets(sets, experts, learned, words, *_state(shape))
    if count == NO_ROOM:
        assert learned, "the even form has a bound"
        return bytes(words.nbytes)  # longer than the even form, whatever it is
    code = words[:count].astype(">u4").tobytes() + int(last).to_bytes(8, "big")[:length]
    writer.uint(len(code))
    writer.raw(code)
    return bytes(writer.data)
