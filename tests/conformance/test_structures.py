"""Structured outputs and forced calls of tools, from a random model that is kept to the structure by llguidance."""

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from parameters_kit import Asker, LocalEngine, asking, writer_files, writer_tokens

from node.engines.base import ABILITIES, STRUCTURES, Prompt, SamplingParams
from node.engines.structures import read_structure
from node.engines.transformers import TransformersEngine
from node.gateway.text import Text

FIELDS = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a", "b"], "additionalProperties": False}
FEW_SPACES = dict.fromkeys(map(str, writer_tokens(" \n\r\t")), -20.0)
NO_WORDS = {"max_tokens": 200, "temperature": 1.0, "seed": None, "logit_bias": FEW_SPACES}
"""A random model draws anything; only the structure makes sense of it. JSON may have any number of spaces."""


def _fits_schema(text: str) -> bool:
    found = json.loads(text)
    return sorted(found) == ["a", "b"] and 0 <= found["a"] <= 99 and found["b"] in ("x", "y")


class Lossy(LocalEngine):
    """Stops in the middle of a completion, and sets `half`."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__(engine)
        self.half = trio.Event()

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Any = None,
        adapter: str = "",
        draws: Any = None,
    ) -> Any:
        flight, drawn = 1 << 20, 0
        self.engine.begin(flight, prompts, sampling)
        try:
            while drawn < 10:
                await trio.sleep(0.001)
                self.engine.step()
                for row, tokens in self.engine.new_tokens(flight):
                    draws(row, tokens)
                    drawn = tokens.end
            self.half.set()
            await trio.sleep_forever()
        finally:
            self.engine.cancel(flight)


@pytest.fixture
async def write(tmp_path: Path, writer: TransformersEngine) -> AsyncIterator[Asker]:
    async with asking(tmp_path, writer, base=writer_files()) as asker:
        yield asker


def _text_of(reply: Any) -> str:
    return Text(writer_files()).decode((), reply.tokens[:-1])


@pytest.mark.parametrize(
    "endpoint", ["chat", *(pytest.param(other, marks=pytest.mark.long) for other in ("completions", "sampling_params"))]
)
async def test_a_text_has_the_structure_that_was_asked_for(write: Asker, endpoint: str):
    forms: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"structured_outputs": {"json": SCHEMA}}, _fits_schema),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, _fits_schema),
        ({"structured_outputs": {"regex": "ab{2,5}c"}}, lambda text: re.fullmatch("ab{2,5}c", text)),
        ({"structured_outputs": {"choice": ["yes", "no", 'a "b"']}}, lambda text: text in ("yes", "no", 'a "b"')),
    ]
    for grammar in ('root ::= "<" inner+ ">"\ninner ::= [a-c] | "-"\n', 'start: "<" INNER+ ">"\nINNER: /[a-c]|-/\n'):
        forms.append(({"structured_outputs": {"grammar": grammar}}, lambda text: re.fullmatch("<[a-c-]+>", text)))
    if endpoint != "sampling_params":
        schema = {"name": "s", "schema": SCHEMA, "strict": True}
        forms.append(({"response_format": {"type": "json_schema", "json_schema": schema}}, _fits_schema))
    for fields, fits in forms:
        for _ in range(3):
            reply = await write(endpoint, **NO_WORDS, **fields)
            assert reply.finish == "stop", (fields, reply.tokens)
            assert fits(_text_of(reply)), fields
            if endpoint != "sampling_params":
                assert reply.text == _text_of(reply)
    reply = await write(endpoint, **NO_WORDS, n=4, structured_outputs={"choice": ["yes", "no"]})
    assert {choice["finish_reason"] for choice in reply.choices} == {"stop"}
    hostile = (
        'root ::= "a',
        "root ::= nothing",
        "root ::= " + "(" * 4000,
        'start: "a" (',
        "a" * 9000,
    )
    for wrong in ({"regex": "("}, *({"grammar": grammar} for grammar in hostile)):
        reply = await write(endpoint, structured_outputs=wrong)
        assert (reply.status, "structure" in reply.why) == (400, True), wrong
    assert not sum(sum(node.refused.values()) for node in write.swarm.service.status().nodes.values())


def _streamed(reply: Any) -> str:
    return "".join(part["choices"][0]["text"] for part in reply.events)


async def test_a_stream_of_a_structure_has_the_tokens_as_they_are_drawn(write: Asker):
    reply = await write("completions", **NO_WORDS, structured_outputs={"regex": "a{20}"}, stream=True)
    assert _streamed(reply) == "a" * 20
    assert len(reply.events) > 2


async def test_a_node_continues_a_text_that_another_one_began(write: Asker):
    """The text continues where it was, and is not begun anew."""
    engine, prompts = Lossy(write.engine.engine), write.engine.prompts
    await write.swarm.add(2, engine=engine)
    write.swarm.kill(1)
    asked = {"structured_outputs": {"regex": "(ab){40}c"}, "stream": True}

    async def lose() -> None:
        await engine.half.wait()
        await write.swarm.add(3, engine=write.engine)
        write.swarm.kill(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        reply = await write("completions", **NO_WORDS, **asked)
    assert _streamed(reply) == "ab" * 40 + "c"
    ((prompt, sampling),) = [(prompt, sampling) for prompt, sampling in prompts if sampling.extra.structure]
    begun = read_structure(sampling.extra.structure).begun
    assert begun >= 1
    assert Text(writer_files()).decode((), prompt[-begun:]) == ("ab" * 40)[:begun]


async def test_a_text_cannot_be_begun_by_a_client(write: Asker):
    assert (await write("chat", structured_outputs={"regex": "a", "begun": 1})).param == "structured_outputs"


async def test_a_forced_tool_is_called(write: Asker):
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("first", "second")]
    for choice, names in (
        ({"type": "function", "function": {"name": "second"}}, {"second"}),
        ("required", {"first", "second"}),
    ):
        reply = await write("chat", **NO_WORDS | {"max_tokens": 400}, tools=tools, tool_choice=choice)
        message = reply.choices[0]["message"]
        if reply.finish == "length":  # a random model may call for ever
            assert choice == "required"
            continue
        assert reply.finish == "tool_calls"
        assert message["content"] is None
        assert message["tool_calls"]
        for call in message["tool_calls"]:
            assert call["function"]["name"] in names
            assert _fits_schema(call["function"]["arguments"])


async def test_a_structure_that_no_engine_follows_is_refused(tmp_path: Path, writer: TransformersEngine):
    async with asking(tmp_path, writer, base=writer_files(), abilities=ABILITIES - {STRUCTURES}) as ask:
        reply = await ask("chat", response_format={"type": "json_object"})
        assert (reply.status, reply.param) == (400, "response_format")
        assert "llguidance" in reply.why
