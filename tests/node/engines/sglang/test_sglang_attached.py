"""A node follows an SGLang that its user started (`--engine-url`), and lets it serve on when it ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_kit import generates, prove, root_of, step

from node.engines.base import SamplingParams
from node.engines.sglang.http import Api
from node.trainers.api import Swarm as Trainer
from scenarios.engines.sglang_bench import FOLLOWS, SMALL, users_own
from scenarios.engines.sglang_updates import PROMPTS, TOKENS
from scenarios.harness.swarm import LOOPBACK, swarm_in

pytestmark = [pytest.mark.sglang, pytest.mark.long]

WITHIN_S = 300.0


@pytest.fixture
def url(model: Path, python: Path, tmp_path: Path) -> Iterator[str]:
    with users_own(model, tmp_path / "users.log", python, threads=1, more=(*SMALL, *FOLLOWS)) as found:
        yield found


def version_of(url: str) -> str:
    """The version that draws a token."""
    body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": TOKENS}}
    return Api(url).post("/generate", body, WITHIN_S)["meta_info"]["weight_version"]


def test_a_node_follows_an_sglang_that_its_user_runs(model: Path, url: str, tmp_path: Path):
    folders = [model]
    for number in range(1, 4):
        folders.append(step(folders[-1], tmp_path / f"step_{number}", number))
    with swarm_in(tmp_path / "swarm", patience_s=WITHIN_S) as swarm:
        swarm.seed(model)
        ticket = swarm.ticket()
        words = ("--engine", "sglang", "--engine-url", url, "--model", str(model), *LOOPBACK)
        swarm.start("node", "join", ticket, *words)
        state = swarm.until("node", generates(0), WITHIN_S)
        assert state["nodes"][0]["engine_urls"] == [url]
        with Trainer.attach(home=swarm.home("seed"), base=model) as trainer:
            for number in (1, 2):
                swarm.publish(folders[number], "--wait")
                swarm.until("node", generates(number), WITHIN_S)
                assert prove(swarm) == root_of(folders[number])
                groups = list(
                    trainer.rollouts([[5, 6, 7], [8, 9]], 3, SamplingParams(max_tokens=12), timeout_s=WITHIN_S)
                )
                assert [len(group.rollouts) for group in groups] == [3, 3]
                spans = [span for group in groups for rollout in group.rollouts for span in rollout.spans]
                assert {span.version for span in spans} == {(0, number)}
        assert version_of(url) == "0.2"

        swarm.signal("node")
        assert version_of(url) == "0.2", "it serves on without the node"
        swarm.publish(folders[3])
        swarm.start("node", "join", ticket, *words)
        swarm.until("node", generates(3), WITHIN_S)
        assert prove(swarm) == root_of(folders[3])
    assert version_of(url) == "0.3"
