"""slime's disk transport publishes to a swarm of processes, and its requests get tokens from one.

slime is on no package index. `SLIME_SOURCE=CLONE pytest -m slow tests/node/trainers/test_slime.py` has its own code, at
`COMMIT`, write the versions and find the engine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from published_kit import drawing

from codec.errors import UsageError
from node.status.query import ask
from scenarios.harness.environments import environment
from scenarios.harness.swarm import NODE, swarm_in

HERE: Final = Path(__file__).parent
COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
SOURCE: Final = os.environ.get("SLIME_SOURCE")
SAMPLING: Final = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
}  # fmt: skip
"""As slime's `GenerateState` makes them."""


@pytest.fixture
def source(tmp_path: Path) -> Path | None:
    """slime's own code at `COMMIT`, if there is a clone."""
    if SOURCE is None:
        return None
    folder = tmp_path / "source"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", COMMIT, "slime"], cwd=SOURCE, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.mark.slow
def test_what_slime_writes_is_what_the_node_holds(tmp_path: Path, source: Path | None) -> None:
    from node.trainers.grpo.tiny import tiny_folder

    base, out = tiny_folder(lambda line: None), tmp_path / "out"
    out.mkdir()
    python = environment("slime", HERE / "slime.txt", inherit=True)
    environ = {name: value for name, value in os.environ.items() if name != "SLIME_SOURCE"}
    environ |= {"PYTHONPATH": str(HERE.parents[2])} | ({} if source is None else {"SLIME_SOURCE": str(source)})
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        swarm.start("node", "join", swarm.ticket(), "--model", str(base), *NODE)
        words = [python, HERE / "slime_writer.py", swarm.home("seed"), base, out]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        report = json.loads(done.stdout.strip().splitlines()[-1])
        status = ask(swarm.home("seed"))
        assert status.head == (0, 9), "three times the base and two versions of slime's"
        assert all(there == want for there, want in report["rows"])
        assert len({want for _, want in report["rows"]}) == 2
        swarm.until("node", lambda state: state["nodes"][0]["root"] == status.root)
    assert "start the trainer again" in report["refused"], "a version that skips others is not applied"


@contextmanager
def engine(gateway: str) -> Iterator[str]:
    words = ["-m", "node.trainers.slime_engine", "--gateway", gateway, "--at", "127.0.0.1:0", "--gpus", "4"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_slime_gets_tokens_from_the_swarm_and_a_lost_node_costs_none(tmp_path: Path, source: Path | None) -> None:
    with drawing(tmp_path, names=("lost", "stays")) as (swarm, _, gateway), engine(gateway) as url:
        prompts = [[1, 2, 3, 0, 26]] * 32

        def generate(prompt: list[int]) -> Any:
            asked = {"sampling_params": SAMPLING, "return_logprob": True, "input_ids": prompt}
            return httpx.post(f"{url}/generate", json=asked, timeout=120).raise_for_status().json()

        with ThreadPoolExecutor(32) as pool:
            futures = [pool.submit(generate, prompt) for prompt in prompts]
            futures[0].result()
            swarm.kill("lost")
            answers = [future.result() for future in futures]
        for answer in answers:
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] in ("stop", "length")
            assert 1 <= len(meta["output_token_logprobs"]) <= SAMPLING["max_new_tokens"]
            assert all(logprob < 0 and token >= 0 for logprob, token, _ in meta["output_token_logprobs"])
            assert meta["weight_version"] == "0.0"
        for path in ("pause_generation", "pull_weights", "update_weights_from_disk", "continue_generation", "workers"):
            assert httpx.post(f"{url}/{path}", json={}).json()["success"], path
        image = {"sampling_params": SAMPLING, "input_ids": [1], "image_data": ["x"]}
        assert httpx.post(f"{url}/generate", json=image).status_code == 400
        with ThreadPoolExecutor(1) as pool:
            swarm.pause("stays")
            drawing_ = pool.submit(generate, prompts[0])
            while not httpx.get(f"{url}/v1/loads?include=core").json()["loads"][0]["num_running_reqs"]:
                pass
            httpx.post(f"{url}/abort_request", json={"abort_all": True}).raise_for_status()
            assert drawing_.result()["meta_info"]["finish_reason"]["type"] == "abort"
        if source is not None:
            find = "from slime.backends.sglang_utils.external import discover_external_engines as find; "
            show = f"print(find([{url.removeprefix('http://')!r}])[0].parallel_config)"
            stub = "import sys, types; p = types.ModuleType('slime.backends.sglang_utils'); "
            path = f"p.__path__ = [{str(source / 'slime/backends/sglang_utils')!r}]; sys.modules[p.__name__] = p; "
            done = subprocess.run(
                [sys.executable, "-c", stub + path + find + show], cwd=source, capture_output=True, text=True
            )
            assert "'tp_size': 1" in done.stdout, done.stderr


def test_a_delta_of_another_size_or_form_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    from node.trainers.disk_delta import applied, checksum

    old = np.arange(8, dtype=np.uint8)
    pack = zstandard.ZstdCompressor().compress
    for raw, encoding in (
        (bytes(7), "xor"),
        (bytes(100), "xor"),
        (bytes(8), "sparse"),
        (bytes(3), "overwrite"),
        (np.array([1, 8], "<u4").tobytes() + b"x", "overwrite"),
        (np.array([2, 1], "<u4").tobytes() + b"x", "overwrite"),
    ):
        with pytest.raises(UsageError, match="not one of 8 bytes"):
            applied(np.frombuffer(pack(raw), np.uint8), old, encoding)
    with pytest.raises(UsageError, match="not one of 8 bytes"):
        applied(np.zeros(8, np.uint8), old, "xor")
    with pytest.raises(UsageError, match="blake3"):
        checksum("crc32", old)
