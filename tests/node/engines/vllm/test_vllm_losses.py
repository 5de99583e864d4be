"""Three engines of a node on one replica. Each is lost at another point of an update, and the others go on."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from codec import Checkpoint, Replica, write_patch
from node.engines.base import Prompt, SamplingParams
from node.engines.group import EngineGroup
from node.engines.host import EngineFailed, EngineHost, EngineLost
from node.engines.replica_ref import ReplicaRef
from node.engines.server_specs import specs_of
from node.settings.config import JoinConfig
from scenarios.engines.engine_bench import SMALL
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

SAMPLING = SamplingParams(max_tokens=8)
WITHIN_S = 600.0
"""Time limit in seconds for vLLMs to start on a busy machine."""
LOST = (EngineLost, EngineFailed)


class Node:
    """A replica and the engines that are filled from it: two of one rank, and one of two ranks."""

    def __init__(self, folder: Path, home: Path, python: Path) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.replica = Replica.from_checkpoint(self.checkpoint)
        self.version = 0
        self.files = home / "files"
        self.files.mkdir(parents=True)
        for name, data in self.checkpoint.files.items():
            (self.files / name).write_bytes(data)
        self.hosts = [
            EngineHost(spec, self.source)
            for engines, tp in ((2, 1), (1, 2))
            for spec in specs_of(self.settings(home / f"tp{tp}", python, engines, tp))
        ]
        self.group = EngineGroup(self.hosts)

    def settings(self, home: Path, python: Path, engines: int, tp: int) -> JoinConfig:
        home.mkdir()
        return JoinConfig(
            home=home,
            engine="vllm",
            engines=engines,
            tp=tp,
            threads=2,
            vllm_python=python,
            vllm_arg=SMALL,
            engine_port=0,
        )

    async def source(self) -> ReplicaRef:
        fd = self.replica.seal_for_readers()
        return ReplicaRef(self.replica.layout, fd, self.files, (0, self.version), self.replica.root)

    def advance(self) -> int:
        self.version += 1
        staged = step_of(self.replica, self.version)
        fd, _ = write_patch(staged, self.replica.layout)
        self.replica.scatter(staged)
        return fd

    async def stage(self) -> None:
        fd = self.advance()
        try:
            await self.group.stage(fd, (0, self.version))
        finally:
            os.close(fd)

    async def commit(self) -> None:
        assert await self.group.commit((0, self.version), self.replica.root) is not None

    async def until_served(self, hosts: list[EngineHost]) -> None:
        """Wait until these hosts hold the replica's version, proven, and generate."""
        for host in hosts:
            with trio.fail_after(WITHIN_S):
                while not (host.ready and host.version == (0, self.version)):  # noqa: ASYNC110 - as a node sees it
                    await trio.sleep(0.1)
            assert await host.prove() == self.replica.root
            completions, _ = await host.generate([Prompt((5, 6, 7))], SAMPLING)
            assert completions[0].spans[0].version == (0, self.version)


def workers(host: EngineHost, what: str) -> list[int]:
    """The processes of the engine's group whose command contains `what`."""
    ask = ["ps", "-o", "pid=,args=", "-g", str(host._process.pid)]
    listed = subprocess.run(ask, capture_output=True, text=True, check=False).stdout  # it fails where there is none
    return [int(line.split()[0]) for line in listed.splitlines() if what in line]


@pytest.mark.long
async def test_engines_survive_the_loss_of_others_during_an_update_and_return_proven(
    untied: Path, python: Path, tmp_path: Path
):
    node = Node(untied, tmp_path, python)
    first, second, third = node.hosts
    async with trio.open_nursery() as nursery:
        await nursery.start(node.group.run)
        await node.until_served(node.hosts)
        assert [len(workers(host, "VLLM::Worker")) for host in node.hosts] == [1, 1, 2]
        await node.stage()
        await node.commit()
        await node.until_served(node.hosts)
        assert await node.group.prove() == (node.replica.root, True)
        scores, version = await node.group.score((5, 6, 7), (8, 9), SAMPLING)
        assert (len(scores), version) == (2, (0, 1))

        # One engine is lost while it stages: the others commit without it.
        stop_and_kill_soon(first, nursery)
        await node.stage()
        await node.commit()
        await wait_lost(first)
        await node.until_served([second, third])

        # Another is lost during a commit: its remaining processes generate nothing.
        await node.stage()
        stop_and_kill_soon(second, nursery)
        await node.commit()
        await wait_lost(second)
        with pytest.raises(LOST):
            await second.generate([Prompt((5, 6, 7))], SAMPLING)
        await node.until_served([third])

        # The last one, of two ranks, loses its engine core after a commit.
        await node.stage()
        await node.commit()
        os.kill(workers(third, "VLLM::EngineCore")[0], signal.SIGKILL)
        await wait_lost(third)

        # Each returns by itself, proven, and follows.
        with trio.fail_after(WITHIN_S):
            for host in node.hosts:
                await host.wait_ready()
        await node.stage()
        await node.commit()
        await node.until_served(node.hosts)
        assert [host.restarts for host in node.hosts] == [1, 1, 1]
        nursery.cancel_scope.cancel()
    with trio.fail_after(60.0):
        while any(workers(host, "VLLM") for host in node.hosts):  # noqa: ASYNC110 - killed, and taking their memory down
            await trio.sleep(0.1)


def stop_and_kill_soon(host: EngineHost, nursery: trio.Nursery) -> None:
    """Stop the host's vLLM worker, and kill it half a second later."""
    (worker,) = workers(host, "VLLM::Worker")
    os.kill(worker, signal.SIGSTOP)

    async def kill() -> None:
        await trio.sleep(0.5)
        os.kill(worker, signal.SIGKILL)

    nursery.start_soon(kill)


async def wait_lost(host: EngineHost) -> None:
    with trio.fail_after(WITHIN_S):
        while host.ready:  # noqa: ASYNC110 - as a node sees it
            await trio.sleep(0.05)
