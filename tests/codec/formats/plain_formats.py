"""Formats a second time, written from `docs/formats.md` alone: plain Python and exact fractions, slow.

It shares nothing with the codec. A tensor is a list of bf16 bit patterns, row by row.
"""

import math
from fractions import Fraction

LARGEST = {"fp8": 448, "int8": 127, "int4": 7}
LEAST = Fraction(1, 2**100)
TILES = {"block": (128, 128), "channel": (1, 0), "group": (1, 128)}
TABLES = "embed_tokens embed_tokens_per_layer embed_in word_embeddings tok_embeddings wte lm_head embed_out output"
KEPT = "wpe score classifier v_head q_head router gate shared_expert_gate e_score_correction_bias conv1d dt_proj x_proj"


def format_of(format_name: str, names: list[str], dtype: str, shape: tuple[int, ...]) -> str | None:
    """The format in which a format holds a tensor of the base; None: it leaves it in bf16. `names`: with aliases."""
    if dtype != "BF16" or 0 in shape or any(name.startswith("~") for name in names):
        return None
    stems = [name.removesuffix(".weight") for name in names]
    last_parts = [stem.split(".")[-1] for stem in stems]
    if len(shape) == 2 and all(
        name.endswith(".weight") and last in TABLES.split() for name, last in zip(names, last_parts, strict=True)
    ):
        return format_name.replace("int4-group", "int8-channel") if format_name.startswith("int4") else None
    (first, *aliases), (stem, *_), (last, *_) = names, stems, last_parts
    is_experts = len(shape) == 3 and ".experts." in first
    if aliases or not (is_experts or (len(shape) == 2 and first.endswith(".weight"))):
        return None
    if "embed" in stem or "norm" in stem or last.endswith("bias") or last in [*TABLES.split(), *KEPT.split()]:
        return None
    return format_name


def bf16(bits: int) -> Fraction | None:
    """The value of a bf16 element; None for infinities and NaNs."""
    exponent, mantissa = bits >> 7 & 255, bits & 127
    if exponent == 255:
        return None
    size = Fraction(mantissa + (128 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 127 - 7)
    return -size if bits >> 15 else size


def is_nan(bits: int) -> bool:
    return bits & 0x7FFF > 0x7F80


def nearest(value: Fraction) -> int:
    """`value` rounded to an integer, ties to even."""
    low = math.floor(value)
    rest = value - low
    if rest == Fraction(1, 2):
        return low + (low & 1)
    return low + (rest > Fraction(1, 2))


def exponent_of(value: Fraction) -> int:
    """The largest e with 2^e <= `value`, which is positive."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def rounded(value: Fraction, mantissa_bits: int, least_exponent: int) -> Fraction:
    """`value` rounded to a float with so many bits after the point and this smallest exponent, ties to even."""
    if value == 0:
        return value
    exponent = exponent_of(abs(value))
    step = Fraction(2) ** (max(exponent, least_exponent) - mantissa_bits)
    return nearest(value / step) * step


def f32(value: Fraction) -> Fraction:
    return rounded(value, 23, -126)


def scale_of(tile: list[int], element: str, powers: bool) -> Fraction:
    largest = max((abs(value) for bits in tile if (value := bf16(bits)) is not None), default=Fraction(0))
    if not powers:
        return max(f32(largest / LARGEST[element]), LEAST)
    scale = LEAST
    while largest > LARGEST[element] * scale:
        scale *= 2
    return scale


def quotient(bits: int, scale: Fraction, largest: int) -> Fraction:
    if is_nan(bits):
        return Fraction(0)
    value = bf16(bits)
    if value is None:
        return Fraction(-largest if bits >> 15 else largest)
    return min(max(f32(value / scale), Fraction(-largest)), Fraction(largest))


def fp8(bits: int, x: Fraction) -> int:
    if is_nan(bits):
        return 0x7F
    value = rounded(x, 3, -6)
    return FP8_CODES[abs(value)] | (0x80 if value < 0 else 0)


def fp8_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = Fraction(mantissa + (8 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 7 - 3)
    return -size if code >> 7 else size


FP8_CODES = {fp8_value(code): code for code in range(0x7F)}
"""The codes of the values that are not negative; 0x7F is NaN."""


def quantise(
    bits: list[int], rows: int, columns: int, element: str, tile: tuple[int, int], powers: bool
) -> tuple[list[list[int]], list[Fraction]]:
    """(codes of each row, as signed values or fp8 bits; scales, row of tiles by row of tiles) of one matrix."""
    tile_rows, tile_columns = tile[0], tile[1] or columns
    codes = [[0] * columns for _ in range(rows)]
    scales = []
    for top in range(0, rows, tile_rows):
        for left in range(0, columns, tile_columns):
            places = [
                (row, column)
                for row in range(top, min(top + tile_rows, rows))
                for column in range(left, min(left + tile_columns, columns))
            ]
            scale = scale_of([bits[row * columns + column] for row, column in places], element, powers)
            scales.append(scale)
            for row, column in places:
                element_bits = bits[row * columns + column]
                x = quotient(element_bits, scale, LARGEST[element])
                codes[row][column] = fp8(element_bits, x) if element == "fp8" else nearest(x)
    return codes, scales


def stored_codes(codes: list[list[int]], element: str) -> bytes:
    if element == "fp8":
        return bytes(code for row in codes for code in row)
    if element == "int8":
        return bytes(code & 255 for row in codes for code in row)
    packed = bytearray()
    for row in codes:
        halves = [code + 8 for code in row] + [0] * (len(row) % 2)
        packed += bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
    return bytes(packed)


def stored_scales(scales: list[Fraction], powers: bool) -> bytes:
    """F8_E8M0, or little-endian single-precision floats."""
    stored = bytearray()
    for scale in scales:
        exponent = exponent_of(scale)
        mantissa = scale / Fraction(2) ** (exponent - 23) - 2**23
        assert mantissa.denominator == 1
        if powers:
            assert mantissa == 0
            stored.append(exponent + 127)
        else:
            stored += ((exponent + 127) << 23 | int(mantissa)).to_bytes(4, "little")
    return bytes(stored)


def dequantised(code: int, scale: Fraction, element: str) -> Fraction:
    """f32(code value x scale)."""
    return f32((fp8_value(code) if element == "fp8" else Fraction(code)) * scale)
