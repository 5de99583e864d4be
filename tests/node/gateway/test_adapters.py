"""Adapters at the gateway: each is a model, and draws what is asked of it."""

from pathlib import Path
from typing import Any

import pytest
import trio
from gateway_kit import END, LETTERS, EchoEngine, gateway, until, with_client
from openai import BadRequestError, InternalServerError, NotFoundError

from node.engines.base import ADAPTERS, Completion, Span
from node.gateway.request_tracker import RequestTracker
from node.ledger.part_history import Change
from node.ledger.state import Head

IDS = [LETTERS.index(letter) for letter in "abc"]
ROOT = b"\7" * 32


class AdaptedEngine(EchoEngine):
    """Repeats the last letter of the prompt instead, with the adapter `last`; with others, the first."""

    def __init__(self, *adapters: str) -> None:
        super().__init__(0.01)
        self.adapters = dict.fromkeys(adapters, (0, 0))
        self.asked: list[str] = []

    async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
        self.asked.append(adapter)
        if not adapter:
            return await super().generate(prompts, sampling, counts)
        await trio.sleep(self.seconds)
        self.drawn += [prompt.token_ids for prompt in prompts]
        found = []
        for prompt in prompts:
            ids = (prompt.token_ids[-1 if adapter == "last" else 0],) * 3 + (END,)
            found.append(Completion(ids, (-0.25,) * 4, "stop", (Span((0, 0), 0, 4),)))
        return found, self.seconds


def publish(swarm: Any, version: int, **adapters: int) -> None:
    """A version that changes all of these adapters."""
    change = Change(base=False, changed=frozenset(adapters), adapters=adapters)
    swarm.service.sealed(Head(0, version, ROOT), change)


async def test_an_adapter_is_a_model(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        publish(swarm, 1, last=3, other=1)
        engine = await swarm.add(1, engine=AdaptedEngine("last", "other"))

        async def use(client):
            models = [model async for model in client.models.list()]
            one = await client.models.retrieve("last")
            base = await client.completions.create(model="policy", prompt=IDS, max_tokens=9)
            last = await client.completions.create(model="last", prompt=IDS, max_tokens=9, n=2)
            chat = await client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "hi"}], max_tokens=9
            )
            stream = await client.completions.create(model="last", prompt="xyz", max_tokens=9, stream=True)
            streamed = [event async for event in stream]
            where = url.removesuffix("/v1") + "/inference/v1/generate"
            body = {"model": "last", "token_ids": IDS, "sampling_params": {"max_tokens": 9}}
            tokens = await client.post(where, cast_to=dict[str, Any], body=body)
            return models, one, base, last, chat, streamed, tokens

        models, one, base, last, chat, streamed, tokens = await with_client(url, use)
        assert [model.id for model in models] == ["policy", "last", "other"]
        assert (one.model_extra["parent"], one.model_extra["own_version"]) == ("policy", 3)
        assert (base.model, base.choices[0].text) == ("policy", "cba")
        assert base.choices[0].model_extra["own_versions"] == [0] * 4, "nothing has changed the base"
        assert (last.model, [choice.text for choice in last.choices]) == ("last", ["ccc", "ccc"])
        for choice in last.choices:
            assert choice.model_extra["versions"] == [[0, 0]] * 4
            assert len(choice.model_extra["own_versions"]) == 4
        assert (chat.model, chat.choices[0].message.content) == ("other", "uuu")
        assert {event.model for event in streamed} == {"last"}
        assert "".join(event.choices[0].text for event in streamed if event.choices) == "zzz"
        assert tokens["choices"][0]["token_ids"] == [IDS[-1]] * 3 + [END]
        assert len(tokens["choices"][0]["own_versions"]) == 4
        assert set(engine.asked) == {"", "last", "other"}


async def test_a_model_that_there_is_not_is_not_found(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        publish(swarm, 1, last=1)
        await swarm.add(1, engine=AdaptedEngine("last"))

        async def use(client):
            for call in (
                client.completions.create(model="lost", prompt=IDS, max_tokens=9),
                client.models.retrieve("lost"),
            ):
                with pytest.raises(NotFoundError, match=r"no model 'lost' here, only 'policy', 'last'") as error:
                    await call
                assert error.value.code == "model_not_found"

        await with_client(url, use)
        publish(swarm, 2)

        async def again(client):
            with pytest.raises(NotFoundError, match="only 'policy'"):
                await client.completions.create(model="last", prompt=IDS, max_tokens=9)

        await with_client(url, again)


async def test_a_removed_adapter_ends_the_requests_for_it(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        publish(swarm, 1, last=1)
        await swarm.add(1, engine=AdaptedEngine())  # which has not loaded it yet
        refused = []

        async def use(client):
            with pytest.raises(BadRequestError) as error:
                await client.completions.create(model="last", prompt=IDS, max_tokens=9)
            refused.append(str(error.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_client, url, use)
            await until(lambda: swarm.service.status().groups_open)
            publish(swarm, 2)
        assert "was removed from the swarm" in refused[0]


async def test_no_engine_serves_adapters_or_has_loaded_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.gateway.request_tracker.ABILITIES_WITHIN_S", 0.3)
    monkeypatch.setitem(RequestTracker.__init__.__kwdefaults__, "without_nodes_s", 0.5)
    async with gateway(tmp_path) as (swarm, url):
        publish(swarm, 1, last=1)
        engine = AdaptedEngine()
        engine.abilities -= {ADAPTERS}
        await swarm.add(1, engine=engine)

        async def use(client):
            with pytest.raises(BadRequestError, match="no engine here serves adapters") as error:
                await client.completions.create(model="last", prompt=IDS, max_tokens=9)
            assert error.value.param == "model"

        await with_client(url, use)
        await swarm.add(2, engine=AdaptedEngine())

        async def wait(client):
            with pytest.raises(InternalServerError, match="No node has loaded the adapter 'last'"):
                await client.completions.create(model="last", prompt=IDS, max_tokens=9)

        await with_client(url, wait)


async def test_a_session_has_a_node_for_each_of_its_models(tmp_path: Path):
    """The prefix of one model is of no use to another, so the session is known by both."""
    async with gateway(tmp_path) as (swarm, url):
        publish(swarm, 1, last=1)
        engines = [await swarm.add(i, engine=AdaptedEngine("last")) for i in (1, 2)]

        async def use(client):
            for _ in range(4):
                for model in ("policy", "last"):
                    await client.completions.create(model=model, prompt=IDS, max_tokens=9, user="someone")

        await with_client(url, use)
        for name in ("", "last"):
            assert sorted(engine.asked.count(name) for engine in engines) == [0, 4], name
