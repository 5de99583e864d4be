"""Figures for people: sizes, times and dollars in three digits, and the rows that the reports of a step share."""

from collections.abc import Iterable, Iterator

from node.tools.distribution import Dollars, Seconds

__all__ = ["bytes_text", "distribution_rows", "seconds_text", "table", "usd_text"]

Row = tuple[str, str]


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} days"


def usd_text(usd: float) -> str:
    """Dollars, with at least three digits where they are less than one."""
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.3g}"


def distribution_rows(nodes: int, up_mbit: float, seconds: Seconds, dollars: Dollars | None) -> Iterator[Row]:
    """How long a version takes to all nodes, and what its traffic costs where prices are known."""
    yield f"to {nodes:,} nodes", f"at {up_mbit:g} Mbit/s a node up, at best"
    for label, name in (("star, full copies", "star_full"), ("star, deltas", "star_delta"), ("swarm", "swarm")):
        price = "" if dollars is None else f", {usd_text(getattr(dollars, name))} of traffic"
        yield f"  {label}", seconds_text(getattr(seconds, name)) + price


def table(rows: Iterable[Row]) -> str:
    return "\n".join(f"{name:<20} {value}" for name, value in rows)
