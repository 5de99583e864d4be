"""Engines that cannot be written in place: loaded by module, with the time in the log, or refused with a sentence."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from codec import Checkpoint, Replica, write_checkpoint, write_patch
from codec.errors import UsageError
from node.engines.base import EngineError, Prompt, SamplingParams
from node.engines.host import EngineHost
from node.engines.interface import WeightPatch
from node.engines.replica_ref import ReplicaRef
from node.engines.server_specs import specs_of
from node.engines.vllm.installed import installed
from node.engines.vllm.server import environment
from node.host.port import free_port
from node.settings.config import JoinConfig
from scenarios.engines.engine_bench import SMALL, Bench, bench
from scenarios.engines.engine_models import make_wide_norms, step_of

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(3 + i, 40 + i)) for i in range(3)]


@pytest.mark.long
def test_weights_in_another_form_are_loaded_by_module(python: Path):
    """The short scenario: weights that are quantized, repacked in the same shape, or copied elsewhere.

    Each is found and loaded, with the time in the log; bits and tokens are those of a fresh engine.
    """
    command = [sys.executable, "-m", "scenarios.engines.updates", "--short", "--threads", "1", "--json"]
    env = os.environ | {"VLLM_PYTHON": str(python)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)
    assert row["updates"] == row["bits_equal"] == row["tokens_equal"] == row["logprobs_equal"] == 3
    forms = (
        "in another form: quantized",
        "it is repacked",
        "2.mlp.down_proj.twin is",
        "3.mlp.down_proj.cpu_linear.packed",
    )
    for form in forms:
        assert any(form in why for why in row["loaded"]), form
    assert sum(row["loaded"].values()) < 40, "tensors in the checkpoint's form must be scattered"
    loads = [json.loads(line) for line in done.stderr.splitlines() if '"event": "loaded"' in line]
    assert any(load.get("version") and load["seconds"] > 0 for load in loads), "the log lacks the time of a load"


@pytest.mark.long
def test_fp8_on_a_cpu_is_refused_in_a_sentence(untied: Path, python: Path, tmp_path: Path):
    sentence = (
        r"^vLLM ended before it served: it has no kernel for fp8 weights on this machine\. Leave out --quantization"
    )
    more = (*SMALL, "--quantization", "fp8")
    with pytest.raises(UsageError, match=sentence), bench(untied, tmp_path / "home", python, more=more, threads=1):
        raise AssertionError("fp8 weights on a CPU were let in")


@contextlib.contextmanager
def users_own(folder: Path, python: Path, log: Path) -> Iterator[str]:
    """A vLLM as a user starts it, with the plugin."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--dtype", "bfloat16", "--served-model-name", "policy", "--enforce-eager", *SMALL]
    command += ["--weight-transfer-config", '{"backend": "swarm"}', "--logprobs-mode", "processed_logprobs"]
    command += ["--middleware", "swarm_vllm.front.SwarmFront"]
    assert installed(python).cpu
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(os.environ, 1, True, 1), start_new_session=True
        )
    try:
        from node.engines.server_process import answers

        while not answers(port):
            assert process.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.long
def test_a_users_vllm_is_updated_by_module_and_outlives_its_drivers(untied: Path, python: Path, fresh, tmp_path: Path):
    folder = make_wide_norms(untied, tmp_path / "wide")
    norms = {t.name for t in Checkpoint.open(folder).layout.tensors if t.dtype == "F32"}
    with users_own(folder, python, tmp_path / "vllm.log") as url:
        with bench(folder, tmp_path / "one", python, url=url) as live:
            assert set(live.engine.classes.loaded) == norms
            assert all("float32 in the checkpoint" in why for why in live.engine.classes.loaded.values())
            for _ in range(2):
                live.update(step_of(live.replica, live.version))
                assert (live.engine.live_hashes() == live.replica.hashes).all()
            greedy = live.greedy(PROMPTS, 16)
            write_checkpoint(tmp_path / "now", live.replica.layout, live.replica.bits, live.checkpoint.files)
            assert fresh([tmp_path / "now"], PROMPTS, 16) == [greedy]
            _too_late_for_its_modules(live)

        # the first driver is gone; the engine holds a later version than its folder, and a second driver takes over
        with bench(folder, tmp_path / "two", python, url=url) as live:
            assert set(live.engine.classes.loaded) == norms
            live.update(step_of(live.replica, 7))
            assert (live.engine.live_hashes() == live.replica.hashes).all()

        # as a node attaches: swarm-node join --engine-url
        trio.run(_followed_by_a_node, url, folder, tmp_path)

        # a changed tokenizer is refused
        for path in folder.iterdir():
            if path.name == "tokenizer_config.json":
                path.write_text(path.read_text() + " ")
        other = make_wide_norms(untied, tmp_path / "other")
        with (
            pytest.raises(UsageError, match=r"vLLM's tokenizer_config\.json is not the swarm's"),
            bench(other, tmp_path / "three", python, url=url),
        ):
            raise AssertionError("another tokenizer was let in")


async def _followed_by_a_node(url: str, folder: Path, home: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    replica = Replica.from_checkpoint(checkpoint)

    async def source() -> ReplicaRef:
        return ReplicaRef(replica.layout, replica.seal_for_readers(), folder, (0, 0), replica.root)

    (spec,) = specs_of(JoinConfig(home=home, engine_url=(url,)))
    host = EngineHost(spec, source)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            await host.wait_ready()
            assert await host.prove() == replica.root
            (completion,), _ = await host.generate([Prompt((1, 2))], SamplingParams(max_tokens=2))
            assert completion.spans[0].version == (0, 0)
            nursery.cancel_scope.cancel()


def _too_late_for_its_modules(live: Bench) -> None:
    """The replica moves on while modules are loaded from it, so the engine gets other bits than the version's, and
    stops."""
    fd, _ = write_patch(staged := step_of(live.replica, 20), live.replica.layout)
    live.replica.scatter(staged)
    live.version += 1
    version, root = live.version, live.replica.root
    live.engine.stage_patch(WeightPatch(fd, (0, version)))
    os.close(fd)
    os.close(live.advance(step_of(live.replica, 21)))
    with pytest.raises(EngineError, match="the replica was past"):
        live.engine.commit((0, version), root)
    with pytest.raises(EngineError, match="poisoned"):
        live.begin([Prompt((1, 2))], SamplingParams(max_tokens=2))
    assert live.reload() == live.replica.root
    assert live.generate([Prompt((1, 2))], SamplingParams(max_tokens=2))[0].spans[0].version == (0, live.version)
