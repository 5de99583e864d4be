"""The helpers of the `openai` client: `parse`, `stream`, tools of pydantic models, and what they accumulate.

`openai_kit` says which tests of which release these calls follow; the pydantic models and tools are theirs. Those tests
replay what a large model once said; here a random model is kept to the structure, or an engine writes a given text.
"""

import json
from collections.abc import AsyncIterator
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai_kit import TAGS, in_sync, serving, with_async
from parameters_kit import Asker, asking, writer_files, writer_tokens
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from node.engines.transformers import TransformersEngine

MESSAGES: Any = [{"role": "user", "content": "What's the weather like in SF?"}]


class Location(BaseModel):
    city: str
    temperature: float
    units: Literal["c", "f"]


class PartialLocation(BaseModel):
    city: str
    temperature: float
    units: Literal["c", "f"] | None = None


class Color(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class ColorDetection(BaseModel):
    color: Color
    hex_color_code: str = Field(description="The hex color code of the detected color")


@dataclass
class CalendarEvent:
    name: str
    date: str
    participants: list[str]


class Condition(BaseModel):
    column: str
    operator: Literal["=", ">", "<"]
    value: str | int


class Query(BaseModel):
    name: str | None = None
    table_name: Literal["orders", "customers", "products"]
    columns: list[Literal["id", "status", "shipped_at"]]
    conditions: list[Condition]
    order_by: Literal["asc", "desc"]


class GetWeatherArgs(BaseModel):
    city: str
    country: str
    units: Literal["c", "f"] = "c"


class GetStockPrice(BaseModel):
    ticker: str
    exchange: str


@pytest.fixture
async def url(tmp_path: Path, writer: TransformersEngine) -> AsyncIterator[str]:
    """Of a gateway whose only node has a random model."""
    async with asking(tmp_path, writer, base=writer_files()) as ask:
        yield url_of(ask)


def url_of(ask: Asker) -> str:
    return f"{ask.url}/v1"


def brief() -> dict[str, Any]:
    """Biases with which a random model ends its strings, lists and objects soon, and writes few spaces between them."""
    biases = dict.fromkeys(writer_tokens('"}]'), 8) | dict.fromkeys(writer_tokens(" \n\r\t"), -20)
    return {
        "model": "policy",
        "messages": MESSAGES,
        "max_tokens": 600,
        "logit_bias": {str(token): bias for token, bias in biases.items()},
    }


MODELS = (PartialLocation, ColorDetection, CalendarEvent)
"""For which there is no time every day."""


@pytest.mark.parametrize(
    "model",
    [Location, Query, *(pytest.param(model, marks=pytest.mark.long) for model in MODELS)],
    ids=lambda model: model.__name__,
)
async def test_an_answer_is_parsed_as_its_model(url: str, model: Any):
    def use(client: OpenAI) -> None:
        answer = client.chat.completions.parse(**brief(), response_format=model)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, model)
        assert choice.message.content
        several = client.chat.completions.parse(**brief(), response_format=model, n=3)
        assert [isinstance(choice.message.parsed, model) for choice in several.choices] == [True] * 3
        raw = client.chat.completions.with_raw_response.parse(**brief(), response_format=model).parse()
        assert isinstance(raw.choices[0].message.parsed, model)

    async def use_async(client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.parse(**brief(), response_format=model)
        assert isinstance(answer.choices[0].message.parsed, model)

    await in_sync(url, use)
    await with_async(url, use_async)


@pytest.mark.parametrize("model", [Location, Query], ids=lambda model: model.__name__)
async def test_a_stream_is_parsed_as_its_model(url: str, model: Any):
    def use(client: OpenAI) -> None:
        with client.chat.completions.stream(**brief(), response_format=model, n=2) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        done = [event for event in events if event.type == "content.done"]
        assert [isinstance(event.parsed, model) for event in done] == [True] * 2
        assert [isinstance(choice.message.parsed, model) for choice in final.choices] == [True] * 2
        assert {choice.message.content for choice in final.choices} == {event.content for event in done}

    async def use_async(client: AsyncOpenAI) -> None:
        async with client.chat.completions.stream(**brief(), response_format=model) as stream:
            assert [event.type async for event in stream][-1] == "content.done"
            assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, model)

    await in_sync(url, use)
    await with_async(url, use_async)


async def test_an_answer_that_is_cut_off_is_not_parsed(url: str):
    def use(client: OpenAI) -> None:
        cut = brief() | {"max_tokens": 1, "response_format": Location}
        with pytest.raises(LengthFinishReasonError):
            client.chat.completions.parse(**cut)
        with pytest.raises(LengthFinishReasonError), client.chat.completions.stream(**cut) as stream:
            stream.until_done()

    await in_sync(url, use)


async def test_a_response_format_of_plain_json(url: str):
    """Without pydantic: the schema as JSON, and `json_object`."""
    schema = {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}},
        "required": ["day"],
        "additionalProperties": False,
    }

    def use(client: OpenAI) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "when", "schema": schema, "strict": True}}
        with client.chat.completions.stream(**brief(), response_format=form) as stream:
            text = stream.get_final_completion().choices[0].message.content or ""
        assert date.fromisoformat(json.loads(text)["day"])
        answer = client.chat.completions.create(**brief(), response_format={"type": "json_object"})
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)

    await in_sync(url, use)


async def test_a_tool_that_must_be_called_is_parsed(url: str):
    tools = [openai.pydantic_function_tool(GetWeatherArgs), openai.pydantic_function_tool(GetStockPrice)]

    def use(client: OpenAI) -> None:
        choice: Any = {"type": "function", "function": {"name": "GetStockPrice"}}
        answer = client.chat.completions.parse(**brief(), tools=tools, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, GetStockPrice)
        assert answer.choices[0].finish_reason == "tool_calls"
        answer = client.chat.completions.parse(**brief(), tools=tools, tool_choice="required")
        calls = answer.choices[0].message.tool_calls or ()
        assert calls
        assert all(isinstance(call.function.parsed_arguments, GetWeatherArgs | GetStockPrice) for call in calls)
        with client.chat.completions.stream(**brief(), tools=tools, tool_choice=choice) as stream:
            events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [isinstance(event.parsed_arguments, GetStockPrice) for event in events] == [True]

    await in_sync(url, use)


# ---------------------------------------------------------------- given texts

WEATHER = '{"city": "Edinburgh", "country": "GB", "units": "c"}'
STOCK = '{"ticker": "AAPL", "exchange": "NASDAQ"}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def test_nothing_to_parse(tmp_path: Path):
    def use(client: OpenAI) -> None:
        answer = client.chat.completions.parse(model="policy", messages=MESSAGES)
        assert (answer.choices[0].message.content, answer.choices[0].message.parsed) == ("It is mild.", None)
        with client.chat.completions.stream(model="policy", messages=MESSAGES) as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "content.delta"]
        assert len(deltas) > 1, "a token at a time"
        assert "".join(deltas) == "It is mild."
        assert [event.content for event in events if event.type == "content.done"] == ["It is mild."]

    async with serving(tmp_path, lambda prompt: "It is mild.") as (_, url):
        await in_sync(url, use, _strict_response_validation=True)


async def test_log_probabilities_are_accumulated(tmp_path: Path):
    def use(client: OpenAI) -> None:
        asked: Any = {"model": "policy", "messages": MESSAGES, "logprobs": True}
        with client.chat.completions.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        parts = [entry for event in events if event.type == "logprobs.content.delta" for entry in event.content]
        (done,) = [event for event in events if event.type == "logprobs.content.done"]
        whole = client.chat.completions.create(**asked).choices[0].logprobs
        assert [entry.token for entry in parts] == [*"Foo!", "<end>"]
        assert done.content == parts == final.choices[0].logprobs.content == whole.content

    async with serving(tmp_path, lambda prompt: "Foo!") as (_, url):
        await in_sync(url, use)


async def test_calls_of_tools_are_parsed_as_their_models(tmp_path: Path):
    tools = [
        openai.pydantic_function_tool(GetWeatherArgs),
        openai.pydantic_function_tool(GetStockPrice, name="get_stock_price", description="Fetch the latest price"),
    ]
    wanted = [GetWeatherArgs(city="Edinburgh", country="GB"), GetStockPrice(ticker="AAPL", exchange="NASDAQ")]

    def use(client: OpenAI) -> None:
        asked: Any = {"model": "policy", "messages": MESSAGES, "tools": tools}
        message = client.chat.completions.parse(**asked).choices[0].message
        assert message.content is None
        assert [each.function.parsed_arguments for each in message.tool_calls or ()] == wanted
        with client.chat.completions.stream(**asked, parallel_tool_calls=True) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == wanted
        assert final.finish_reason == "tool_calls"
        assert [each.function.parsed_arguments for each in final.message.tool_calls or ()] == wanted

    text = call("GetWeatherArgs", WEATHER) + call("get_stock_price", STOCK)
    async with serving(tmp_path, lambda prompt: text, TAGS) as (_, url):
        await in_sync(url, use)


async def test_tools_without_a_model(tmp_path: Path):
    """Strict ones are parsed as JSON; others only by the stream's helper, which leaves their arguments as text."""
    function: dict[str, Any] = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    loose: Any = [{"type": "function", "function": function}]
    strict: Any = [{"type": "function", "function": function | {"strict": True}}]

    def use(client: OpenAI) -> None:
        asked: Any = {"model": "policy", "messages": MESSAGES}
        (found,) = client.chat.completions.parse(**asked, tools=strict).choices[0].message.tool_calls or ()
        assert found.function.parsed_arguments == json.loads(WEATHER)
        with pytest.raises(ValueError, match="strict"):
            client.chat.completions.parse(**asked, tools=loose)
        with client.chat.completions.stream(**asked, tools=loose) as stream:
            (found,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert (json.loads(found.function.arguments), found.function.parsed_arguments) == (json.loads(WEATHER), None)

    async with serving(tmp_path, lambda prompt: call("get_weather", WEATHER), TAGS) as (_, url):
        await in_sync(url, use)


async def test_parts_are_accumulated_by_the_client(tmp_path: Path):
    def use(client: OpenAI) -> None:
        state: Any = ChatCompletionStreamState()
        options: Any = {"include_usage": True}
        for part in client.chat.completions.create(
            model="policy", messages=MESSAGES, stream=True, stream_options=options
        ):
            state.handle_chunk(part)
        found = state.get_final_completion()
        whole = client.chat.completions.create(model="policy", messages=MESSAGES)
        assert found.choices[0].message.content == whole.choices[0].message.content == "It is mild."
        assert found.usage == whole.usage

    async with serving(tmp_path, lambda prompt: "It is mild.") as (_, url):
        await in_sync(url, use)
