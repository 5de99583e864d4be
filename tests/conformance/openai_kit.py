"""The unmodified `openai` client against a gateway: every way in which that package's own tests make a call.

The tests of this folder follow the calls of `tests/api_resources/chat/test_completions.py`,
`tests/api_resources/test_completions.py`, `tests/api_resources/test_models.py`, `tests/lib/chat` and
`tests/test_client.py` of openai-python 2.54.0 (https://github.com/openai/openai-python, commit 03b3ec47), which run
against a mock server: the same methods, parameters and values, here against a gateway with nodes.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from gateway_kit import SpellingEngine, gateway
from openai import AsyncOpenAI, OpenAI
from parameters_kit import writer_files
from tokenizers import Tokenizer

__all__ = [
    "ASYNC_WAYS",
    "SYNC_WAYS",
    "TAGS",
    "Writing",
    "in_sync",
    "serving",
    "template_files",
    "text_of",
    "with_async",
]

Resource = Any
Body = Mapping[str, Any]
TAGS = "{% if tools %}call them in <tool_call></tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""A chat template that teaches calls of tools."""
WITHIN_S = 30.0


def template_files(template: str) -> dict[str, bytes]:
    """The small files of a base with a token for each byte, and this chat template."""
    settings = {"eos_token": "<end>", "chat_template": template}
    return writer_files() | {"tokenizer_config.json": json.dumps(settings).encode()}


class Writing(SpellingEngine):
    """Answers with the text `write(prompt)`, a token for each byte. `prompts`: those that came, as text."""

    logprob = 0.0

    def __init__(self, write: Callable[[str], str]) -> None:
        super().__init__(0.002)
        self.prompts: list[str] = []
        self._write = write
        self._tokens = Tokenizer.from_str(writer_files()["tokenizer.json"].decode())

    def next_letter(self, prompt: Any, ids: Any) -> int:
        asked = self._tokens.decode(list(prompt))
        if not ids:
            self.prompts.append(asked)
        tokens = [*self._tokens.encode(self._write(asked)).ids, self._tokens.token_to_id("<end>")]
        return tokens[len(ids)]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, write: Callable[[str], str], template: str | None = None, **config: Any
) -> AsyncIterator[tuple[Writing, str]]:
    """A gateway with one node whose engine writes what `write(prompt)` says. Yields (engine, URL)."""
    async with gateway(folder, writer_files() if template is None else template_files(template), **config) as (
        swarm,
        url,
    ):
        engine = await swarm.add(1, engine=Writing(write))
        yield engine, url


async def in_sync(url: str, use: Callable[[OpenAI], Any], **options: Any) -> Any:
    """Run `use` with a client in a thread."""

    def run() -> Any:
        with OpenAI(base_url=url, **({"api_key": "none", "max_retries": 0, "timeout": WITHIN_S} | options)) as client:
            return use(client)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def with_async(url: str, use: Callable[[AsyncOpenAI], Awaitable[Any]], **options: Any) -> Any:
    """Run `use` with an asynchronous client in a thread."""

    async def run() -> Any:
        given = {"api_key": "none", "max_retries": 0, "timeout": WITHIN_S} | options
        async with AsyncOpenAI(base_url=url, **given) as client:
            return await use(client)

    return await trio.to_thread.run_sync(lambda: asyncio.run(run()), abandon_on_cancel=True)


def text_of(found: Any) -> str:
    """The text of the first choice of an answer, or of a list with the parts of one."""
    parts = found if isinstance(found, list) else [found]
    choices = [choice for part in parts for choice in part.choices if choice.index == 0]
    return "".join(_text(choice) for choice in choices)


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text
    return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""


# ---------------------------------------------------------------- the ways of a call


def _plain(resource: Resource, body: Body) -> Any:
    return resource.create(**body)


def _raw(resource: Resource, body: Body) -> Any:
    response = resource.with_raw_response.create(**body)
    assert response.is_closed
    assert response.http_request.headers["X-Stainless-Lang"] == "python"
    return response.parse()


def _streaming(resource: Resource, body: Body) -> Any:
    with resource.with_streaming_response.create(**body) as response:
        assert not response.is_closed
        found = response.parse()
    assert response.is_closed
    return found


def _stream(resource: Resource, body: Body) -> Any:
    with resource.create(**body, stream=True) as stream:
        return list(stream)


def _raw_stream(resource: Resource, body: Body) -> Any:
    response = resource.with_raw_response.create(**body, stream=True)
    stream = response.parse()
    found = list(stream)
    stream.close()
    return found


def _streaming_stream(resource: Resource, body: Body) -> Any:
    with resource.with_streaming_response.create(**body, stream=True) as response:
        found = list(response.parse())
    assert response.is_closed
    return found


SYNC_WAYS = (_plain, _raw, _streaming, _stream, _raw_stream, _streaming_stream)
"""Each returns an answer, or the list of its parts."""


async def _plain_async(resource: Resource, body: Body) -> Any:
    return await resource.create(**body)


async def _raw_async(resource: Resource, body: Body) -> Any:
    response = await resource.with_raw_response.create(**body)
    assert response.is_closed
    return response.parse()


async def _streaming_async(resource: Resource, body: Body) -> Any:
    async with resource.with_streaming_response.create(**body) as response:
        assert not response.is_closed
        found = await response.parse()
    assert response.is_closed
    return found


async def _stream_async(resource: Resource, body: Body) -> Any:
    async with await resource.create(**body, stream=True) as stream:
        return [part async for part in stream]


async def _raw_stream_async(resource: Resource, body: Body) -> Any:
    response = await resource.with_raw_response.create(**body, stream=True)
    stream = response.parse()
    found = [part async for part in stream]
    await stream.close()
    return found


async def _streaming_stream_async(resource: Resource, body: Body) -> Any:
    async with resource.with_streaming_response.create(**body, stream=True) as response:
        found = [part async for part in await response.parse()]
    assert response.is_closed
    return found


ASYNC_WAYS = (_plain_async, _raw_async, _streaming_async, _stream_async, _raw_stream_async, _streaming_stream_async)
"""As `SYNC_WAYS`."""
