"""The price lists: every price has its source, and a price that the user names replaces it."""

import math
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.tools.distribution import EgressPrices
from node.tools.prices import PRICES, egress_prices, price_list

LEAF = '{ value = 0.5, checked = "provider", on = "2026-01-01", from = "a page" }'
NAMES = ("egress_usd_gb", "ingress_usd_gb", "regional_usd_gb", "near_usd_gb")
PROVIDER = '[providers.a]\ntitle = "A"\n' + "".join(f"{name} = {LEAF}\n" for name in NAMES)


def test_the_list_that_is_shipped() -> None:
    prices = price_list()
    assert {"aws", "gcp", "azure", "lambda", "runpod", "vast", "flat"} <= prices.providers.keys()
    assert {"r2", "s3"} <= prices.stores.keys()
    assert prices.provider("AWS").egress_usd_gb.usd == 0.09
    assert prices.store("r2").egress_usd_gb.usd == 0
    for entry in (*prices.providers.values(), *prices.stores.values()):
        assert entry.title
        assert entry.egress_usd_gb.source
        assert entry.egress_usd_gb.on


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no provider 'acme'.*runpod"):
        price_list().provider("acme")
    with pytest.raises(UsageError, match=r"no object store 'acme'.*r2"):
        price_list().store("acme")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PROVIDER.replace(LEAF, "0.5", 1), "write { value"),
        (PROVIDER.replace('"a page"', '""', 1), "write { value"),
        (PROVIDER.replace('"provider"', '"hearsay"', 1), "checked is one of"),
        (PROVIDER.replace("0.5", "-1", 1), "0 or more"),
        (PROVIDER.replace("0.5", "nan", 1), "0 or more"),
        (PROVIDER.replace("near_usd_gb", "far_usd_gb"), "exactly"),
        ("[providers", "Cannot read"),
    ],
)
def test_a_list_with_a_mistake_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        price_list(file)


def test_a_list_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PROVIDER)
    provider = price_list(file).provider("a")
    assert (provider.egress_usd_gb.usd, provider.near_usd_gb.source) == (0.5, "a page")
    assert PRICES.is_file()


def test_prices_that_the_user_names() -> None:
    assert egress_prices(None, None, None) is None
    assert egress_prices(None, 0.02, None) == EgressPrices(0.02, 0.02)
    assert egress_prices(None, 0.0, 0.09) == EgressPrices(0.09, 0.0)
    assert egress_prices("vast", None, None) == EgressPrices(0.01, 0.01, 0.01)
    assert egress_prices("vast", 0.03, 0.09) == EgressPrices(0.09, 0.03, 0.01)
    assert egress_prices("aws", 0.0, None) == EgressPrices(0.09, 0.0)
    with pytest.raises(UsageError, match="what the nodes pay"):
        egress_prices(None, None, 0.09)
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(UsageError, match="0 or more"):
            egress_prices(None, wrong, None)
