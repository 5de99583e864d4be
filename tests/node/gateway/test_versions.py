"""Requests by version: what may be served is, the rest gets a 409 that says what is served now."""

from pathlib import Path
from typing import Any

import pytest
import trio
from gateway_kit import ROOT, SpellingEngine, gateway, until, with_client
from openai import BadRequestError, ConflictError

from node.gateway.parameters import BadRequest
from node.gateway.wanted_version import NotServed, WantedVersion, wanted_version
from node.ledger.state import Head


async def refused(client: Any, **body: Any) -> ConflictError:
    with pytest.raises(ConflictError) as caught:
        await client.completions.create(model="policy", prompt="a", max_tokens=2, **body)
    return caught.value


async def test_what_is_not_served_is_refused_with_what_is(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.01))
        swarm.service.sealed(Head(0, 3, b"\3" * 32))

        async def use(client):
            later = [
                await refused(client, extra_body={"min_version": 4}),
                await refused(client, extra_body={"exact_version": [1, 0]}),
                await refused(client, extra_headers={"X-Min-Version": "0.4"}),
                await refused(client, extra_body={"min_version": 4}, stream=True),
            ]
            over = await refused(client, extra_body={"exact_version": 2})
            return later, over

        later, over = await with_client(url, use)
        for error in later:
            assert error.response.headers["retry-after"] == "1"
            assert error.response.headers["x-served-version"] == "0.3"
            assert "0.3" in error.message
            assert error.code == "version_not_served"
        assert [error.param for error in later] == ["min_version", "exact_version", "min_version", "min_version"]
        assert "retry-after" not in over.response.headers
        assert over.response.headers["x-should-retry"] == "false"


async def test_a_request_waits_for_a_node_that_holds_its_version(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        engine = await swarm.add(1, engine=SpellingEngine(0.01), ask_every_s=0.05)
        swarm.service.sealed(Head(0, 1, b"\1" * 32))

        async def use(client):
            ask = client.completions.create
            old = await ask(model="policy", prompt="a", max_tokens=2)
            return old, await ask(model="policy", prompt="a", max_tokens=2, extra_body={"min_version": 1})

        answers: list[Any] = []

        async def ask() -> None:
            answers.extend(await with_client(url, use))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: len(engine.drawn_versions) == 1)
            await trio.sleep(0.3)
            assert len(engine.asked) == 1, "the node's version is too old for the second"
            engine.version, engine.root = (0, 1), b"\1" * 32
        old, new = (answer.choices[0].model_extra for answer in answers)
        assert (old["version_start"], old["version_end"]) == ([0, 0], [0, 0])
        assert (new["version_start"], new["version_end"]) == ([0, 1], [0, 1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exact_answer_over_which_a_version_came_is_refused(tmp_path: Path, stream: bool):
    class Moving(SpellingEngine):
        async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
            swarm.service.sealed(Head(0, 1, ROOT))
            self.version = (0, 1)
            return await super().generate(prompts, sampling, counts, adapter, draws)

    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=Moving(0.01), ask_every_s=0.05)

        async def use(client):
            body: dict[str, Any] = {"model": "policy", "prompt": "a", "max_tokens": 3, "stream": stream}
            answer = await client.completions.create(**body, extra_body={"exact_version": 0})
            return [part async for part in answer]

        with pytest.raises(Exception, match="came while the answer") as caught:
            await with_client(url, use)
        assert stream or isinstance(caught.value, ConflictError)


async def test_wrong_versions_are_refused(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.01))

        async def use(client):
            found = []
            for body in ({"min_version": -1}, {"min_version": [1, 2, 3]}, {"min_version": 1, "exact_version": 0}):
                with pytest.raises(BadRequestError) as caught:
                    await client.completions.create(model="policy", prompt="a", extra_body=body)
                found.append(caught.value.param)
            return found

        assert await with_client(url, use) == ["min_version", "min_version", "exact_version"]


class _Body:
    min_version: Any = None
    exact_version: Any = None


def test_headers_and_fields():
    assert wanted_version(_Body(), {}) is None
    assert wanted_version(_Body(), {"x-exact-version": "2.7"}) == WantedVersion("exact_version", 2, 7)
    assert wanted_version(_Body(), {"x-min-version": " 7 "}) == WantedVersion("min_version", None, 7)
    body = _Body()
    body.min_version = [1, 5]
    assert wanted_version(body, {"x-min-version": "9"}) == WantedVersion("min_version", 1, 5)
    body.exact_version = [1, 6]
    assert wanted_version(body, {}) == WantedVersion("exact_version", 1, 6)
    for text in ("", "a", "1.2.3", "-1", "9" * 40, "\u0663"):
        with pytest.raises(BadRequest):
            wanted_version(_Body(), {"x-min-version": text})


def test_what_can_be_drawn_now():
    WantedVersion("min_version", None, 3).check((1, 3))
    WantedVersion("min_version", 0, 9).check((1, 3))
    WantedVersion("exact_version", 1, 3).check((1, 3))
    for wanted, later in ((WantedVersion("min_version", 1, 4), True), (WantedVersion("exact_version", 0, 3), False)):
        with pytest.raises(NotServed) as caught:
            wanted.check((1, 3))
        assert (caught.value.later, caught.value.served) == (later, (1, 3))
