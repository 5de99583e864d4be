"""A js-libp2p peer against our transport: it is compatible with another libp2p implementation."""

import fcntl
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio

from codec.sign import Key
from swarm.gossip.announcements import Gossip
from swarm.transport.base import Lane, PeerKey
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import PeerPolicy

pytestmark = pytest.mark.foreign

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / ".cache" / "foreign"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="session")
def installed() -> Path:
    """The locked npm packages, installed once, while other workers wait."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("needs node and npm")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    stamp = INSTALLED / "installed.lock"
    lock = (HERE / "package-lock.json").read_text()
    with (INSTALLED / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != lock:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / name, INSTALLED / name)
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=INSTALLED, check=True, timeout=300)
            stamp.write_text(lock)
        for name in ("peer.mjs", "polyfill.mjs"):  # node resolves imports from the folder of the file
            if not (INSTALLED / name).exists() or (INSTALLED / name).read_bytes() != (HERE / name).read_bytes():
                shutil.copy(HERE / name, INSTALLED / name)
    return INSTALLED


class JsPeer:
    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._buffer = b""

    async def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            more = await self._process.stdout.receive_some()
            assert more, "the js peer ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    async def do(self, verb: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps({"do": verb, **arguments}).encode() + b"\n")
        answer = await self.read()
        assert "error" not in answer, answer["error"]
        return answer


@asynccontextmanager
async def js_peer(nursery: trio.Nursery, installed: Path, security: str) -> AsyncIterator[tuple[JsPeer, dict]]:
    process = await nursery.start(
        partial(
            trio.run_process,
            ["node", "--import", "./polyfill.mjs", "peer.mjs", security],
            cwd=installed,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            check=False,
        )
    )
    try:
        peer = JsPeer(process)
        yield peer, await peer.read()
    finally:
        process.kill()


async def echo(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
    async for data in stream:
        await stream.send_all(data)


@pytest.mark.parametrize("security", ["tls", "noise"])
async def test_js_dials_us(installed: Path, security: str) -> None:
    granted: set[PeerKey] = set()
    ours = Libp2pTransport(
        Key(bytes([5]) * 32), ["/ip4/127.0.0.1/tcp/0"], policy=PeerPolicy(admits=granted.__contains__)
    )
    gossip = Gossip(ours, "interop", lambda data: data != b"bad")
    got: list[bytes] = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(ours.serve, echo)

            async def serve_until_ready(*, task_status: trio.TaskStatus[None]) -> None:
                await gossip.run(got.append, task_status=task_status)

            await nursery.start(serve_until_ready)
            async with js_peer(nursery, installed, security) as (js, about):
                dialed = await js.do("dial", address=f"{address}/p2p/{peer_id(ours.key)}")
                assert dialed == {
                    "encryption": {"tls": "/tls/1.0.0", "noise": "/noise"}[security],
                    "multiplexer": "/yamux/1.0.0",
                }
                while not ours.peers():  # noqa: ASYNC110 - js has dialed when it has read our last message
                    await trio.sleep(0.01)
                assert ours.peers() == [peer_key(about["id"])]
                # Without a grant the peer may open streams, and is not in the gossip mesh; with a grant it is a member.
                assert await js.do("echo", bytes=1000) == {"got": 1000, "same": True}
                await js.do("subscribe", topic="interop")
                await gossip.publish(b"us before the grant")
                await trio.sleep(1)
                assert (await js.do("heard"))["heard"] == []
                granted.add(peer_key(about["id"]))
                assert (await js.do("ping"))["ms"] >= 0
                assert await js.do("echo", bytes=8 * MEBIBYTE) == {"got": 8 * MEBIBYTE, "same": True}
                identified = await js.do("identify")
                assert "/meshsub/1.1.0" in identified["protocols"]
                assert identified["agent"] == f"swarm-node/{version('swarm-node')}"

                await js.do("hangup")
                while ours.peers():  # noqa: ASYNC110
                    await trio.sleep(0.05)
                await trio.sleep(0.5)
                await js.do("dial", address=f"{address}/p2p/{peer_id(ours.key)}")
                heard: list[str] = []
                number = 0
                while not (
                    any(data.startswith(b"js") for data in got) and any(text.startswith("us") for text in heard)
                ):
                    number += 1  # the mesh takes a moment: several tries
                    await gossip.publish(b"us %d" % number)
                    await js.do("publish", topic="interop", text="bad")
                    await js.do("publish", topic="interop", text=f"js {number}")
                    await trio.sleep(0.3)
                    heard = (await js.do("heard"))["heard"]
                assert b"bad" not in got
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("security", ["tls", "noise"])
async def test_we_dial_js(installed: Path, security: str) -> None:
    ours = Libp2pTransport(Key(bytes([5]) * 32), ["/ip4/127.0.0.1/tcp/0"])
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(ours.serve, echo)
            async with js_peer(nursery, installed, security) as (_, about):
                key = peer_key(about["id"])
                await ours.connect(key, [address.partition("/p2p/")[0] for address in about["addresses"]])
                sent = bytes(range(251)) * 4000
                async with await ours.open_stream(key, Lane.CONTROL) as stream:
                    nursery.start_soon(stream.send_all, sent)
                    got = b""
                    while len(got) < len(sent):
                        got += await stream.receive_some()
                    assert got == sent
                await ours.disconnect(key)
                assert ours.peers() == []
            nursery.cancel_scope.cancel()
