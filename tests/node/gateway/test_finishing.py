"""`join --finish-within`: a real node that gets SIGTERM while it generates finishes its leases, leaves, and exits with
0."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from gateway_kit import base_folder
from openai import AsyncOpenAI

from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]

READY_S = 180.0
FINISH_S = 60.0
LEAVES_S = 10.0
"""What `docs/deploy.md` promises on top of --finish-within."""
REQUESTS = 48


def test_a_node_finishes_its_leases_and_leaves(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", "2")
        join = ("join", ticket, "--model", str(base), "--threads", "1", *LOOPBACK)
        leaver = swarm.start("leaver", *join, "--finish-within", f"{FINISH_S:.0f}s")
        swarm.start("stayer", *join)
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", SWARM_HOME=str(swarm.home("seed")))
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == 2,
            within_s=READY_S,
        )
        url = json.loads((swarm.folder / "gateway.log").read_text())["url"]
        asyncio.run(ask_all(url, leaver))
        asked = time.monotonic()
        assert swarm.ends("leaver", FINISH_S + LEAVES_S) == 0
        assert time.monotonic() - asked < FINISH_S + LEAVES_S
        assert '"given_back": false' in swarm.log("leaver", 1 << 20)
        work = swarm.state("seed")["work"]
        assert (work["accepted"], work["samples_leased"]) == (REQUESTS, 0)
        assert given_back(swarm) == []
        swarm.until_seed("its lease has ended", lambda seed: len(seed.nodes) == 1)


async def ask_all(url: str, leaver: subprocess.Popen[bytes]) -> None:
    """Ask for all samples at once; after the first few answers, send SIGTERM to one of the nodes that generate."""
    answered = 0
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=180.0) as client:

        async def ask(i: int) -> None:
            nonlocal answered
            await client.completions.create(
                model="policy", prompt="abc", max_tokens=64, temperature=1.0, extra_body={"ignore_eos": True}
            )
            answered += 1
            if answered == 4:
                leaver.send_signal(signal.SIGTERM)

        await asyncio.gather(*(ask(i) for i in range(REQUESTS)))


def given_back(swarm: Swarm) -> list[str]:
    """Why samples went to another node than the first one, by the ledger's book."""
    book = sqlite3.connect(f"file:{swarm.home('seed')}/ledger.sqlite?mode=ro", uri=True)
    return [why for (why,) in book.execute("select why from requeues")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_node_without_work_leaves_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """On SIGTERM since it has nothing to finish; Ctrl-C never waits for work."""
    base = base_folder(tmp_path / "base")
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        join = ("join", swarm.ticket(), "--model", str(base), "--engine", "none", *LOOPBACK)
        swarm.start("idle", *join, "--finish-within", "600s")
        swarm.until_seed("it has joined", lambda seed: [member.held for member in seed.nodes] == [(0, 0)])
        assert swarm.signal("idle", number, LEAVES_S) == code
        swarm.until_seed("its lease has ended", lambda seed: not seed.nodes)
