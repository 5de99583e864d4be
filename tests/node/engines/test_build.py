"""A model built from its config and filled from a replica equals the model that is loaded from the folder."""

from pathlib import Path

import pytest

from codec import Checkpoint, Replica
from codec.errors import UsageError
from node.engines.base import Prompt, SamplingParams

pytest.importorskip("torch")
from node.engines.transformers import TransformersEngine


@pytest.mark.parametrize("which", ["tied_folder", "untied_folder"])
def test_an_engine_filled_from_the_replica_equals_a_loaded_one(which, request, tmp_path: Path):
    folder = request.getfixturevalue(which)
    checkpoint = Checkpoint.open(folder)
    replica = Replica.from_checkpoint(checkpoint)
    for name, data in checkpoint.files.items():  # all that a node without a checkpoint has besides the bits
        (tmp_path / name).write_bytes(data)
    built, loaded = TransformersEngine(threads=1, device="cpu"), TransformersEngine(threads=1, device="cpu")
    loaded.load(folder)
    loaded.attach(checkpoint.layout)
    built.load(tmp_path, weights=False)
    built.attach(replica.layout)
    built.reload(replica.bits, (0, 0), replica.root)
    assert (built.live_hashes(replica.layout) == replica.hashes).all()
    prompts, sampling = [Prompt((1, 2, 3), stream=i) for i in range(4)], SamplingParams(max_tokens=12)
    assert built.generate(prompts, sampling) == loaded.generate(prompts, sampling)


def test_a_missing_or_empty_config_is_reported_in_a_sentence(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        TransformersEngine(threads=1, device="cpu").load(tmp_path, weights=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="does not describe"):
        TransformersEngine(threads=1, device="cpu").load(tmp_path, weights=False)
