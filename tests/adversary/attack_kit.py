"""Runs attacks in a separate process (`attacker.py`), so that measurements show the victim only."""

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
"""An attacker ends by itself after this time, even if its test was killed."""
READY_S = 60.0


class Attack:
    """A running attack. `progress`: its last report: bytes sent, connections, sessions that the victim ended."""

    def __init__(self, process: trio.Process, members: int) -> None:
        self._process = process
        self._members = members
        self.progress: dict[str, Any] = {}
        self.ready = trio.Event()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the attacker's process while the block runs; its connections stay open."""
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
                self.progress = json.loads(line)
                if self.progress["connections"] or self.progress["begun"] >= max(1, self._members):
                    self.ready.set()  # every attacker has begun


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
    """Run the attack `what` until the block ends: by a stranger, or by `members` members on one ticket, together at
    `mbit` Mbit/s, against the seed, or with `at_box` against the node."""
    ticket = await trio.to_thread.run_sync(arena.another_ticket, max(1, members))
    order = {
        "what": what, "ticket": ticket, "members": members, "mbit": mbit, "count": count, "addresses": addresses,
        "seconds": MOST_S, "box": arena.box_public.hex() if "box" in arena.swarm.running else "",
        "box_port": arena.box_port, "at_box": at_box,
    }  # fmt: skip
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (arena.swarm.folder / "attacker.log").open("ab") as log:
        async with trio.open_nursery() as nursery:
            process = await trio.lowlevel.open_process(
                [sys.executable, str(here / "attacker.py"), json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
            )
            running = Attack(process, members)
            try:
                nursery.start_soon(running.listen)
                with trio.move_on_after(READY_S):
                    await running.ready.wait()
                assert running.ready.is_set(), f"the attack did not begin: {arena.swarm.log('attacker')}"
                yield running
                assert process.poll() is None, f"the attack ended by itself: {arena.swarm.log('attacker')}"
            finally:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
                nursery.cancel_scope.cancel()
