"""Many requests at once, while nodes come and go: each gets one answer, and its own."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import trio
from gateway_kit import END, LETTERS, gateway, with_client

IN_FLIGHT = 256


def prompt(i: int) -> list[int]:
    """Return a prompt that differs for every request, so that each answer can be matched to its request."""
    return [i // 27 % 27, i % 27, 5]


async def ask_all(client, count: int, *, stream_every: int = 5) -> list[tuple[int, tuple[int, ...]]]:
    """Return (request, tokens) of each answer."""

    async def ask(i: int) -> tuple[int, tuple[int, ...]]:
        create = client.completions.create
        if i % stream_every:
            answer = await create(model="policy", prompt=prompt(i), max_tokens=8)
            choices = answer.choices
        else:
            choices = [
                choice
                async for part in await create(model="policy", prompt=prompt(i), max_tokens=8, stream=True)
                for choice in part.choices
            ]
        assert len(choices) == 1, "answered twice"
        return i, tuple(choices[0].model_extra["token_ids"])

    return await asyncio.gather(*(ask(i) for i in range(count)))


def assert_all(answers, count: int) -> None:
    assert dict(answers) == {i: (*reversed(prompt(i)), END) for i in range(count)}
    assert max(Counter(i for i, _ in answers).values()) == 1


@pytest.mark.slow
async def test_256_in_flight_over_four_nodes_two_of_which_are_killed(tmp_path: Path):
    settings = {"min_deadline_s": 1.0, "max_deadline_s": 1.5, "lapsed_least": 1 << 16}
    """Short deadlines: on a busy machine, leases of honest nodes expire too."""
    async with gateway(tmp_path, settings=settings) as (swarm, url):
        for i in (1, 2, 3, 4):
            await swarm.add(i, seconds=0.3, batch=16)

        async def kill() -> None:
            while swarm.service.status().accepted < 8:  # noqa: ASYNC110 - the status signals no event
                await trio.sleep(0.01)
            assert swarm.service.status().samples_leased > 0
            swarm.kill(1)
            swarm.kill(2, known=False)  # the ledger is not told, so its leases expire

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with trio.fail_after(120):
                answers = await with_client(url, lambda client: ask_all(client, IN_FLIGHT))
        assert_all(answers, IN_FLIGHT)
        status = swarm.service.status()
        assert status.accepted == IN_FLIGHT
        assert (status.groups_open, status.groups_ready, status.samples_leased) == (0, 0, 0)
        drawn = sum(len(engine.drawn) for engine in swarm.engines.values())
        assert drawn >= IN_FLIGHT


async def test_requests_survive_until_a_new_node_joins(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1, seconds=5.0)

        async def replace() -> None:
            while swarm.service.status().samples_leased < 8:  # noqa: ASYNC110 - the status signals no event
                await trio.sleep(0.01)
            swarm.kill(1)
            await trio.sleep(0.2)
            await swarm.add(2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            with trio.fail_after(15):
                answers = await with_client(url, lambda client: ask_all(client, 8))
        assert_all(answers, 8)


@pytest.mark.slow
async def test_requests_beyond_the_limit_get_429_and_the_rest_is_answered(tmp_path: Path):
    async with gateway(tmp_path, in_flight=64) as (swarm, url):
        await swarm.add(1, seconds=0.2)

        async def use(client):
            async def ask(i: int) -> int:
                try:
                    answer = await client.completions.create(model="policy", prompt=prompt(i), max_tokens=8)
                except Exception as error:
                    return error.status_code
                assert answer.choices[0].text == "".join(LETTERS[token] for token in reversed(prompt(i)))
                return 200

            return Counter(await asyncio.gather(*(ask(i) for i in range(200))))

        codes = await with_client(url, use)
        assert codes.keys() == {200, 429}
        assert codes[200] >= 64

        async def patient(client):  # needs only the client's own retries
            return await ask_all(client, 70, stream_every=1000)

        answers = await with_client(url, patient, max_retries=20)
        assert_all(answers, 70)
