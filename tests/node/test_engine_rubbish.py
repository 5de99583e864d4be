"""An engine process that sends invalid or unrequested answers, or dies at any byte.

It is started again, the node continues, and none of its answers reach the ledger.
"""

import contextlib
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
from engine_kit import NodeReplica

from node.engines.base import Prompt, SamplingParams
from node.engines.host import EngineDeadlines, EngineFailed, EngineHost, EngineLost, EngineSpec
from node.engines.judgement import Claim
from swarm import guard
from swarm.guard import Source

SAMPLING = SamplingParams(max_tokens=4)

ENGINE = """
import os, struct, sys, time
from pathlib import Path
import msgspec
from codec import Replica
from node.engines.messages import *
from node.ipc.channel import connect
from node.ipc.framing import encode_frame

folder, how = Path(sys.argv[1]), sys.argv[2]
channel = connect(folder / "engine.sock", FromNode)
lives = folder / "lives"
first = not lives.exists()
lives.touch()
if first and how == "silent":
    time.sleep(60)
if first and how == "no hello":
    channel.send(Done(1, 0.0))
    time.sleep(60)
channel.send(Ready(os.getpid(), scores=True))
if first and how == "hello twice":
    channel.send(Ready(os.getpid()))
    time.sleep(60)

def completion(**other):
    fields = {"token_ids": (1, 2), "logprobs": (-1.0, -1.0), "finish_reason": "stop",
            "spans": ({"version": (0, 0), "start": 0, "end": 2},)} | other
    return fields

def answer(message, name, **fields):
    body = msgspec.msgpack.encode({"type": name, "number": message.number} | fields)
    channel._sock.setblocking(True)
    channel._sock.sendall(struct.pack("<IB", len(body), 0) + body)

WRONG = {
    "too few": [],
    "too long": [completion(token_ids=(1,) * 5, logprobs=(-1.0,) * 5,
                            spans=({"version": (0, 0), "start": 0, "end": 5},))],
    "no token ids": [completion(token_ids=(-1, 1 << 40))],
    "another version": [completion(spans=({"version": (3, 7), "start": 0, "end": 2},))],
    "no spans": [completion(spans=())],
    "not a number": [completion(logprobs=(float("nan"), -1.0))],
    "no utf-8": None,
}
JUDGEMENTS = {
    "other length": {"scores": [-1.0, -1.0]},
    "not numbers": {"scores": [float("nan")]},
    "no version": {"version": (-1, 5)},
    "unasked": {"previous": [-1.0]},
    "no draw": {"margins": [0.5]},
    "long before": {"previous": [-1.0] * 3},
}
while True:
    message, fds = channel.recv(3600)
    match message:
        case Attach():
            channel.send(Proof(message.number, message.root))
        case Generate() if how.startswith("early"):
            waiting = message
        case Commit():
            drawn = completion(spans=({"version": message.version, "start": 0, "end": 2},))
            answer(waiting, "completions", completions=[drawn], seconds=0.1)
            time.sleep(0.3)
            channel.send(Done(message.number, 0.1) if how == "early" else Failed(message.number, "no", False, True))
        case Reload():
            channel.send(Proof(message.number, message.root))
        case Generate():
            if not first or how not in (*WRONG, "counts", "many counts", "cut", "seconds", "out of turn"):
                answer(message, "completions", completions=[completion() for _ in message.prompts], seconds=0.1)
            elif how == "counts":
                channel.send(Progress(message.number, (1, 2, 3)))
            elif how == "many counts":
                channel.send(Progress(message.number, (1 << 40,)))
            elif how == "seconds":
                answer(message, "completions", completions=[completion()], seconds=float("nan"))
            elif how == "out of turn":
                channel.send(Proof(message.number, bytes(32)))
            elif how == "no utf-8":
                body = msgspec.msgpack.encode({"type": "failed", "number": message.number, "why": "xxxx",
                                               "usage": False, "poisoned": False})
                body = body.replace(b"xxxx", b"\\xff\\xfe\\xff\\xfe")
                channel._sock.setblocking(True)
                channel._sock.sendall(struct.pack("<IB", len(body), 0) + body)
            elif how == "cut":
                channel._sock.setblocking(True)
                channel._sock.sendall(encode_frame(Done(message.number, 0.1))[:-3])
                os._exit(3)
            else:
                answer(message, "completions", completions=WRONG[how], seconds=0.1)
        case Judge() if how in JUDGEMENTS:
            wrong = JUDGEMENTS[how] if first else {}
            answer(message, "judged", judgement={"version": (0, 0), "scores": [-1.0]} | wrong)
        case Score():
            answer(message, "scores", logprobs=[-1.0], version=(0, 0))
"""


@contextlib.asynccontextmanager
async def engine(folder: Path, how: str, **deadlines: float):
    node = NodeReplica(folder)
    command = (sys.executable, "-c", ENGINE, str(folder), how)
    host = EngineHost(
        EngineSpec(folder / "engine.sock", command, folder / "log"), node.source, EngineDeadlines(**deadlines)
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            yield host
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))


HOW = (
    "too few", "too long", "no token ids", "another version", "no spans", "not a number", "no utf-8", "counts",
    "many counts", "seconds", "out of turn", "cut",
)  # fmt: skip


@pytest.mark.parametrize("how", [*HOW[:3], *(pytest.param(how, marks=pytest.mark.slow) for how in HOW[3:])])
async def test_an_invalid_answer_ends_the_engines_process(tmp_path: Path, how: str):
    before = guard.bugs[Source.ENGINE]
    async with engine(tmp_path, how) as host:
        await host.wait_ready()
        with pytest.raises(EngineLost):
            await host.generate([Prompt((1,))], SAMPLING, lambda counts: None)
        await host.wait_ready()
        assert host.restarts == 1
        completions, _ = await host.generate([Prompt((1,)), Prompt((2,))], SAMPLING)
        assert [completion.token_ids for completion in completions] == [(1, 2), (1, 2)]
    assert guard.bugs[Source.ENGINE] == before


async def test_an_engine_that_sends_ready_twice_is_started_again(tmp_path: Path):
    async with engine(tmp_path, "hello twice") as host:
        with trio.fail_after(30):
            while not (tmp_path / "lives").exists() or not host.ready:  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)
        await trio.sleep(0.1)
        await host.wait_ready()


async def test_a_wrong_number_of_scores_ends_the_engines_process(tmp_path: Path):
    async with engine(tmp_path, "scores") as host:
        await host.wait_ready()
        assert (await host.score((1,), (2,), SAMPLING))[0] == (-1.0,)
        with pytest.raises(EngineLost):
            await host.score((1,), (2, 3), SAMPLING)
        await host.wait_ready()


@pytest.mark.parametrize("how", ["other length", "not numbers", "no version", "unasked", "no draw", "long before"])
@pytest.mark.slow
async def test_an_invalid_judgement_ends_the_engines_process(tmp_path: Path, how: str):
    async with engine(tmp_path, how) as host:
        await host.wait_ready()
        with pytest.raises(EngineLost):
            await host.judge(Claim((1,), (2,), SAMPLING, 0))
        await host.wait_ready()
        assert (await host.judge(Claim((1,), (2,), SAMPLING, 0))).scores == (-1.0,)
        assert host.restarts == 1


async def test_a_message_larger_than_a_frame_is_refused_without_a_restart(tmp_path: Path):
    """The worker then tries the prompts one by one."""
    async with engine(tmp_path, "large") as host:
        await host.wait_ready()
        with pytest.raises(EngineFailed, match="more than a local message may have"):
            await host.generate([Prompt((1 << 31,) * 65_536)] * 110, SAMPLING)
        await host.generate([Prompt((1,))], SAMPLING)
        assert host.restarts == 0


@pytest.mark.parametrize("how", ["early", "early and fails"])
async def test_tokens_of_a_version_wait_for_the_end_of_its_commit(tmp_path: Path, how: str):
    """vLLM draws from a version before it has answered the commit, because it reads some bits back first."""
    async with engine(tmp_path, how) as host:
        await host.wait_ready()
        found: list[object] = []

        async def generate() -> None:
            try:
                completions, _ = await host.generate([Prompt((1,))], SAMPLING)
                found.append((completions[0].spans[0].version, host.version))
            except EngineLost as error:
                found.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.testing.wait_all_tasks_blocked(0.1)
            committed = await host.commit((0, 1), bytes(32))
        assert (committed is not None) == (how == "early")
        if how == "early":
            assert found == [((0, 1), (0, 1))]
        else:
            assert "whose commit failed" in str(found[0])
        assert host.restarts == 0
