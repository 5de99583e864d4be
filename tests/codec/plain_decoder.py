"""A second decoder, written from `docs/codec.md` alone: plain Python, one obvious step at a time, slow.

It shares nothing with the codec but the hash and signature libraries. Floats are not needed: bits are integers.
"""

import struct
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

# name: (bytes, exponent shift, exponent mask, is a float)
DTYPES = {
    "BF16": (2, 7, 0xFF, True),
    "F16": (2, 10, 0x1F, True),
    "F32": (4, 23, 0xFF, True),
    "F64": (8, 0, 0, True),
    "F8_E4M3": (1, 3, 0x0F, True),
    "F8_E5M2": (1, 2, 0x1F, True),
    "I8": (1, 0, 0, False),
    "I32": (4, 0, 0, False),
    "I64": (8, 0, 0, False),
    "BOOL": (1, 0, 0, False),
}


class Bytes:
    """A file read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, n: int) -> bytes:
        assert self.at + n <= len(self.data)
        self.at += n
        return self.data[self.at - n : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def text(self) -> str:
        return self.take(self.varint()).decode()


class BitString:
    """Bits, least significant of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.bits = [byte >> i & 1 for byte in data for i in range(8)]
        self.at = 0

    def number(self, width: int) -> int:
        value = sum(self.bits[self.at + i] << i for i in range(width))
        self.at += width
        return value

    def unary(self) -> int:
        zeros = 0
        while self.number(1) == 0:
            zeros += 1
        return zeros

    def align(self, width: int) -> None:
        while self.at % width:
            assert self.number(1) == 0

    def ends(self) -> None:
        assert not any(self.bits[self.at :])
        assert len(self.bits) - self.at < 8

    def count(self) -> int:
        length = self.number(5)
        assert length <= 21
        return 0 if length == 0 else (1 << (length - 1)) + self.number(length - 1)

    def rice(self, n: int, k: int) -> list[int]:
        low = [self.number(k) for _ in range(n)]
        return [(self.unary() << k) + low[i] for i in range(n)]

    def gamma(self, n: int, k: int) -> list[int]:
        lengths = [self.unary() for _ in range(n)]
        return [(1 << (length + k)) + self.number(length + k) - (1 << k) for length in lengths]

    def golomb(self, n: int, m: int) -> list[int]:
        length = (m - 1).bit_length()
        short = (1 << length) - m
        rests = []
        for _ in range(n):
            rest = self.number(length - 1) if length else 0
            if length and rest >= short:
                rest = 2 * rest + self.number(1) - short
            rests.append(rest)
        return [self.unary() * m + rest for rest in rests]

    def numbers(self, n: int, modes: set[int]) -> list[int]:
        mode = self.number(2)
        modes.add(mode)
        if mode == 0:
            return [0] * n
        if mode == 1:
            return self.rice(n, self.number(5))
        nx = self.count()
        k1, k2 = self.number(5), self.number(5)
        gaps = self.rice(nx, k1)
        excess = self.rice(nx, k2) if mode == 2 else self.gamma(nx, k2)
        values = [0] * n
        at = -1
        for gap, more in zip(gaps, excess, strict=True):
            at += gap + 1
            values[at] = more + 1
        return values


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: list[int]
    aliases: list[str]

    @property
    def elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


def read_layout(data: bytes) -> list[Tensor]:
    source = Bytes(data)
    assert source.take(4) == b"SWL1"
    tensors = []
    for _ in range(source.varint()):
        name, dtype = source.text(), source.text()
        shape = [source.varint() for _ in range(source.varint())]
        tensors.append(Tensor(name, dtype, shape, [source.text() for _ in range(source.varint())]))
    for _ in range(source.varint()):
        source.text(), source.varint(), source.take(32)
    assert source.at == len(data)
    return tensors


@dataclass
class Model:
    """The model's blocks as lists of integers, in order, and the dtype of each in `dtypes`."""

    tensors: list[Tensor]
    layout_hash: bytes
    blocks: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    modes: set[int] = field(default_factory=set)
    coders: set[int] = field(default_factory=set)
    gap_codes: set[int] = field(default_factory=set)
    planes: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)

    def load(self, data: bytes) -> None:
        """Tensors one after another, without gaps."""
        source = Bytes(data)
        for tensor in self.tensors:
            size = DTYPES[tensor.dtype][0]
            left = tensor.elements
            while left:
                count = min(left, 1 << 20)
                raw = source.take(count * size)
                self.blocks.append([int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)])
                self.dtypes.append(tensor.dtype)
                left -= count

    def raw(self, block: int) -> bytes:
        size = DTYPES[self.dtypes[block]][0]
        return b"".join(value.to_bytes(size, "little") for value in self.blocks[block])

    def dump(self) -> bytes:
        return b"".join(self.raw(block) for block in range(len(self.blocks)))

    def root(self) -> bytes:
        hashes = b"".join(blake3(self.raw(block)).digest() for block in range(len(self.blocks)))
        return blake3(b"swarm-node root 1\0" + self.layout_hash + hashes).digest()

    def apply(self, sealed: bytes, body: bytes, public: bytes) -> bytes:
        """Verify a chunk, apply it, and check each block's hash; the parent root that it names."""
        Ed25519PublicKey.from_public_bytes(public).verify(sealed[:64], b"swarm-node chunk 1\0" + sealed[64:])
        header = Bytes(sealed[64:])
        assert header.take(4) == b"SWC1"
        assert header.take(32) == public
        _epoch, _version, _attempt, _seq = (header.varint() for _ in range(4))
        parent, layout_hash = header.take(32), header.take(32)
        assert layout_hash == self.layout_hash
        piece_bytes = 1 << header.varint()
        entries = []
        expected = 0
        for _ in range(header.varint()):
            block = expected + header.varint()
            length, coder = divmod(header.varint(), 3)
            entries.append((block, coder, length, header.take(32)))
            expected = block + 1
        for start in range(0, len(body), piece_bytes):
            assert blake3(body[start : start + piece_bytes]).digest() == header.take(32)
        assert header.at == len(header.data)
        payloads = Bytes(body)
        for block, coder, length, digest in entries:
            self.coders.add(coder)
            self.decode(block, coder, payloads.take(length))
            assert blake3(self.raw(block)).digest() == digest
        assert payloads.at == len(body)
        return parent

    def decode(self, block: int, coder: int, payload: bytes) -> None:
        dtype, values = self.dtypes[block], self.blocks[block]
        size = DTYPES[dtype][0]
        if coder == 2 and len(payload) != size * len(values):
            self.new_values(values, dtype, payload)
        elif coder == 2:
            values[:] = [int.from_bytes(payload[i : i + size], "little") for i in range(0, len(payload), size)]
        elif size == 8:
            count = len(payload) // 12
            positions = struct.unpack(f"<{count}I", payload[: 4 * count])
            for position, value in zip(positions, struct.unpack(f"<{count}Q", payload[4 * count :]), strict=True):
                values[position] = value
        elif coder == 0:
            self.rice(values, dtype, payload)
        else:
            self.pco(values, dtype, payload)

    def rice(self, values: list[int], dtype: str, payload: bytes) -> None:
        bits = BitString(payload[1:])
        members: list[list[int]] = [[] for _ in range(16)]
        for position, value in enumerate(values):
            members[class_of(value, dtype, payload[0])].append(position)
        for positions in members:
            n = bits.count()
            if n == 0:
                continue
            changed = []
            rank = -1
            for gap in bits.numbers(n, self.modes):
                rank += gap + 1
                changed.append(positions[rank])
            self.change(values, dtype, changed, bits)
        bits.ends()

    def pco(self, values: list[int], dtype: str, payload: bytes) -> None:
        bits = BitString(payload[1:])
        n = bits.count()
        clustered = bits.number(1)
        self.gap_codes.add(clustered)
        gaps = bits.numbers(n, self.modes) if clustered else bits.golomb(n, bits.count())
        members: list[list[int]] = [[] for _ in range(16)]
        position = -1
        for gap in gaps:
            position += gap + 1
            members[class_of(values[position], dtype, payload[0])].append(position)
        for positions in members:
            if positions:
                self.change(values, dtype, positions, bits)
        bits.ends()

    def new_values(self, values: list[int], dtype: str, payload: bytes) -> None:
        size, _, _, is_float = DTYPES[dtype]
        assert len(payload) < size * len(values)
        assert size < 8
        bits = BitString(payload)
        log2 = bits.number(8)
        assert 13 <= log2 <= 20
        n = bits.count()
        assert n > 0
        kept = bits.numbers(n, self.modes)
        sizes = [more + 1 for more in bits.numbers(n, self.modes)]
        left = sum(sizes)
        assert sum(kept) + left <= len(values)
        found: list[int] = []
        while left:
            here = min(left, 1 << log2)
            left -= here
            planes: list[list[int]] = []
            for _ in range(size):
                planes.append(self.plane(bits, here, planes[-1] if planes else None))
            for column in zip(*planes, strict=True):
                value = int.from_bytes(bytes(column), "big")
                found.append(value >> 1 | (value & 1) << (8 * size - 1) if is_float else value)
        bits.ends()
        position = at = 0
        for skipped, run in zip(kept, sizes, strict=True):
            position += skipped
            values[position : position + run] = found[at : at + run]
            position, at = position + run, at + run

    def plane(self, bits: BitString, n: int, above: list[int] | None) -> list[int]:
        mode = bits.number(2)
        self.planes.add(mode)
        if mode == 3:
            return [bits.number(8)] * n
        if mode == 0:
            bits.align(16)
            return [bits.number(8) for _ in range(n)]
        named: list[int] = []
        if mode == 2:
            assert above is not None
            named = [bits.number(8) for _ in range(bits.number(4))]
            assert named == sorted(set(named))
        tables = [self.table(bits) for _ in range(len(named) + 1)]
        bits.align(16)
        states = [bits.number(32) for _ in range(4)]
        assert min(states) >= 1 << 16
        symbols = []
        for i in range(n):
            context = len(named)
            if above is not None and above[i] in named:
                context = named.index(above[i])
            frequencies, starts, slots = tables[context]
            state = states[i % 4]
            symbol = slots[state % 4096]
            state = frequencies[symbol] * (state // 4096) + state % 4096 - starts[symbol]
            if state < 1 << 16:
                state = state << 16 | bits.number(16)
            states[i % 4] = state
            symbols.append(symbol)
        assert states == [1 << 16] * 4
        return symbols

    def table(self, bits: BitString) -> tuple[list[int], list[int], list[int]]:
        """Frequencies and first slots of the symbols, and the symbol of each slot."""
        form = bits.number(2)
        self.tables.add(form)
        assert form < 3
        frequencies = [16] * 256
        if form == 1:
            symbol = bits.number(8)
            frequencies = [4096 if i == symbol else 0 for i in range(256)]
        elif form == 2:
            frequencies = bits.numbers(256, self.modes)
        assert sum(frequencies) == 4096
        starts = [sum(frequencies[:symbol]) for symbol in range(256)]
        return frequencies, starts, [symbol for symbol in range(256) for _ in range(frequencies[symbol])]

    def change(self, values: list[int], dtype: str, positions: list[int], bits: BitString) -> None:
        """Read the signs and magnitudes of one class, and apply them."""
        size, _, _, is_float = DTYPES[dtype]
        signs = [bits.number(1) for _ in positions]
        magnitudes = [more + 1 for more in bits.numbers(len(positions), self.modes)]
        for position, sign, magnitude in zip(positions, signs, magnitudes, strict=True):
            place = ordinal(values[position], size, is_float) + (-magnitude if sign else magnitude)
            values[position] = ordinal(place % (1 << 8 * size), size, is_float)


def class_of(value: int, dtype: str, top: int) -> int:
    _, shift, mask, _ = DTYPES[dtype]
    return min(15, max(0, top - (value >> shift & mask)))


def ordinal(value: int, size: int, is_float: bool) -> int:
    """The rank on the number line, modulo 2^width; its own inverse."""
    half = 1 << (8 * size - 1)
    return value ^ (half - 1) if is_float and value >= half else value
