"""A trainer of one's own adds two things: `publish` of (checkpoint name, tensor) pairs, and an OpenAI client."""

import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
import openai
from published_kit import drawing

from codec import Checkpoint, Replica
from node import Swarm

STEPS, PROMPTS, SAMPLES = 3, ("dbca=", "acbd=", "bdac=", "cadb="), 4


def draw(client: Any, prompt: str) -> list[Any]:
    found = client.completions.create(
        model="policy", prompt=prompt, n=SAMPLES, max_tokens=8, temperature=1.0, logprobs=0
    )
    return found.choices


@pytest.mark.slow
def test_pairs_and_an_openai_client_are_enough(tmp_path: Path) -> None:
    import torch
    from recipe_kit import live_roots
    from safetensors.torch import load_file, save_file

    with drawing(tmp_path, "--max-lag", "0", names=("lost", "stays")) as (swarm, base, url):
        weights, layout = load_file(base / "model.safetensors"), Checkpoint.open(base).layout
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0)
        with Swarm.attach(home=swarm.home("seed"), start=False) as mine:
            for step in range(1, STEPS + 1):
                with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
                    futures = [pool.submit(draw, client, prompt) for prompt in (*PROMPTS, *PROMPTS)]
                    next(as_completed(futures))
                    if step == 2:
                        swarm.signal("lost", signal.SIGKILL)
                choices = [choice for future in futures for choice in future.result()]
                assert len(choices) == 2 * len(PROMPTS) * SAMPLES, "samples were lost with the node"
                drawn_by = {tuple(version) for choice in choices for version in choice.versions}
                assert drawn_by == {(0, step - 1)}, "each of the newest version"

                for tensor in weights.values():  # in place of an optimizer's step
                    tensor.view(torch.int16).flatten()[step::7] ^= 1
                root = mine.publish(iter(weights.items()), step=step).wait(timeout_s=60.0).root.hex()
                saved = tmp_path / f"step_{step}"
                saved.mkdir()
                (saved / "config.json").write_bytes((base / "config.json").read_bytes())
                save_file(weights, saved / "model.safetensors")
                assert root == Replica.from_checkpoint(Checkpoint.open(saved), layout).root.hex()
                assert live_roots(swarm.home("stays"), step, root) == [root] * (2 if step == 1 else 1)
