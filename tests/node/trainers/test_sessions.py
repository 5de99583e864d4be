"""The turns of a conversation reach the gateway as one session, from trainers that are stood in for here."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from uuid import uuid4

import pytest

pytest.importorskip("httpx")

from scripted_gateway import drawn, gateway
from standing_kit import standing_in

from node.trainers.prefix_sessions import PrefixSessions

FIRST = list(range(32))


def test_verls_turns_are_one_session_although_it_names_each_anew() -> None:
    replica = SimpleNamespace(
        RolloutReplica=object,
        RolloutReplicaRegistry=SimpleNamespace(register=lambda *_: None),
        TokenOutput=SimpleNamespace,
    )
    engine = SimpleNamespace(register=lambda _: lambda cls: cls)
    with (
        standing_in(
            "node.trainers.verl", ray={},
            verl__checkpoint_engine__base={"CheckpointEngine": object, "CheckpointEngineRegistry": engine},
            verl__workers__rollout={"replica": replica},
        ) as verl,
        gateway(drawn([7] * 5)) as server,
    ):  # fmt: skip

        async def conversations() -> None:
            ours = verl.SwarmServer(server.url, room=1000)
            for start in (0, 1000):
                prompt = [start + token for token in FIRST]
                for _ in range(3):
                    found = await ours.generate(prompt, {}, uuid4().hex)
                    prompt = [*prompt, *found.token_ids, 5, 6]  # and what a tool says

        asyncio.run(conversations())
        sessions = [asked["session_id"] for asked in server.asked]
    assert sessions[:3] == [sessions[0]] * 3
    assert sessions[3:] == [sessions[3]] * 3
    assert sessions[0] != sessions[3]


def test_torchtitans_routing_session_is_the_gateways() -> None:
    @dataclass
    class Sampling:
        max_tokens: int = 3

    with (
        standing_in(
            "node.trainers.torchtitan_generator",
            monarch__actor={"Actor": object, "concurrent_endpoint": lambda method: method},
            torchtitan__experiments__rl__types={"Completion": SimpleNamespace},
        ) as titan,
        gateway(drawn([7])) as server,
    ):

        async def turns() -> None:
            ours = titan.SwarmGenerator(server.url, "secret")
            for turn, session in (("0", "rollout 3"), ("1", "rollout 3"), ("0", None)):
                await ours.generate(
                    FIRST, request_id=turn, routing_session_id=session, sampling_config=Sampling(), metrics_prefix=""
                )

        asyncio.run(turns())
        assert [asked.get("session_id") for asked in server.asked] == ["rollout 3", "rollout 3", None]
        assert server.keys == ["Bearer secret"] * 3


def test_a_prompt_continues_the_longest_sequence_that_is_its_beginning() -> None:
    sessions = PrefixSessions()
    sessions.note(FIRST, "short")
    sessions.note([*FIRST, *FIRST], "long")
    assert sessions.find([*FIRST, 1], "new") == "short"
    assert sessions.find([*FIRST, *FIRST, 1], "new") == "long"
    assert sessions.find(FIRST[1:], "new") == "new"
    assert sessions.find([], "new") == "new"
    assert sessions.find(FIRST[:-1], "new") == "new", "a prompt of which it is no beginning"
    sessions.note([], "nothing")
    assert sessions.find([1], "new") == "new"


def test_the_sequence_that_was_used_least_recently_is_forgotten() -> None:
    sessions = PrefixSessions(remembered=2)
    prompts = [[k] * 4 for k in range(3)]
    sessions.note(prompts[0], "0")
    sessions.note(prompts[1], "1")
    assert sessions.find(prompts[0], "") == "0"
    sessions.note(prompts[2], "2")
    assert [sessions.find(prompt, "") for prompt in prompts] == ["0", "", "2"]
