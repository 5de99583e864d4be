"""The devices of a machine as its engines see them, and refusals before a node joins."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from codec import FileSpec, Layout, TensorSpec, write_checkpoint
from codec.errors import UsageError
from codec.sign import Key
from node.cli.app import run
from node.engines import devices, visible_gpus
from node.engines.device_plan import Gpu, ModelNeeds
from node.engines.devices import check_numbers, machine_of, needs_of_folder, needs_of_layout, needs_the_model, plan_of
from node.engines.visible_gpus import ask_gpus, named_gpus
from node.settings.config import JoinConfig
from node.settings.ticket import Ticket

GB = 10**9
CONFIG = {
    "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 96, "head_dim": 8,
    "max_position_embeddings": 1000,
}  # fmt: skip
A_TOKEN = 2 * 2 * 4 * 8 * 2
"""Bytes of a token's keys and values, by that config."""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose torch sees two GPUs of 80 GB."""
    path = tmp_path / "python"
    said = json.dumps(["12.8", True, [["NVIDIA H100", 80 * GB]] * 2])
    path.write_text(f"#!/bin/sh\necho 'a warning of torch'\necho '{said}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "gpu_files", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    visible_gpus.visible_gpus.cache_clear()
    yield
    visible_gpus.visible_gpus.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 20,000 bytes."""
    from blake3 import blake3

    folder, config = tmp_path_factory.mktemp("model") / "base", json.dumps(CONFIG).encode()
    layout = Layout(
        (TensorSpec("w", "BF16", (10_000,)),), (FileSpec("config.json", len(config), blake3(config).digest()),)
    )
    write_checkpoint(folder, layout, lambda name: np.zeros(10_000, np.uint16), {"config.json": config})
    return folder


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("0", "1")),
        ("", ("0", "1")),  # torch would see none then; what it says counts
        ("3,1", ("3", "1")),
        ("GPU-5bd0e6a1, MIG-7f3c", ("GPU-5bd0e6a1", "MIG-7f3c")),
        ("4,5,-1,6", ("4", "5")),
    ],
)
def test_gpus_have_the_names_of_the_environment(visible: str | None, names: tuple[str, ...]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert named_gpus([80 * GB, 40 * GB], environment) == (Gpu(names[0], 80 * GB), Gpu(names[1], 40 * GB))


def test_the_torch_of_the_engines_environment_is_asked(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    found = ask_gpus(python)
    assert (found.cuda, found.usable, found.models) == ("12.8", True, ("NVIDIA H100",) * 2)
    assert found.gpus == (Gpu("6", 80 * GB), Gpu("7", 80 * GB))


@pytest.mark.parametrize("script", ["exit 3", "echo nonsense", "echo '[1]'", "true", "echo '[\"\", true, [[1]]]'"])
def test_a_python_that_cannot_say_has_no_gpus(tmp_path: Path, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    found = ask_gpus(path)
    assert (found.gpus, found.usable, bool(found.error)) == ((), False, True)
    assert ask_gpus(tmp_path / "none").error


@pytest.mark.usefixtures("on_gpus")
def test_flags_for_more_gpus_than_there_are_are_refused_before_the_node_joins(tmp_path: Path, python: Path) -> None:
    def config(**flags: object) -> JoinConfig:
        return JoinConfig(home=tmp_path / "home", engine="vllm", vllm_python=python, **flags)  # type: ignore[arg-type]

    check_numbers(config())
    check_numbers(config(engines=2))
    for flags, sentence in (({"engines": 3}, "--engines 3: .* 2 GPUs"), ({"engines": 2, "tp": 2}, "--tp 2: .* 2 GPUs")):
        with pytest.raises(UsageError, match=sentence):
            check_numbers(config(**flags))
    check_numbers(JoinConfig(home=tmp_path, engine_url=("http://127.0.0.1:1",)))
    check_numbers(JoinConfig(home=tmp_path, engine="none"))


@pytest.mark.usefixtures("on_gpus")
def test_with_the_models_folder_its_heads_and_bytes_count_too(tmp_path: Path, python: Path, folder: Path) -> None:
    config = JoinConfig(home=tmp_path / "home", engine="sglang", sglang_python=python, model=folder)
    check_numbers(config)
    with pytest.raises(UsageError, match=r"--tp 5: .*12 attention heads"):
        check_numbers(JoinConfig(home=tmp_path / "home", engine="sglang", sglang_python=python, model=folder, tp=5))


@pytest.mark.usefixtures("on_gpus")
def test_a_box_with_gpus_is_used_whole_without_flags(tmp_path: Path, python: Path) -> None:
    config = JoinConfig(home=tmp_path, engine="vllm", vllm_python=python)
    machine = machine_of(config)
    assert needs_the_model(config, machine)
    plan = plan_of(config, machine, ModelNeeds(16 * GB, 32))
    assert [share.gpus for share in plan.shares] == [("0",), ("1",)]
    # The reference engine takes one GPU, unless it is told otherwise.
    one = JoinConfig(home=tmp_path, engine="transformers")
    assert machine_of(one).gpus == ()
    assert len(plan_of(one, machine_of(one), None).shares) == 1


def test_without_a_gpu_there_is_one_engine_on_the_cpu_or_as_many_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_files", lambda: False)
    config = JoinConfig(home=tmp_path, engine="vllm", vllm_python=Path("/no/python"))
    assert not needs_the_model(config, machine_of(config))
    assert str(plan_of(config, machine_of(config), None)) == "1 engine on the CPU"
    two = JoinConfig(home=tmp_path, engine="transformers", engines=2)
    assert [bool(share.cores) for share in plan_of(two, machine_of(two), None).shares] == [True, True]


def test_a_models_needs_are_those_of_its_folder_and_of_its_layout(tmp_path: Path, folder: Path) -> None:
    config = JoinConfig(home=tmp_path, engine="vllm")
    found = needs_of_folder(config, folder)
    assert found == ModelNeeds(20_000, 12, 1000 * A_TOKEN, 4)
    from codec import Checkpoint

    layout = Checkpoint.open(folder).layout
    data = (folder / "config.json").read_bytes()
    assert needs_of_layout(config, layout, lambda _: data, drafted=False) == found
    for missing in (None, b"[]", b"no json", b"[" * 10_000, b'"\xff"'):
        assert needs_of_layout(config, layout, lambda _, data=missing: data, drafted=False) == ModelNeeds(20_000)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ((), 1000),
        (("--max-model-len=64",), 64),
        (("--max-model-len", "2k"), 2000),
        (("--max-model-len=1K", "--seed=3"), 1024),
        (("--max-model-len=auto",), 1000),
        (("--seed", "7"), 1000),
    ],
)
def test_a_shorter_context_needs_less(tmp_path: Path, folder: Path, flags: tuple[str, ...], tokens: int) -> None:
    config = JoinConfig(home=tmp_path, engine="vllm", vllm_arg=flags)
    assert needs_of_folder(config, folder).cache_bytes == tokens * A_TOKEN


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--engines", "3"], "--engines 3: this machine has 2 GPUs"),
        (["--tp", "5"], "12 attention heads, which 5 ranks cannot divide"),
        (["--tp", "2", "--engines", "2"], "--engines 2 --tp 2: this machine has 2 GPUs"),
        (["--engine", "transformers", "--engines", "3"], "--engines 3: this machine has 2 GPUs"),
    ],
)
def test_join_refuses_the_impossible_before_it_looks_for_the_swarm(
    tmp_path: Path,
    folder: Path,
    flags: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    python = tmp_path / "python"
    gpus = json.dumps(["12.8", True, [["NVIDIA H100", 80 * GB]] * 2])
    packages = json.dumps([["vllm", "0.32.0"], ["swarm-vllm", "0.5.0"]])
    python.write_text(f"#!/bin/sh\ncase \"$2\" in\n*importlib*) echo '{packages}';;\n*) echo '{gpus}';;\nesac\n")
    python.chmod(0o755)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    if "transformers" in flags:
        monkeypatch.setattr(devices.sys, "executable", str(python))
        monkeypatch.setattr("node.settings.extras.find_spec", lambda name: name)
    ticket = str(Ticket(Key(bytes(32)).public, ("/ip4/203.0.113.7/tcp/4001",), b"sealed", "wan"))
    words = ["join", ticket, "--engine", "vllm", "--vllm-python", str(python), "--model", str(folder), *flags]
    if "transformers" in flags:
        words = ["join", ticket, "--model", str(folder), *flags]
    assert run(words) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert not list((tmp_path / "home").glob("swarm-*")), "nothing of the swarm was opened"
