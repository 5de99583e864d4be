"""Streams: tokens reach the client as they are drawn, and what a client has is never repeated or contradicted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from gateway_kit import END, LETTERS, ROOT, SpellingEngine, base_files, gateway, until, with_client

from codec.sign import Key
from node.engines.base import ABILITIES, STREAMS, DrawnTokens, SamplingParams
from node.engines.top_logprobs import pack_top
from node.gateway.followed_sample import FollowedSample, can_follow, rest_of
from node.gateway.text import Text
from node.ledger.messages import Rollout, VersionSpan
from node.ledger.packing import pack_floats, pack_tokens


def letters(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


async def read(client: Any, heard: list[Any] | None = None, **body: Any) -> list[Any]:
    """The parts of a streamed completion; `heard` gets each as it comes."""
    heard = [] if heard is None else heard
    asked = {"model": "policy", "prompt": "a", "max_tokens": 8, "stream": True} | body
    async for part in await client.completions.create(**asked):
        heard.append(part)
    return heard


def text_of(parts: list[Any]) -> str:
    return "".join(choice.text for part in parts for choice in part.choices)


def tokens_of(parts: list[Any]) -> list[int]:
    return [token for part in parts for choice in part.choices for token in choice.model_extra["token_ids"]]


async def test_tokens_come_as_they_are_drawn(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        engine = await swarm.add(1, engine=SpellingEngine(0.1))
        heard: list[Any] = []

        async def use(client):
            return await read(client, heard, stream_options={"include_usage": True}, logprobs=0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_client, url, use)
            await until(lambda: engine.told >= 2)
            await until(lambda: text_of(heard), within_s=0.2)
            assert len(text_of(heard)) < 8, "the engine is not done, and the client has text"
        assert text_of(heard) == "bcdefghi"
        assert tokens_of(heard) == letters("bcdefghi")
        *parts, usage = heard
        assert len(parts) >= 4
        first, last = parts[0].choices[0], parts[-1].choices[0]
        assert first.model_extra["prompt_token_ids"] == letters("a")
        assert first.model_extra["version_start"] == [0, 0]
        assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert last.model_extra["versions"] == [[0, 0]] * 8
        assert last.model_extra["version_end"] == [0, 0]
        offsets = [offset for part in parts for offset in part.choices[0].logprobs.text_offset]
        assert offsets == list(range(8))
        assert usage.usage.completion_tokens == 8


async def test_chat_and_several_samples_stream_side_by_side(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.02))

        async def use(client):
            several = await read(client, prompt=["a", "k"], n=2, max_tokens=4)
            messages = [{"role": "user", "content": "hi"}]
            stream = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, max_tokens=5, logprobs=True
            )
            more = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, max_tokens=5, n=3
            )
            return several, [part async for part in stream], [part async for part in more]

        several, chat, more = await with_client(url, use)
        begins = [(part.choices[0].index, part.choices[0].delta.role) for part in more]
        assert begins[:3] == [(0, "assistant"), (1, "assistant"), (2, "assistant")], "the client's helper needs this"
        assert {role for _, role in begins[3:]} == {None}
        texts = dict.fromkeys(range(4), "")
        for part in several:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "bcde", 1: "bcde", 2: "lmno", 3: "lmno"}
        choices = [part.choices[0] for part in chat]
        assert choices[0].delta.role == "assistant"
        assert len("".join(choice.delta.content or "" for choice in choices)) == 5
        assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) == 5
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_node_that_dies_in_a_stream_is_continued_from_what_was_sent(tmp_path: Path, known: bool):
    """`known`: the membership shows the death; otherwise its silence does."""
    async with gateway(tmp_path, settings={"silent_s": 2.0, "doubt_s": 0.5}) as (swarm, url):
        first = await swarm.add(1, engine=SpellingEngine(0.05))
        heard: list[Any] = []

        async def use(client):
            return await read(client, heard, max_tokens=20)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_client, url, use)
            await until(lambda: len(text_of(heard)) >= 4)
            second = await swarm.add(2, engine=SpellingEngine(0.01))
            swarm.kill(1, known=known)
            with trio.fail_after(40):
                while len(text_of(heard)) < 20:  # noqa: ASYNC110 - the client's list has no event
                    await trio.sleep(0.02)
        assert text_of(heard) == "bcdefghijklmnopqrstu"
        assert tokens_of(heard) == letters(text_of(heard))
        (continued,) = second.asked
        assert len(continued) >= 5, "the second node got what was sent at the end of its prompt"
        assert list(continued) == letters("abcdefghijklmnopqrstu"[: len(continued)])
        assert first.asked == [tuple(letters("a"))]
        assert len(heard[-1].choices[0].model_extra["versions"]) == 20
        assert not swarm.service.status().groups_open


async def test_a_node_that_signs_other_tokens_than_it_told_is_continued_and_counted(tmp_path: Path):
    class Liar(SpellingEngine):
        def completion(self, ids, reason):
            return super().completion([25] * len(ids), reason)

    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=Liar(0.02))
        heard: list[Any] = []

        async def use(client):
            return await read(client, heard)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_client, url, use)
            await until(lambda: len(text_of(heard)) >= 2)
            await swarm.add(2, engine=SpellingEngine(0.01))
            await until(lambda: swarm.service.status().nodes[Key(bytes([1]) * 32).public.hex()].refused)
            swarm.kill(1)
        told = text_of(heard)
        assert told.startswith("bcd"), "what was told stays"
        assert len(told) == 8
        refused = swarm.service.status().nodes[Key(bytes([1]) * 32).public.hex()].refused
        assert refused == {"malformed rollout": refused["malformed rollout"]}


async def test_a_node_that_tells_nothing_still_answers_streams(tmp_path: Path):
    engine = SpellingEngine(0.01)
    engine.abilities = ABILITIES - {STREAMS}
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=engine)
        parts = await with_client(url, lambda client: read(client, max_tokens=5))
        assert text_of(parts) == "bcdef"
        assert engine.told == 0


@pytest.mark.parametrize(("stop", "shown"), [("ef", "bcd"), ("zz", "bcdefghi"), ("b", "")])
async def test_what_may_be_a_stop_text_is_held_back(tmp_path: Path, stop: str, shown: str):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.02))

        async def use(client):
            whole = await client.completions.create(model="policy", prompt="a", max_tokens=8, stop=stop)
            kept = await read(client, stop=stop, extra_body={"include_stop_str_in_output": True})
            return whole, await read(client, stop=stop), kept

        whole, parts, kept = await with_client(url, use)
        assert text_of(parts) == shown == whole.choices[0].text
        assert tokens_of(parts) == whole.choices[0].model_extra["token_ids"]
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert text_of(kept) == shown + (stop if stop != "zz" else "")


async def test_an_end_token_is_not_shown(tmp_path: Path):
    class Ending(SpellingEngine):
        def next_letter(self, prompt, ids):
            return END if len(ids) == 3 else super().next_letter(prompt, ids)

    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=Ending(0.01))
        parts = await with_client(url, read)
        assert text_of(parts) == "bcd"
        assert tokens_of(parts) == [*letters("bcd"), END]
        assert parts[-1].choices[0].finish_reason == "stop"


async def test_a_client_that_goes_withdraws_its_stream(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.05))

        async def use(client):
            stream = await client.completions.create(model="policy", prompt="a", max_tokens=64, stream=True)
            async for _ in stream:
                break
            await stream.close()

        await with_client(url, use)
        await until(lambda: not swarm.service.status().groups_open)


# ---------------------------------------------------------------- a followed sample, without a swarm


def sample_of(sampling: SamplingParams, **options: Any) -> tuple[FollowedSample, list[int]]:
    """A sample in its first group, and a list that grows when it is lost."""
    sampling = sampling.with_options(**options) if options else sampling
    sample, lost = FollowedSample(sampling), []
    sample.begin_group(lambda: lost.append(len(sample.tokens)))
    return sample, lost


def likeliest(tokens: list[int], count: int) -> bytes:
    """`Completion.top`: the tokens themselves, and those after them."""
    ids = np.array([[token + k for k in range(count)] for token in tokens])
    return pack_top(ids, np.full(ids.shape, -0.5)) if count else b""


def drawn(start: int, tokens: list[int], version: int = 0, top: int = 0) -> DrawnTokens:
    return DrawnTokens(start, tuple(tokens), (-0.5,) * len(tokens), (0, version), likeliest(tokens, top))


def rollout(tokens: list[int], reason: Any = "length", version: int = 0, top: int = 0) -> Rollout:
    span = VersionSpan(0, version, ROOT, len(tokens))
    packed = pack_tokens(tokens), pack_floats((-0.5,) * len(tokens))
    return Rollout(1, 1, 0, bytes(32), *packed, reason, (span,), top=likeliest(tokens, top))


PLAIN = SamplingParams(8, stop_tokens=(END,))


def test_tokens_after_a_gap_wait_for_the_accepted_sample():
    sample, lost = sample_of(PLAIN)
    sample.hear(0, 1, drawn(0, [1, 2]))
    sample.hear(0, 1, drawn(3, [4]))
    assert sample.tokens.tolist() == [1, 2]
    assert sample.finish(rollout([1, 2, 3, 4, 5, 6, 7, 8]), b"n")
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not lost


def test_the_token_that_ends_a_sample_waits_until_it_is_accepted():
    for tokens in ([1, END], [1, 2, 3, 4, 5, 6, 7, 8]):
        sample, _ = sample_of(PLAIN)
        sample.hear(0, 1, drawn(0, tokens))
        assert sample.tokens.tolist() == tokens[:-1]


@pytest.mark.parametrize("again", ["lapse", "restart", "other lease"])
def test_a_lost_sample_is_continued_by_the_next_group(again: str):
    sample, lost = sample_of(PLAIN, min_tokens=6)
    sample.hear(0, 1, drawn(0, [1, 2], version=3))
    if again == "lapse":
        sample.lapse(0)
    else:
        sample.hear(0, 1 if again == "restart" else 2, drawn(0, [9]))
    assert (lost, sample.lost) == ([2], True)
    sample.hear(0, 1, drawn(2, [5]))
    assert sample.tokens.tolist() == [1, 2], "what the lost lease tells is not heard"
    taken, sampling = sample.begin_group(lambda: None)
    assert (list(taken), sampling.max_tokens, sampling.extra.min_tokens) == ([1, 2], 6, 4)
    sample.hear(0, 3, drawn(0, [3], version=4))
    assert sample.finish(rollout([3, 4, 5, 6, 7, 8], version=4), b"n")
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.versions == [((0, 3), 2), ((0, 4), 8)]


def test_likeliest_tokens_stay_with_their_tokens():
    """In the part of the first group, in that of the next one, and after a stop text cut the last tokens off."""
    text = Text(base_files())
    sampling = PLAIN.with_options(stop_texts=("fg",), top_logprobs=2)
    sample = FollowedSample(sampling, lambda: text.stop_text(letters("a"), ("fg",), special=False, least=0))
    sample.begin_group(lambda: None)
    sample.hear(0, 1, drawn(0, letters("bcd"), top=2))
    assert sample.since(1).top == likeliest(letters("cd"), 2)
    sample.lapse(0)
    sample.begin_group(lambda: None)
    sample.hear(0, 2, drawn(0, letters("e"), top=2))
    assert sample.finish(rollout(letters("efghi"), top=2), b"n")
    assert sample.since(0).tokens == letters("bcdefg")
    assert sample.since(0).top == likeliest(letters("bcdefg"), 2)
    restored = FollowedSample(sampling)
    whole = sample.since(0)
    assert restored.restore(whole.tokens, whole.logprobs, whole.top, whole.versions, whole.ending) == whole


def test_nothing_is_lost_with_a_lease_that_told_nothing():
    sample, lost = sample_of(PLAIN)
    sample.lapse(0)
    sample.hear(0, 2, drawn(0, [1]))
    assert (lost, sample.tokens.tolist()) == ([], [1])


@pytest.mark.parametrize("options", [{"seeded": True}, {"presence_penalty": 1.0}, {"banned": ((1, 2),)}])
def test_a_sample_that_depends_on_places_is_drawn_again_and_compared(options: dict[str, Any]):
    sample, lost = sample_of(PLAIN, **options)
    sample.hear(0, 1, drawn(0, [1, 2, 3]))
    sample.lapse(0)
    sample.hear(0, 2, drawn(0, [1, 2]))
    sample.hear(0, 2, drawn(2, [3, 4]))
    assert (lost, sample.tokens.tolist()) == ([], [1, 2, 3, 4]), "each token once"
    sample.lapse(0)
    sample.hear(0, 3, drawn(0, [1, 7]))
    assert lost == [4], "the model changed: the next group continues what the client has"
    assert sample.tokens.tolist() == [1, 2, 3, 4]


def test_an_accepted_rollout_that_contradicts_what_was_taken_is_not_the_end():
    sample, _ = sample_of(PLAIN)
    sample.hear(0, 1, drawn(0, [1, 2]))
    assert not sample.finish(rollout([1, 9, 3, 4, 5, 6, 7, 8]), b"n")
    assert (sample.ending, sample.tokens.tolist(), sample.contradicted) == (None, [1, 2], True)


def test_a_node_is_not_blamed_for_what_another_one_told():
    sample, _ = sample_of(PLAIN, seeded=True)
    sample.hear(0, 9, drawn(0, [1, 2]))
    sample.lapse(0)
    assert not sample.finish(rollout([1, 9, 3, 4, 5, 6, 7, 8]), b"n"), "the model changed, and this node told nothing"
    assert not sample.contradicted


def test_a_stop_text_over_the_border_of_two_groups_is_found():
    text = Text(base_files())
    sampling = PLAIN.with_options(stop_texts=("cde",))
    finder = lambda: text.stop_text(letters("a"), ("cde",), special=False, least=0)  # noqa: E731
    sample = FollowedSample(sampling, finder)
    sample.begin_group(lambda: None)
    sample.hear(0, 1, drawn(0, letters("bcd")))
    sample.lapse(0)
    sample.begin_group(lambda: None)
    sample.hear(0, 2, drawn(0, letters("ef")))
    assert sample.tokens.tolist() == letters("bcd"), "the token that completes it waits"
    assert sample.finish(rollout(letters("efghi")), b"n")
    assert sample.ending is not None
    assert (sample.ending.reason, sample.ending.length, sample.ending.stop) == ("stop", 4, (1, 4))
    assert sample.tokens.tolist() == letters("bcde")


def test_what_can_be_followed():
    seeded = PLAIN.with_options(seeded=True)
    assert can_follow(PLAIN, 4, 10)
    assert can_follow(PLAIN.with_options(top_logprobs=3), 4, 10)
    assert can_follow(seeded, 1, 10)
    assert not can_follow(seeded, 2, 10)
    assert not can_follow(PLAIN.with_options(routes=True), 1, 10)
    assert not can_follow(PLAIN, 1, 65530)
    assert rest_of(PLAIN, 0) is PLAIN
    assert rest_of(PLAIN, 3).seed != PLAIN.seed
    assert rest_of(PLAIN, 3).options is PLAIN.options
