"""Attacks that run in a process of their own (`attacker.py`), so that what is measured is the victim and not them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
from arena_kit import Arena

MOST_S = 600.0
"""An attacker ends by itself after this, whatever became of its test."""
READY_S = 60.0


class Attack:
    """One that runs. `told`: what it last said of itself: bytes and messages sent, how often it was thrown out."""

    def __init__(self, process: trio.Process, members: int) -> None:
        self._process = process
        self._members = members
        self.told: dict[str, Any] = {}
        self.ready = trio.Event()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still for a while, connections and all."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        left = b""
        async for data in stdout:
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                self.told = json.loads(line)
                if self.told["connections"] or self.told["begun"] >= max(1, self._members):
                    self.ready.set()  # each of them is at it


@asynccontextmanager
async def attack(
    arena: Arena,
    what: str,
    *,
    mbit: float = 100.0,
    members: int = 0,
    count: int = 0,
    addresses: int = 4,
    at_box: bool = False,
) -> AsyncIterator[Attack]:
    """`what` by a stranger, or by so many members on one ticket, together at `mbit`, until the block ends: to the seed,
    or to the node."""
    ticket = await trio.to_thread.run_sync(arena.another_ticket, max(1, members))
    told = {
        "what": what, "ticket": ticket, "members": members, "mbit": mbit, "count": count, "addresses": addresses,
        "seconds": MOST_S, "box": arena.box_public.hex() if "box" in arena.swarm.running else "",
        "box_port": arena.box_port, "at_box": at_box,
    }  # fmt: skip
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (arena.swarm.folder / "attacker.log").open("ab") as log:
        async with trio.open_nursery() as nursery:
            process = await trio.lowlevel.open_process(
                [sys.executable, str(here / "attacker.py"), json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
            )
            made = Attack(process, members)
            try:
                nursery.start_soon(made.listen)
                with trio.move_on_after(READY_S):
                    await made.ready.wait()
                assert made.ready.is_set(), f"the attack did not begin: {arena.swarm.log('attacker')}"
                yield made
                assert process.poll() is None, f"the attack ended by itself: {arena.swarm.log('attacker')}"
            finally:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
                nursery.cancel_scope.cancel()
