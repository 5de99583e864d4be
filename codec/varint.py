"""The primitives of the codec's binary formats: LEB128 integers, raw bytes and text.

`Writer` appends fields. `Reader` reads them back from untrusted bytes: it bounds each field before use, accepts only
the shortest form of an integer (so that each value has one encoding), and raises a `PeerError` that names the field.
"""

from codec.errors import PeerError

__all__ = ["MAX_INT", "Reader", "Writer"]

MAX_INT = (1 << 63) - 1
"""The largest integer in any format."""


class Writer:
    """Appends fields to `data`."""

    def __init__(self, head: bytes = b"") -> None:
        self.data = bytearray(head)

    def uint(self, value: int) -> None:
        """Append `value` >= 0 as LEB128: 7 bits per byte, low bits first, the top bit set in all bytes but the last."""
        assert 0 <= value <= MAX_INT, value
        while value >= 0x80:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def raw(self, value: bytes) -> None:
        """Append bytes whose length the reader knows."""
        self.data += value

    def text(self, value: str) -> None:
        """Append the length in bytes, then the text as UTF-8."""
        encoded = value.encode()
        self.uint(len(encoded))
        self.data += encoded


class Reader:
    """Reads fields from the front of `data`. Every method raises `PeerError` naming `field` for malformed bytes."""

    def __init__(self, data: bytes, what: str) -> None:
        """`what`: the name of the format, with which every error begins."""
        self._data = data
        self._at = 0
        self._what = what

    @property
    def left(self) -> int:
        """The number of bytes not yet read."""
        return len(self._data) - self._at

    def fail(self, field: str, why: str) -> PeerError:
        """The error to raise for `field`."""
        return PeerError(f"{self._what}.{field}: {why}")

    def uint(self, field: str, most: int = MAX_INT) -> int:
        """Read an integer of at most `most`."""
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
        """Read `length` bytes."""
        if length > self.left:
            raise self.fail(field, "ends too soon")
        self._at += length
        return bytes(self._data[self._at - length : self._at])

    def text(self, field: str, most: int) -> str:
        """Read a text of at most `most` bytes."""
        encoded = self.raw(field, self.uint(field, most))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise self.fail(field, "not UTF-8") from error

    def end(self) -> None:
        """Raise `PeerError` if bytes follow."""
        if self.left:
            raise self.fail("end", f"{self.left} bytes too many")
