"""Each short example runs as a script, on a tiny model. Most use a seed without a network and a fake node."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from seed_kit import FakeSeed, RunningSeed, running

from codec import Checkpoint, Replica
from node import Swarm
from node.ledger.messages import Rollout, VersionSpan, WorkLease, seal_rollout, work_hash
from node.ledger.packing import pack_floats, pack_tokens
from scenarios.harness.swarm import LOOPBACK, swarm_in

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of 30,000 parameters that sorts three letters, badly."""
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny

    recipe = TinyRecipe(letters=3, hidden=32, inner=64, layers=2, heads=2, kv_heads=1, steps=2, rows=8, spread=0.1)
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder, recipe, lambda line: None)
    return folder


@pytest.fixture
def seed(base: Path, tmp_path: Path) -> Any:
    """A seed of `base` that serves `tmp_path`, and whose node answers with as many tokens as are asked for."""
    fake = FakeSeed(Replica.from_checkpoint(Checkpoint.open(base)))
    fake.files = {path.name: path.read_bytes() for path in base.iterdir() if path.suffix == ".json"}
    with running(tmp_path, fake) as there:
        there.node.draw = lambda lease, sample: draw(there, lease, sample)
        yield there


def draw(there: RunningSeed, lease: WorkLease, sample: int) -> bytes:
    """A rollout of `max_tokens` letters, signed by the seed's node."""
    count = lease.sampling.max_tokens
    rollout = Rollout(
        lease=lease.lease,
        token=lease.token,
        sample=sample,
        work=work_hash(lease.group, sample, lease.prompt, lease.sampling),
        token_ids=pack_tokens(tuple((sample + i) % 26 for i in range(count))),
        logprobs=pack_floats((-3.0,) * count),
        finish_reason="length",
        spans=(VersionSpan(*there.seed.head, there.seed.replica.root, count),),
    )
    return seal_rollout(there.node.key, rollout)


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    """What `python examples/NAME WORDS` does, in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_publish_loop_publishes_each_step(
    seed: RunningSeed, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(monkeypatch, "publish_loop.py", "--base", base, "--home", tmp_path, "--steps", 3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 3 + 1
    assert lines[-1].startswith("version 0.3: ")
    assert seed.seed.head == (0, 3)


def test_a_checkpoint_folder_is_published(
    seed: RunningSeed, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(base, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, checkpoint / "model.safetensors")
    run_script(monkeypatch, "publish_checkpoint.py", checkpoint, "--home", tmp_path, "--step", 500)
    root = Replica.from_checkpoint(Checkpoint.open(checkpoint)).root.hex()
    assert capsys.readouterr().out.startswith(f"version 0.1 root {root} delta ")
    assert seed.seed.receiver.root.hex() == root


def test_an_openai_client_gets_completions(
    seed: RunningSeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Swarm.attach(home=tmp_path, start=False) as swarm:
        run_script(monkeypatch, "openai_client.py", "cab>", "--url", swarm.openai_url, "--max-tokens", 4)
    assert capsys.readouterr().out.splitlines() == ["length [(0, 0)] 'abcd'", "length [(0, 0)] 'bcde'"]


@pytest.fixture
def sizes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference trainer's `tiny`, replaced by `base`, which takes no warm-up."""
    from node.trainers.grpo import sizes
    from node.trainers.grpo.task import SortLetters
    from node.trainers.grpo.trainer import GrpoConfig

    config = GrpoConfig(lr=1e-3, prompts=2, samples=4)
    monkeypatch.setitem(sizes.SIZES, "tiny", sizes.Size(lambda progress: base, lambda folder: SortLetters(3), config))


STEP = re.compile(r"step (\d+) version 0\.(\d+) reward [\d.]+ loss [+-][\d.]+ density [\d.]+% delta \d+ bytes")


@pytest.mark.usefixtures("sizes")
def test_the_reference_trainer_steps_and_publishes(
    seed: RunningSeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(monkeypatch, "reference_grpo.py", "--home", tmp_path, "--steps", 2)
    found = [STEP.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert [match and match.groups() for match in found] == [("1", "1"), ("2", "2")]
    assert seed.seed.head == (0, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("sizes")
def test_the_reference_trainer_over_real_processes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed and a node that runs transformers, as processes of their own."""
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        words = ("join", swarm.ticket(), "--engine", "transformers", "--threads", "1", *LOOPBACK)
        swarm.start("node", *words)
        swarm.until("seed", lambda state: len(state["nodes"]) == 1 and state["nodes"][0]["engine"] is not None)
        run_script(monkeypatch, "reference_grpo.py", "--home", swarm.home("seed"), "--steps", 2)
    found = [STEP.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert [match and match.groups() for match in found] == [("1", "1"), ("2", "2")]
