"""The front keeps requests while the seed is away: each is answered once, and streams go on from what was sent."""

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from gateway_kit import LETTERS, SpellingEngine, base_files, gateway, raw, until, with_client
from gateway_kit import Swarm as Nodes
from msgspec.structs import replace
from openai import RateLimitError

from codec.errors import PeerError
from node.engines.top_logprobs import pack_top
from node.gateway import Gateway, bodies
from node.gateway.admission import Admission
from node.gateway.clients import Clients
from node.gateway.followed_sample import Ending, FollowedSample, Piece
from node.gateway.front.front import Front
from node.gateway.front.messages import ToSeed
from node.gateway.parsed_request import parse_completion
from node.gateway.progress import Began, Ended, drawn_of, note_of, read_notes, sent_piece
from node.gateway.text import Text
from node.gateway.token_events import TokenEvents
from node.http.server import serve
from node.ipc.async_channel import AsyncChannel
from node.settings.config import GatewayConfig

VERSION = (0, 0)


class Seeds:
    """A front, and one seed after the other that answers its clients. The nodes outlive the seeds."""

    def __init__(self, nodes: Nodes, nursery: trio.Nursery, front: Front) -> None:
        self.nodes, self.nursery, self.front = nodes, nursery, front
        self._scope = trio.CancelScope()

    async def start(self, **options: Any) -> None:
        ours, theirs = socket.socketpair()
        config = GatewayConfig(at="127.0.0.1:1", **options)
        self._scope = scope = trio.CancelScope()

        async def live(*, task_status: trio.TaskStatus[str]) -> None:
            with theirs, scope:
                channel = AsyncChannel.adopt(theirs, ToSeed)
                try:
                    seed = Gateway(
                        self.nodes.service, base_files, lambda: self.nodes.service.head, config, front=channel
                    )
                    await seed.run(task_status=task_status)
                finally:
                    channel.close()

        await self.nursery.start(live)
        self.nursery.start_soon(self.front.serve_seed, ours)
        await trio.testing.wait_all_tasks_blocked()

    async def end(self) -> None:
        self._scope.cancel()
        await trio.testing.wait_all_tasks_blocked()


@contextlib.asynccontextmanager
async def fronted(folder: Path, key: str = "", **front: Any) -> AsyncIterator[tuple[Seeds, str]]:
    """Yields (seeds, URL); one seed is up."""
    async with trio.open_nursery() as nursery:
        nodes = Nodes(folder, nursery)
        await nursery.start(nodes.service.run)
        seeds = Seeds(nodes, nursery, Front(**front))
        await seeds.start()
        check = Admission(Clients(None, key)).check

        async def listen(*, task_status: trio.TaskStatus[int]) -> None:
            await serve(seeds.front, "127.0.0.1", 0, check=check, task_status=task_status)

        port = await nursery.start(listen)
        yield seeds, f"http://127.0.0.1:{port}/v1"
        nursery.cancel_scope.cancel()
    nodes.book.close()


async def read(client: Any, heard: list[Any], **body: Any) -> list[Any]:
    """`heard` gets each part of a streamed completion as it comes."""
    asked = {"model": "policy", "prompt": "a", "max_tokens": 20, "stream": True} | body
    async for part in await client.completions.create(**asked):
        heard.append(part)
    return heard


def text_of(parts: list[Any]) -> str:
    return "".join(choice.text for part in parts for choice in part.choices)


async def test_a_front_answers_as_the_seed_itself(tmp_path: Path):
    body = json.dumps({"model": "policy", "prompt": "a", "max_tokens": 5, "temperature": 0.0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    bad = asked.replace(b"max_tokens", b"max_takens")
    direct, through = tmp_path / "direct", tmp_path / "through"
    direct.mkdir()
    through.mkdir()
    answers = []
    async with gateway(direct) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine())
        answers.append([json.loads((await raw(url, data)).partition(b"\r\n\r\n")[2]) for data in (asked, bad)])
    async with fronted(through) as (seeds, url):
        await seeds.nodes.add(1, engine=SpellingEngine())
        answers.append([json.loads((await raw(url, data)).partition(b"\r\n\r\n")[2]) for data in (asked, bad)])
    for whole, _ in answers:
        del whole["id"], whole["created"]
    assert answers[0] == answers[1]
    assert answers[0][0]["choices"][0]["text"] == "bcdef"
    assert answers[0][1]["error"]["param"] == "max_takens"


async def test_a_request_in_flight_is_answered_once_by_the_next_seed(tmp_path: Path):
    async with fronted(tmp_path) as (seeds, url):
        engine = await seeds.nodes.add(1, engine=SpellingEngine(0.05))
        found: list[Any] = []

        async def use(client: Any) -> None:
            found.append(await client.completions.create(model="policy", prompt="a", max_tokens=10))

        async with trio.open_nursery() as clients:
            clients.start_soon(with_client, url, use)
            await until(lambda: engine.asked)
            await trio.sleep(0.1)
            await seeds.end()
            answer = await raw(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 2" in answer
            await seeds.start()
        assert [each.choices[0].text for each in found] == ["bcdefghijk"]


async def test_a_request_in_flight_is_not_refused_because_the_next_seed_is_full(tmp_path: Path):
    async with fronted(tmp_path) as (seeds, url):
        engine = await seeds.nodes.add(1, engine=SpellingEngine(0.05))
        found: list[Any] = []
        heard: list[Any] = []

        async def use(client: Any) -> None:
            found.append(await client.completions.create(model="policy", prompt="a", max_tokens=10))

        async def refused(client: Any) -> None:
            with pytest.raises(RateLimitError):
                await client.completions.create(model="policy", prompt="a", n=2)

        async with trio.open_nursery() as clients:
            clients.start_soon(with_client, url, use)
            clients.start_soon(with_client, url, lambda client: read(client, heard, max_tokens=10))
            await until(lambda: len(engine.asked) == 2)
            await seeds.end()
            await seeds.start(in_flight=1)
            await with_client(url, refused)
        assert [each.choices[0].text for each in found] == [text_of(heard)] == ["bcdefghijk"]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("options", [{}, {"stop": "pq"}, {"presence_penalty": 0.5}, {"logprobs": 0}])
async def test_a_stream_goes_on_after_what_was_sent(tmp_path: Path, times: int, options: dict[str, Any]):
    async with fronted(tmp_path) as (seeds, url):
        engine = await seeds.nodes.add(1, engine=SpellingEngine(0.03))
        heard: list[Any] = []

        async def use(client: Any) -> None:
            await read(client, heard, stream_options={"include_usage": True}, **options)

        async with trio.open_nursery() as clients:
            clients.start_soon(with_client, url, use)
            for _ in range(times):
                begun = len(text_of(heard))
                await until(lambda begun=begun: len(text_of(heard)) >= begun + 2)
                await seeds.end()
                await seeds.start()
        wanted = "bcdefghijklmno" if "stop" in options else "bcdefghijklmnopqrstu"
        assert text_of(heard) == wanted
        tokens = [token for part in heard for choice in part.choices for token in choice.model_extra["token_ids"]]
        assert len(tokens) == heard[-1].usage.completion_tokens == (16 if "stop" in options else 20)
        assert "".join(LETTERS[token] for token in tokens).startswith(wanted)
        assert len({(part.id, part.created) for part in heard}) == 1
        last = heard[-2].choices[0]
        assert len(last.model_extra["versions"]) == len(tokens)
        if "logprobs" in options:
            offsets = [offset for part in heard[:-1] for offset in part.choices[0].logprobs.text_offset]
            assert offsets == list(range(20))
        asked = {"".join(LETTERS[token] for token in prompt) for prompt in engine.asked}
        assert (len(asked) == 1) == ("presence_penalty" in options), "the others were continued"


async def test_a_request_waits_for_a_seed_only_so_long(tmp_path: Path):
    async with fronted(tmp_path, away_s=0.3) as (seeds, url):
        engine = await seeds.nodes.add(1, engine=SpellingEngine(0.05))
        heard: list[Any] = []
        errors: list[Any] = []

        async def use(client: Any, **body: Any) -> None:
            try:
                await read(client, heard, **body)
            except Exception as error:
                errors.append(error)

        async with trio.open_nursery() as clients:
            clients.start_soon(with_client, url, use)
            clients.start_soon(with_client, url, lambda client: use(client, stream=False))
            await until(lambda: len(text_of(heard)) >= 2 and len(engine.asked) == 2)
            await seeds.end()
        assert len(errors) == 2
        assert all("The seed ended, and is not back after 0 s. Ask again later." in str(error) for error in errors)
        assert {getattr(error, "status_code", None) for error in errors} == {None, 503}


@pytest.mark.slow
async def test_an_answer_in_parts_that_cannot_go_on_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Several samples with one seed are sent when all are accepted; a stream that has some of them ends with an
    error."""
    monkeypatch.setattr("node.gateway.front.backend.WINDOW_BYTES", 1)
    async with fronted(tmp_path) as (seeds, url):
        await seeds.nodes.add(1, engine=SpellingEngine(0.001))
        data = json.dumps(
            {"model": "policy", "prompt": "a", "n": 4, "seed": 3, "stream": True, "max_tokens": 4}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        found: list[bytes] = []

        async def ask() -> None:
            found.append(await raw(url, head + b"Content-Length: %d\r\n\r\n" % len(data) + data))

        async with trio.open_nursery() as clients:
            clients.start_soon(ask)
            await until(lambda: seeds.front._seeds.link is not None and seeds.front._seeds.link._answers)
            await until(lambda: not seeds.nodes.service.status().groups_open)
            await trio.sleep(0.3)
            await seeds.end()
        assert b"The seed ended while it answered this. Ask again." in found[0]
        assert b"[DONE]" not in found[0]


async def test_a_client_that_goes_withdraws_its_work(tmp_path: Path):
    async with fronted(tmp_path) as (seeds, url):
        await seeds.nodes.add(1, engine=SpellingEngine(0.05))

        async def use(client: Any) -> None:
            stream = await client.completions.create(model="policy", prompt="a", max_tokens=64, stream=True)
            async for _ in stream:
                break
            await stream.close()

        await with_client(url, use)
        await until(lambda: not seeds.nodes.service.status().groups_open)
        link = seeds.front._seeds.link
        assert link is not None
        await until(lambda: not link._answers)
        assert (seeds.front._notes.held, seeds.front._kept_bytes) == (0, 0)


async def test_requests_beyond_the_memory_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.gateway.front.front.KEPT_BYTES", 0)
    async with fronted(tmp_path) as (seeds, url):
        engine = await seeds.nodes.add(1, engine=SpellingEngine(0.05))

        async def use(client: Any) -> None:
            with pytest.raises(Exception, match="The seed ended while it answered this"):
                await client.completions.create(model="policy", prompt="a", max_tokens=20)

        async with trio.open_nursery() as clients:
            clients.start_soon(with_client, url, use)
            await until(lambda: engine.asked)
            await seeds.end()


async def test_a_seed_that_sends_garbage_ends_only_its_own_connection(tmp_path: Path):
    async with fronted(tmp_path) as (seeds, url):
        await seeds.end()
        ours, theirs = socket.socketpair()
        with theirs:
            seeds.nursery.start_soon(seeds.front.serve_seed, ours)
            await trio.testing.wait_all_tasks_blocked()
            theirs.sendall(b"\xff" * 64)
            await until(lambda: seeds.front._seeds.link is None)
        await seeds.start()
        assert (await raw(url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------- notes, without a swarm


def pieces_of(text: str, sizes: list[int], reason: str, top: int = 0) -> list[Piece]:
    """`top`: so many likeliest tokens of each draw."""
    tokens = [LETTERS.index(letter) for letter in text]
    found, begin = [], 0
    for size in sizes:
        end = min(len(tokens), begin + size)
        ending = Ending(reason, len(tokens), None, b"n") if end == len(tokens) else None
        ids = np.array([[token + k for k in range(top)] for token in tokens[begin:end]], np.uint32)
        likeliest = pack_top(ids, np.full(ids.shape, -0.5)) if top else b""
        found.append(Piece(begin, tokens[begin:end], [-0.5] * (end - begin), ((VERSION, end),), ending, likeliest))
        begin = end
    return found


@pytest.mark.parametrize("sizes", [[1] * 12, [3, 1, 8], [5, 7], [12]])
@pytest.mark.parametrize("body", [{}, {"stop": ["zz", "lm:"]}, {"logprobs": 0}, {"logprobs": 2}])
def test_replayed_notes_restore_the_encoder_at_every_part(sizes: list[int], body: dict[str, Any]):
    text = Text(base_files())
    asked = bodies.parse("completions", json.dumps({"prompt": "a", "max_tokens": 12, "stream": True} | body).encode())
    parsed = parse_completion(asked, text, "", exact=False)
    top = parsed.sampling.extra.top_logprobs
    pieces = pieces_of("hello klm no", sizes, "length", top)
    whole = TokenEvents("policy", "1", parsed, text, chat=False, created=7)
    parts = [whole.encode(whole.choices[0].parts(piece)) for piece in pieces]
    for cut in range(len(pieces) + 1):
        notes = [note_of([Began("1", 7, 3)])] + [note_of([sent_piece(0, piece)]) for piece in pieces[:cut]]
        past = read_notes(notes, top)
        assert past.began == Began("1", 7, 3)
        again = TokenEvents("policy", "1", parsed, text, chat=False, created=7)
        sample = FollowedSample(parsed.sampling)
        for sent in past.sent:
            again.choices[0].parts(sample.restore(*drawn_of(sent), sent.versions, sent.ending))
        assert [again.encode(again.choices[0].parts(piece)) for piece in pieces[cut:]] == parts[cut:]
        assert again.choices[0].sent == 12
        assert past.tokens == sum(len(piece.tokens) for piece in pieces[:cut])


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": bytes(4)},
        {"logprobs": bytes(4)},
        {"top": bytes(8)},
        {"versions": []},
        {"versions": [(VERSION, 3)]},
        {"versions": [(VERSION, 2), (VERSION, 1)]},
    ],
)
def test_a_note_that_does_not_go_with_those_before_it_is_refused(wrong: dict[str, Any]):
    sent = replace(sent_piece(0, Piece(0, [1, 2], [-0.5, -0.5], ((VERSION, 2),), None)), **wrong)
    with pytest.raises(PeerError, match="note"):
        read_notes([note_of([Began("1", 7, 3)]), note_of([sent])])


def test_the_end_of_a_stream_is_noted():
    assert read_notes([note_of([Began("1", 7, 3)]), b"", note_of([Ended()])][::2]).ended
