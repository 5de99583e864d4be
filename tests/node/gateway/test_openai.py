"""The unmodified OpenAI client against the gateway: each understands the other."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from gateway_kit import END, LETTERS, UNKNOWN, base_files, gateway, until, with_client
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, RateLimitError

IDS = [LETTERS.index(letter) for letter in "abc"]


async def test_completions_of_text_and_of_token_ids(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            models = [model.id async for model in client.models.list()]
            assert models == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            text = await client.completions.create(model="policy", prompt="hello", max_tokens=16)
            ids = await client.completions.create(model="policy", prompt=IDS, max_tokens=16, logprobs=0, n=3)
            both = await client.completions.create(model="policy", prompt=["ab", "xyz"], n=2, max_tokens=16)
            return text, ids, both

        text, ids, both = await with_client(url, use)
        (choice,) = text.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("olleh", "stop", 0)
        assert text.usage.completion_tokens == 6
        assert text.usage.prompt_tokens == 5
        assert [c.index for c in ids.choices] == [0, 1, 2]
        for choice in ids.choices:
            extra = choice.model_extra
            assert choice.text == "cba"
            assert extra["token_ids"] == [*reversed(IDS), END]
            assert extra["prompt_token_ids"] == IDS
            assert extra["versions"] == [[0, 0]] * 4
            assert choice.logprobs.token_logprobs == [-0.25] * 4
            assert choice.logprobs.tokens == ["c", "b", "a", "<end>"]
            assert choice.logprobs.text_offset == [0, 1, 2, 3]
        assert [c.text for c in both.choices] == ["ba", "ba", "zyx", "zyx"]
        assert swarm.service.status().groups_open == swarm.service.status().groups_ready == 0


async def test_tokens_in_and_tokens_out(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            async def ask(**body):
                where = url.removesuffix("/v1") + "/inference/v1/generate"
                return await client.post(where, cast_to=dict[str, Any], body={"model": "policy"} | body)

            drawn = await ask(
                token_ids=IDS, sampling_params={"max_tokens": 9, "logprobs": 1, "top_k": -1}, cache_salt="1"
            )
            refused = []
            for wrong in (
                {"token_ids": [], "sampling_params": {}},
                {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 21}},
                {"token_ids": IDS, "sampling_params": {}, "features": {"mm_hashes": {}}},
                {"token_ids": IDS},
            ):
                with pytest.raises(BadRequestError) as error:
                    await ask(**wrong)
                refused.append(str(error.value))
            return drawn, refused

        drawn, refused = await with_client(url, use)
        (choice,) = drawn["choices"]
        assert choice["token_ids"] == [*reversed(IDS), END]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in (2, 1, 0, END)]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.25] * 4
        assert (choice["finish_reason"], choice["versions"]) == ("stop", [[0, 0]] * 4)
        assert drawn["prompt_token_ids"] == IDS
        names = ("token_ids", "prompt_logprobs", "features", "sampling_params")
        assert all(name in why for name, why in zip(names, refused, strict=True))


async def test_chat_uses_the_base_checkpoints_template(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            return await client.chat.completions.create(
                model="policy",
                messages=[
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                ],
                logprobs=True,
                max_completion_tokens=64,
            )

        answer = await with_client(url, use)
        text = "system: be brief\nuser: hi\nassistant: "
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role) == (text[::-1], "assistant")
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.25] * (len(text) + 1)
        assert len(choice.model_extra["token_ids"]) == len(choice.model_extra["versions"]) == len(text) + 1


async def test_streams_have_the_content_of_complete_answers(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            parts = [
                part
                async for part in await client.completions.create(
                    model="policy", prompt="abc", n=2, max_tokens=9, stream=True, stream_options={"include_usage": True}
                )
            ]
            chat = [
                part
                async for part in await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=64
                )
            ]
            return parts, chat

        parts, chat = await with_client(url, use)
        texts = {0: "", 1: ""}
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "cba", 1: "cba"}
        assert parts[-1].usage.completion_tokens == 8
        text = "".join(choice.delta.content or "" for part in chat for choice in part.choices)
        assert text == "user: hi\nassistant: "[::-1]
        assert chat[-1].choices[0].finish_reason == "stop"
        ids = [choice.model_extra for part in chat for choice in part.choices if "token_ids" in choice.model_extra]
        versions = chat[-1].choices[0].model_extra["versions"]
        assert sum(len(each["token_ids"]) for each in ids) == len(versions) == len(text) + 1


async def test_stops_and_lengths(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        engine = await swarm.add(1)

        async def use(client):
            create = client.completions.create
            short = await create(model="policy", prompt="abcdef", max_tokens=3)
            cut = await create(model="policy", prompt="abcdef", max_tokens=20, stop=["cb", "zz"], logprobs=0)
            on = await create(model="policy", prompt="ab", max_tokens=6, extra_body={"ignore_eos": True})
            return short.choices[0], cut.choices[0], on.choices[0]

        short, cut, on = await with_client(url, use)
        assert (short.text, short.finish_reason) == ("fed", "length")
        assert (cut.text, cut.finish_reason) == ("fed", "stop")
        assert len(cut.model_extra["token_ids"]) == len(cut.logprobs.token_logprobs) == 5  # up to the b of "cb"
        assert engine.tokens == 3 + 5 + 6, "no token is generated after a stop text"
        assert (on.finish_reason, len(on.model_extra["token_ids"])) == ("length", 6)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": "abc", "n": 0}, "n: 1 to"),
        ({"prompt": "abc", "n": 1000}, "n: 1 to"),
        ({"prompt": [], "max_tokens": 4}, "prompt:"),
        ({"prompt": "", "max_tokens": 4}, "at least one token"),
        ({"prompt": "abc", "max_tokens": 1000}, "reads 128 tokens"),
        ({"prompt": "abc", "temperature": -1.0}, "temperature"),
        ({"prompt": "abc", "top_p": 7}, "top_p"),
        ({"prompt": "abc", "presence_penalty": 3.0}, "presence_penalty: -2 to 2"),
        ({"prompt": "abc", "logprobs": 5}, "logprobs"),
        ({"prompt": "abc", "extra_body": {"top_k": -20}}, "top_k: 0"),
        ({"prompt": "abc", "echo": True, "logprobs": 0}, "echo: no engine here scores prompts"),
        ({"prompt": [[1] * 100] * 64, "n": 4, "extra_body": {"prompt_logprobs": 20}}, "no engine here scores prompts"),
        ({"prompt": [1, "a"]}, "not both"),
        ({"prompt": [1, -1]}, "token ids are whole numbers"),
        ({"prompt": [99]}, "token id outside"),
        ({"prompt": "abc", "stop": ["x"] * 50}, "at most"),
    ],
)
async def test_impossible_requests_get_an_error_in_a_sentence(tmp_path: Path, asked, says):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            with pytest.raises(BadRequestError, match=says) as caught:
                await client.completions.create(model="policy", **asked)
            assert caught.value.status_code == 400
            after = await client.completions.create(model="policy", prompt="abc")
            assert after.choices[0].text == "cba"

        await with_client(url, use)


async def test_other_errors_have_their_codes(tmp_path: Path):
    async with gateway(tmp_path, in_flight=4, api_key="sesame") as (swarm, url):

        async def use(client):
            with pytest.raises(InternalServerError, match="No node of this swarm generates") as caught:
                await client.completions.create(model="policy", prompt="abc")
            assert caught.value.status_code == 503

        await with_client(url, use, api_key="sesame")
        await swarm.add(1)

        async def use_with_nodes(client):
            with pytest.raises(NotFoundError, match="no model 'gpt-5'"):
                await client.completions.create(model="gpt-5", prompt="abc")
            with pytest.raises(RateLimitError, match="in flight") as caught:
                await client.completions.create(model="policy", prompt="abc", n=5)
            assert caught.value.response.headers["retry-after"] == "1"
            with pytest.raises(BadRequestError, match="no tools"):
                await client.chat.completions.create(model="policy", messages=[{"role": "tool", "content": "x"}])
            sound = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
            said = {"type": "text", "text": "What is this?"}
            with pytest.raises(BadRequestError, match="'input_audio': only parts of the type text") as caught:
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": [said, sound]}]
                )
            assert caught.value.param == "messages[0].content[1]"

        await with_client(url, use_with_nodes, api_key="sesame")

        async def stranger(client):
            with pytest.raises(APIStatusError) as caught:
                await client.completions.create(model="policy", prompt="abc")
            assert caught.value.status_code == 401

        await with_client(url, stranger)


async def test_token_ids_work_without_a_tokenizer(tmp_path: Path):
    async with gateway(tmp_path, files={}) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            ids = await client.completions.create(model="policy", prompt=[3, 4], max_tokens=2)
            with pytest.raises(BadRequestError, match="token ids"):
                await client.completions.create(model="policy", prompt="abc")
            with pytest.raises(BadRequestError, match="chat template"):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
            return ids

        ids = await with_client(url, use)
        assert ids.choices[0].model_extra["token_ids"] == [4, 3]
        assert ids.choices[0].text == ""


async def test_a_session_stays_with_its_node(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        for i in (1, 2, 3, 4):
            await swarm.add(i)

        async def use(client):
            for turn in range(6):
                for session in ("left", "right"):
                    await client.completions.create(
                        model="policy", prompt=session + "abcdef"[turn], extra_headers={"X-Session-Id": session}
                    )

        await with_client(url, use)
        for session in ("left", "right"):
            ids = tuple(LETTERS.index(letter) for letter in session)
            where = [node for node, e in swarm.engines.items() if any(d[:-1] == ids for d in e.drawn)]
            assert len(where) == 1, "the node with its prefix in the cache"


async def test_a_client_that_hangs_up_withdraws_its_work(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, seconds=30.0)
        with trio.move_on_after(0.5):

            async def use(client):
                await client.completions.create(model="policy", prompt="abc", timeout=0.3)

            with pytest.raises(Exception, match="timed out"):
                await with_client(url, use)
        await until(lambda: not swarm.service.status().groups_open)
        await until(lambda: not next(iter(swarm.workers.values())).status().generating)


@pytest.mark.parametrize(
    ("config", "reads"),
    [
        ({"n_positions": 40}, 40),
        ({"max_position_embeddings": 8, "rope_scaling": {"factor": 5.0}}, 40),
        ({"text_config": {"max_position_embeddings": 40}}, 40),
        ({}, None),
    ],
)
async def test_the_context_limit_is_that_of_rollouts(tmp_path: Path, config: dict[str, Any], reads: int | None):
    files = base_files() | {"config.json": json.dumps(config | {"vocab_size": UNKNOWN + 1}).encode()}
    async with gateway(tmp_path, files=files) as (swarm, url):
        await swarm.add(1)

        async def use(client):
            (model,) = [model async for model in client.models.list()]
            assert model.model_extra["max_model_len"] == reads
            refused = []
            for most, prompt in ((60_000 if reads is None else 38, IDS), (4, [UNKNOWN + 1, 1])):
                try:
                    await client.completions.create(model="policy", prompt=prompt, max_tokens=most)
                except BadRequestError as error:
                    refused.append((error.body["param"], error.body["message"]))
            chat = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "ab"}])
            return refused, chat

        refused, chat = await with_client(url, use)
        outside = ("prompt", "prompt: Token 0 of the prompt is 31; the model's token ids are 0 to 30.")
        long = "The model reads 40 tokens; the prompt has 3, and max_tokens asks for 38 more: ask for at most 37."
        assert refused == ([("max_tokens", long)] if reads else []) + [outside]
        if reads:
            assert (chat.choices[0].finish_reason, chat.usage.total_tokens) == ("length", reads)
