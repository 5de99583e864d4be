"""Numbers and strings in bytes: LEB128, and a reader that believes nothing.

Both halves of every binary format of the codec: `Writer` appends, `Reader` takes the same things back, bounds each one
before it is used, accepts only the shortest form (so that one value has one encoding), and raises a `PeerError` that
names the field.
"""

from codec.errors import PeerError

__all__ = ["MAX_INT", "Reader", "Writer"]

MAX_INT = (1 << 63) - 1
"""The largest integer that any format carries."""


class Writer:
    """Appends fields to `data`."""

    def __init__(self, head: bytes = b"") -> None:
        self.data = bytearray(head)

    def uint(self, value: int) -> None:
        """`value` >= 0 as LEB128: seven bits a byte, low ones first, the top bit set on all but the last."""
        assert 0 <= value <= MAX_INT, value
        while value >= 0x80:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def raw(self, value: bytes) -> None:
        """Bytes of a length that the reader knows."""
        self.data += value

    def text(self, value: str) -> None:
        """UTF-8 behind its length."""
        encoded = value.encode()
        self.uint(len(encoded))
        self.data += encoded


class Reader:
    """Takes fields off the front of `data`; every method raises `PeerError` naming `field` when it cannot."""

    def __init__(self, data: bytes, what: str) -> None:
        """`what`: the name of the whole, the first word of every error."""
        self._data = data
        self._at = 0
        self._what = what

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return len(self._data) - self._at

    def fail(self, field: str, why: str) -> PeerError:
        """The error to raise for `field`."""
        return PeerError(f"{self._what}.{field}: {why}")

    def uint(self, field: str, most: int = MAX_INT) -> int:
        value = shift = 0
        while True:
            if self._at >= len(self._data):
                raise self.fail(field, "ends too soon")
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 56:
                raise self.fail(field, "number too long")
        if byte == 0 and shift:
            raise self.fail(field, "number not in its shortest form")
        if value > most:
            raise self.fail(field, f"{value} is more than {most}")
        return value

    def raw(self, field: str, length: int) -> bytes:
        if length > self.left:
            raise self.fail(field, "ends too soon")
        self._at += length
        return bytes(self._data[self._at - length : self._at])

    def text(self, field: str, most: int) -> str:
        encoded = self.raw(field, self.uint(field, most))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise self.fail(field, "not UTF-8") from error

    def end(self) -> None:
        """Nothing may follow."""
        if self.left:
            raise self.fail("end", f"{self.left} bytes too many")
