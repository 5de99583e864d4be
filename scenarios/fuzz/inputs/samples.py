"""Makes a valid value of any message type from the type alone. The messages of local sockets use it."""

from typing import Any

import msgspec.inspect as types

__all__ = ["sample_of"]


def sample_of(kind: Any) -> Any:
    """Return a plain value of this type without empty lists and nil. Raises `TypeError` for an unsupported type."""
    return _made(types.type_info(kind))


def _made(info: types.Type) -> Any:
    match info:
        case types.Metadata():
            return _made(info.type)
        case types.UnionType():
            return _made(next(part for part in info.types if not isinstance(part, types.NoneType)))
        case types.BoolType():
            return False
        case types.IntType():
            return max(1, info.ge or 0)
        case types.FloatType():
            return 1.0
        case types.StrType():
            return "a" * max(1, info.min_length or 0)
        case types.BytesType():
            return bytes(max(4, info.min_length or 0))
        case types.LiteralType():
            return info.values[0]
        case types.EnumType():
            return next(iter(info.cls)).value
        case types.ListType() | types.VarTupleType():
            return [_made(info.item_type)]
        case types.TupleType():
            return [_made(item) for item in info.item_types]
        case types.DictType():
            return {"a": _made(info.value_type)}
        case types.StructType():
            return _struct(info)
        case types.AnyType():
            return 1
    raise TypeError(f"no sample of {info}")


def _struct(info: types.StructType) -> Any:
    values = [_made(field.type) for field in info.fields]
    if info.array_like:
        return values if info.tag is None else [info.tag, *values]
    found = {field.encode_name: value for field, value in zip(info.fields, values, strict=True)}
    return found if info.tag is None else {info.tag_field or "type": info.tag} | found
