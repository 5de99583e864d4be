"""slime's disk transport publishes to a swarm of processes, and its requests get tokens from one.

slime is on no package index. `SLIME_SOURCE=CLONE pytest -m long tests/node/trainers/test_slime.py` has its own code, at
`COMMIT`, write the versions and draw the samples.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from published_kit import drawing, train
from slime_kit import check_trained, checked_out, engine

from codec.errors import UsageError
from node.status.query import ask
from scenarios.harness.swarm import NODE, swarm_in

COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
SOURCE: Final = os.environ.get("SLIME_SOURCE")
STEPS: Final = 3
SAMPLING: Final = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
}  # fmt: skip
"""As slime's `GenerateState` makes them."""


@pytest.fixture
def source(tmp_path: Path) -> Path | None:
    """slime's own code at `COMMIT`, if there is a clone."""
    return None if SOURCE is None else checked_out(SOURCE, COMMIT, "slime", tmp_path / "source")


def own(source: Path | None) -> dict[str, str]:
    return {} if source is None else {"SLIME_SOURCE": str(source)}


@pytest.mark.long
def test_what_slime_writes_is_what_the_node_holds(tmp_path: Path, source: Path | None) -> None:
    from node.trainers.grpo.tiny import tiny_folder

    base, out = tiny_folder(lambda line: None), tmp_path / "out"
    out.mkdir()
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        swarm.start("node", "join", swarm.ticket(), "--model", str(base), *NODE)
        report = train(swarm, "slime_writer.py", swarm.home("seed"), base, out, name="slime", **own(source))
        status = ask(swarm.home("seed"))
        assert status.head == (0, 9), "three times the base and two versions of slime's"
        assert all(there == want for there, want in report["rows"])
        assert len({want for _, want in report["rows"]}) == 2
        swarm.until("node", lambda state: state["nodes"][0]["root"] == status.root)
    assert "start the trainer again" in report["refused"], "a version that skips others is not applied"


@pytest.mark.long
def test_slime_trains_on_the_swarm_and_a_lost_node_costs_no_sample(tmp_path: Path, source: Path | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with drawing(tmp_path, "--max-lag", "0", names=("lost", "stays")) as (swarm, base, gateway), engine(gateway) as url:
        words = swarm.home("seed"), url, base, out, swarm.pid("lost"), swarm.home("stays")
        report = train(swarm, "slime_run.py", *words, name="slime", **own(source))
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
    check_trained(report, STEPS)


@pytest.mark.slow
def test_slimes_engine_answers_as_sglang_does(tmp_path: Path) -> None:
    with drawing(tmp_path) as (swarm, _, gateway), engine(gateway) as url:
        asked = {"sampling_params": SAMPLING, "return_logprob": True, "input_ids": [1, 2, 3, 0, 26]}

        def generate() -> Any:
            return httpx.post(f"{url}/generate", json=asked, timeout=120).raise_for_status().json()["meta_info"]

        meta = generate()
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert 1 <= len(meta["output_token_logprobs"]) <= SAMPLING["max_new_tokens"]
        assert all(logprob < 0 and token >= 0 for logprob, token, _ in meta["output_token_logprobs"])
        assert meta["weight_version"] == "0.0"
        assert httpx.get(f"{url}/workers").json()["workers"] == [{"url": url}]
        assert httpx.get(f"{url}/server_info").json()["num_gpus"] == 4
        for path in ("pause_generation", "pull_weights", "update_weights_from_disk", "continue_generation", "workers"):
            assert httpx.post(f"{url}/{path}", json={}).json()["success"], path
        assert httpx.post(f"{url}/generate", json=asked | {"image_data": ["x"]}).status_code == 400
        with ThreadPoolExecutor(1) as pool:
            swarm.pause("node")
            drawn = pool.submit(generate)
            while not httpx.get(f"{url}/v1/loads?include=core").json()["loads"][0]["num_running_reqs"]:
                time.sleep(0.05)
            httpx.post(f"{url}/abort_request", json={"abort_all": True}).raise_for_status()
            assert drawn.result()["finish_reason"]["type"] == "abort"


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
