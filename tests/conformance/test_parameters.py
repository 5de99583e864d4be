"""The parameter matrix: every field of OpenAI's and vLLM's requests is supported, refused by name, or harmless.

The rows are those of `node.gateway.parameters`. A field that a later release of OpenAI's client or vLLM adds is in no
row, so the tests here fail. Each supported field has a test of its effect, with a real engine behind a real ledger.
"""

import base64
import io
import json
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
import trio
from parameters_kit import (
    BOS,
    END,
    SHAPE,
    Asker,
    LocalEngine,
    asking,
    files,
    make_engine,
    make_experts,
    tokens_of,
    writer_files,
)

from node.engines.base import ABILITIES, IMAGES, OPTIONS, ROUTES
from node.engines.transformers import TransformersEngine
from node.gateway.bodies import BODIES, parse
from node.gateway.parameters import ENDPOINTS, PARAMETERS, Parameter, markdown
from node.gateway.parsed_request import parse_chat, parse_completion
from node.gateway.text import Text
from node.member.worker import NodeWorker

HERE = Path(__file__).parent
VLLM: dict[str, Any] = json.loads((HERE / "vllm_fields.json").read_text())
Effect = Callable[[Asker, str], Awaitable[None]]
EFFECTS: dict[str, Effect] = {}
"""By field: a test that it does what the table says, on one endpoint."""
WITH: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "routed_experts_prompt_start": {"return_routed_experts": True},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "he"}]},
}
"""By field: other fields that a request with it must have."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return make_engine(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    engine = make_experts(tmp_path_factory.mktemp("experts"))
    engine.measure()
    return engine


@pytest.fixture
async def ask(tmp_path: Path, engine: TransformersEngine) -> AsyncIterator[Asker]:
    async with asking(tmp_path, engine) as asker:
        yield asker


def effect(*names: str) -> Callable[[Effect], Effect]:
    def keep(test: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(names, test))
        return test

    return keep


# ---------------------------------------------------------------- the table is complete


@pytest.mark.parametrize(("endpoint", "module"), [("chat", chat_params), ("completions", completion_params)])
def test_every_field_of_openai_is_in_the_table(endpoint: str, module: Any):
    kinds = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    theirs = {name for kind in kinds for name in typing.get_type_hints(kind)}
    assert len(theirs) > 15
    assert theirs <= {row.name for row in PARAMETERS if endpoint in row.on}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_vllm_is_in_the_table(endpoint: str):
    assert set(VLLM[endpoint]) <= {row.name for row in PARAMETERS if endpoint in row.on}


def test_the_table_has_one_row_for_each_field_of_an_endpoint():
    cells = [(row.name, endpoint) for row in PARAMETERS for endpoint in row.on]
    assert len(cells) == len(set(cells))
    assert all(set(row.on) <= set(ENDPOINTS) and row.says.endswith(".") for row in PARAMETERS)


def test_every_supported_field_has_a_test_of_its_effect():
    assert set(EFFECTS) == {row.name for row in PARAMETERS if row.happens == "done"}


def test_the_documentation_shows_the_table():
    page = (HERE.parents[1] / "docs" / "parameters.md").read_text()
    assert markdown() in page, "the page gives the command that prints the table"


# ---------------------------------------------------------------- refused, harmless, unknown


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_refused_fields_are_refused_by_name(ask: Asker, endpoint: str):
    refused = [row for row in PARAMETERS if row.happens == "refused" and endpoint in row.on]
    assert refused
    for row in refused:
        reply = await ask(endpoint, **{row.name: row.example})
        name = f"sampling_params.{row.name}" if endpoint == "sampling_params" else row.name
        assert (reply.status, reply.param) == (400, name), row.name
        assert name in reply.why
        assert row.says in reply.why


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_values_without_an_effect_are_accepted(endpoint: str):
    required = {"completions": {"prompt": "a"}, "chat": {"messages": []}}
    for row in PARAMETERS:
        for value in (None, *row.nothing) if row.happens == "refused" and endpoint in row.on else ():
            body = required.get(endpoint) or {"token_ids": [1], "sampling_params": {}}
            (body["sampling_params"] if endpoint == "sampling_params" else body)[row.name] = value
            parse("generate" if endpoint == "sampling_params" else endpoint, json.dumps(body).encode())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_harmless_fields_change_nothing(ask: Asker, endpoint: str):
    plain = await ask(endpoint)
    harmless = [row for row in PARAMETERS if row.happens == "harmless" and endpoint in row.on]
    assert harmless
    for row in harmless:
        reply = await ask(endpoint, **{row.name: row.example})
        assert (reply.tokens, reply.finish) == (plain.tokens, plain.finish), row.name


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_unknown_fields_and_wrong_types_are_refused_by_name(ask: Asker, endpoint: str):
    inside = "sampling_params." if endpoint == "sampling_params" else ""
    reply = await ask(endpoint, frobnicate=1)
    assert (reply.status, reply.param) == (400, f"{inside}frobnicate")
    typed = [row for row in PARAMETERS if endpoint in row.on and row.kind is not Any]
    assert typed
    for row in typed:
        reply = await ask(endpoint, **{row.name: [[{"no": "such thing"}]]})
        assert (reply.status, reply.param) == (400, inside + row.name), row.name


# ---------------------------------------------------------------- supported


@effect("model")
async def _model(ask: Asker, endpoint: str) -> None:
    assert (await ask(endpoint, model="policy")).status == 200
    reply = await ask(endpoint, model="another")
    assert (reply.status, reply.param) == (404, "model")


@effect("prompt", "messages", "token_ids")
async def _prompts(ask: Asker, endpoint: str) -> None:
    if endpoint == "chat":
        conversations = [
            [{"role": role, "content": text}] for role, text in (("user", "abc"), ("user", "xyz"), ("tool", "abc"))
        ]
        replies = [await ask(endpoint, messages=messages) for messages in conversations]
    elif endpoint == "completions":
        replies = [await ask(endpoint, prompt=prompt) for prompt in ("abc", "xyz", [4, 5])]
    else:
        replies = [await ask(endpoint, token_ids=ids) for ids in ([1, 2], [3, 4], [5])]
    assert len({tuple(reply.prompt) for reply in replies}) == len({tuple(reply.tokens) for reply in replies}) == 3


@effect("sampling_params")
async def _sampling_params(ask: Asker, endpoint: str) -> None:
    assert len((await ask(endpoint, sampling_params={"max_tokens": 2, "ignore_eos": True})).tokens) == 2


@effect("max_tokens", "max_completion_tokens")
async def _lengths(ask: Asker, endpoint: str) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if any(row.name == name and endpoint in row.on for row in PARAMETERS):
            reply = await ask(endpoint, **{name: 2}, ignore_eos=True)
            assert (len(reply.tokens), reply.finish) == (2, "length")
            for wrong in (0, 1 << 20):
                assert (await ask(endpoint, **{name: wrong})).param == _inside(endpoint) + name
    if endpoint == "chat":
        body = parse("chat", json.dumps({"messages": [], "max_tokens": 2, "max_completion_tokens": 3}).encode())
        with pytest.raises(ValueError, match="another number") as caught:
            parse_chat(body, Text(files()))
        assert caught.value.param == "max_completion_tokens"  # type: ignore[attr-defined]


@effect("temperature", "top_p", "top_k", "min_p")
async def _narrow(ask: Asker, endpoint: str) -> None:
    greedy = await ask(endpoint, temperature=0)
    assert greedy.tokens == (await ask(endpoint, temperature=0)).tokens
    for narrow in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 0, "min_p": 0.99999}):
        reply = await ask(endpoint, temperature=1, **narrow)
        assert reply.tokens == greedy.tokens, narrow
    hot = [await ask(endpoint, temperature=50, ignore_eos=True, top_k=-1) for _ in range(3)]
    assert len({tuple(reply.tokens) for reply in hot}) == 3
    some = await ask(endpoint, temperature=50, ignore_eos=True, top_k=2, max_tokens=1, n=40)
    assert len({choice["token_ids"][0] for choice in some.choices}) == 2
    reply = await ask(endpoint, temperature=0.001)
    assert (reply.status, reply.param) == (400, f"{_inside(endpoint)}temperature")


@effect("presence_penalty", "frequency_penalty", "repetition_penalty")
async def _penalties(ask: Asker, endpoint: str) -> None:
    """tests/node/engines shows that the penalties equal vLLM's."""
    liked = {"logit_bias": {"3": 6}, "ignore_eos": True}
    plain = await ask(endpoint, **liked, max_tokens=40)
    most = plain.tokens.count(3)
    for more in ({"presence_penalty": 2.0}, {"frequency_penalty": 0.8}, {"repetition_penalty": 3.0}):
        assert (await ask(endpoint, **liked, **more, max_tokens=40)).tokens.count(3) < most, more
        (name,) = more
        assert (await ask(endpoint, **{name: 1000.0})).param == _inside(endpoint) + name


@effect("logit_bias", "allowed_token_ids")
async def _biases(ask: Asker, endpoint: str) -> None:
    for fields in ({"logit_bias": {"5": 100}}, {"allowed_token_ids": [5]}):
        assert (await ask(endpoint, **fields)).tokens == [5] * 12
    both = await ask(endpoint, allowed_token_ids=[5, 6, END], logit_bias={"5": -100, "6": -100})
    assert both.tokens == [END]
    for wrong in ({"logit_bias": {"a": 1}}, {"logit_bias": {"1": 1e6}}, {"allowed_token_ids": []}):
        reply = await ask(endpoint, **wrong)
        (name,) = wrong
        assert (reply.status, reply.param) == (400, _inside(endpoint) + name)
    assert "token id outside" in (await ask(endpoint, allowed_token_ids=[4000])).why


@effect("bad_words")
async def _bad_words(ask: Asker, endpoint: str) -> None:
    fields = {"allowed_token_ids": tokens_of("abc"), "logit_bias": {"0": 30, "1": 20}}
    assert (await ask(endpoint, **fields)).tokens == [0] * 12
    assert (await ask(endpoint, **fields, bad_words=["a"])).tokens == [1] * 12
    assert (await ask(endpoint, **fields, bad_words=["aa"])).tokens == [0, 1] * 6
    assert (await ask(endpoint, **fields, bad_words=["aaa"])).tokens == [0, 0, 1] * 4
    reply = await ask(endpoint, allowed_token_ids=[0], bad_words=["a"])
    assert (reply.status, reply.param) == (400, f"{_inside(endpoint)}allowed_token_ids")


@effect("seed")
async def _seed(ask: Asker, endpoint: str) -> None:
    fields = {"temperature": 1.5, "ignore_eos": True}
    alone = await ask(endpoint, **fields, seed=7)
    several = await ask(endpoint, **fields, seed=7, n=3)
    assert several.tokens == alone.tokens
    assert several.choices[0]["logprobs"] == alone.choices[0]["logprobs"]
    assert len({tuple(choice["token_ids"]) for choice in several.choices}) == 3
    assert (await ask(endpoint, **fields, seed=8)).tokens != alone.tokens
    assert len({tuple((await ask(endpoint, **fields)).tokens) for _ in range(3)}) == 3, "no seed, no repetition"
    again: list[list[int]] = []
    async with trio.open_nursery() as nursery:  # other requests of the same length, in the same batches
        for i in range(6):
            nursery.start_soon(lambda i=i: ask(endpoint, **fields, n=4, seed=None if i % 2 else 100 + i))

        async def repeat() -> None:
            again.append((await ask(endpoint, **fields, seed=7)).tokens)

        for _ in range(3):
            nursery.start_soon(repeat)
    assert again == [alone.tokens] * 3
    assert not sum(sum(node.refused.values()) for node in ask.swarm.service.status().nodes.values())
    if endpoint != "sampling_params":
        assert alone.body["system_fingerprint"] == "transformers/auto/cpu"


@effect("n")
async def _n(ask: Asker, endpoint: str) -> None:
    assert [choice["index"] for choice in (await ask(endpoint, n=3)).choices] == [0, 1, 2]
    assert (await ask(endpoint, n=0)).param == f"{_inside(endpoint)}n"


@effect("stop", "include_stop_str_in_output", "skip_special_tokens")
async def _stop(ask: Asker, endpoint: str) -> None:
    """The tokens drawn are a, b, c, end token, a, b, c ..., and the end token ends nothing."""
    letters = {
        "allowed_token_ids": [*tokens_of("abc"), END],
        "ignore_eos": True,
        "logit_bias": {"0": 90, "1": 50, "2": 10, str(END): -30},
        "bad_words": ["aa", "ba", "bb", "ca", "cb", "cc"],
        "max_tokens": 12,
    }
    plain = await ask(endpoint, **letters)
    assert plain.tokens == [*tokens_of("abc"), END] * 3
    drawn = ask.engine.drawn
    cut = await ask(endpoint, **letters, stop=["bcab", "zz"])
    assert (cut.tokens, cut.finish) == (plain.tokens[:6], "stop")
    assert ask.engine.drawn - drawn == cut.body["usage"]["completion_tokens"] == 6, "no later token is drawn or charged"
    assert (await ask(endpoint, **letters, stop="bcab", min_tokens=6)).tokens == plain.tokens[:10]
    for wrong in ({"stop": ["x"] * 17}, {"stop": ""}):
        assert (await ask(endpoint, **wrong)).param == f"{_inside(endpoint)}stop"
    special = await ask(endpoint, **letters, stop="<end>", skip_special_tokens=False)
    assert special.tokens == plain.tokens[:4]
    assert (await ask(endpoint, **letters, stop="<end>")).tokens == plain.tokens, "then it is not text"
    if endpoint != "sampling_params":
        assert (plain.text, cut.text) == ("abcabcabc", "a")
        assert (await ask(endpoint, **letters, stop="bcab", include_stop_str_in_output=True)).text == "abcab"
        assert (await ask(endpoint, **letters, skip_special_tokens=False)).text == "abc<end>" * 3
        ended = {"logit_bias": {str(END): 100}, "skip_special_tokens": False}
        assert (await ask(endpoint, **ended)).text == ""
        assert (await ask(endpoint, **ended, include_stop_str_in_output=True)).text == "<end>"


@effect("stop_token_ids", "ignore_eos", "min_tokens")
async def _ends(ask: Asker, endpoint: str) -> None:
    ends = {"logit_bias": {str(END): 100}}
    assert ((await ask(endpoint, **ends)).tokens, (await ask(endpoint, **ends)).finish) == ([END], "stop")
    on = await ask(endpoint, **ends, ignore_eos=True)
    assert (on.tokens, on.finish) == ([END] * 12, "length")
    least = await ask(endpoint, **ends, min_tokens=3)
    assert (len(least.tokens), least.tokens.index(END), least.finish) == (4, 3, "stop")
    own = await ask(endpoint, logit_bias={"5": 100}, stop_token_ids=[5])
    assert (own.tokens, own.finish) == ([5], "stop")
    assert (await ask(endpoint, min_tokens=13)).param == f"{_inside(endpoint)}min_tokens"
    assert (await ask(endpoint, stop_token_ids=[1] * 2000)).status == 200
    assert (await ask(endpoint, stop_token_ids=list(range(2000)))).param == f"{_inside(endpoint)}stop_token_ids"


@effect("add_special_tokens")
async def _special(ask: Asker, endpoint: str) -> None:
    replies = [await ask(endpoint, add_special_tokens=value) for value in (True, False, None)]
    assert [reply.prompt[0] == BOS for reply in replies] == [True, False, endpoint == "completions"]


@effect("truncate_prompt_tokens", "truncation_side")
async def _truncation(ask: Asker, endpoint: str) -> None:
    whole = (await ask(endpoint)).prompt
    assert (await ask(endpoint, truncate_prompt_tokens=3)).prompt == whole[-3:]
    assert (await ask(endpoint, truncate_prompt_tokens=3, truncation_side="right")).prompt == whole[:3]
    assert (await ask(endpoint, truncate_prompt_tokens=0)).param == "truncate_prompt_tokens"
    assert (await ask(endpoint, truncation_side="left")).param == "truncation_side"
    long = {"prompt": "a" * 500} if endpoint == "completions" else {"messages": [{"role": "u", "content": "a" * 500}]}
    assert (await ask(endpoint, **long)).status == 400
    assert len((await ask(endpoint, **long, truncate_prompt_tokens=-1)).prompt) == 128 - 12


@effect("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "documents")
async def _template(ask: Asker, endpoint: str) -> None:
    def begins(text: str) -> bytes:
        return bytes(tokens_of(text))

    async def prompt(**fields: Any) -> bytes:
        return bytes((await ask(endpoint, **fields)).prompt)

    plain = begins("user: hello\nassistant: ")
    assert await prompt() == plain
    assert await prompt(add_generation_prompt=True) == plain
    assert await prompt(add_generation_prompt=False) == begins("user: hello\n")
    assert await prompt(reasoning_effort="high") == begins("think high\n") + plain
    assert await prompt(documents=[{"text": "read me"}]) == begins("read me\n") + plain
    assert await prompt(chat_template_kwargs={"thinking": True}) == begins("thinking\n") + plain
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well "}]
    open_ended = {"messages": messages, "continue_final_message": True}
    assert await prompt(**open_ended) == begins("user: hello\nassistant: well"), "this template strips"
    assert (await ask(endpoint, **open_ended, add_generation_prompt=True)).param == "continue_final_message"
    for kwargs in ({"unread": 1}, {"messages": []}, {"tools": []}):
        assert (await ask(endpoint, chat_template_kwargs=kwargs)).param == "chat_template_kwargs"


@effect("tools")
async def _tools(ask: Asker, endpoint: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = (await ask(endpoint)).prompt
    for choice in (None, "auto"):
        assert (await ask(endpoint, tools=tools, tool_choice=choice)).prompt == [*tokens_of("tools "), BOS, 28, *plain]
    assert (await ask(endpoint, tools=tools, tool_choice="none")).prompt == plain


@effect("response_format", "structured_outputs")
async def _structures(ask: Asker, endpoint: str) -> None:
    """What is refused; `test_structures` shows that texts have their structure."""
    for form in ("response_format", "structured_outputs"):
        if any(row.name == form and endpoint in row.on for row in PARAMETERS):
            for wrong in ({"type": "xml"}, {"json": {}, "regex": "a"}, {"structural_tag": "a"}, {}):
                assert (await ask(endpoint, **{form: wrong})).param == _inside(endpoint) + form
            good = {"type": "json_object"} if form == "response_format" else {"regex": "a+"}
            reply = await ask(endpoint, **{form: good}, ignore_eos=True)
            assert (reply.status, reply.param) == (400, _inside(endpoint) + "ignore_eos")
    if endpoint != "sampling_params":
        both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}}
        assert (await ask(endpoint, **both)).param == "structured_outputs"
        assert (await ask(endpoint, response_format={"type": "text"})).status == 200


@effect("tool_choice")
async def _tool_choice(ask: Asker, endpoint: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = (await ask(endpoint)).prompt
    assert (await ask(endpoint, tools=tools, tool_choice="none")).prompt == plain
    for wrong in ({"type": "function", "function": {"name": "g"}}, "some", {"type": "function"}):
        assert (await ask(endpoint, tools=tools, tool_choice=wrong)).param == "tool_choice"
    assert (await ask(endpoint, tool_choice="required")).param == "tool_choice"
    both = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    assert (await ask(endpoint, tools=tools, **both)).param == "tool_choice"


@effect("logprobs")
async def _logprobs(ask: Asker, endpoint: str) -> None:
    value: Any = {"chat": True, "completions": 0, "sampling_params": 1}[endpoint]
    for temperature, top_p, top_k in ((1.0, 1.0, 5), (0.7, 0.8, 0), (0.0, 1.0, 0)):
        reply = await ask(endpoint, logprobs=value, temperature=temperature, top_p=top_p, top_k=top_k)
        drawn_by = _sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        wanted, _ = await ask.engine.score(reply.prompt, reply.tokens, drawn_by)
        assert reply.logprobs == pytest.approx(wanted, abs=1e-4)
        plain, _ = await ask.engine.score(reply.prompt, reply.tokens, _sampling(temperature=1.0))
        alike = reply.logprobs == pytest.approx(plain, abs=1e-4)
        assert alike == (temperature == 0), "they are those of the sampled distribution"
    if endpoint == "completions":
        assert (await ask(endpoint)).logprobs is None
        assert (await ask(endpoint, logprobs=1)).logprobs
        assert (await ask(endpoint, logprobs=21)).param == "logprobs"
    elif endpoint == "chat":
        assert (await ask(endpoint)).logprobs is None
    else:
        assert (await ask(endpoint, logprobs=21)).param == "sampling_params.logprobs"
    await _likeliest(ask, endpoint)


async def _likeliest(ask: Asker, endpoint: str) -> None:
    """The likeliest tokens are those of the model's own distribution, after the request's changes."""
    fields: dict[str, Any] = {"chat": {"logprobs": True, "top_logprobs": 4}}.get(endpoint, {"logprobs": 4})
    fields |= {"return_tokens_as_token_ids": True} if endpoint != "sampling_params" else {}
    for more in ({"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}):
        reply = await ask(endpoint, **fields, **more)
        sampled = dict(zip(reply.tokens, reply.logprobs or (), strict=False))
        found = reply.choices[0]["logprobs"]
        if endpoint == "completions":
            rows = [[(token, at) for token, at in one.items()] for one in found["top_logprobs"]]
        else:
            rows = [[(each["token"], each["logprob"]) for each in entry["top_logprobs"]] for entry in found["content"]]
        assert len(rows) == len(reply.tokens)
        for number, (token, row) in enumerate(zip(reply.tokens, rows, strict=True)):
            top = sorted(row, key=lambda pair: -pair[1])[: 3 if "top_k" in more else 4]
            assert len(top) == (3 if "top_k" in more else 4)
            drawn_by = _sampling(temperature=more["temperature"], top_k=more.get("top_k", 0))
            for name, at in top:
                text = [*reply.tokens[:number], int(name.removeprefix("token_id:"))]
                scored, _ = await ask.engine.score(reply.prompt, text, drawn_by)
                assert scored[-1] == pytest.approx(at, abs=1e-4)
            if more["temperature"] == 0:
                assert top[0][0] == f"token_id:{token}"
            elif "top_k" in more:
                assert f"token_id:{token}" in dict(top)
        assert sampled
    assert (await ask(endpoint, **fields, n=2)).status == 200


@effect("top_logprobs")
async def _top_logprobs(ask: Asker, endpoint: str) -> None:
    await _likeliest(ask, endpoint)
    for wrong in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        assert (await ask(endpoint, **wrong)).param == "top_logprobs"
    streamed = await ask(endpoint, logprobs=True, top_logprobs=2, stream=True)
    parts = [part["choices"][0]["logprobs"] for part in streamed.events if part["choices"][0]["logprobs"]]
    whole = await ask(endpoint, logprobs=True, top_logprobs=2)
    assert [entry for part in parts for entry in part["content"]] == whole.choices[0]["logprobs"]["content"]


def _streamed_text(reply: Any) -> str:
    choices = [part["choices"][0] for part in reply.events]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


@effect("echo")
async def _echo(ask: Asker, endpoint: str) -> None:
    if endpoint == "completions":
        for prompt, shown in (("abc", "abc"), (["ab", "cd"], "ab"), (tokens_of("xyz"), "xyz")):
            plain = await ask(endpoint, prompt=prompt, temperature=0)
            reply = await ask(endpoint, prompt=prompt, temperature=0, echo=True)
            assert reply.text == shown + plain.text
            assert reply.tokens == plain.tokens
        assert reply.text == _streamed_text(await ask(endpoint, prompt=prompt, temperature=0, echo=True, stream=True))
        await _echoed_logprobs(ask)
        return
    messages = [{"role": "assistant", "content": "he"}]
    plain = await ask(endpoint, messages=messages, temperature=0)
    assert (await ask(endpoint, messages=messages, temperature=0, echo=True)).text == "he" + plain.text
    streamed = await ask(endpoint, messages=messages, temperature=0, echo=True, stream=True)
    assert _streamed_text(streamed) == "he" + plain.text
    plain = await ask(endpoint, temperature=0)
    assert (await ask(endpoint, temperature=0, echo=True)).text == plain.text, "the last message is the user's"


async def _echoed_logprobs(ask: Asker) -> None:
    """They are those of the model's own distribution at temperature 1, whatever the sampling."""
    for count, more in ((0, {}), (3, {"temperature": 0.5, "top_k": 4, "seed": 3}), (1, {"max_tokens": 0})):
        fields = {"echo": True, "logprobs": count, "return_tokens_as_token_ids": True} | more
        reply = await ask("completions", **fields)
        found, prompt, drawn = reply.choices[0]["logprobs"], reply.prompt, reply.tokens
        assert len(drawn) == more.get("max_tokens", 12)
        assert found["tokens"] == [f"token_id:{token}" for token in [*prompt, *drawn]]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert all(len(values) == len(found["tokens"]) for values in found.values())
        assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
        scored, _ = await ask.engine.score(prompt[:1], prompt[1:], _sampling(temperature=1.0))
        assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(scored, abs=1e-5)
        await _check_likeliest(ask, prompt, found["top_logprobs"][1 : len(prompt)], count)
        if drawn:
            plain = await ask("completions", **fields | {"echo": False})
            assert found["token_logprobs"][len(prompt) :] == plain.logprobs
            assert found["top_logprobs"][len(prompt) :] == plain.choices[0]["logprobs"]["top_logprobs"]
            assert reply.text == "hello" + plain.text
        else:
            assert (reply.text, reply.finish, reply.body["usage"]["completion_tokens"]) == ("hello", "length", 0)
        streamed = await ask("completions", **fields, stream=True)
        assert streamed.events[0]["choices"][0]["logprobs"] == found
        assert _streamed_text(streamed) == reply.text
    for wrong in ({"max_tokens": 0}, {"max_tokens": -1, "echo": True}):
        reply = await ask("completions", **wrong)
        assert reply.param == "max_tokens"
        assert "or 0 with echo" in reply.why
    assert (await ask("completions", prompt=[3], echo=True, logprobs=2, max_tokens=0)).logprobs == [None]


async def _check_likeliest(ask: Asker, prompt: list[int], rows: list[dict[str, float]], count: int) -> None:
    """`rows`: of each token of the prompt but the first: by name, the log-probabilities of it and the likeliest."""
    plain = _sampling(temperature=1.0)
    for number, row in enumerate(rows, 1):
        own = f"token_id:{prompt[number]}"
        assert own in row
        assert len(row) in (count, count + 1)
        for name, at in row.items():
            text = [*prompt[1:number], int(name.removeprefix("token_id:"))]
            scored, _ = await ask.engine.score(prompt[:1], text, plain)
            assert scored[-1] == pytest.approx(at, abs=1e-4)
        if count:
            others = [await ask.engine.score(prompt[:1], [*prompt[1:number], i], plain) for i in range(BOS + 1)]
            assert max(row.values()) == pytest.approx(max(scored[-1] for scored, _ in others), abs=1e-4)


@effect("prompt_logprobs")
async def _prompt_logprobs(ask: Asker, endpoint: str) -> None:
    name = f"{_inside(endpoint)}prompt_logprobs"
    assert "prompt_logprobs" not in (await ask(endpoint)).body | (await ask(endpoint)).choices[0]
    for count, more in ((0, {"n": 2}), (4, {"temperature": 0.7, "top_p": 0.5})):
        reply = await ask(endpoint, prompt_logprobs=count, **more)
        found, prompt = (reply.choices[0] if endpoint == "completions" else reply.body)["prompt_logprobs"], reply.prompt
        assert (found[0], len(found)) == (None, len(prompt))
        scored, _ = await ask.engine.score(prompt[:1], prompt[1:], _sampling(temperature=1.0))
        for token, row, wanted in zip(prompt[1:], found[1:], scored, strict=True):
            own = row[str(token)]
            assert own["logprob"] == pytest.approx(wanted, abs=1e-5)
            assert own["decoded_token"] == (None if endpoint == "sampling_params" else ask.text(token))
            ranked = sorted((entry["rank"], -entry["logprob"]) for entry in row.values())
            assert ranked == sorted(ranked, key=lambda pair: pair[1])
            assert [rank for rank, _ in ranked[:count]] == list(range(1, count + 1))
            assert len(row) == count + (own["rank"] > count)
        rows = [{f"token_id:{token}": each["logprob"] for token, each in row.items()} for row in found[1:]]
        await _check_likeliest(ask, prompt, rows, count)
    assert (await ask(endpoint, prompt_logprobs=21)).param == (await ask(endpoint, prompt_logprobs=-1)).param == name
    assert (await ask(endpoint, prompt_logprobs=1, return_routed_experts=True)).param == name
    if endpoint != "sampling_params":
        assert (await ask(endpoint, prompt_logprobs=0, stream=True)).param == name
    if endpoint == "completions":
        both = await ask(endpoint, prompt_logprobs=3, echo=True, logprobs=1)
        assert {len(row) for row in both.choices[0]["logprobs"]["top_logprobs"][1:6]} <= {1, 2}
        assert {len(row) for row in both.choices[0]["prompt_logprobs"][1:]} <= {3, 4}


@effect("parallel_tool_calls")
async def _one_call(ask: Asker, endpoint: str) -> None:
    """tests/node/gateway/test_tools.py shows that only the first call is left."""
    assert (await ask(endpoint, parallel_tool_calls=False)).text == (await ask(endpoint)).text


@effect("return_tokens_as_token_ids")
async def _as_ids(ask: Asker, endpoint: str) -> None:
    reply = await ask(endpoint, logprobs=True if endpoint == "chat" else 0, return_tokens_as_token_ids=True)
    found = reply.choices[0]["logprobs"]
    names = found.get("tokens") or [entry["token"] for entry in found["content"]]
    assert names == [f"token_id:{token}" for token in reply.tokens]


@effect("min_version", "exact_version")
async def _versions(ask: Asker, endpoint: str) -> None:
    """tests/node/gateway shows how requests and nodes with different versions meet."""
    for name in ("min_version", "exact_version"):
        reply = await ask(endpoint, **{name: [0, 0]})
        choice = reply.choices[0]
        assert (choice["version_start"], choice["version_end"]) == ([0, 0], [0, 0])
        reply = await ask(endpoint, **{name: 1})
        assert (reply.status, reply.body["error"]["param"]) == (409, name)


@effect("request_id")
async def _request_id(ask: Asker, endpoint: str) -> None:
    body = (await ask(endpoint, request_id="mine")).body
    assert (body.get("id") or body["request_id"]).endswith("mine")


@effect("stream", "stream_options")
async def _stream(ask: Asker, endpoint: str) -> None:
    plain = await ask(endpoint)
    streamed = await ask(endpoint, stream=True, stream_options={"include_usage": True})
    parts = [choice for event in streamed.events for choice in event["choices"]]
    assert [token for part in parts for token in part.get("token_ids", [])] == plain.tokens
    assert streamed.events[-1]["usage"] == plain.body["usage"]
    assert not any(event.get("usage") for event in (await ask(endpoint, stream=True)).events)
    for options in ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, {"stream_options": {"a": 1}}):
        assert (await ask(endpoint, **options)).param == "stream_options"
    so_far = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2}
    for more in ({}, {"seed": 4}):  # with a seed, the samples are sent when they are accepted
        prompt, counted = plain.body["usage"]["prompt_tokens"], {0: [0], 1: [0]}
        for event in (await ask(endpoint, **so_far, **more)).events[:-1]:
            (choice,), usage = event["choices"], event["usage"]
            assert usage["total_tokens"] - usage["completion_tokens"] == usage["prompt_tokens"] == prompt
            counted[choice["index"]].append(usage["completion_tokens"])
        assert all(counts == sorted(counts) and counts[-1] == 12 for counts in counted.values())


@effect("stream_interval")
async def _interval(ask: Asker, endpoint: str) -> None:
    plain = await ask(endpoint, ignore_eos=True)
    streamed = await ask(endpoint, ignore_eos=True, stream=True, stream_interval=5)
    sizes = [len(found) for event in streamed.events if (found := event["choices"][0].get("token_ids"))]
    assert sum(sizes) == len(plain.tokens) == 12
    assert sizes[0] < 12
    assert all(size >= 5 for size in sizes[1:-1])
    assert len(sizes) <= 4
    assert _streamed_text(streamed) == plain.text
    for wrong in (0, 1 << 20):
        assert (await ask(endpoint, stream=True, stream_interval=wrong)).param == "stream_interval"


@effect("return_prompt_text")
async def _prompt_text(ask: Asker, endpoint: str) -> None:
    assert "prompt_text" not in (await ask(endpoint)).body
    assert (await ask(endpoint, return_prompt_text=True)).body["prompt_text"] == "user: hello\nassistant: "
    cut = await ask(endpoint, return_prompt_text=True, truncate_prompt_tokens=4)
    assert cut.body["prompt_text"] == "nt: "
    for more in ({}, {"seed": 4, "n": 2}):
        events = (await ask(endpoint, return_prompt_text=True, stream=True, **more)).events
        assert [event.get("prompt_text") for event in events[:2]] == ["user: hello\nassistant: ", None]


@effect("session_id", "prompt_cache_key", "user")
async def _sessions(ask: Asker, endpoint: str) -> None:
    """tests/node/gateway shows that a session stays with its node."""

    def affinity(**fields: Any) -> bytes:
        prompt = {"prompt": "a"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "a"}]}
        body = parse(endpoint, json.dumps(prompt | fields).encode())
        return (parse_completion if endpoint == "completions" else parse_chat)(body, Text(files())).affinity

    names = ("session_id", "prompt_cache_key", "user")
    assert affinity() == b""
    assert {affinity(**{name: "mine"}) for name in names} == {affinity(session_id="mine", user="yours")}
    assert affinity(user="mine") != affinity(user="yours")


@effect("return_routed_experts", "routed_experts_prompt_start")
async def _routes(ask: Asker, endpoint: str) -> None:
    """tests/node/engines shows that the engine's routes are exact; here, that they come in vLLM's form."""

    def routes(choice: dict[str, Any]) -> Any:
        return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))

    five = {"max_tokens": 5, "ignore_eos": True}
    plain = await ask(endpoint, **five)
    assert "routed_experts" not in plain.choices[0]
    reply = await ask(endpoint, **five, n=2, return_routed_experts=True)
    assert reply.tokens == plain.tokens
    prompt = len(reply.prompt)
    for choice in reply.choices:
        found = routes(choice)
        assert (found.shape, found.dtype) == ((prompt + 4, SHAPE.layers, SHAPE.chosen), np.uint8)
        assert found.max() < SHAPE.experts
        np.testing.assert_array_equal(found, routes(reply.choices[0]))
    later = await ask(endpoint, **five, return_routed_experts=True, routed_experts_prompt_start=prompt - 1)
    np.testing.assert_array_equal(routes(later.choices[0]), routes(reply.choices[0])[prompt - 1 :])
    if endpoint != "sampling_params":
        streamed = await ask(endpoint, **five, return_routed_experts=True, stream=True)
        (choice,) = [c for event in streamed.events for c in event["choices"] if "routed_experts" in c]
        np.testing.assert_array_equal(routes(choice), routes(reply.choices[0]))
    start = f"{_inside(endpoint)}routed_experts_prompt_start"
    assert (await ask(endpoint, return_routed_experts=True, routed_experts_prompt_start=prompt + 1)).param == start
    assert (await ask(endpoint, routed_experts_prompt_start=1)).param == start


def _inside(endpoint: str) -> str:
    return "sampling_params." if endpoint == "sampling_params" else ""


def _sampling(**fields: Any) -> Any:
    from node.engines.base import SamplingOptions, SamplingParams

    options = {name: value for name, value in fields.items() if name in SamplingOptions.__struct_fields__}
    rest = {name: value for name, value in fields.items() if name not in options}
    return SamplingParams(12, **rest, options=SamplingOptions(**options))


def cells() -> list[Any]:
    """Each test of an effect, for each endpoint that has one of its fields. CI has time for one of the endpoints."""
    rows: dict[tuple[Effect, str], list[Parameter]] = {}
    for row in PARAMETERS:
        for endpoint in row.on if row.happens == "done" else ():
            rows.setdefault((EFFECTS[row.name], endpoint), []).append(row)
    found: dict[Effect, list[Any]] = {}
    for (test, endpoint), same in rows.items():
        found.setdefault(test, []).append((test, endpoint, same))
    return [
        pytest.param(
            *cell,
            id=f"{cell[1]}-{'+'.join(row.name for row in cell[2])}",
            marks=() if j == i % len(of_test) else pytest.mark.long,
        )
        for i, of_test in enumerate(found.values())
        for j, cell in enumerate(of_test)
    ]


@pytest.mark.conformance
@pytest.mark.parametrize(("test", "endpoint", "rows"), cells())
async def test_a_supported_field_has_its_effect(
    tmp_path: Path,
    engine: TransformersEngine,
    experts: TransformersEngine,
    writer: TransformersEngine,
    test: Effect,
    endpoint: str,
    rows: list[Parameter],
):
    by = {_routes: experts, _structures: writer}.get(test, engine)
    async with asking(tmp_path, by, base=writer_files() if by is writer else None) as ask:
        await _check_effect(ask, test, endpoint, rows)


async def _check_effect(ask: Asker, test: Effect, endpoint: str, rows: list[Parameter]) -> None:
    for row in rows:
        if row.example is not None:
            extra = WITH.get(row.name, {})
            assert (await ask(endpoint, **{row.name: row.example}, **extra)).status == 200, "the table's example"
    await test(ask, endpoint)


# ---------------------------------------------------------------- nodes without an ability


@pytest.mark.parametrize("endpoint", ["completions", "chat", "sampling_params"])
async def test_routes_of_a_model_or_an_engine_without_experts_are_refused(
    tmp_path: Path, engine: TransformersEngine, experts: TransformersEngine, endpoint: str
):
    async with asking(tmp_path, engine) as ask:
        reply = await ask(endpoint, return_routed_experts=True)
        assert (reply.status, reply.param) == (400, "return_routed_experts")
        assert "no engine here records which experts" in reply.why
    (tmp_path / "dense").mkdir()
    async with asking(tmp_path / "dense", experts, shape=False) as ask:
        reply = await ask(endpoint, return_routed_experts=True)
        assert reply.status == 400
        assert "this model has no experts" in reply.why


async def test_a_seed_that_no_engine_can_repeat_is_refused_unless_it_may_be_inexact(
    tmp_path: Path, engine: TransformersEngine
):
    for name, inexact in (("exact", False), ("inexact", True)):
        folder = tmp_path / name
        folder.mkdir()
        async with asking(folder, engine, abilities=frozenset({OPTIONS}), inexact_seeds=inexact) as ask:
            reply = await ask("completions", seed=3, temperature=1)
            assert (reply.status, reply.body.get("error", {}).get("param")) == (
                (200, None) if inexact else (400, "seed")
            )
            if inexact:
                assert (await ask("completions", seed=3, temperature=1)).tokens == reply.tokens
            else:
                assert "--inexact-seeds" in reply.why
                assert (await ask("completions", stream=True, seed=3)).status == 400, "before a stream begins"


async def test_a_node_of_an_older_release_gets_no_work_with_options(
    tmp_path: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
):
    """Such a node drops the question for its abilities, because it does not know the message."""
    hear, old = NodeWorker.hear, []

    def hear_as_old(worker: NodeWorker, body: bytes) -> None:
        old.append(worker)
        if worker is not old[0] or body[2] != 14:
            hear(worker, body)

    monkeypatch.setattr(NodeWorker, "hear", hear_as_old)
    async with asking(tmp_path, engine) as ask:
        monkeypatch.setattr("node.gateway.request_tracker.ABILITIES_WITHIN_S", 0.3)
        assert (await ask("completions")).status == 200
        reply = await ask("completions", min_p=0.5)
        assert (reply.status, reply.param) == (400, "min_p")
        assert "this release of swarm-node" in reply.why
        drawn = ask.engine.drawn
        new = await ask.swarm.add(2, engine=LocalEngine(engine))
        assert (await ask("completions", min_p=0.5)).status == 200
        assert (ask.engine.drawn, new.drawn > 0) == (drawn, True)
        assert not sum(sum(node.refused.values()) for node in ask.swarm.service.status().nodes.values())


async def test_checks_of_rollouts_with_options_accuse_no_honest_node(tmp_path: Path, engine: TransformersEngine):
    settings = {"check_share": 1.0, "check_tolerance": 1e-4}
    async with asking(tmp_path, engine, settings=settings) as ask:
        for i in (2, 3):
            await ask.swarm.add(i, engine=LocalEngine(engine), ask_every_s=0.05)
        for fields in (
            {"top_k": 3},
            {"min_p": 0.1, "top_p": 0.9},
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
            {"logit_bias": {"1": 5}, "bad_words": ["ab"], "min_tokens": 4},
            {"allowed_token_ids": [1, 2, 3, END], "seed": 4},
            {"stop": "a", "temperature": 0, "repetition_penalty": 3.0},
        ):
            assert (await ask("completions", **{"temperature": 1} | fields, n=4)).status == 200
        status = ask.swarm.service.status
        with trio.fail_after(30):
            while status().checks.confirmed < 24:  # noqa: ASYNC110 - the ledger's status has no event
                await trio.sleep(0.05)
        assert not ask.swarm.service.reputation()


def test_the_transformers_engine_has_every_ability(engine: TransformersEngine):
    engine.measure()
    assert {name for name in engine.abilities if not name.startswith("class:")} == ABILITIES - {IMAGES, ROUTES}


def test_bodies_have_exactly_the_fields_of_the_table():
    for endpoint, body in BODIES.items():
        assert set(body.__struct_fields__) == {row.name for row in PARAMETERS if endpoint in row.on}


# ---------------------------------------------------------------- vLLM


@pytest.mark.vllm
def test_the_stored_fields_of_vllm_are_those_of_the_installed_release():
    import subprocess

    from scenarios.engines.vllm_environment import vllm_python

    command = [vllm_python(), HERE / "vllm_fields.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout[done.stdout.index("{") :]) == VLLM, "run vllm_fields.py anew, and look at the table"
