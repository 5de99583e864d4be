"""The calls of the `openai` client's own tests: each works, or is refused with the right class of error and `param`.

`openai_kit` says which tests of which release these calls follow. The values of parameters are theirs, so some ask for
what cannot be (no token at all, the bias of a token "foo"); `node.gateway.parameters` says of each field what happens.
"""

import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
import trio
from gateway_kit import gateway, until
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    PermissionDeniedError,
    RateLimitError,
)
from openai_kit import ASYNC_WAYS, SYNC_WAYS, Writing, in_sync, serving, text_of, with_async
from parameters_kit import writer_files
from pydantic import BaseModel

WORKS = None
SAID = "This is an answer."
SCHEMA = {"name": "name", "description": "description", "parameters": {"foo": "bar"}}
CHAT: dict[str, tuple[Any, str | None]] = {
    "audio": ({"format": "wav", "voice": "alloy"}, "audio"),
    "frequency_penalty": (-2, WORKS),
    "function_call": ("none", WORKS),
    "functions": ([SCHEMA], "functions"),
    "logit_bias": ({"foo": 0}, "logit_bias"),
    "logprobs": (True, WORKS),
    "max_completion_tokens": (0, "max_completion_tokens"),
    "max_tokens": (0, "max_tokens"),
    "metadata": ({"foo": "string"}, WORKS),
    "modalities": (["text"], WORKS),
    "moderation": (
        {"model": "model", "policy": {"input": {"mode": "score"}, "output": {"mode": "score"}}},
        "moderation",
    ),
    "n": (1, WORKS),
    "parallel_tool_calls": (True, WORKS),
    "prediction": ({"content": "string", "type": "content"}, "prediction"),
    "presence_penalty": (-2, WORKS),
    "prompt_cache_key": ("prompt-cache-key-1234", WORKS),
    "prompt_cache_options": ({"mode": "implicit", "ttl": "30m"}, WORKS),
    "prompt_cache_retention": ("in_memory", WORKS),
    "reasoning_effort": ("none", WORKS),
    "response_format": ({"type": "text"}, WORKS),
    "safety_identifier": ("safety-identifier-1234", WORKS),
    "seed": (-9007199254740991, WORKS),
    "service_tier": ("auto", WORKS),
    "stop": ("\n", WORKS),
    "store": (True, "store"),
    "stream_options": ({"include_obfuscation": True, "include_usage": True}, "stream_options"),
    "temperature": (1, WORKS),
    "tool_choice": ("none", WORKS),
    "tools": ([{"function": SCHEMA | {"strict": True}, "type": "function"}], WORKS),
    "top_logprobs": (0, WORKS),
    "top_p": (1, WORKS),
    "user": ("user-1234", WORKS),
    "verbosity": ("low", "verbosity"),
    "web_search_options": (
        {
            "search_context_size": "low",
            "user_location": {
                "approximate": {"city": "city", "country": "country", "region": "region", "timezone": "timezone"},
                "type": "approximate",
            },
        },
        "web_search_options",
    ),
}
"""By field: the client's value, and the `param` of the refusal."""
COMPLETION: dict[str, tuple[Any, str | None]] = {
    "best_of": (0, "best_of"),
    "echo": (True, WORKS),
    "frequency_penalty": (-2, WORKS),
    "logit_bias": ({"foo": 0}, "logit_bias"),
    "logprobs": (0, WORKS),
    "max_tokens": (32, WORKS),
    "n": (1, WORKS),
    "presence_penalty": (-2, WORKS),
    "seed": (0, WORKS),
    "stop": ("\n", WORKS),
    "stream_options": ({"include_obfuscation": True, "include_usage": True}, "stream_options"),
    "suffix": ("test.", "suffix"),
    "temperature": (1, WORKS),
    "top_p": (1, WORKS),
    "user": ("user-1234", WORKS),
}
MESSAGES = [{"content": "string", "role": "developer", "name": "name"}]
PROMPT = "This is a test."
CHATS = ("chat", CHAT, {"model": "policy", "messages": MESSAGES})
COMPLETIONS = ("completions", COMPLETION, {"model": "policy", "prompt": PROMPT, "max_tokens": 32})
Case = tuple[str, dict[str, tuple[Any, str | None]], dict[str, Any]]


def resource_of(client: OpenAI | AsyncOpenAI, name: str) -> Any:
    return client.chat.completions if name == "chat" else client.completions


def accepted(fields: dict[str, tuple[Any, str | None]], given: dict[str, Any]) -> dict[str, Any]:
    """All fields that work, at once; but this engine scores no prompts, as `echo` with `logprobs` needs it."""
    return given | {field: value for field, (value, param) in fields.items() if param is WORKS and field != "echo"}


@pytest.mark.parametrize(("fields", "module"), [(CHAT, chat_params), (COMPLETION, completion_params)])
def test_every_parameter_of_the_client_is_tried(fields: dict[str, Any], module: Any):
    kinds = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    theirs = {name for kind in kinds for name in typing.get_type_hints(kind)}
    assert theirs - {"messages", "model", "prompt", "stream"} == set(fields)


@pytest.mark.parametrize("case", [CHATS, COMPLETIONS], ids=lambda case: case[0])
async def test_each_parameter_works_or_is_refused_by_its_name(tmp_path: Path, case: Case):
    name, fields, given = case

    def ask_each(client: OpenAI) -> None:
        create = resource_of(client, name).create
        for field, (value, param) in fields.items():
            for stream in (False, True):
                if field == "stream_options" and not stream:
                    continue
                body = given | {field: value, "stream": stream}
                if param is WORKS:
                    found = create(**body)
                    shown = text_of(list(found) if stream else found)
                    assert shown == (PROMPT + SAID if field == "echo" else SAID), field
                else:
                    with pytest.raises(BadRequestError) as refused:
                        create(**body)
                    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error"), field
                    assert param in refused.value.message, field

    async with serving(tmp_path, lambda prompt: SAID) as (_, url):
        await in_sync(url, ask_each)


@pytest.mark.parametrize(
    "strict", [pytest.param(False, id="loose"), pytest.param(True, id="strict", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("case", [CHATS, COMPLETIONS], ids=lambda case: case[0])
async def test_every_way_of_a_call_gives_the_answer(tmp_path: Path, case: Case, strict: bool):
    """Plain, raw and streaming responses, whole and in parts, with the fewest and with the most parameters."""
    name, fields, given = case
    bodies = (given, accepted(fields, given))
    # OpenAI's own streams of completions break the client's types, too: they have no reason to finish until they do
    ways = 3 if name == "completions" and strict else len(SYNC_WAYS)

    def ask_all(client: OpenAI) -> None:
        for body in bodies:
            for way in SYNC_WAYS[:ways]:
                assert text_of(way(resource_of(client, name), body)) == SAID, way

    async def ask_all_async(client: AsyncOpenAI) -> None:
        for body in bodies:
            for way in ASYNC_WAYS[:ways]:
                assert text_of(await way(resource_of(client, name), body)) == SAID, way

    async with serving(tmp_path, lambda prompt: SAID) as (engine, url):
        await in_sync(url, ask_all, _strict_response_validation=strict)
        await with_async(url, ask_all_async, _strict_response_validation=strict)
        assert len(engine.prompts) == 2 * 2 * ways


async def test_all_parameters_at_once_are_refused_for_one_of_them(tmp_path: Path):
    async with serving(tmp_path, lambda prompt: SAID) as (engine, url):

        def ask(client: OpenAI) -> None:
            for name, fields, given in (CHATS, COMPLETIONS):
                refusals = {param for _, param in fields.values() if param}
                everything = {field: value for field, (value, _) in fields.items()}
                for stream in (False, True):
                    with pytest.raises(BadRequestError) as refused:
                        resource_of(client, name).create(**given | everything | {"stream": stream})
                    assert refused.value.param in refusals

        await in_sync(url, ask)
        assert not engine.prompts


async def test_models_are_listed_and_retrieved_and_not_deleted(tmp_path: Path):
    def use(client: OpenAI) -> None:
        models = client.models
        assert [model.id for model in models.list()] == ["policy"]
        assert models.with_raw_response.list().parse().data[0].id == "policy"
        with models.with_streaming_response.list() as response:
            assert response.parse().data[0].object == "model"
        assert models.retrieve("policy").owned_by == "swarm"
        assert models.with_raw_response.retrieve("policy").parse().id == "policy"
        with models.with_streaming_response.retrieve("policy") as response:
            assert response.parse().id == "policy"
        with pytest.raises(NotFoundError) as missing:
            models.retrieve("gpt-4o-mini")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(APIStatusError) as refused:
            models.delete("policy")
        assert refused.value.status_code == 405

    async def use_async(client: AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        async with client.models.with_streaming_response.retrieve("policy") as response:
            assert (await response.parse()).id == "policy"

    async with serving(tmp_path, lambda prompt: SAID) as (_, url):
        await in_sync(url, use, _strict_response_validation=True)
        await with_async(url, use_async, _strict_response_validation=True)


OTHERS: dict[str, Callable[[OpenAI], Any]] = {
    "stored completions": lambda client: client.chat.completions.retrieve("completion_id"),
    "stored completions' messages": lambda client: client.chat.completions.messages.list("completion_id"),
    "updates of them": lambda client: client.chat.completions.update("completion_id", metadata={"foo": "string"}),
    "deletions of them": lambda client: client.chat.completions.delete("completion_id"),
    "responses": lambda client: client.responses.create(model="policy", input="string"),
    "a response": lambda client: client.responses.retrieve("response_id"),
    "embeddings": lambda client: client.embeddings.create(model="policy", input="string"),
    "moderations": lambda client: client.moderations.create(input="string"),
    "images": lambda client: client.images.generate(prompt="string"),
    "speech": lambda client: client.audio.speech.create(input="string", model="policy", voice="alloy"),
    "files": lambda client: client.files.list(),
    "batches": lambda client: client.batches.list(),
    "fine-tuning": lambda client: client.fine_tuning.jobs.list(),
    "vector stores": lambda client: client.vector_stores.list(),
    "assistants": lambda client: client.beta.assistants.list(),
    "conversations": lambda client: client.conversations.create(),
}


async def test_what_is_not_served_is_not_found(tmp_path: Path):
    def use(client: OpenAI) -> None:
        for name, ask in OTHERS.items():
            with pytest.raises(NotFoundError) as missing:
                ask(client)
            assert "There is no" in missing.value.message, name
        with pytest.raises(APIStatusError) as refused:
            client.chat.completions.list()
        assert refused.value.status_code == 405

    async with serving(tmp_path, lambda prompt: SAID) as (_, url):
        await in_sync(url, use)


# ---------------------------------------------------------------- errors, retries, timeouts


async def test_each_refusal_has_its_class(tmp_path: Path):
    asked = {"model": "policy", "prompt": PROMPT}

    def use(client: OpenAI) -> None:
        create = client.completions.create
        with pytest.raises(AuthenticationError) as wrong_key:
            client.with_options(api_key="another").completions.create(**asked)
        assert wrong_key.value.code == "invalid_api_key"
        with pytest.raises(PermissionDeniedError):
            create(**asked, extra_headers={"Origin": "https://example.org"})
        with pytest.raises(NotFoundError) as no_model:
            create(model="gpt-3.5-turbo-instruct", prompt=PROMPT)
        assert no_model.value.code == "model_not_found"
        with pytest.raises(ConflictError) as version:
            create(**asked, extra_body={"exact_version": 7})
        assert (version.value.param, version.value.code) == ("exact_version", "version_not_served")
        with pytest.raises(RateLimitError) as many:
            create(**asked, n=64)
        assert many.value.code == "overloaded"
        assert float(many.value.response.headers["Retry-After"]) > 0
        with pytest.raises(APIStatusError) as large:
            create(model="policy", prompt="a" * (9 << 20))
        assert large.value.status_code == 413
        with pytest.raises(BadRequestError) as unknown:
            create(**asked, extra_body={"frobnicate": 1})
        assert unknown.value.param == "frobnicate"
        assert isinstance(unknown.value.body, dict)
        with pytest.raises(TypeError, match="BaseModel"):  # the client's own check
            client.chat.completions.create(model="policy", messages=MESSAGES, response_format=BaseModel)  # type: ignore[arg-type]

    async with serving(tmp_path, lambda prompt: SAID, api_key="sesame", in_flight=32) as (_, url):
        await in_sync(url, use, api_key="sesame")


async def test_a_client_retries_until_there_is_a_node(tmp_path: Path):
    async with gateway(tmp_path, writer_files()) as (swarm, url):
        found: list[Any] = []

        def use(client: OpenAI) -> None:
            with pytest.raises(InternalServerError) as none:
                client.completions.create(model="policy", prompt=PROMPT)
            assert none.value.code == "no_nodes"
            patient = client.with_options(max_retries=6)
            found.append(patient.completions.with_raw_response.create(model="policy", prompt=PROMPT, max_tokens=32))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_sync, url, use)
            await trio.sleep(0.7)
            await swarm.add(1, engine=Writing(lambda prompt: SAID))
        (response,) = found
        assert text_of(response.parse()) == SAID
        assert response.retries_taken == int(response.http_request.headers["x-stainless-retry-count"]) > 0


async def test_a_client_waits_as_long_as_it_is_told(tmp_path: Path):
    """`Retry-After` of an answer of 429 is a second; without it the client would ask again after half a second."""
    async with serving(tmp_path, lambda prompt: SAID, in_flight=1) as (engine, url):
        engine.seconds = 0.02  # the first answer takes 19 tokens

        def hold(client: OpenAI) -> None:
            client.completions.create(model="policy", prompt=PROMPT, max_tokens=32)

        def retry(client: OpenAI) -> tuple[Any, float]:
            began = time.monotonic()
            ask = client.with_options(max_retries=3).completions.with_raw_response.create
            return ask(model="policy", prompt=PROMPT, max_tokens=32), time.monotonic() - began

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_sync, url, hold)
            await until(lambda: engine.asked)
            response, seconds = await in_sync(url, retry)
        assert response.retries_taken == 1
        assert seconds > 1.0
        assert text_of(response.parse()) == SAID


async def test_a_timeout_withdraws_the_request(tmp_path: Path):
    async with gateway(tmp_path, writer_files()) as (swarm, url):
        engine = await swarm.add(1, engine=Writing(lambda prompt: SAID))
        engine.seconds = 0.5

        def use(client: OpenAI) -> None:
            with pytest.raises(APITimeoutError):
                client.completions.create(model="policy", prompt=PROMPT, max_tokens=32, timeout=0.3)
            with pytest.raises(APITimeoutError):
                client.with_options(timeout=0.3).chat.completions.create(model="policy", messages=MESSAGES)

        await in_sync(url, use)
        await until(lambda: not swarm.service.status().groups_open)
    with pytest.raises(APIConnectionError):
        await in_sync(url, lambda client: client.models.list())


async def test_headers_query_and_body_of_the_users_own(tmp_path: Path):
    async with serving(tmp_path, lambda prompt: SAID) as (engine, url):

        def use(client: OpenAI) -> None:
            create = client.completions.create
            body = {"model": "policy", "prompt": PROMPT, "max_tokens": 32}
            more = {"extra_headers": {"X-Session-Id": "s"}, "extra_query": {"a": "b"}, "extra_body": {"top_k": 3}}
            answer = create(**body, **more)
            assert text_of(answer) == SAID
            assert answer.choices[0].model_extra["version_end"] == [0, 0]
            other = client.copy(organization="o", project="p", default_headers={"X-Foo": "bar"}, base_url=url + "/")
            assert text_of(other.completions.create(**body)) == SAID
            assert "choices" in client.post("/completions", cast_to=dict[str, Any], body=body)

        await in_sync(url, use)
        assert len(engine.prompts) == 3
