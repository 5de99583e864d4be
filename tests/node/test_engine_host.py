"""`EngineHost` with a real engine process: bits by descriptor, commits, and all failures of the process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from engine_kit import NodeReplica, engine

from codec.errors import UsageError
from node.engines.base import Prompt, SamplingOptions, SamplingParams
from node.engines.group import EngineGroup
from node.engines.host import EngineFailed, EngineHost, EngineLost, EngineSpec, worker_command
from node.engines.judgement import Claim, Judgement
from node.engines.messages import Commit, Done

SAMPLING = SamplingParams(max_tokens=4, stop_tokens=(2,))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()


async def test_it_follows_the_replica_bit_for_bit(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        assert await host.prove() == node.replica.root == host.root
        seen = set()
        for _ in range(3):
            fd, version, root = node.step()
            await host.stage(fd, version)
            os.close(fd)
            assert host.version == (0, version[1] - 1)
            assert await host.commit(version, root) is not None
            assert (host.version, host.root) == (version, root)
            assert await host.prove() == root
            completions, seconds = await host.generate([Prompt((1, 2), stream=i) for i in range(5)], SAMPLING)
            assert seconds >= 0
            assert [completion.token_ids[1] for completion in completions] == [3, 4, 5, 6, 7]
            assert {span.version for completion in completions for span in completion.spans} == {version}
            seen.add(completions[0].token_ids[0])
        assert len(seen) == 3
        pid = host._process.pid
    assert not alive(pid), "no process is left when the node stops"


async def test_it_knows_what_the_engine_measured_after_loading_and_after_a_reload(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        assert host.abilities == {"class:numpy/1/cpu/float32/none/tp1"}
        await host.reload()
        assert host.abilities == {"class:numpy/2/cpu/float32/none/tp1"}
        await host.prove()
        assert host.abilities == {"class:numpy/2/cpu/float32/none/tp1"}


async def test_staging_goes_on_while_it_generates(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    (tmp_path / "slow").touch()
    async with engine(tmp_path, node, monkeypatch) as host:
        done: list[str] = []

        async def generate() -> None:
            await host.generate([Prompt((1,))], SAMPLING)
            done.append("generated")

        fd, version, root = node.step()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(0.05)
            await host.stage(fd, version)
            done.append("staged")
            await host.commit(version, root)
            done.append("committed")
        assert done == ["staged", "generated", "committed"]
        os.close(fd)


async def test_a_failed_commit_is_never_served(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        fd, version, root = node.step()
        await host.stage(fd, version)
        os.close(fd)
        (tmp_path / "poison").touch()
        assert await host.commit(version, root) is None
        assert host.reloads == 1
        assert await host.prove() == root == host.root
        with pytest.raises(EngineFailed, match="not what is staged"):
            await host._link.ask(Commit(999, (0, 9), root), Done, 5.0)


async def test_a_commit_without_a_stage_reloads(tmp_path, monkeypatch):
    """For example after a restart between stage and commit: the engine must not take the new version without its
    bits."""
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        fd, version, root = node.step()
        os.close(fd)
        assert await host.commit(version, root) is None
        assert await host.prove() == root


async def test_a_replica_that_moves_while_it_is_read_is_detected(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    stale = node.ref
    fd, _, root = node.step()
    os.close(fd)
    asked = 0

    async def source():
        nonlocal asked
        asked += 1
        return stale if asked < 3 else node.ref

    async with engine(tmp_path, node, monkeypatch, source) as host:
        assert asked == 3
        assert host.root == root == await host.prove()


async def test_a_dead_engine_is_started_again_from_the_replica(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        fd, version, _ = node.step()
        os.close(fd)
        (tmp_path / "die").touch()
        with pytest.raises(EngineLost):
            await host.generate([Prompt((1,))], SAMPLING)
        with pytest.raises(EngineLost):
            await host.stage(0, version)
        await host.wait_ready()
        assert host.restarts == 1
        assert host.version == version
        assert await host.prove() == node.replica.root


async def test_an_engine_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch, generate_s=0.5) as host:
        pid = host._process.pid
        (tmp_path / "hang").touch()
        with pytest.raises(EngineLost, match=r"within 0\.5 s"):
            await host.generate([Prompt((1,))], SAMPLING)
        await host.wait_ready()
        assert not alive(pid)
        await host.generate([Prompt((1,))], SAMPLING)


async def test_a_bad_patch_is_refused_and_harms_nothing(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        fd = os.memfd_create("junk")
        os.write(fd, b"not a patch at all, but long enough to be one")
        with pytest.raises(EngineFailed, match="patch"):
            await host.stage(fd, (0, 1))
        os.close(fd)
        assert await host.prove() == node.replica.root


async def test_an_error_that_the_user_can_fix_has_the_engines_text(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    (tmp_path / "config.json").unlink()
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent.parent}")
    socket, log = tmp_path / "engine.sock", tmp_path / "log"
    for name, says in (("numpy_engine:NumpyEngine", r"no config\.json"), ("nowhere:Engine", "nowhere:Engine cannot")):
        host = EngineHost(EngineSpec(socket, worker_command(socket, name), log), node.source)
        with pytest.raises(UsageError, match=says), trio.fail_after(30):
            await host.run()


def test_no_orphan_is_left_when_the_node_is_killed(tmp_path, monkeypatch):
    """A killed node (SIGKILL) cleans up nothing, so its engine must end by itself."""
    here = Path(__file__).parent
    code = (
        "import sys, trio, pytest; from pathlib import Path; from engine_kit import *\n"
        "async def main():\n"
        "    folder = Path(sys.argv[1]); monkeypatch = pytest.MonkeyPatch()\n"
        "    async with engine(folder, NodeReplica(folder), monkeypatch) as host:\n"
        "        print(host._process.pid, flush=True)\n"
        "        await trio.sleep(60)\n"
        "trio.run(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent.parent}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


PORTABLE = SamplingParams(max_tokens=4, options=SamplingOptions(portable=True))


async def test_it_judges_claims_under_its_version(tmp_path, monkeypatch):
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        found = await host.judge(Claim((1,), (2, 3), PORTABLE, 7, previous=True))
        assert found == Judgement((0, 0), (-3.0, -4.0), (-2.0, -2.0), (0.5, 0.5))
        found = await host.judge(Claim((1,), (2, 3), SAMPLING, 7))
        assert (found.previous, found.margins) == ((), ())
        group = EngineGroup([host])
        assert await group.judge(Claim((1,), (2, 3), SAMPLING, 7)) == found
        with pytest.raises(ValueError, match="claim"):
            await host.judge(Claim((), (2,), SAMPLING, 7))


@pytest.mark.parametrize("how", ["torn", "die"])
async def test_an_engine_that_fails_in_a_rewind_is_never_left_with_other_bits(tmp_path, monkeypatch, how):
    """Poisoned, it is reloaded; killed, it is started again and filled."""
    node = NodeReplica(tmp_path)
    async with engine(tmp_path, node, monkeypatch) as host:
        (tmp_path / how).touch()
        with pytest.raises(EngineLost):
            await host.judge(Claim((1,), (2, 3), PORTABLE, 7, previous=True))
        await host.wait_ready()
        assert (host.reloads, host.restarts) == ((1, 0) if how == "torn" else (0, 1))
        assert await host.prove() == node.replica.root
        assert (await host.judge(Claim((1,), (2, 3), PORTABLE, 7, previous=True))).previous
