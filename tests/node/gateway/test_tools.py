"""Calls of tools in answers and streams, earlier calls in messages, and the endpoints for tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import END, LETTERS, UNKNOWN, SpellingEngine, gateway, with_client
from openai import BadRequestError, NotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from node.engines.structures import read_structure
from node.gateway.structure_fields import forced_calls
from node.gateway.tool_calls import Forced, ToolCall, find_calls, held_back, plain_arguments, syntax_of

TAGS = "{% if tools %}call them in <tool_call></tool_call>{% endif %}"
JSON = '{% if tools %}answer <|python_tag|>{"name": 1, "parameters": 2}{% endif %}'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SIGNS = LETTERS + '<>/{}"_;,0123456789'
"""More signs than the gateway kit's tokenizer has: those of JSON and tags."""
STOP = len(SIGNS)


def files(template: str) -> dict[str, bytes]:
    """A base whose tokenizer has a token for each sign."""
    vocabulary = {sign: i for i, sign in enumerate(SIGNS)} | {"<end>": STOP, "<unk>": STOP + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<unk>"])
    template += "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    template += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": template}).encode(),
        "config.json": json.dumps({"max_position_embeddings": 1024}).encode(),
    }


class Saying(SpellingEngine):
    """Answers with `text`, a sign at a time."""

    def __init__(self, text: str) -> None:
        super().__init__(0.002)
        self.text = text

    def next_letter(self, prompt, ids):
        return SIGNS.index(self.text[len(ids)]) if len(ids) < len(self.text) else STOP


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (TAGS, "wait\n" + CALL, "wait", [("add", {"a": 1})]),
        (TAGS, CALL + CALL, None, [("add", {"a": 1})] * 2),
        (TAGS, "a <tool_call>no json</tool_call>", "a <tool_call>no json</tool_call>", []),
        (TAGS, "just <b> text", "just <b> text", []),
        (JSON, '{"name": "add", "parameters": {"a": 2}}', None, [("add", {"a": 2})]),
        (JSON, '{"name": 3}', '{"name": 3}', []),
        ("", CALL, CALL, []),
    ],
)
async def test_calls_are_found(
    tmp_path: Path, stream: bool, template: str, text: str, content: str | None, calls: list[Any]
):
    async with gateway(tmp_path, files(template)) as (swarm, url):
        await swarm.add(1, engine=Saying(text))
        tools = TOOLS if template else None

        async def use(client: Any) -> Any:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            asked |= {"tools": tools} if tools else {}
            if not stream:
                answer = await client.chat.completions.create(**asked)
                (choice,) = answer.choices
                found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
                assert all(c.id.startswith("call_") for c in choice.message.tool_calls or [])
                return choice.message.content, found, choice.finish_reason
            said, found, reason = "", [], None
            async for part in await client.chat.completions.create(**asked, stream=True):
                (choice,) = part.choices
                said += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    assert call.index == len(found)
                    found.append((call.function.name, call.function.arguments))
                reason = choice.finish_reason or reason
            return said, found, reason

        said, found, reason = await with_client(url, use)
        assert (said or None if not stream else said.strip() or None) == content
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
        assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_call_is_left_without_parallel_calls(tmp_path: Path, stream: bool):
    other = CALL.replace('"a": 1', '"a": 2')
    async with gateway(tmp_path, files(TAGS)) as (swarm, url):
        await swarm.add(1, engine=Saying("wait " + CALL + other))

        async def use(client: Any) -> Any:
            asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            found = []
            for parallel in (False, True):
                asked |= {"tools": TOOLS, "parallel_tool_calls": parallel}
                answer = await client.chat.completions.create(**asked, stream=stream)
                if stream:
                    parts = [part.choices[0] async for part in answer]
                    calls = [call for part in parts for call in part.delta.tool_calls or ()]
                    said = "".join(part.delta.content or "" for part in parts)
                    reason = parts[-1].finish_reason
                else:
                    (choice,) = answer.choices
                    calls, said, reason = choice.message.tool_calls, choice.message.content, choice.finish_reason
                found.append([json.loads(call.function.arguments) for call in calls])
                assert (said.strip(), reason) == ("wait", "tool_calls")
            return found

        assert await with_client(url, use) == [[{"a": 1}], [{"a": 1}, {"a": 2}]]


def test_a_forced_list_has_one_call_without_parallel_calls():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    for one in (False, True):
        found = forced_calls("required", tools, one=one)
        assert found is not None
        schema = read_structure(found[0].structure).json
        assert schema is not None
        assert schema.get("maxItems") == (1 if one else None)
    two = json.dumps([{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}])
    assert find_calls(two, Forced(None), one=True) == ("", [ToolCall("f", "{}")])
    assert find_calls("no call", "tags", one=True) == ("no call", [])


def test_arguments_of_earlier_calls_are_objects_for_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (found,) = plain_arguments(message)["tool_calls"]
    assert found["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}', "the client's message is not changed"
    for odd in ("no json", "[1]", {"a": 1}, None):
        message = {"tool_calls": [{"function": {"name": "add", "arguments": odd}}]}
        assert plain_arguments(message) == message
    for odd in ({"tool_calls": "x"}, {"tool_calls": ["x"]}, {"tool_calls": [{"function": 1}]}):
        assert plain_arguments(odd) == odd


def test_syntaxes():
    assert syntax_of(TAGS) == "tags"
    assert syntax_of(JSON) == "json"
    assert syntax_of(None) is None
    assert syntax_of("{{ messages }}<tool_call>") is None, "it does not read tools"
    assert syntax_of(TAGS + "<function=") is None, "its calls are not JSON"
    assert find_calls(
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "json"
    ).calls == [
        ToolCall("a", "{}"),
        ToolCall("b", "{}"),
    ]
    assert find_calls('<tool_call>{"name": "a"}', "tags").calls == [ToolCall("a", "{}")], "it was cut off"
    assert find_calls("[" * 100_000, "json").calls == []
    assert [held_back(text, "tags") for text in ("a", "a<", "a<tool", "a<b", "<tool_call>x")] == [0, 1, 5, 0, 12]
    assert [held_back(text, "json") for text in ("a", ' {"', "")] == [0, 3, 0]


async def test_text_to_tokens_and_back(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        where = url.removesuffix("/v1")

        async def use(client: Any) -> Any:
            async def ask(path: str, **body: Any) -> Any:
                return await client.post(where + path, cast_to=dict[str, Any], body=body)

            found = [
                await ask("/tokenize", prompt="abc", return_token_strs=True),
                await ask("/tokenize", model="policy", messages=[{"role": "user", "content": "hi"}]),
                await ask("/detokenize", tokens=[0, 1, 2, END]),
            ]
            refused = []
            for path, body in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "a", "unknown": 1}),
                ("/detokenize", {"tokens": [-1]}),
            ):
                with pytest.raises(BadRequestError) as caught:
                    await ask(path, **body)
                refused.append(caught.value)
            with pytest.raises(NotFoundError) as caught:
                await client.responses.create(model="policy", input="hi")
            return found, refused, caught.value

        (prompt, chat, text), refused, no_responses = await with_client(url, use)
        expected = {"count": 3, "max_model_len": 128, "tokens": [0, 1, 2], "token_strs": ["a", "b", "c"]}
        assert prompt == expected
        assert chat["tokens"] == [LETTERS.index(letter) for letter in "user: hi\nassistant: "]
        assert text == {"prompt": "abc<end>"}
        assert refused[0].param == "prompt"
        assert len(refused) == 3
        assert "/v1/chat/completions" in no_responses.message
        assert UNKNOWN > END
