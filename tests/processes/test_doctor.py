"""`swarm-node doctor` beside a real swarm: a healthy machine is all ok, and each fault that is acted out is named."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from kit import checkpoint, ticket_of, weights

from codec.sign import Key
from node.doctor.checks import gather
from node.doctor.rules import examine
from node.settings.config import JoinConfig
from scenarios.harness.swarm import LOOPBACK, Ended, Swarm, swarm_in, swarm_on

pytestmark = pytest.mark.slow

PLAIN = ("--engine", "none", *LOOPBACK)
ENTER = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')
GROUPS = Path("/sys/fs/cgroup")
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root: namespaces, mounts, control groups")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A seed and one node that holds its model."""
    folder = tmp_path_factory.mktemp("doctor")
    with swarm_on(folder / "swarm", checkpoint(folder / "base", weights()), 1) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def ticket(swarm: Swarm) -> str:
    return swarm.ticket("--nodes", "100")


def doctor(swarm: Swarm, name: str, *words: str, **options: Any) -> tuple[dict[str, dict[str, str]], Ended]:
    """The lines of `swarm-node doctor --json` by check, and how it ended."""
    ended = swarm.command(name, "doctor", *words, "--json", **options)
    assert "Traceback" not in ended.err, ended
    report = json.loads(ended.out)
    assert ended.code == (0 if report["useful"] else 1), ended
    return {line["check"]: line for line in report["checks"]}, ended


def names(lines: dict[str, dict[str, str]], check: str, verdict: str, found: str, mend: str) -> None:
    """`check` is named with this verdict, words and remedy, and nothing else stops the machine."""
    line = lines[check]
    assert line["verdict"] == verdict, lines
    assert found in line["found"], line
    assert mend in line["mend"], line
    assert line["costs"], line
    stopping = {name for name, other in lines.items() if other["verdict"] == "stops"}
    assert stopping <= {check}, stopping


def test_a_healthy_machine_is_all_ok_and_leaves_no_trace(swarm: Swarm, ticket: str) -> None:
    lines, ended = doctor(swarm, "healthy", ticket, *PLAIN)
    assert ended.code == 0
    assert {name: line["found"] for name, line in lines.items() if line["verdict"] != "ok"} == {
        "GPU": "not needed: --engine none",
        "engines": "not needed: --engine none",
    }
    assert "Mbit/s" in lines["rate from the seed"]["found"]
    assert "Mbit/s" in lines["neighbour"]["found"]
    assert "this model (2.9 MB) needs" in lines["memory"]["found"]
    assert [path.name for path in swarm.home("healthy").iterdir()] == ["node.key"]
    swarm.until_seed("the visitor's lease has ended", lambda seed: len(seed.nodes) == 1)


def test_people_get_lines_that_fit_their_terminal(swarm: Swarm, ticket: str) -> None:
    ended = swarm.command("people", "doctor", ticket, *PLAIN, COLUMNS="80")
    assert ended.code == 0, ended
    for line in ended.out.splitlines():
        assert len(line) <= 80 or len(line[28:].split()) == 1, line  # a long path is not broken
    assert ended.out.rstrip().endswith("This machine is useful.")


def test_a_ticket_for_one_machine_is_not_spent_on_a_visit(swarm: Swarm) -> None:
    ticket = swarm.ticket("--nodes", "1", "--nodes-ever", "1")
    assert doctor(swarm, "once", ticket, *PLAIN)[1].code == 0
    assert doctor(swarm, "once", ticket, *PLAIN)[1].code == 0
    lines, _ = doctor(swarm, "another", ticket, *PLAIN)
    names(lines, "ticket", "stops", "refuses this machine", "swarm-node invite")


def test_a_home_in_which_a_node_runs_is_not_visited(swarm: Swarm, ticket: str) -> None:
    before = swarm.state("node0")["nodes"][0]["slot"]
    lines, ended = doctor(swarm, "node0", ticket, *PLAIN)
    assert ended.code == 0
    assert "a node runs in this home already" in lines["address"]["found"]
    assert swarm.state("node0")["nodes"][0]["slot"] == before


# ---------------------------------------------------------------- faults of the ticket and of the seed


def test_a_damaged_ticket(swarm: Swarm, ticket: str) -> None:
    lines, _ = doctor(swarm, "damaged", ticket[:60], *PLAIN)
    names(lines, "ticket", "stops", "cut off", "swarm-node invite")


def test_an_expired_ticket(swarm: Swarm) -> None:
    ticket = swarm.ticket("--expires", "1s")
    time.sleep(1.1)
    lines, _ = doctor(swarm, "expired", ticket, *PLAIN)
    names(lines, "ticket", "stops", "expired", "swarm-node invite")


def test_a_revoked_ticket(swarm: Swarm) -> None:
    ticket = swarm.ticket()
    swarm.json("seed", "revoke", ticket)
    lines, _ = doctor(swarm, "revoked", ticket, *PLAIN)
    names(lines, "ticket", "stops", "revoked", "swarm-node invite")


def test_a_closed_port(swarm: Swarm) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound and not listened on: the system refuses connections
        lines, _ = doctor(swarm, "closed", ticket_of(Key.generate(), sock.getsockname()[1]), *PLAIN)
    names(lines, "seed", "stops", "refused", "start the seed")


def test_another_program_at_the_seeds_address(swarm: Swarm) -> None:
    seed_port = int(swarm.json("seed", "invite")["addrs"][0].rpartition("/")[2])
    lines, _ = doctor(swarm, "other", ticket_of(Key.generate(), seed_port), *PLAIN)
    names(lines, "seed", "stops", "not this swarm's seed", "leads to another program")


@AS_ROOT
def test_no_network(swarm: Swarm) -> None:
    """In a network namespace of its own, in which not even loopback is up."""
    lines, _ = doctor(swarm, "cut", ticket_of(Key.generate(), 4001), *PLAIN, prefix=("unshare", "--net"))
    names(lines, "seed", "stops", "no route", "ip route")


@pytest.mark.parametrize(
    ("days", "verdict", "found"), [(-90, "stops", "90 days behind"), (1, "costs", "24 h ahead"), (0, "ok", "agrees")]
)
def test_a_wrong_clock(swarm: Swarm, ticket: str, tmp_path: Path, days: int, verdict: str, found: str) -> None:
    config = JoinConfig(home=tmp_path / "home", engine="none", listen=("127.0.0.1:0",))

    async def look() -> Any:
        return await gather(ticket, config, clock=lambda: time.time() + 86_400 * days)

    line = examine(trio.run(look))["clock"]
    assert (line.verdict, found in line.found) == (verdict, True), line
    assert ("timedatectl" in line.mend) == (verdict != "ok")


# ---------------------------------------------------------------- faults of the way back


def test_an_announced_port_that_does_not_lead_here(swarm: Swarm, ticket: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        lines, ended = doctor(swarm, "mapped", ticket, *PLAIN, "--announce", f"127.0.0.1:{sock.getsockname()[1]}")
    assert ended.code == 0
    names(lines, "address", "costs", "the seed cannot reach this machine at", "--announce PUBLIC-IP:PORT")


@contextmanager
def island() -> Iterator[tuple[str, ...]]:
    """The words that run a command in a network namespace with nothing but loopback."""
    script = "ip link set lo up && echo ready && exec sleep 300"
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield ("nsenter", "--target", str(holder.pid), "--net", "--")
    finally:
        holder.kill()
        holder.wait()


@AS_ROOT
def test_a_router_without_hairpin(tmp_path: Path) -> None:
    """Seed and node are in one network, and the node announces the public address, which leads nowhere from inside."""
    with island() as inside, swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(checkpoint(tmp_path / "base", weights()), prefix=inside)
        lines, _ = doctor(swarm, "here", swarm.ticket(), *PLAIN, "--announce", "8.8.4.4:4001", prefix=inside)
    names(lines, "address", "costs", "no hairpin", "--announce 127.0.0.1:")


def test_a_rented_machine_whose_port_is_not_mapped(swarm: Swarm, ticket: str) -> None:
    rented = {"PUBLIC_IPADDR": "203.0.113.9", "VAST_TCP_PORT_22": "31022"}
    announced = ("--announce", "127.0.0.1:9")
    lines, _ = doctor(swarm, "rented", ticket, *PLAIN, *announced, **rented)
    names(lines, "address", "costs", "cannot reach", "a mapped port (mapped: 22)")


def test_a_port_that_is_taken(swarm: Swarm, ticket: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        listen = ("--listen", f"127.0.0.1:{sock.getsockname()[1]}")
        lines, _ = doctor(swarm, "taken", ticket, "--engine", "none", *listen)
    names(lines, "address", "stops", "in use", "--listen with a free port")


# ---------------------------------------------------------------- faults of the machine


@AS_ROOT
def test_a_full_disk(swarm: Swarm, ticket: str) -> None:
    """The home is a tmpfs of 64 KiB that another file fills."""
    home = swarm.home("full")
    home.mkdir()
    fill = f"cat /dev/zero > {home}/ballast 2>/dev/null"
    script = f'mount -t tmpfs -o size=64k,mode=700 none {home} && {{ {fill}; exec "$@"; }}'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    lines, _ = doctor(swarm, "full", ticket, *PLAIN, prefix=prefix)
    names(lines, "disk", "stops", "No space left", "--home")


@AS_ROOT
def test_a_small_disk(swarm: Swarm, ticket: str) -> None:
    home = swarm.home("small")
    home.mkdir()
    script = f'mount -t tmpfs -o size=20m,mode=700 none {home} && exec "$@"'
    lines, _ = doctor(swarm, "small", ticket, *PLAIN, prefix=("unshare", "--mount", "sh", "-c", script, "sh"))
    names(lines, "disk", "stops", "needed", "free some space")


@contextmanager
def group(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A control group of version 1 or 2 with these limits."""
    for folder in (GROUPS / controller, GROUPS):
        made = folder / f"swarm-doctor-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if all((made / name).exists() for name in limits):
                for name, value in limits.items():
                    (made / name).write_text(value)
                yield made
                return
        finally:
            made.rmdir()
    pytest.skip(f"this machine lets us make no control group with {', '.join(limits)}")


def limit_of(controller: str, old: dict[str, str], new: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The limits in the form that this machine's control groups have."""
    return controller, old if (GROUPS / controller).is_dir() else new


@AS_ROOT
def test_too_little_memory(swarm: Swarm, ticket: str) -> None:
    size = str(230 << 20)
    with group(*limit_of("memory", {"memory.limit_in_bytes": size}, {"memory.max": size})) as folder:
        lines, _ = doctor(swarm, "lean", ticket, *PLAIN, prefix=(*ENTER, str(folder)))
    names(lines, "memory", "stops", "this model (2.9 MB) needs 0.5 GB", "swarm-node relay")


@AS_ROOT
def test_a_container_with_few_processes(swarm: Swarm) -> None:
    with group("pids", {"pids.max": "100"}) as folder:
        lines, _ = doctor(swarm, "pids", *PLAIN, prefix=(*ENTER, str(folder)))
    names(lines, "container", "stops", "at most 100", "--pids-limit")


@AS_ROOT
def test_a_container_with_half_a_core(swarm: Swarm) -> None:
    old = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    with group(*limit_of("cpu", old, {"cpu.max": "50000 100000"})) as folder:
        lines, ended = doctor(swarm, "cpu", *PLAIN, prefix=(*ENTER, str(folder)))
    assert ended.code == 0
    names(lines, "container", "costs", "0.5 of", "--cpus")


def test_a_folder_without_a_checkpoint(swarm: Swarm, tmp_path: Path) -> None:
    lines, _ = doctor(swarm, "folder", *PLAIN, "--model", str(tmp_path))
    names(lines, "model", "stops", str(tmp_path), "leave out --model")


def test_few_open_files(swarm: Swarm) -> None:
    lines, _ = doctor(swarm, "files", *PLAIN, prefix=("sh", "-c", 'ulimit -n 200 && exec "$@"', "sh"))
    names(lines, "limits", "stops", "200 open files", "ulimit -n 4096")


def test_a_gpu_that_is_not_there(swarm: Swarm) -> None:
    lines, _ = doctor(swarm, "gpu", *LOOPBACK, "--device", "cuda:63")
    if "shows no GPU" in lines["GPU"]["found"]:
        names(lines, "GPU", "stops", "no GPU", "docker run --gpus all")
    else:
        names(lines, "GPU", "stops", "cuda:63", "--device cuda")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], Path]:
    """An environment of its own in which these distributions seem to be installed; its Python."""

    def make(distributions: dict[str, str]) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        packages = next((folder / "lib").glob("python*/site-packages"))
        for name, version in distributions.items():
            info = packages / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder / "bin" / "python"

    return make


@pytest.mark.parametrize(
    ("distributions", "found", "mend"),
    [
        ({}, "has no vLLM", "--vllm-python"),
        ({"vllm": "0.10.2", "swarm_vllm": "0.1.0"}, "has vLLM 0.10.2, and 0.32 or later", "--upgrade"),
        ({"vllm": "0.32.1"}, "without the swarm's plugin", "pip install --no-deps"),
    ],
)
def test_a_vllm_that_does_not_work(
    swarm: Swarm, bare: Callable[[dict[str, str]], Path], distributions: dict[str, str], found: str, mend: str
) -> None:
    lines, _ = doctor(swarm, "vllm", *LOOPBACK, "--engine", "vllm", "--vllm-python", str(bare(distributions)))
    names(lines, "engine", "stops", found, mend)


def test_a_vllm_that_works(swarm: Swarm, bare: Callable[[dict[str, str]], Path]) -> None:
    python = bare({"vllm": "0.32.1", "swarm_vllm": "0.1.0"})
    lines, ended = doctor(swarm, "works", *LOOPBACK, "--engine", "vllm", "--vllm-python", str(python))
    assert (lines["engine"]["verdict"], ended.code) == ("ok", 0)
