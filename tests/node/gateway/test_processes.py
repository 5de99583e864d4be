"""The whole gateway in real processes: a seed, nodes with transformers engines, and requests while a node is killed."""

import asyncio
import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from gateway_kit import LETTERS, base_folder
from openai import AsyncOpenAI

from scenarios.harness.swarm import LOOPBACK, swarm_in

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]

READY_S = 180.0
"""Time limit in seconds: several engines import torch on two busy cores."""


def prompt(i: int) -> str:
    return "".join(LETTERS[(i * k) % 26] for k in (1, 3, 5, 7, 11))


def expected(base: Path, requests: int) -> dict[int, tuple[int, ...]]:
    """Return the greedy answers of one engine in this process."""
    import torch

    from node.engines.base import Prompt, SamplingParams
    from node.engines.transformers import TransformersEngine

    torch.set_num_threads(1)
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(base)
    prompts = [Prompt(tuple(LETTERS.index(letter) for letter in prompt(i))) for i in range(requests)]
    made = engine.generate(prompts, SamplingParams(32, temperature=0.0))
    return {i: completion.token_ids for i, completion in enumerate(made)}


@pytest.mark.parametrize(
    ("requests", "names", "doomed"),
    [
        (96, ("one", "two", "three"), ("two",)),
        pytest.param(256, ("one", "two", "three", "four"), ("two", "four"), marks=pytest.mark.long),
    ],
)
def test_requests_in_flight_survive_killed_nodes(
    tmp_path: Path, requests: int, names: tuple[str, ...], doomed: tuple[str, ...]
):
    """No request is lost or answered twice, and each gets its own answer."""
    base = base_folder(tmp_path / "base")
    wanted = expected(base, requests)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in names:
            swarm.start(name, "join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        home = {"SWARM_HOME": str(swarm.home("seed"))}
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", **home)
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == len(names),
            within_s=READY_S,
        )
        url = json.loads((swarm.folder / "gateway.log").read_text())["url"]

        async def ask_all() -> dict[int, tuple[int, ...]]:
            answers: dict[int, tuple[int, ...]] = {}
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=180.0) as client:

                async def ask(i: int) -> None:
                    answer = await client.completions.create(
                        model="policy",
                        prompt=prompt(i),
                        max_tokens=32,
                        temperature=0.0,
                        extra_body={"ignore_eos": True},
                    )
                    (choice,) = answer.choices
                    assert i not in answers
                    answers[i] = tuple(choice.model_extra["token_ids"])
                    assert choice.model_extra["versions"] == [[0, 0]] * 32
                    if len(answers) % 8 == 0 and len(answers) // 8 <= len(doomed):  # while requests are in flight
                        await asyncio.to_thread(swarm.signal, doomed[len(answers) // 8 - 1], signal.SIGKILL)

                await asyncio.gather(*(ask(i) for i in range(requests)))
            return answers

        answers = asyncio.run(ask_all())
        assert answers == wanted, "each answer must have exactly the model's tokens"
        work = swarm.state("seed")["work"]
        assert work["accepted"] == requests
        assert (work["groups_open"], work["groups_ready"], work["samples_leased"]) == (0, 0, 0)
        assert all(node["seconds"] is not None for node in work["nodes"].values() if node["member"])

        one = swarm.state("seed")["nodes"][0]["peer"]
        assert swarm.json("seed", "quarantine", one, "--why", "a test")["changed"]
        assert "a test" in swarm.command("seed", "quarantine").out
        assert swarm.json("seed", "quarantine", one, "--release")["changed"]
        assert "no node" in swarm.command("seed", "quarantine").out.lower()
        assert swarm.command("seed", "quarantine", "nobody").code == 2
        assert swarm.signal("gateway", signal.SIGINT) == 130


def test_streams_in_flight_are_continued_when_a_node_is_killed(tmp_path: Path):
    """What each client of a stream got is the model's answer, each token once, though a node died in many of them."""
    requests, names = 24, ("one", "two")
    base = base_folder(tmp_path / "base")
    wanted = expected(base, requests)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in names:
            swarm.start(name, "join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        home = {"SWARM_HOME": str(swarm.home("seed"))}
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", **home)
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == len(names),
            within_s=READY_S,
        )
        url = json.loads((swarm.folder / "gateway.log").read_text())["url"]

        async def read_all() -> dict[int, tuple[list[int], str, int]]:
            """The tokens, the text and the number of events of each stream."""
            answers: dict[int, tuple[list[int], str, int]] = {}
            heard = 0
            killed = False
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=180.0) as client:

                async def read(i: int) -> None:
                    nonlocal heard, killed
                    tokens, text, events = [], "", 0
                    stream = await client.completions.create(
                        model="policy",
                        prompt=prompt(i),
                        max_tokens=32,
                        temperature=0.0,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    async for part in stream:
                        (choice,) = part.choices
                        tokens += choice.model_extra["token_ids"]
                        text, events, heard = text + choice.text, events + 1, heard + 1
                        if heard >= requests and not killed:  # many streams have begun
                            killed = True
                            await asyncio.to_thread(swarm.signal, "two", signal.SIGKILL)
                    answers[i] = tokens, text, events

                await asyncio.gather(*(read(i) for i in range(requests)))
            return answers

        answers = asyncio.run(read_all())
        assert {i: tuple(tokens) for i, (tokens, _, _) in answers.items()} == wanted
        for tokens, text, events in answers.values():
            assert text == "".join(LETTERS[token] for token in tokens if token < len(LETTERS))
            assert events > 1, "the tokens did not come all at once"
        work = swarm.state("seed")["work"]
        assert (work["groups_open"], work["groups_ready"], work["samples_leased"]) == (0, 0, 0)
        assert not sum(count for node in work["nodes"].values() for count in node["refused"].values())


def test_requests_in_flight_survive_a_restart_of_the_seed(tmp_path: Path):
    """The seed and a node are killed while answers are drawn: each request is answered once, with the model's tokens,
    and what the streams had got is neither repeated nor contradicted."""
    requests, names = 32, ("one", "two")
    base = base_folder(tmp_path / "base")
    wanted = expected(base, requests)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in names:
            swarm.start(name, "join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        home = {"SWARM_HOME": str(swarm.home("seed"))}
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", **home)
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == len(names),
            within_s=READY_S,
        )
        url = json.loads((swarm.folder / "gateway.log").read_text())["url"]

        async def ask_all() -> tuple[dict[int, list[int]], int]:
            """The tokens of each answer, and of all streams when the seed was killed."""
            answers: dict[int, list[int]] = {}
            heard, cut = 0, 0

            def kill() -> None:
                swarm.signal("seed", signal.SIGKILL)
                swarm.signal("two", signal.SIGKILL)
                swarm.seed(base)

            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=180.0) as client:

                async def ask(i: int) -> None:
                    nonlocal heard, cut
                    body = {"model": "policy", "prompt": prompt(i), "max_tokens": 32, "temperature": 0.0}
                    more = {"ignore_eos": True}
                    if i % 2:
                        answer = await client.completions.create(**body, extra_body=more)
                        tokens = answer.choices[0].model_extra["token_ids"]
                    else:
                        tokens, text = [], ""
                        async for part in await client.completions.create(**body, stream=True, extra_body=more):
                            tokens += part.choices[0].model_extra["token_ids"]
                            text, heard = text + part.choices[0].text, heard + 1
                            if heard >= requests and not cut:  # many streams have begun
                                cut = sum(map(len, answers.values())) + heard
                                await asyncio.to_thread(kill)
                        assert text == "".join(LETTERS[token] for token in tokens if token < len(LETTERS))
                    assert i not in answers
                    answers[i] = tokens

                await asyncio.gather(*(ask(i) for i in range(requests)))
            return answers, cut

        answers, cut = asyncio.run(ask_all())
        assert 0 < cut < 32 * requests, "the seed was killed in the middle"
        assert {i: tuple(tokens) for i, tokens in answers.items()} == wanted
        swarm.until_logged("gateway", "is served again")
        work = swarm.state("seed")["work"]
        assert (work["groups_open"], work["groups_ready"], work["samples_leased"]) == (0, 0, 0)
        assert swarm.signal("gateway", signal.SIGINT) == 130
