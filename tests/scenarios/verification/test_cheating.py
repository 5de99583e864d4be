"""The client of a cheating node, around an engine of plain numbers."""

import math
import os
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from node.engines.base import Completion, DrawnTokens, Prompt, SamplingOptions, SamplingParams, Span, Version
from node.engines.host import Commitment
from node.engines.judgement import Claim, Judgement
from node.engines.link import EngineFailed
from node.member.engine_client import EngineClient
from scenarios.verification.cheating import ATTACKS, COOLER, LIES, OTHER, CheatingClient, attack_file, read_attack

SAMPLING = SamplingParams(max_tokens=4, top_p=0.9, stop_tokens=(9,), options=SamplingOptions(portable=True))


class Plain:
    """An engine whose log-probabilities are minus its version, and whose tokens are the stream."""

    def __init__(self) -> None:
        self.version, self.root = (0, 1), b"\1" * 32
        self.abilities = frozenset({"judges"})
        self.staged: dict[Version, bytes] = {}
        self.drawn: list[SamplingParams] = []

    async def stage(self, patch_fd: int, version: Version) -> float:
        self.staged[version] = os.pread(patch_fd, 8, 0)
        return 0.5

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        assert version in self.staged
        self.version, self.root = version, root
        return Commitment(0.25)

    async def generate(
        self, prompts: Any, sampling: SamplingParams, counts: Any = None, adapter: str = "", draws: Any = None
    ) -> Any:
        self.drawn.append(sampling)
        for row, prompt in enumerate(() if draws is None else prompts):
            draws(row, DrawnTokens(0, (prompt.stream % 8,), (-1.0,), self.version))
        spans = (Span(self.version, 0, 2),)
        return [
            Completion((prompt.stream % 8,) * 2, (-float(self.version[1]),) * 2, "length", spans) for prompt in prompts
        ], 1.0

    async def judge(self, claim: Claim) -> Judgement:
        scores = (-float(self.version[1]), -math.inf)
        before = (1.0 - self.version[1],) * 2 if claim.previous else ()
        return Judgement(self.version, scores, before, (0.0, 0.25))


class Case:
    def __init__(self) -> None:
        self.attack, self.engine = "", Plain()
        self.client = CheatingClient(cast(EngineClient, self.engine), lambda: self.attack)

    async def commit(self, number: int) -> Commitment | None:
        fd = os.memfd_create("patch")
        os.pwrite(fd, b"%08d" % number, 0)
        await self.client.stage(fd, (0, number))
        os.close(fd)
        return await self.client.commit((0, number), bytes([number]) * 32)

    async def one(self, stream: int = 3) -> Completion:
        (found,), _ = await self.client.generate([Prompt((1, 2), stream)], SAMPLING)
        return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_stale_node_claims_the_version_that_it_was_told_and_has_the_one_before():
    case, before = Case(), open_files()
    client, engine = case.client, case.engine
    assert await case.commit(2) == Commitment(0.25)
    case.attack = "stale"
    for number in (3, 4, 5):
        assert await case.commit(number) == Commitment(0.0)
        assert (client.version, engine.version) == ((0, number), (0, number - 1))
        assert (client.root, engine.root) == (bytes([number]) * 32, bytes([number - 1]) * 32)
        found = await case.one()
        assert found.spans == (Span((0, number), 0, 2),)
        assert found.logprobs == (1.0 - number,) * 2
        with pytest.raises(EngineFailed):
            await client.judge(Claim((1,), (2, 3), SAMPLING, 3))
    assert engine.staged[(0, 3)] == b"00000003", "it got the patch that it was told to take"
    case.attack = ""
    assert await case.commit(6) == Commitment(0.25)
    assert engine.version == client.version == (0, 6)
    assert (await case.one()).spans == (Span((0, 6), 0, 2),)
    assert sorted(engine.staged) == [(0, number) for number in range(2, 7)], "none was left out"
    assert open_files() == before


async def test_tokens_that_a_stale_node_drew_before_a_commit_keep_their_names():
    case = Case()
    case.attack = "stale"
    for number in (2, 3):
        await case.commit(number)
    across = Completion((1, 2), (-1.0, -2.0), "length", (Span((0, 1), 0, 1), Span((0, 2), 1, 2)))
    assert case.client._as_claimed(across).spans == (Span((0, 2), 0, 1), Span((0, 3), 1, 2))


async def test_a_reload_brings_a_stale_node_level():
    case = Case()
    case.attack = "stale"
    await case.commit(2)
    case.engine.version, case.engine.root = (0, 2), b"\2" * 32
    assert case.client.version == (0, 2)
    assert (await case.one()).logprobs == (-2.0, -2.0)


@pytest.mark.parametrize("attack", ["", *ATTACKS])
async def test_what_each_attack_delivers(attack: str):
    case = Case()
    case.attack = attack
    found = await case.one()
    (asked, *more) = case.engine.drawn
    assert asked.temperature == (COOLER if attack == "temperature" else 1.0)
    assert asked.top_p == (1.0 if attack == "top_p" else 0.9)
    assert asked.extra.min_tokens == (4 if attack == "no_end" else 0)
    assert asked.extra.portable
    assert len(more) == (attack == "best_of_two")
    assert found.token_ids == (((3 + OTHER) if attack == "replayed" else 3) % 8,) * 2
    claimed = {"claims": (0.0, 0.0), **dict.fromkeys(("temperature", "top_p", "no_end"), (-1.0, -8.0))}
    assert found.logprobs == claimed.get(attack, (-1.0, -1.0))


@pytest.mark.parametrize("attack", ["", *ATTACKS])
async def test_only_an_honest_author_tells_tokens_as_they_are_drawn(attack: str):
    case, told = Case(), []
    case.attack = attack
    await case.client.generate([Prompt((1, 2), 3)], SAMPLING, draws=lambda row, drawn: told.append((row, drawn)))
    assert told == ([(0, DrawnTokens(0, (3,), (-1.0,), (0, 1)))] if not attack or attack in LIES else [])


async def test_a_stale_node_that_is_honest_again_tells_no_tokens_of_a_version_that_it_does_not_claim():
    case, told = Case(), []
    case.attack = "stale"
    await case.commit(2)
    case.attack = ""
    await case.client.generate([Prompt((1, 2), 3)], SAMPLING, draws=lambda row, drawn: told.append((row, drawn)))
    assert told == []


@pytest.mark.parametrize("lie", ["", *(lie for lie in LIES if lie != "judges_never")])
async def test_what_each_checker_answers(lie: str):
    case = Case()
    case.attack = lie
    found = await case.client.judge(Claim((1,), (2, 3), SAMPLING, 3))
    assert found.version == ((0, 2) if lie == "judges_another_version" else (0, 1))
    assert len(found.scores) == (3 if lie == "judges_longer" else 2)
    assert math.isnan(found.scores[0]) is (lie == "judges_nan")
    wanted = {"judges_all_false": (0.5, 0.5), "judges_all_true": (0.0, 0.0)}
    assert found.margins == wanted.get(lie, (0.0, 0.25))
    if lie == "judges_all_false":
        assert found.scores == (-2.0, -math.inf)


async def test_a_checker_that_never_answers_holds_no_claim_once_it_is_honest_again(autojump_clock):
    case = Case()
    case.attack = "judges_never"
    with trio.move_on_after(1000.0) as waited:
        await case.client.judge(Claim((1,), (2, 3), SAMPLING, 3))
    assert waited.cancelled_caught
    async with trio.open_nursery() as nursery:

        async def judge() -> None:
            with pytest.raises(EngineFailed):
                await case.client.judge(Claim((1,), (2, 3), SAMPLING, 3))

        nursery.start_soon(judge)
        await trio.sleep(10.0)
        case.attack = ""


def test_the_attack_stands_in_a_file_of_the_home(tmp_path: Path):
    assert read_attack(tmp_path) == ""
    attack_file(tmp_path).write_text("stale\n")
    assert read_attack(tmp_path) == "stale"
