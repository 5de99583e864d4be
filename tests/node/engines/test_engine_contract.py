"""The engines that need no vLLM pass the contract of `Engine`. vLLM's run is in `vllm/test_vllm_updates.py`."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_contract import AdapterContract, EngineContract, Subject

from codec import Checkpoint, Replica
from node.engines.interface import Engine, SharedReplica

sys.path.append(str(Path(__file__).parents[1]))
from numpy_engine import NumpyEngine


def attached(make: Callable[[], Engine], base: Path, folder: Path) -> Subject:
    """An engine at version 0 of `base`, filled as a node fills it: from the replica, with the small files beside it."""
    checkpoint = Checkpoint.open(base)
    for name, data in checkpoint.files.items():
        (folder / name).write_bytes(data)
    replica = Replica.from_checkpoint(checkpoint)
    subject = Subject(make(), replica)
    subject.engine.attach_replica(SharedReplica(replica, replica.seal_for_readers(), folder))
    assert subject.reload() == replica.root
    return subject


class TestNumpyEngine(EngineContract, AdapterContract):
    @pytest.fixture
    def subject(self, tied_folder: Path, tmp_path: Path) -> Subject:
        return attached(NumpyEngine, tied_folder, tmp_path)

    @pytest.fixture
    def detached(self) -> Engine:
        return NumpyEngine()


class TestTransformersEngine(EngineContract, AdapterContract):
    @pytest.fixture
    def subject(self, untied_folder: Path, tmp_path: Path) -> Subject:
        return attached(self.make, untied_folder, tmp_path)

    @pytest.fixture
    def detached(self) -> Engine:
        return self.make()

    def make(self) -> Engine:
        from node.engines.transformers import TransformersEngine

        return TransformersEngine(threads=1, device="cpu")
