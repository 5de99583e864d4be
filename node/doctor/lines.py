"""A line of the doctor's answer."""

from typing import Literal

from msgspec import Struct

__all__ = ["Line", "Verdict", "costs", "ok", "skipped", "stops"]

Verdict = Literal["ok", "costs", "stops", "skipped"]
"""`costs`: the machine is useful, but less than it could be. `stops`: it is not useful until this is mended.
`skipped`: not looked at, or not known."""


class Line(Struct, frozen=True):
    """One check. `mend`: a command, or what to do; empty where there is nothing to mend."""

    verdict: Verdict
    found: str
    costs: str = ""
    mend: str = ""


def ok(found: str) -> Line:
    return Line("ok", found)


def costs(found: str, what: str, mend: str) -> Line:
    return Line("costs", found, what, mend)


def stops(found: str, what: str, mend: str) -> Line:
    return Line("stops", found, what, mend)


def skipped(found: str, mend: str = "") -> Line:
    return Line("skipped", found, "", mend)
