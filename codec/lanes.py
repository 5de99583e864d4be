"""Sixty-four elements at a time: vector steps that numba has no words for, written as portable LLVM IR.

LLVM turns each into AVX2, AVX-512 or NEON as the machine allows. Arrays of weights come in as addresses, not as numpy
arrays: a mapped checkpoint may be read-only or unaligned, and the kernels are compiled once all the same. An argument
`like` is any array of the element type (uint8, uint16, uint32); only its type matters.

The class of an element is a number of 4 bits. A *plane* is one bit of the class for 64 elements, in one uint64, so that
the mask of any class is three ANDs away and counting all sixteen costs a few dozen scalar instructions.
"""

import platform
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "CLASSES",
    "LANES",
    "class_mask",
    "count_classes",
    "countdown_classes",
    "element",
    "negatives",
    "planes",
    "planes_and_copy",
    "popcount",
    "put_element",
    "select_bit",
    "trailing_zeros",
]

CLASSES: Final = 16
LANES: Final = 64
_HAS_PDEP: Final = platform.machine() == "x86_64" and bool(llvmlite.binding.get_host_cpu_features().get("bmi2"))
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _splat(builder: Any, scalar: Any, lane: Any) -> Any:
    vector = ir.VectorType(lane, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _pointer(builder: Any, address: Any, index: Any, pointee: Any, width: int) -> Any:
    """A pointer to element `index` of the array at `address`."""
    byte = builder.add(address, builder.mul(index, _I64(width // 8)))
    return builder.inttoptr(byte, pointee.as_pointer())


def _load(builder: Any, address: Any, index: Any, lane: Any) -> Any:
    vector = ir.VectorType(lane, LANES)
    loaded = builder.load(_pointer(builder, address, index, vector, lane.width))
    loaded.align = 1
    return loaded


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [a.type for a in args]), name)
    return builder.call(function, args)


def _class_planes(builder: Any, words: Any, shift: Any, mask: Any, top: Any) -> list[Any]:
    """Four uint64: the bits of min(15, top -| ((word >> shift) & mask)) for each lane; -| stops at zero."""
    lane, bytes_ = words.type.element, ir.VectorType(_I8, LANES)
    exponents = builder.lshr(words, _splat(builder, builder.trunc(shift, lane), lane))
    exponents = builder.and_(exponents, _splat(builder, builder.trunc(mask, lane), lane))
    if lane.width > 8:
        exponents = builder.trunc(exponents, bytes_)
    tops = _splat(builder, builder.trunc(top, _I8), _I8)
    classes = _call(builder, "llvm.usub.sat.v64i8", bytes_, tops, exponents)
    classes = _call(builder, "llvm.umin.v64i8", bytes_, classes, ir.Constant(bytes_, [CLASSES - 1] * LANES))
    found = []
    for bit in range(4):
        moved = builder.shl(classes, ir.Constant(bytes_, [7 - bit] * LANES))
        found.append(builder.bitcast(builder.icmp_signed("<", moved, ir.Constant(bytes_, [0] * LANES)), _I64))
    return found


def _masks(builder: Any, planes_: list[Any]) -> list[Any]:
    """The mask of each of the sixteen classes."""
    inverse = [builder.not_(plane) for plane in planes_]
    low = [builder.and_([inverse[0], planes_[0]][c & 1], [inverse[1], planes_[1]][c >> 1]) for c in range(4)]
    high = [builder.and_([inverse[2], planes_[2]][c & 1], [inverse[3], planes_[3]][c >> 1]) for c in range(4)]
    return [builder.and_(low[c & 3], high[c >> 2]) for c in range(CLASSES)]


def _tuple_of(builder: Any, context: Any, kind: Any, values: list[Any]) -> Any:
    return context.make_tuple(builder, kind, values)


@intrinsic
def planes(typingctx: Any, like: Any, old: Any, new: Any, index: Any, shift: Any, mask: Any, top: Any) -> Any:
    """(changed, plane 0..3) of the 64 elements from `index`: changed is the mask of old != new; classes are of old."""
    kind = types.UniTuple(types.uint64, 5)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(like.dtype.bitwidth)
        before = _load(builder, args[1], args[3], lane)
        after = _load(builder, args[2], args[3], lane)
        changed = builder.bitcast(builder.icmp_unsigned("!=", before, after), _I64)
        found = _class_planes(builder, before, args[4], args[5], args[6])
        return _tuple_of(builder, context, kind, [changed, *found])

    return kind(like, *[types.int64] * 6), codegen


@intrinsic
def planes_and_copy(typingctx: Any, like: Any, old: Any, copy: Any, index: Any, shift: Any, mask: Any, top: Any) -> Any:
    """Plane 0..3 of the 64 elements from `index` of `old`, which are also written to the same place of `copy`."""
    kind = types.UniTuple(types.uint64, 4)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(like.dtype.bitwidth)
        words = _load(builder, args[1], args[3], lane)
        store = builder.store(words, _pointer(builder, args[2], args[3], words.type, lane.width))
        store.align = 1
        return _tuple_of(builder, context, kind, _class_planes(builder, words, args[4], args[5], args[6]))

    return kind(like, *[types.int64] * 6), codegen


def _slots(context: Any, builder: Any, array_type: Any, array: Any) -> list[Any]:
    """Pointers to the first sixteen items of an int64 array."""
    data = context.make_array(array_type)(context, builder, array).data
    return [builder.gep(data, [_I64(c)]) for c in range(CLASSES)]


@intrinsic
def count_classes(typingctx: Any, counts: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> Any:
    """counts[c] += how many of the 64 elements are of class c. `counts`: int64[16]."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        slots = _slots(context, builder, sig.args[0], args[0])
        for slot, mask in zip(slots, _masks(builder, list(args[1:])), strict=True):
            builder.store(builder.add(builder.load(slot), builder.ctpop(mask)), slot)
        return context.get_dummy_value()

    return types.void(counts, *[types.uint64] * 4), codegen


@intrinsic
def countdown_classes(typingctx: Any, counts: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> Any:
    """counts[c] -= how many of the 64 elements are of class c; negative (int64) if any count became so."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        slots = _slots(context, builder, sig.args[0], args[0])
        signs = _I64(0)
        for slot, mask in zip(slots, _masks(builder, list(args[1:])), strict=True):
            left = builder.sub(builder.load(slot), builder.ctpop(mask))
            builder.store(left, slot)
            signs = builder.or_(signs, left)
        return signs

    return types.int64(counts, *[types.uint64] * 4), codegen


@intrinsic
def negatives(typingctx: Any, counts: Any) -> Any:
    """The mask of classes whose count is negative."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = _I64(0)
        for c, slot in enumerate(_slots(context, builder, sig.args[0], args[0])):
            sign = builder.lshr(builder.load(slot), _I64(63))
            found = builder.or_(found, builder.shl(sign, _I64(c)))
        return found

    return types.uint64(counts), codegen


@intrinsic
def class_mask(typingctx: Any, which: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> Any:
    """The mask of the elements of class `which`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = _I64(-1)
        for bit in range(4):
            wanted = builder.and_(builder.lshr(args[0], _I64(bit)), _I64(1))
            # wanted - 1 is all ones where the bit is 0: it inverts the plane.
            found = builder.and_(found, builder.xor(args[1 + bit], builder.sub(wanted, _I64(1))))
        return found

    return types.uint64(types.uint64, *[types.uint64] * 4), codegen


@intrinsic
def select_bit(typingctx: Any, word: Any, rank: Any) -> Any:
    """The index of the set bit of `word` with `rank` set bits below it; there is one."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _HAS_PDEP:
            placed = _call(builder, "llvm.x86.bmi.pdep.64", _I64, builder.shl(_I64(1), args[1]), args[0])
            return builder.cttz(placed, ir.Constant(ir.IntType(1), 1))
        # Six halvings: is the bit in the lower half of what is left?
        word_, rank_, at = args[0], args[1], _I64(0)
        for width in (32, 16, 8, 4, 2, 1):
            below = builder.ctpop(builder.and_(word_, _I64((1 << width) - 1)))
            above = builder.icmp_unsigned(">=", rank_, below)
            rank_ = builder.select(above, builder.sub(rank_, below), rank_)
            word_ = builder.select(above, builder.lshr(word_, _I64(width)), word_)
            at = builder.select(above, builder.add(at, _I64(width)), at)
        return at

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def element(typingctx: Any, like: Any, address: Any, index: Any) -> Any:
    """Element `index` of the array at `address`, as int64 >= 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(like.dtype.bitwidth)
        loaded = builder.load(_pointer(builder, args[1], args[2], lane, lane.width))
        loaded.align = 1
        return builder.zext(loaded, _I64)

    return types.int64(like, types.int64, types.int64), codegen


@intrinsic
def put_element(typingctx: Any, like: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the low bits of `value` to element `index` of the array at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(like.dtype.bitwidth)
        store = builder.store(builder.trunc(args[3], lane), _pointer(builder, args[1], args[2], lane, lane.width))
        store.align = 1
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, types.int64), codegen


@intrinsic
def popcount(typingctx: Any, word: Any) -> Any:
    """Bits set."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """The index of the lowest bit set; `word` is not zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen
