"""What a token costs: bytes, dollars and limits of each way, against cases computed by hand and published figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.tools.prices import Price, Store, price_list
from scenarios.rl.cost import MODELS, PROVIDERS, main
from scenarios.rl.cost_model import WAYS, Links, Preset, Prices, bill, cheapest, crossing, preset_of
from scenarios.sim.virtual.compute import Compute

GB = 1e9
PRESET = Preset(
    name="by hand",
    nodes=4,
    tokens_s=1000.0,
    step_s=10.0,
    samples=10,
    prompt_tokens=100,
    usd_hour=36.0,  # a cent a second: a step costs 0.10
    full_bytes=100 * GB,
    delta_bytes=2 * GB,
    swarm_bytes=0.5 * GB,
)
FAST = Links(bytes_s=1000 * GB, regions=2, border_copies=1.5, object_bytes=1 * GB, poll_s=1.0, full_every=10)
FREE = Prices.flat(0.0, 0.0)
STORE = Store("by hand", "", *(Price(usd, "none", "", "by hand") for usd in (0.05, 1000.0, 100.0)))


def test_the_bytes_of_each_way() -> None:
    """4 nodes in 2 regions; a delta of 2 GB, a full copy of 100."""
    full = WAYS["star-full"](PRESET, 2 * GB, FAST, 0.0)
    assert (full.trainer_sent, full.node_far, full.node_near) == (400 * GB, 0, 0)
    star = WAYS["star"](PRESET, 2 * GB, FAST, 0.0)
    assert (star.trainer_sent, star.node_far, star.node_near) == (8 * GB, 0, 0)
    relays = WAYS["relays"](PRESET, 2 * GB, FAST, 0.0)
    assert (relays.trainer_sent, relays.node_far, relays.node_near) == (4 * GB, 0, 4 * GB)
    store = WAYS["store-free"](PRESET, 2 * GB, FAST, 0.0)
    assert (store.trainer_sent, store.stored, store.store_read) == (0, 2 * GB, 8 * GB)
    assert (store.puts, store.gets) == (3, 4 * (2 + 10))  # two objects and a mark; two objects and ten polls a node
    swarm = WAYS["swarm"](PRESET, 2 * GB, FAST, 0.0)  # three of the four copies cross a border: 1.5 to each region
    assert (swarm.trainer_sent, swarm.node_far, swarm.node_near) == (2 * GB, 4 * GB, 2 * GB)


@pytest.mark.parametrize("way", ["star", "relays", "store-free", "swarm"])
@pytest.mark.parametrize(("nodes", "regions"), [(1, 1), (4, 1), (8, 4), (3, 4)])
def test_every_node_receives_a_copy(way: str, nodes: int, regions: int) -> None:
    links = replace(FAST, regions=regions)
    traffic = WAYS[way](replace(PRESET, nodes=nodes), GB, links, 0.0)
    sent = traffic.trainer_sent + traffic.node_far + traffic.node_near + traffic.store_read
    assert sent == pytest.approx(nodes * GB)
    assert traffic.stored == (GB if way == "store-free" else 0)


def test_in_one_region_nodes_send_only_to_neighbours() -> None:
    traffic = WAYS["swarm"](PRESET, GB, replace(FAST, regions=1), 0.0)
    assert (traffic.trainer_sent, traffic.node_far, traffic.node_near) == (GB, 0, 3 * GB)


def test_the_seconds_of_each_way() -> None:
    """Links of 1 GB/s, 4 nodes in 2 regions, 1 GB."""
    links = replace(FAST, bytes_s=1 * GB)
    seconds = {way: WAYS[way](PRESET, GB, links, 0.0).seconds for way in WAYS}
    assert seconds == {
        "star-full": 400.0,
        "star": 4.0,
        "relays": 2.0,
        "store-free": 2.0,  # written, then read, for the delta is one object
        "store-paid": 2.0,
        "swarm": 1.0,
    }


def test_machines_that_join_need_the_model() -> None:
    joined = 3 * GB
    assert WAYS["star"](PRESET, GB, FAST, joined).trainer_sent == 7 * GB
    assert WAYS["swarm"](PRESET, GB, FAST, joined).trainer_sent == GB
    assert WAYS["swarm"](PRESET, GB, FAST, joined).node_far == 5 * GB
    store = WAYS["store-paid"](PRESET, GB, FAST, joined)
    assert store.stored == GB + 100 * GB / 10  # every tenth version in full
    assert store.store_read == 4 * GB + joined
    found = bill(PRESET, "swarm", replace(FAST, joins_hour=360), Prices.flat(0.0, 1.0))
    assert found.node_usd == pytest.approx(100 + 3 * 0.5, rel=1e-3)  # one joins in each step of 10 s


def test_the_dollars_by_hand() -> None:
    """The trainer pays 0.10 a GB, a node 0.02 to receive it; among nodes a GB costs 0.20 far and 0.04 near; a store
    charges 0.05, its readers pay 0.03 to receive. Work adds 83 kB, for 0.30 a GB."""
    prices = Prices(0.10, 0.01, 0.30, 0.02, 0.20, 0.04, 0.08, 0.05, 0.03)
    star = bill(PRESET, "star", FAST, prices)
    assert star.machine_usd == pytest.approx(0.10)
    assert star.trainer_usd == pytest.approx(8 * 0.10, rel=1e-4)
    assert star.node_usd == pytest.approx(8 * 0.02, rel=1e-3)
    assert star.store_usd == 0
    assert star.usd == pytest.approx(0.10 + 0.80 + 0.16, rel=1e-3)
    assert star.tokens_usd == pytest.approx(10_000 / star.usd)
    swarm = bill(PRESET, "swarm", FAST, prices)  # 0.5 GB: one copy from the trainer, two over borders, one near
    assert swarm.trainer_usd == pytest.approx(0.5 * 0.10, rel=1e-3)
    assert swarm.node_usd == pytest.approx(0.5 * 0.02 + 1.0 * 0.20 + 0.5 * 0.04, rel=1e-3)
    store = bill(PRESET, "store-paid", FAST, prices, STORE)
    assert store.trainer_usd == pytest.approx(2 * 0.08, rel=1e-3)
    assert store.store_usd == pytest.approx(8 * 0.05 + 3 * 1000 / 1e6 + 48 * 100 / 1e6)
    assert store.node_usd == pytest.approx(8 * 0.03, rel=1e-3)


def test_bytes_that_stay_with_a_provider_cost_what_it_charges_between_regions() -> None:
    listed = price_list()
    s3 = listed.store("s3")
    apart = Prices.of(listed, "aws", "vast", s3)
    assert (apart.trainer_usd_gb, apart.ingress_usd_gb, apart.node_usd_gb) == (0.09, 0.01, 0.01)
    assert (apart.far_usd_gb, apart.store_usd_gb) == (0.02, 0.0)
    assert (apart.store_read_usd_gb, apart.store_ingress_usd_gb) == (0.09, 0.01)
    inside = Prices.of(listed, "aws", "aws", s3)
    assert (inside.trainer_usd_gb, inside.node_usd_gb, inside.ingress_usd_gb) == (0.02, 0.02, 0.0)
    assert (inside.store_usd_gb, inside.store_read_usd_gb, inside.store_ingress_usd_gb) == (0.0, 0.02, 0.0)
    other = Prices.of(listed, "aws", "aws", listed.store("r2"))
    assert (other.store_usd_gb, other.store_read_usd_gb) == (0.09, 0.0)


def test_prompts_and_rollouts_are_paid_for_too() -> None:
    """10 rollouts of 1,000 tokens, 8 bytes each and a head; 10 prompts of 100 tokens of 4 bytes."""
    dear = replace(Prices.flat(1e6, 1e6), trainer_ingress_usd_gb=1e6)
    nothing = bill(PRESET, "swarm", FAST, dear, nbytes=0.0)
    head = nothing.node_usd * GB / 1e6 / 10 - 8000
    assert 150 < head < 500
    received = 10 * (8000 + head)
    assert nothing.trainer_usd == pytest.approx((4000 + received) * 1e6 / GB)


def test_a_version_that_takes_longer_than_a_step_makes_gpus_wait() -> None:
    """0.5 GB/s: 4 copies of 2 GB take 16 s, and a step generates for 10."""
    slow = bill(PRESET, "star", replace(FAST, bytes_s=0.5 * GB), FREE)
    assert slow.share == pytest.approx(10 / 16)
    assert slow.machine_usd == pytest.approx(0.16)
    assert slow.tokens_usd == pytest.approx(10_000 / 0.16)
    assert bill(PRESET, "star", FAST, FREE).share == 1


def test_more_nodes_have_more_of_everything() -> None:
    twice = PRESET.of_nodes(8)
    assert (twice.nodes, twice.samples, twice.usd_hour, twice.tokens_s) == (8, 20, 72.0, 2000.0)
    assert bill(twice, "star", FAST, FREE).tokens_usd == pytest.approx(bill(PRESET, "star", FAST, FREE).tokens_usd)


def test_where_two_ways_cost_the_same() -> None:
    assert crossing(lambda usd: 3 * usd - 0.6, 10.0) == pytest.approx(0.2)
    assert crossing(lambda usd: usd + 1, 10.0) is None
    assert crossing(lambda usd: 0.0, 10.0) is None
    bills = [bill(PRESET, way, FAST, FREE, STORE) for way in WAYS]
    assert cheapest(bills).way == "star-full"  # the first of those that cost nothing but the GPUs, on links so fast


def test_the_published_runs_are_reproduced() -> None:
    """From tokens/s and dollars an hour follow SparrowRL's tokens a dollar: 3.60, 2.12; 2.99 and 1.33 with RDMA."""
    compute = Compute()
    for model, published, reserved in (("8b", 3.60e6, 2.99e6), ("14b", 2.12e6, 1.33e6)):
        figures = compute.models[model]
        assert figures["published_tokens_s"] * 3600 / figures["usd_hour"] == pytest.approx(published, rel=0.01)
        assert figures["tokens_s"] * 3600 / figures["reserved_usd_hour"] == pytest.approx(reserved, rel=0.01)
        trainer, nodes = figures["trainer_gpus"], figures["nodes"]
        gpus = trainer * compute.gpu["h100_usd_hour"] + nodes * compute.gpu["a100_usd_hour"]
        assert gpus == pytest.approx(figures["usd_hour"], abs=0.005)
    mixed = compute.models["8b-mixed"]
    gpus = 4 * sum(compute.gpu[f"{name}_usd_hour"] for name in ("h100", "a100", "l40"))
    assert gpus == pytest.approx(mixed["usd_hour"], abs=0.005)


def test_presets_come_from_the_input_file() -> None:
    preset = preset_of(Compute(), "8b")
    assert (preset.nodes, preset.usd_hour) == (8, 15.88)
    assert preset.step_s == pytest.approx(45, rel=0.01)
    assert preset.swarm_bytes == pytest.approx(8.19e9 * 0.0096 * 6.2 / 8)
    assert preset_of(Compute(), "8b", bits_changed=7.14).swarm_bytes == pytest.approx(8.19e9 * 0.0096 * 7.14 / 8)
    with pytest.raises(UsageError, match="no model 70b"):
        preset_of(Compute(), "70b")


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    answer = report(capsys)
    assert len(answer["rows"]) == len(MODELS) * len(PROVIDERS)
    for row in answer["rows"]:
        assert set(row["ways"]) == set(WAYS)
        assert row["cheapest"]
    assert all(answer["prices"][name]["egress_usd_gb"]["source"] for name in ("aws", "runpod", "r2", "s3"))


def test_free_traffic_makes_the_ways_alike_and_paid_traffic_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    answer = report(capsys, "--model", "8b", "--provider", "runpod", "--provider", "aws/runpod")
    free, paid = answer["rows"]
    assert {"star", "relays", "store-free", "swarm"} <= set(free["cheapest"])
    assert paid["cheapest"] == ["swarm"]


def test_the_limit_is_where_both_cost_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    (limit,) = report(capsys, "--model", "8b", "--provider", "aws")["limits"]
    price = limit["swarm_against"]["store-free"]["node_usd_gb"]
    compute, preset = Compute(), preset_of(Compute(), "8b")
    links = Links(62.5e6, 1, compute.wan["border_copies"])
    r2 = price_list().store("r2")
    swarm, store = (bill(preset, way, links, Prices.flat(0.09, price, r2), r2) for way in ("swarm", "store-free"))
    assert swarm.usd == pytest.approx(store.usd, rel=1e-9)
    by_hand = (preset.delta_bytes - preset.swarm_bytes) * 0.09 / (7 * preset.swarm_bytes)
    assert price == pytest.approx(by_hand, rel=0.02)  # requests to the store are the rest
    assert limit["swarm_against"]["star-full"]["node_usd_gb"] is None


def test_with_the_same_bytes_a_store_that_is_free_to_read_wins_where_nodes_pay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (row,) = report(capsys, "--model", "8b", "--provider", "clouds", "--same-delta")["rows"]
    assert row["cheapest"] == ["store-free"]


def test_one_relay_in_one_region_costs_what_a_swarm_does_for_the_same_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "8b", "--provider", "aws", "--regions", "1", "--same-delta"]) == 0
    assert "relays: the same at any price" in capsys.readouterr().out


def test_the_table_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--model", "8b", "--plot", str(tmp_path / "cost.png")]) == 0
    out = capsys.readouterr().out
    assert "Million tokens a dollar" in out
    assert "SparrowRL: 3.60 million tokens a dollar, published 3.60" in out
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gbit", "0"], "--gbit"),
        (["--gbit", "nan"], "--gbit"),
        (["--bits", "0"], "--bits"),
        (["--provider", "acme"], "runpod"),
        (["--free-store", "acme"], "r2"),
        (["--model", "70b"], "no model 70b"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        main(arguments)
