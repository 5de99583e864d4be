"""What a version changed, however early or late the runtime confirms it."""

import numpy as np
import pytest
from seed_kit import random_replica

from codec import Layout, Replica, TensorSpec
from codec.adapter import AdapterConfig, AdapterModule, AdapterSlots
from codec.parts import BASE, Part, extended
from node.coordinator.adapters import AdaptersHeld
from node.coordinator.version_changes import VersionChanges
from node.ledger.part_history import Change
from swarm.protocol.core.events import VersionId

SMALL = Layout((TensorSpec("up.weight", "BF16", (64, 64)),))
PARTED = extended(SMALL, AdapterSlots.reserve(SMALL, 2, 4))
ONE, TWO = VersionId(0, 1), VersionId(0, 2)
MATH = frozenset({Part.adapter(0)})


def write(replica: Replica, slot: int, name: str, own: int) -> None:
    config = AdapterConfig(name, SMALL.hash, 4, 8.0, (AdapterModule("up", 4),), {}, own)
    (block,) = replica.layout.blocks_of(f"~adapter/{slot:02}/config")
    replica._writable(block)[:] = np.frombuffer(config.to_bytes(), np.uint8)
    replica.rehash()


@pytest.fixture
def replica() -> Replica:
    replica = random_replica(PARTED)
    for slot, name in enumerate(("math", "code")):
        write(replica, slot, name, 1)
    return replica


def test_confirmed_while_it_is_being_sealed(replica: Replica) -> None:
    changes = VersionChanges(AdaptersHeld(replica))
    with changes.sealing(ONE, MATH):
        write(replica, 0, "math", 2)
        assert changes.confirmed(ONE) == Change(False, frozenset({"math"}), {"math": 2, "code": 1})
    with changes.sealing(TWO, frozenset({BASE})):
        assert changes.confirmed(TWO) == Change(True, frozenset(), {"math": 2, "code": 1})


def test_confirmed_after_the_next_one_has_begun(replica: Replica) -> None:
    changes = VersionChanges(AdaptersHeld(replica))
    with changes.sealing(ONE, MATH):
        write(replica, 0, "math", 2)
    with changes.sealing(TWO, MATH):
        write(replica, 0, "math", 3)
        assert changes.confirmed(ONE) == Change(False, frozenset({"math"}), {"math": 2, "code": 1})
    assert changes.confirmed(TWO) == Change(False, frozenset({"math"}), {"math": 3, "code": 1})


def test_a_version_that_another_process_sealed_changed_everything(replica: Replica) -> None:
    changes = VersionChanges(AdaptersHeld(replica))
    assert changes.confirmed(ONE) == Change(True, frozenset({"math", "code"}), {"math": 1, "code": 1})


def test_a_version_that_could_not_be_sealed_leaves_nothing(replica: Replica) -> None:
    changes = VersionChanges(AdaptersHeld(replica))
    with pytest.raises(OSError, match="full"), changes.sealing(ONE, MATH):
        raise OSError("full")
    assert changes.confirmed(ONE).base
