"""Price lists of providers and object stores (`prices.toml`). A price without a source is refused."""

import math
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from codec.errors import UsageError
from node.tools.distribution import EgressPrices

__all__ = ["PRICES", "Price", "PriceList", "Provider", "Store", "egress_prices", "price_list"]

PRICES: Final = Path(__file__).with_name("prices.toml")
_CHECKED: Final = ("provider", "third party", "none")


@dataclass(frozen=True, slots=True)
class Price:
    """One price in dollars. `checked`: whose page says so. `on`: the date of that page. `source`: the page."""

    usd: float
    checked: Literal["provider", "third party", "none"]
    on: str
    source: str


@dataclass(frozen=True, slots=True)
class Provider:
    """What a provider of machines charges a GB. `regional_usd_gb`, `near_usd_gb`: between two of its machines, in two
    regions or in one, both ends together."""

    title: str
    egress_usd_gb: Price
    ingress_usd_gb: Price
    regional_usd_gb: Price
    near_usd_gb: Price


@dataclass(frozen=True, slots=True)
class Store:
    """What an object store charges: a GB that is read over the internet, and a million requests that write or read.
    `provider`: machines of this provider write in their own region for nothing, and read at its `regional_usd_gb`."""

    title: str
    provider: str
    egress_usd_gb: Price
    put_usd_million: Price
    get_usd_million: Price


@dataclass(frozen=True, slots=True)
class PriceList:
    providers: dict[str, Provider]
    stores: dict[str, Store]

    def provider(self, name: str) -> Provider:
        """Raises `UsageError` for an unknown name."""
        return _named(self.providers, name, "provider")

    def store(self, name: str) -> Store:
        """Raises `UsageError` for an unknown name."""
        return _named(self.stores, name, "object store")


def _named(table: dict[str, Any], name: str, what: str) -> Any:
    if name.lower() not in table:
        raise UsageError(f"The price list has no {what} {name!r}: use one of {', '.join(table)}.")
    return table[name.lower()]


def _price(where: str, leaf: Any) -> Price:
    if not isinstance(leaf, dict) or set(leaf) != {"value", "checked", "on", "from"} or not leaf["from"]:
        raise UsageError(f"{where}: write {{ value = ..., checked = ..., on = ..., from = ... }}.")
    if leaf["checked"] not in _CHECKED:
        raise UsageError(f"{where}: checked is one of {', '.join(_CHECKED)}.")
    if not isinstance(leaf["value"], int | float) or not 0 <= leaf["value"] < math.inf:
        raise UsageError(f"{where}: value is a number of dollars, 0 or more.")
    return Price(float(leaf["value"]), leaf["checked"], str(leaf["on"]), leaf["from"])


def _entry(kind: type[Provider] | type[Store], where: str, table: dict[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    if set(table) != set(names):
        raise UsageError(f"[{where}] must have exactly {', '.join(names)}.")
    values: dict[str, Any] = {}
    for name in names:
        is_price = name.endswith(("_gb", "_million"))
        values[name] = _price(f"[{where}] {name}", table[name]) if is_price else str(table[name])
    return kind(**values)


@cache
def price_list(path: Path = PRICES) -> PriceList:
    """Raises `UsageError` when the file cannot be read, or a price in it lacks its source."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error
    return PriceList(
        {name: _entry(Provider, f"providers.{name}", table) for name, table in found.get("providers", {}).items()},
        {name: _entry(Store, f"stores.{name}", table) for name, table in found.get("stores", {}).items()},
    )


def egress_prices(provider: str | None, node_usd_gb: float | None, trainer_usd_gb: float | None) -> EgressPrices | None:
    """The prices that the user named; None if there are none. A number replaces the provider's; without its own price,
    the trainer pays what a node pays. Raises `UsageError` when the nodes' price is missing, or a price is negative."""
    if not all(0 <= price < math.inf for price in (node_usd_gb, trainer_usd_gb) if price is not None):
        raise UsageError("Prices are dollars a GB, 0 or more.")
    if provider is None and node_usd_gb is None:
        if trainer_usd_gb is None:
            return None
        raise UsageError("Say what the nodes pay as well: --egress-usd-gb (0 where traffic is free), or --provider.")
    listed = None if provider is None else price_list().provider(provider)
    node = node_usd_gb if listed is None or node_usd_gb is not None else listed.egress_usd_gb.usd
    assert node is not None
    trainer = node if listed is None else listed.egress_usd_gb.usd
    return EgressPrices(
        trainer if trainer_usd_gb is None else trainer_usd_gb,
        node,
        0.0 if listed is None else listed.ingress_usd_gb.usd,
    )
