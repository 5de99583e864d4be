"""Vector instructions over 64 elements, in portable LLVM IR, since numba cannot express them.

LLVM compiles them to AVX2, AVX-512 or NEON, whichever the machine has. Arrays of weights are passed as addresses and
not as numpy arrays: a mapped checkpoint may be read-only or unaligned, and numba would compile a kernel for each such
type. An argument `like` is any array of the element type (uint8, uint16 or uint32); only its type is used.

The class of an element is a 4-bit number. A *mask* is a uint64 whose bits tell which of 64 elements are in a class. The
masks of all sixteen classes are computed at once from four masks, one for each bit of the class number.
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
    "bit_length",
    "classify",
    "copy_lanes",
    "differing",
    "element",
    "popcount",
    "prefetch",
    "put_element",
    "select_bit",
    "trailing_zeros",
]

CLASSES: Final = 16
LANES: Final = 64
_HAS_PDEP: Final = platform.machine() == "x86_64" and bool(llvmlite.binding.get_host_cpu_features().get("bmi2"))
_CACHE_LINE: Final = 64
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _pointer(builder: Any, address: Any, index: Any, pointee: Any, width: int) -> Any:
    """A pointer to element `index` of the array at `address`; `width`: bits per element."""
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
    """Four uint64: plane b holds bit b of each lane's class, min(15, max(0, top - ((word >> shift) & mask)))."""
    lane, bytes_ = words.type.element, ir.VectorType(_I8, LANES)
    exponents = builder.lshr(words, _splat(builder, builder.trunc(shift, lane), words.type))
    exponents = builder.and_(exponents, _splat(builder, builder.trunc(mask, lane), words.type))
    if lane.width > 8:
        exponents = builder.trunc(exponents, bytes_)
    tops = _splat(builder, builder.trunc(top, _I8), bytes_)
    classes = _call(builder, "llvm.usub.sat.v64i8", bytes_, tops, exponents)
    classes = _call(builder, "llvm.umin.v64i8", bytes_, classes, ir.Constant(bytes_, [CLASSES - 1] * LANES))
    found = []
    for bit in range(4):
        picked = builder.and_(classes, ir.Constant(bytes_, [1 << bit] * LANES))
        found.append(builder.bitcast(builder.icmp_unsigned("!=", picked, ir.Constant(bytes_, [0] * LANES)), _I64))
    return found


def _class_masks(builder: Any, planes: list[Any]) -> Any:
    """The masks of all sixteen classes, as a vector of uint64."""
    vector = ir.VectorType(_I64, CLASSES)
    masks = None
    for bit, plane in enumerate(planes):
        inverted = ir.Constant(vector, [0 if c >> bit & 1 else -1 for c in range(CLASSES)])
        term = builder.xor(_splat(builder, plane, vector), inverted)
        masks = term if masks is None else builder.and_(masks, term)
    return masks


def _count(context: Any, builder: Any, sig: Any, args: Any, planes: list[Any]) -> None:
    """masks[row] = the masks of the classes; seen[row + 1] = seen[row] + the number of elements in each."""
    vector = ir.VectorType(_I64, CLASSES)
    found = _class_masks(builder, planes)
    first = builder.mul(args[0], _I64(CLASSES))

    def row_pointer(argument: int) -> Any:
        data = context.make_array(sig.args[argument])(context, builder, args[argument]).data
        return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())

    builder.store(found, row_pointer(1)).align = 8
    here = row_pointer(2)
    below = builder.load(here)
    below.align = 8
    sizes = _call(builder, "llvm.ctpop.v16i64", vector, found)
    builder.store(builder.add(below, sizes), builder.gep(here, [_I64(1)])).align = 8


@intrinsic
def classify(
    typingctx: Any, row: Any, masks: Any, seen: Any, like: Any, old: Any, index: Any, shift: Any, mask: Any, top: Any
) -> Any:
    """Find the classes of the 64 elements of `old` from `index` on, and count the elements of each.

    `masks`: uint64[rows * 16]; row `row` receives the mask of each class. `seen`: int64[(rows + 1) * 16]; row `row` + 1
    receives row `row` plus the number of elements of each class among these 64.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = _load(builder, args[4], args[5], ir.IntType(like.dtype.bitwidth))
        _count(context, builder, sig, args, _class_planes(builder, words, *args[6:9]))
        return context.get_dummy_value()

    return types.void(types.int64, masks, seen, like, *[types.int64] * 5), codegen


@intrinsic
def differing(typingctx: Any, like: Any, old: Any, new: Any, index: Any) -> Any:
    """The mask of the elements, among the 64 from `index` on, in which `old` and `new` differ."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.IntType(like.dtype.bitwidth)
        before, after = _load(builder, args[1], args[3], lane), _load(builder, args[2], args[3], lane)
        return builder.bitcast(builder.icmp_unsigned("!=", before, after), _I64)

    return types.uint64(like, *[types.int64] * 3), codegen


@intrinsic
def copy_lanes(typingctx: Any, like: Any, source: Any, target: Any, index: Any) -> Any:
    """Copy the 64 elements from `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = _load(builder, args[1], args[3], ir.IntType(like.dtype.bitwidth))
        store = builder.store(words, _pointer(builder, args[2], args[3], words.type, like.dtype.bitwidth))
        store.align = 1
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 3), codegen


@intrinsic
def prefetch(typingctx: Any, like: Any, address: Any, index: Any) -> Any:
    """Have the cache fetch the 64 elements from `index` on. They need not exist: this reads nothing."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        width, byte = like.dtype.bitwidth, _I8.as_pointer()
        flags = [_I32(0), _I32(3), _I32(1)]  # for reading, into all caches, data
        start = builder.inttoptr(builder.add(args[1], builder.mul(args[2], _I64(width // 8))), byte)
        for line in range(0, LANES * width // 8, _CACHE_LINE):
            _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), builder.gep(start, [_I64(line)]), *flags)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 2), codegen


@intrinsic
def select_bit(typingctx: Any, word: Any, rank: Any) -> Any:
    """The index of the set bit of `word` that has `rank` set bits below it. The caller ensures that it exists."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _HAS_PDEP:
            placed = _call(builder, "llvm.x86.bmi.pdep.64", _I64, builder.shl(_I64(1), args[1]), args[0])
            return builder.cttz(placed, ir.Constant(ir.IntType(1), 1))
        # Binary search in six steps: is the bit in the lower half of the remaining bits?
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
    """The number of set bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """The index of the lowest set bit; 64 for zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def bit_length(typingctx: Any, word: Any) -> Any:
    """The number of bits of `word` without leading zeros; 0 for zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sub(_I64(64), builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.uint64), codegen
