"""Numbers as people read them."""

__all__ = ["size_text", "time_text", "version_text"]


def size_text(count: float | None) -> str:
    """Bytes, in powers of ten: 999 B, 1.2 kB, 3.4 MB; - where they are not known."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_text(seconds: float | None) -> str:
    """Seconds: 3.2 ms, 0.45 s, 12.3 s, 5 min, 3.2 h; - where they are not known."""
    if seconds is None:
        return "-"
    if seconds < 0.1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def version_text(version: tuple[int, int] | None) -> str:
    """A version (epoch, number): its number, and the epoch where there was a rollback; - where it is not known."""
    if version is None:
        return "-"
    epoch, number = version
    return f"{number} (epoch {epoch})" if epoch else str(number)
