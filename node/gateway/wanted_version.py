"""The versions of the model that a request allows its tokens to be from. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from codec.errors import SwarmError
from node.engines.base import Version
from node.gateway.parameters import BadRequest

__all__ = ["NotServed", "WantedVersion", "name_of", "wanted_version"]

HEADERS: Final = {"min_version": "x-min-version", "exact_version": "x-exact-version"}
"""By field: the header, in lower case, that stands for it. The field has precedence."""
MOST: Final = (1 << 63) - 1


class NotServed(SwarmError):
    """The swarm does not serve the version that a request wants. `later`: it may at a later time. `served`: the newest
    version now."""

    def __init__(self, why: str, param: str, served: Version, *, later: bool) -> None:
        super().__init__(why)
        self.param, self.served, self.later = param, served, later


class WantedVersion(msgspec.Struct, frozen=True):
    """`field`: `min_version` (no token is from an older one) or `exact_version` (each token is from this one).
    `epoch`: None: that of the newest version."""

    field: str
    epoch: int | None
    number: int

    def at(self, head: Version) -> Version:
        """The wanted version, where `head` is the newest one."""
        return (head[0] if self.epoch is None else self.epoch, self.number)

    def check(self, head: Version) -> None:
        """Raises `NotServed` unless a swarm with the newest version `head` can draw the tokens now."""
        wanted = self.at(head)
        if wanted > head:
            why = f"{name_of(wanted)} is not sealed yet; the newest version now is {name_of(head)}. Try again."
            raise NotServed(f"{self.field}: {why}", self.field, head, later=True)
        if self.field == "exact_version" and wanted < head:
            why = f"{name_of(wanted)} is over; the newest version now is {name_of(head)}."
            raise NotServed(f"exact_version: {why}", self.field, head, later=False)

    def check_tokens(self, versions: Iterable[Version], head: Version) -> None:
        """Raises `NotServed` when tokens of these versions are not what is wanted."""
        wanted = self.at(head)
        if self.field == "exact_version" and any(version != wanted for version in versions):
            why = f"{name_of(head)} came while the answer to {name_of(wanted)} was drawn."
            raise NotServed(f"exact_version: {why}", self.field, head, later=False)


def wanted_version(body: Any, headers: Mapping[str, str]) -> WantedVersion | None:
    """What a request wants, by the fields of its body or its headers; None: whatever is served. Raises `BadRequest`."""
    found = {name: headers[header] for name, header in HEADERS.items() if header in headers}
    found |= {name: value for name in HEADERS if (value := getattr(body, name)) is not None}
    wanted = {name: _wanted(name, value) for name, value in found.items()}
    least, exact = wanted.get("min_version"), wanted.get("exact_version")
    if least is None or exact is None:
        return least or exact
    if least.epoch != exact.epoch or least.number > exact.number:
        raise BadRequest("exact_version: it is not one that min_version allows; give one of them.", "exact_version")
    return exact


def _wanted(name: str, value: int | str | list[int]) -> WantedVersion:
    numbers = _numbers(value)
    if not 1 <= len(numbers) <= 2 or not all(0 <= number <= MOST for number in numbers):
        raise BadRequest(f"{name}: a version's number, or [epoch, number].", name)
    return WantedVersion(name, numbers[0] if len(numbers) == 2 else None, numbers[-1])


def name_of(version: Version) -> str:
    """EPOCH.NUMBER."""
    return f"{version[0]}.{version[1]}"


def _numbers(value: int | str | list[int]) -> list[int]:
    if isinstance(value, str):
        parts = value.strip().split(".")
        return [int(part) for part in parts] if all(p.isascii() and p.isdigit() and len(p) < 20 for p in parts) else []
    return [value] if isinstance(value, int) else list(value)
