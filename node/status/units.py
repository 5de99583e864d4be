"""Numbers as people read them."""

__all__ = ["size"]


def size(count: float | None) -> str:
    """Bytes as people read them, in powers of ten: 999 B, 1.2 kB, 3.4 MB."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
