"""Reads and writes the lock file: one version of every dependency, with the sha256 of each file that pip may install.

pip checks hashes only in a complete requirements file (it refuses a constraints file with hashes), and no environment
needs the whole lock file. So each pin names the groups that need it, and `select` returns the complete requirements of
the chosen groups. The module uses only the standard library, because install.sh runs it in an empty environment.
"""

import argparse
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["CORE", "LOCK", "UNHASHED", "Pin", "canonical", "parse", "render", "requirements", "select"]

LOCK: Final = Path(__file__).parents[1] / "requirements.lock"

CORE: Final = "core"
"""The group that every install needs; the other groups are the extras and dependency groups of pyproject.toml."""

UNHASHED: Final = "torch"
"""The only package without hashes: each machine needs its own build of it, from an index of its choice."""

_PIN: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?:\s*;\s*(?P<marker>[^\\]+?))?\s*\\?$")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})\s*\\?$")


@dataclass(frozen=True)
class Pin:
    """One dependency. `groups` need it; `marker`: on which platforms, empty for all; `hashes`: hex sha256."""

    name: str
    version: str
    groups: tuple[str, ...]
    marker: str = ""
    hashes: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """The requirement in pip's syntax, without hashes."""
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")


def canonical(name: str) -> str:
    """Return the normalized name of a package (PEP 503): `Typing.Extensions` and `typing_extensions` are the same."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> list[Pin]:
    """Parse a lock file. Raises `ValueError` for a line that is neither a comment, a pin nor a hash."""
    pins: list[Pin] = []
    groups: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith("# for "):
            groups = tuple(line.removeprefix("# for ").split(", "))
        elif not line or line.startswith("#"):
            continue
        elif found := _HASH.match(line):
            if not pins:
                raise ValueError(f"line {number} of the lock file has a hash before any pin")
            last = pins[-1]
            pins[-1] = Pin(last.name, last.version, last.groups, last.marker, (*last.hashes, found[1]))
        elif found := _PIN.match(line):
            pins.append(Pin(found["name"], found["version"], groups, found["marker"] or ""))
        else:
            raise ValueError(f"line {number} of the lock file is not understood: {line}")
    return pins


def requirements(pins: Iterable[Pin]) -> str:
    """Return a requirements file of these pins, with their hashes."""
    return "".join(
        " \\\n    ".join((pin.requirement, *(f"--hash=sha256:{digest}" for digest in sorted(pin.hashes)))) + "\n"
        for pin in pins
    )


def render(pins: Iterable[Pin], header: str) -> str:
    """Return the lock file of these pins after `header`. `parse` reads it back."""
    ordered = sorted(pins, key=lambda pin: canonical(pin.name))
    return header + "".join(f"# for {', '.join(pin.groups)}\n{requirements([pin])}" for pin in ordered)


def select(pins: Iterable[Pin], groups: Collection[str]) -> list[Pin]:
    """Return the pins that any of these groups needs. Raises `ValueError` for a group that the lock file lacks."""
    pins = list(pins)
    known = {group for pin in pins for group in pin.groups}
    if unknown := sorted(set(groups) - known):
        raise ValueError(
            f"EXTRAS cannot be {', '.join(unknown)}: choose from {', '.join(sorted(known - {CORE}))}, none"
        )
    return [pin for pin in pins if not set(groups).isdisjoint(pin.groups)]


def main() -> None:
    """Writes the two files that install.sh gives to pip, and prints the pin of torch if a chosen group needs it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where requirements.txt and constraints.txt are written")
    parser.add_argument("groups", nargs="+", metavar="group")
    options = parser.parse_args()
    pins = parse(LOCK.read_text())
    try:
        chosen = select(pins, options.groups)
    except ValueError as error:
        sys.exit(f"{error}.")
    hashed = [pin for pin in chosen if pin.name != UNHASHED]
    (options.folder / "requirements.txt").write_text(requirements(hashed))
    versions = "".join(f"{pin.requirement}\n" for pin in pins if pin.name != UNHASHED)
    (options.folder / "constraints.txt").write_text(versions)
    for pin in chosen:
        if pin.name == UNHASHED:
            print(pin.requirement)


if __name__ == "__main__":
    main()
