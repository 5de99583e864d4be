"""Adapters that are published to real seeds and nodes, and processes that are killed in the middle of it."""

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from adapter_trainer import adapter
from kit import all_hold, check, holds

from codec import Checkpoint, Layout, Replica, TensorSpec, write_checkpoint
from codec.adapter import AdapterConfig, AdapterSlots
from codec.parts import extended
from node.host.port import free_port
from node.trainers.tensors.adapter_slot import slot_bits, slot_config
from node.trainers.tensors.plain_lora import plain_lora
from scenarios.harness.processes import PATIENCE_S
from scenarios.harness.swarm import Swarm, swarm_in

HERE = Path(__file__).parent
CONFIG = b'{"model_type": "none"}'
SLOTS = ("--adapters", "4", "--adapter-rank", "64")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A seed with four slots, at a port that it keeps, and two nodes."""
    base = tmp_path / "base"
    rng = np.random.default_rng(0)
    layout = Layout(tuple(TensorSpec(f"layers.{i}.up.weight", "BF16", (512, 256)) for i in range(4)))
    bits = {t.name: (rng.standard_normal(t.elements).astype(np.float32).view(np.uint32) >> 16) for t in layout.tensors}
    write_checkpoint(base, layout, lambda name: bits[name].astype(np.uint16), {"config.json": CONFIG})
    with swarm_in(tmp_path) as swarm:
        swarm.at = ("--listen", f"127.0.0.1:{free_port()}")
        swarm.seed(base, *swarm.at, *SLOTS)
        ticket = swarm.ticket()
        swarm.node("box", ticket, "--model", str(base))
        swarm.node("bare", ticket)
        swarm.until("seed", all_hold([0, 0], 2))
        yield swarm
        for path in tmp_path.glob("*.log"):
            text = path.read_text(errors="replace")
            assert "Traceback" not in text, path
            assert "This is a bug" not in text, path


class Trainer:
    """A process that publishes an adapter."""

    def __init__(self, swarm: Swarm, name: str, first: int, count: int, pause_s: float = 0.0) -> None:
        home, base = swarm.home("seed"), swarm.folder / "base"
        words = [str(home), name, str(base), str(first), str(count), str(pause_s)]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "adapter_trainer.py"), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def rows(self, within_s: float = PATIENCE_S) -> list[dict[str, int]]:
        """What it has published; it must end well."""
        out, err = self.process.communicate(timeout=within_s)
        assert self.process.returncode == 0, err[-3000:]
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> list[dict[str, int]]:
        self.process.kill()
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return [json.loads(line) for line in out.splitlines()]


def expected_root(base: Path, held: dict[int, tuple[str, int, int]]) -> str:
    """The root of a swarm whose slots hold these adapters: (name, step, the adapter's own version) by slot."""
    checkpoint = Checkpoint.open(base)
    slots = AdapterSlots.reserve(checkpoint.layout, 4, 64)
    replica = Replica.create(extended(checkpoint.layout, slots))
    for name in checkpoint.names:
        _write(replica, name, checkpoint.bits(name))
    for slot, (name, step, own) in held.items():
        source: Any = plain_lora(adapter(name, step, base), name, lambda module: lambda found: found)
        config = slot_config(source, name, checkpoint.layout, slots)
        raw, weights = slot_bits(source, config, slots)
        raw = raw.copy()
        raw[4:12] = np.frombuffer(own.to_bytes(8, "little"), np.uint8)
        decoded = AdapterConfig.from_bytes(raw.tobytes())
        assert decoded is not None
        assert decoded.version == own
        _write(replica, f"~adapter/{slot:02}/config", raw)
        _write(replica, f"~adapter/{slot:02}/weights", weights)
    replica.rehash()
    return replica.root.hex()


def _write(replica: Replica, name: str, bits: Any) -> None:
    at = 0
    for block in replica.layout.blocks_of(name):
        count = replica.layout.block(block).count
        replica._writable(block)[:] = bits[at : at + count]
        at += count


def all_at(swarm: Swarm, version: int, root: str) -> None:
    state = swarm.until("seed", all_hold([0, version], 2))
    assert state["root"] == root
    for name in ("box", "bare"):
        swarm.until(name, holds(root))


@pytest.mark.slow
def test_two_adapters_and_the_commands(swarm: Swarm) -> None:
    base = swarm.folder / "base"
    one, two = Trainer(swarm, "one", 1, 4), Trainer(swarm, "two", 1, 4)
    rows = [trainer.rows() for trainer in (one, two)]
    assert sorted(row["version"] for found in rows for row in found) == list(range(1, 9))
    assert [[row["own"] for row in found] for found in rows] == [[1, 2, 3, 4]] * 2
    slots = {row["slot"]: row["name"] for row in swarm.json("seed", "adapters")["adapters"]}
    assert sorted(slots.items()) in ([(0, "one"), (1, "two")], [(0, "two"), (1, "one")])
    all_at(swarm, 8, expected_root(base, {slot: (name, 4, 4) for slot, name in slots.items()}))

    own = {
        (name, row["version"]): row["own"] for name, found in zip(("one", "two"), rows, strict=True) for row in found
    }
    assert changes(swarm) == [(version, False, {name: n}) for (name, version), n in sorted(own.items(), key=_version)]

    folder = swarm.folder / "saved"
    _save(folder, "two", 9, base)
    report = swarm.json("seed", "publish", str(folder), "--adapter", "two", "--wait")
    assert (report["adapter"], report["adapter_version"], report["version"]) == ("two", 5, 9)
    steps = {"one": (4, 4), "two": (9, 5)}
    all_at(swarm, 9, expected_root(base, {slot: (name, *steps[name]) for slot, name in slots.items()}))

    listed = swarm.json("seed", "adapters")
    assert (listed["slots"], listed["rank"]) == (4, 64)
    assert {row["name"]: row["version"] for row in listed["adapters"]} == {"one": 4, "two": 5}
    assert "2 of 4 slots are in use" in swarm.command("seed", "adapters").out

    said = swarm.command("seed", "remove-adapter", "one")
    assert said.code == 0, said
    assert "Version 10: without the adapter one." in said.out
    left = {slot: (name, 9, 5) for slot, name in slots.items() if name == "two"}
    all_at(swarm, 10, expected_root(base, left))
    check(swarm.command("seed", "remove-adapter", "one"), 2, r"no adapter 'one'; it has: two\.")
    check(swarm.command("seed", "publish", str(base), "--adapter", "x"), 2, r"adapter_config\.json")
    check(swarm.command("seed", "publish", str(folder), "--adapter", "x/y"), 2, "characters")
    check(swarm.command("seed", "publish", str(folder), "--adapter", "x", "--raw"), 2, "exclude each other")
    said = swarm.command("seed", "publish", str(folder), "--adapter", "one")
    assert "adapter one version 1" in said.out, said
    left = {slot: (name, 9, 5 if name == "two" else 1) for slot, name in slots.items()}
    swarm.until("seed", all_hold([0, 11], 2))


def _version(item: tuple[tuple[str, int], int]) -> int:
    return item[0][1]


def changes(swarm: Swarm) -> list[tuple[int, bool, dict[str, int]]]:
    """What the seed's ledger knows that each version changed: (number, base, adapters by name)."""
    with contextlib.closing(sqlite3.connect(swarm.home("seed") / "ledger.sqlite")) as book:
        rows = book.execute("select version, base, adapters from part_changes order by epoch, version").fetchall()
    return [(version, bool(base), msgspec.msgpack.decode(packed)) for version, base, packed in rows]


def _save(folder: Path, name: str, step: int, base: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    config, tensors = adapter(name, step, base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.long
def test_a_trainer_killed_in_the_middle_of_an_adapters_version(swarm: Swarm) -> None:
    """Nobody sees the version that it left; another adapter's trainer goes on, and a restarted one continues."""
    rng, base = random.Random(3), swarm.folder / "base"
    steady = Trainer(swarm, "steady", 1, 40, 0.1)
    own = step = 0
    for _ in range(4):
        mortal = Trainer(swarm, "mortal", step + 1, 1000)
        assert mortal.process.stdout is not None
        line = json.loads(mortal.process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.3))
        rows = [line, *mortal.kill()]
        step = rows[-1]["step"]
        own = rows[-1]["own"]
    last = Trainer(swarm, "mortal", 500, 1).rows()[-1]
    assert last["own"] in range(own + 1, own + 3), "at most one more version was sealed than the trainer heard of"
    rows = steady.rows(120)
    assert [row["own"] for row in rows] == list(range(1, 41)), "none of its versions was lost, or sent twice"
    version = max(rows[-1]["version"], last["version"])
    held = {0: ("steady", 40, 40), 1: ("mortal", 500, last["own"])}
    if expected_root(base, held) != swarm.state("seed")["root"]:
        held = {1: held[0], 0: held[1]}
    all_at(swarm, version, expected_root(base, held))


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_seed_killed_in_the_middle_of_an_adapters_version(swarm: Swarm, both: bool) -> None:
    """The version is sent again when it is back. `both`: the trainer is killed too, and continues where it was."""
    rng, base = random.Random(4), swarm.folder / "base"
    step, own = 1, 0
    for _ in range(3):
        trainer = Trainer(swarm, "a", step, 6 if not both else 1000)
        assert trainer.process.stdout is not None
        row = json.loads(trainer.process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.2))
        swarm.signal("seed", signal.SIGKILL)
        rows = [row, *trainer.kill()] if both else [row]
        time.sleep(0.2)
        swarm.seed(base, *swarm.at)
        if not both:
            rows += trainer.rows(60)
            assert [found["own"] for found in rows] == list(range(own + 1, own + 7)), "each was sealed once"
        step, own = rows[-1]["step"] + 1, rows[-1]["own"]
    row = Trainer(swarm, "a", 700, 1).rows()[-1]
    assert row["own"] in (range(own + 1, own + 3) if both else range(own + 1, own + 2))
    all_at(swarm, row["version"], expected_root(base, {0: ("a", 700, row["own"])}))
