"""What a start would find after a power failure: what is durable passes; what was promised and is not is noticed."""

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from codec import Checkpoint, FileSpec, Layout, TensorSpec, write_checkpoint
from codec.sign import Key
from node.coordinator.recovery import open_newest_version
from node.host.endpoint import store_folder
from node.ledger.book import LEDGER, Book
from scenarios.hunt.machine import Machine, Tally
from scenarios.hunt.oracle import Oracle
from scenarios.hunt.restarts import Restarts
from scenarios.hunt.schedule import SEED
from swarm.protocol.core.version import VersionId
from swarm.runtime.replica.model import Model
from swarm.store import Store

KEY = Key(b"k" * 32)
CONFIG = b"{}"
LAYOUT = Layout((TensorSpec("a", "BF16", (8, 40)),), (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))


async def nothing() -> None:
    pass


def seed_with_version_0(folder: Path) -> tuple[Machine, Restarts]:
    """A seed that has run once."""
    base, bits = folder / "base", np.arange(320, dtype=np.uint16)
    write_checkpoint(base, LAYOUT, lambda name: bits, {"config.json": CONFIG})
    oracle = Oracle(LAYOUT)
    oracle.roots[VersionId(0, 0)] = oracle.begun((bits,))
    machine = Machine(SEED, KEY, folder / SEED, random.Random(1), oracle, Tally(), nothing)
    with Store(store_folder(machine.home, KEY.public), KEY.public) as store, closing(Book(machine.home / LEDGER)):
        open_newest_version(store, Model(store, base=base), Checkpoint.open(base), LAYOUT, KEY)
        store.records.put([("boot", b"7")])
    return machine, Restarts(folder / "restart", base, LAYOUT, 1)


def look_often(machine: Machine, restarts: Restarts) -> set[str]:
    look = restarts.of_seed(machine)
    for _ in range(30):
        look("Announce")
    assert machine.tally.looks > 5
    assert not (machine.home.parent / "restart").exists()
    return {violation.name for violation in machine.oracle.violations}


def test_what_is_durable_is_found(tmp_path: Path) -> None:
    machine, restarts = seed_with_version_0(tmp_path)
    machine.disk.settle()
    machine.oracle.booted(7, SEED)
    before = sorted(path for path in machine.home.rglob("*"))
    assert look_often(machine, restarts) == set()
    assert sorted(path for path in machine.home.rglob("*")) == before


@pytest.mark.parametrize(
    ("promised", "missed"),
    [("version", "no sealed version lost"), ("boot", "no boot number twice"), ("lease", "no lease id twice")],
)
def test_what_was_promised_and_is_not_there_is_noticed(tmp_path: Path, promised: str, missed: str) -> None:
    machine, restarts = seed_with_version_0(tmp_path)
    machine.disk.settle()
    match promised:
        case "version":
            machine.oracle.roots[VersionId(0, 1)] = bytes(32)
        case "boot":
            machine.oracle.booted(8, SEED)
        case "lease":
            machine.oracle.leased(5, 5)
    assert look_often(machine, restarts) == {missed}
