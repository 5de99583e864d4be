"""The names of versions in vLLM's outputs: of the base, and of each adapter that is served beside it.

vLLM names one weight version for all requests of a step. The engine core's name is that of the base, followed by those
of the adapters: `0.7` without any, `0.7|1:0.5|3:0.9` with adapters in slots 0 and 2 (their ids are one higher). The
front takes the part that concerns a request.
"""

from typing import Any

__all__ = ["all_of", "of_request", "spans_of"]


def all_of(base: str, adapters: dict[int, str]) -> str:
    """The name of a step's weights. `adapters`: versions by id."""
    return "|".join([base, *(f"{number}:{version}" for number, version in sorted(adapters.items()))])


def of_request(name: str, adapter: int) -> str:
    """The part that concerns a request: `BASE`, or `BASE/ADAPTER` for one of an adapter (id above 0).

    Raises `ValueError` when the adapter was not served.
    """
    base, *others = name.split("|")
    if not adapter:
        return base
    for other in others:
        number, _, version = other.partition(":")
        if number == str(adapter):
            return f"{base}/{version}"
    raise ValueError(f"adapter {adapter} was not served in a step that drew tokens by it")


def spans_of(found: Any, adapter: int) -> tuple[tuple[str, int, int], ...]:
    """vLLM's spans as (name for this request, start, end); spans that only differ in other adapters are joined."""
    out: list[tuple[str, int, int]] = []
    for span in found or ():
        name = of_request(span.version, adapter)
        if out and out[-1][0] == name:
            out[-1] = (name, out[-1][1], span.end)
        else:
            out.append((name, span.start, span.end))
    return tuple(out)
