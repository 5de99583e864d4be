"""The rules alone: made-up facts in, lines out."""

import pytest
from msgspec.structs import replace

from node.doctor.facts import (
    Dial,
    Facts,
    GpuFacts,
    MachineFacts,
    NeighbourFacts,
    Rate,
    SglangFacts,
    TicketFacts,
    VisitFacts,
    VllmFacts,
)
from node.doctor.lines import Line
from node.doctor.report import as_json, as_text
from node.doctor.rules import RULES, examine, useful

GB = 10**9
NOW = 1_800_000_000.0
FAST = Rate(8 << 20, 0.4)
SLOW = Rate(4 << 20, 6.0)
HEALTHY = Facts(
    machine=MachineFacts(
        home="/data/swarm", disk_free_bytes=100 * GB, memory_free_bytes=64 * GB, file_limit=65536, machine_cpus=16,
        unix_time=NOW, shared_memory_bytes=8 * GB,
        gpu=GpuFacts(
            device_files=True, torch="2.9.0", torch_cuda="12.8", usable=True, names=("NVIDIA H100",),
            memory_bytes=(80 * GB,), indices=("0",),
        ),
    ),
    ticket=TicketFacts(swarm="12D3KooWabcdefgh", addrs=("/ip4/8.8.8.8/tcp/4001",), expires=NOW + 86_400, nodes=10),
    visit=VisitFacts(
        dials=(Dial(address="/ip4/8.8.8.8/tcp/4001", rtt_ms=30.0),), connected=True, welcomed=True,
        own_time=NOW, seed_time=NOW + 0.1, seed_boot=1, rtt_ms=30.0, rate=FAST, model_bytes=16 * GB, members=3,
        neighbour=NeighbourFacts(name="box-7", rtt_ms=50.0, rate=FAST), claimed=("/ip4/0.0.0.0/tcp/4001",),
        dialable=True, own_addresses=("/ip4/8.8.4.4/tcp/4001",), own_port=4001,
        seen_by_seed="/ip4/8.8.4.4/tcp/4001", seen_by_neighbour="/ip4/8.8.4.4/tcp/4001",
    ),
)  # fmt: skip


def line(check: str, **changes: object) -> Line:
    """The line of one check, for the healthy machine with these changes; fields of the parts by their names."""
    facts = HEALTHY
    for name, value in changes.items():
        part = next((part for part in ("visit", "machine") if hasattr(getattr(facts, part), name)), None)
        if part is None:
            facts = replace(facts, **{name: value})
        else:
            facts = replace(facts, **{part: replace(getattr(facts, part), **{name: value})})
    return RULES[check](facts)


def test_a_healthy_machine_is_all_ok() -> None:
    lines = examine(HEALTHY)
    assert {name: line.verdict for name, line in lines.items()} == dict.fromkeys(RULES, "ok")
    assert useful(lines)
    assert "this model (16.0 GB) needs 18.8 GB" in lines["memory"].found
    assert "64.0 GB are free" in lines["memory"].found
    assert "its own address is public" in lines["address"].found


def test_an_engine_whose_memory_is_the_replica_is_reckoned_without_a_copy() -> None:
    on_cpu = line("memory", replica="engine", device="cpu", memory_free_bytes=40 * GB)
    assert (on_cpu.verdict, "beside no copy of this model (16.0 GB)" in on_cpu.found) == ("ok", True)


NO_TORCH = {"missing_modules": ("torch", "transformers"), "torch_advice": "make install EXTRAS=torch"}
OLD_VLLM = VllmFacts(python="/v/bin/python", vllm="0.31.9", plugin="0.1.0")
TWO_GPUS = {
    "gpu": GpuFacts(
        device_files=True, usable=True, names=("NVIDIA H100",) * 2, memory_bytes=(80 * GB,) * 2, indices=("0", "1")
    )
}  # fmt: skip
NO_CUDA = GpuFacts(device_files=True, error="no CUDA")
FAULTS = [
    ("ticket", {"ticket_error": "This ticket was damaged in copying."}, "stops", "damaged"),
    ("ticket", {"refused": "The ticket is full."}, "stops", "full"),
    ("seed", {"dials": (Dial(address="a", error="refused"),)}, "stops", "no address of the ticket answers"),
    ("seed", {"connected": False, "connect_error": "another key"}, "stops", "not this swarm's seed"),
    ("seed", {"welcomed": False, "connect_error": "too slow"}, "stops", "did not answer the request"),
    ("seed", {"rtt_ms": 900.0}, "costs", "900 ms"),
    ("clock", {"own_time": NOW - 100 * 86_400, "seed_boot": int(NOW) - 1_577_836_800}, "stops", "100 days behind"),
    ("clock", {"own_time": NOW + 300}, "costs", "5 min ahead"),
    ("address", {"dialable": False}, "costs", "cannot reach this machine"),
    ("address", {"listen_error": "Port 4001 is in use."}, "stops", "in use"),
    ("rate from the seed", {"rate": SLOW}, "costs", "6 Mbit/s"),
    ("neighbour", {"neighbour": NeighbourFacts(name="box-7", error="no route")}, "costs", "box-7 cannot be reached"),
    ("neighbour", {"neighbour": NeighbourFacts(name="box-7", rtt_ms=9.0, rate=SLOW)}, "costs", "6 Mbit/s"),
    ("model", {"model_error": "/x is not a checkpoint."}, "stops", "not a checkpoint"),
    ("disk", {"home_error": "Read-only file system"}, "stops", "Read-only"),
    ("disk", {"disk_free_bytes": 20 * GB}, "stops", "34.7 GB needed"),
    ("disk", {"disk_free_bytes": 34 * GB}, "costs", "34.7 GB needed"),
    ("memory", {"memory_free_bytes": 2 * GB}, "stops", "needs 18.8 GB"),
    ("memory", {"memory_free_bytes": 8 * GB}, "costs", "the replica goes to the disk"),
    ("memory", {"replica": "engine"}, "stops", "from a GPU has not been proven"),
    ("limits", {"file_limit": 128}, "stops", "128 open files"),
    ("limits", {"file_limit": 512}, "costs", "512 open files"),
    ("limits", {"address_space_bytes": GB}, "stops", "ulimit -v"),
    ("limits", {"file_size_bytes": GB}, "stops", "ulimit -f"),
    ("limits", {"process_limit": 50}, "stops", "ulimit -u"),
    ("container", {"pids_limit": 64}, "stops", "pids.max"),
    ("container", {"cpus": 0.5}, "costs", "0.5 of 16 cores"),
    ("engines", {"engine": "vllm", "vllm": OLD_VLLM, "engines": 2}, "stops", "--engines 2: this machine has 1 GPU"),
    ("engines", {"engine": "vllm", "vllm": OLD_VLLM, "model_bytes": 400 * GB}, "stops", "The model has 400.0 GB"),
    ("engines", {"engine": "vllm", "vllm": OLD_VLLM, "tp": 1, "engines": 1, **TWO_GPUS}, "costs", "idle: 1"),
    ("GPU", {"engine": "vllm", "vllm": OLD_VLLM, "gpu": NO_CUDA}, "costs", "does not see it: no CUDA"),
    ("container", {"engine": "vllm", "tp": 2, "shared_memory_bytes": 64 << 20}, "stops", "/dev/shm has"),
    ("GPU", {"gpu": GpuFacts()}, "costs", "shows no GPU"),
    ("GPU", {"gpu": GpuFacts(), "device": "cuda:1"}, "stops", "shows no GPU"),
    ("GPU", {"gpu": GpuFacts(device_files=True, torch="2.9.0")}, "stops", "without CUDA"),
    ("GPU", {"gpu": GpuFacts(device_files=True, torch="2.9.0", torch_cuda="12.8", error="driver too old")}, "stops",
     "driver too old"),
    ("GPU", {"device": "cuda:1"}, "stops", "there is no cuda:1"),
    ("GPU", {"model_bytes": 140 * GB}, "stops", "the model has 140.0 GB"),
    ("engine", NO_TORCH, "stops", "torch and transformers not installed"),
    ("engine", {"engine": "sglang", "sglang": SglangFacts(error="/p has no SGLang")}, "stops", "no SGLang"),
    ("engine", {"engine": "vllm", "vllm": replace(OLD_VLLM, vllm="")}, "stops", "has no vLLM"),
    ("engine", {"engine": "vllm", "vllm": OLD_VLLM}, "stops", "has vLLM 0.31.9"),
    ("engine", {"engine": "vllm", "vllm": replace(OLD_VLLM, vllm="0.32.0", plugin="")}, "stops", "without the swarm's"),
    ("engine", {"engine": "vllm", "vllm": replace(OLD_VLLM, error="no Python that runs")}, "stops", "no Python"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "verdict", "found"), FAULTS)
def test_each_fault_is_named_with_its_price_and_its_remedy(
    check: str, changes: dict[str, object], verdict: str, found: str
) -> None:
    judged = line(check, **changes)
    assert (judged.verdict, found in judged.found) == (verdict, True), judged
    assert judged.costs, judged
    assert judged.mend, judged


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"seen_by_seed": "/ip4/9.9.9.9/tcp/4001", "seen_by_neighbour": None}, "a NAT that keeps ports"),
        ({"seen_by_seed": "/ip4/9.9.9.9/tcp/7", "seen_by_neighbour": "/ip4/9.9.9.9/tcp/7"}, "a NAT that changes ports"),
        ({"seen_by_seed": "/ip4/9.9.9.9/tcp/7", "seen_by_neighbour": "/ip4/9.9.9.9/tcp/8"}, "a symmetric NAT"),
        ({"seen_by_seed": None}, "the kind of NAT is not known"),
    ],
)
def test_the_kind_of_nat_is_told_from_what_two_peers_see(changes: dict[str, object], kind: str) -> None:
    assert kind in line("address", **changes).found


def test_behind_a_symmetric_nat_the_remedy_is_a_relay() -> None:
    seen = {"seen_by_seed": "/ip4/9.9.9.9/tcp/7", "seen_by_neighbour": "/ip4/9.9.9.9/tcp/8"}
    assert "swarm-node relay TICKET" in line("address", dialable=False, **seen).mend
    assert line("address", dialable=False, relayed=True, **seen).verdict == "ok"


def test_a_rented_machine_gets_advice_in_its_providers_words() -> None:
    assert "template of RunPod" in line("address", dialable=False, provider="RunPod").mend
    assert "mapped: 22" in line("address", dialable=False, provider="Vast.ai", mapped_ports=(22,)).mend


def test_few_bytes_that_came_fast_are_no_slow_link() -> None:
    assert line("rate from the seed", rate=Rate(120_000, 0.4)).verdict == "ok"


def test_without_a_ticket_only_the_machine_is_judged() -> None:
    facts = replace(HEALTHY, ticket=None, visit=None)
    lines = examine(facts)
    swarm = ("ticket", "seed", "clock", "address", "rate from the seed", "neighbour", "model", "memory")
    assert [name for name, line in lines.items() if line.verdict == "skipped"] == list(swarm)
    assert "free; what the model needs is not known" in lines["memory"].found
    known = examine(replace(facts, machine=replace(facts.machine, model_bytes=16 * GB)))
    assert known["memory"].verdict == "ok"


def test_another_model_in_the_folder_is_named() -> None:
    machine = replace(HEALTHY.machine, model_bytes=3 * GB)
    judged = RULES["model"](replace(HEALTHY, machine=machine))
    assert (judged.verdict, "3.0 GB, and the swarm's model 16.0 GB" in judged.found) == ("costs", True)
    same = replace(HEALTHY.machine, model_bytes=16 * GB)
    assert RULES["model"](replace(HEALTHY, machine=same)).verdict == "ok"


def test_an_expired_ticket_does_not_stop_a_member() -> None:
    expired = replace(HEALTHY, ticket=TicketFacts(swarm="x", addrs=(), expires=NOW - 7200, nodes=1))
    assert RULES["ticket"](expired).verdict == "ok"
    assert HEALTHY.visit is not None
    stranger = replace(expired, visit=replace(HEALTHY.visit, welcomed=False))
    assert (RULES["ticket"](stranger).verdict, RULES["ticket"](stranger).costs != "") == ("stops", True)


def test_the_text_names_what_to_mend_first_and_fits_its_columns() -> None:
    assert HEALTHY.machine is not None
    broken = replace(HEALTHY, machine=replace(HEALTHY.machine, home_error="No space left on device", file_limit=10))
    text = as_text(examine(broken), 72)
    assert max(map(len, text.splitlines())) <= 72
    assert "This machine is not useful yet: disk, limits. Mend the first" in " ".join(text.split())
    assert "STOPS  disk" in text
    assert as_text(examine(HEALTHY), 80).endswith("This machine is useful.")
    slow = as_text(examine(replace(HEALTHY, visit=replace(HEALTHY.visit or VisitFacts(), rate=SLOW))), 80)
    assert slow.endswith("It would be more so without: rate from the seed.")


def test_what_other_machines_say_does_not_control_the_terminal() -> None:
    refused = replace(HEALTHY, visit=replace(HEALTHY.visit or VisitFacts(), refused="no\x1b[2J\nok  ticket  fine"))
    text = as_text(examine(refused), 200)
    assert "no?[2J?ok  ticket  fine" in text
    assert "\x1b" not in text


def test_json_has_every_check_and_the_outcome() -> None:
    report = as_json(examine(HEALTHY))
    assert report["useful"] is True
    assert [entry["check"] for entry in report["checks"]] == list(RULES)
    assert set(report["checks"][0]) == {"check", "verdict", "found", "costs", "mend"}


def test_the_plan_of_the_engines_is_shown() -> None:
    servers = {"engine": "vllm", "vllm": OLD_VLLM}
    two = line("engines", **servers, **TWO_GPUS)
    assert (two.verdict, two.found) == ("ok", "2 engines on 1 GPU each (0 | 1)")
    large = line("engines", **servers, **TWO_GPUS, model_bytes=100 * GB)
    assert large.found == "1 engine on 2 GPUs (0,1)"
    unknown = line("engines", **servers, **TWO_GPUS, visit=None)
    assert "without the model's size" in unknown.found
    assert line("engines", engine="none").verdict == "skipped"
    assert line("engines", engine="vllm").found == "servers that you run (--engine-url)"
    assert line("engines", engines=2, device="cpu").found == "2 engines on the CPU"
