"""A real full disk: a small tmpfs in a separate mount namespace. Needs root, or user namespaces."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, root_of, step, weights

from scenarios.harness.swarm import LOOPBACK, NODE, Ended, Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights()
SECOND = step(FIRST, 1, density=0.3)


class SmallDisk:
    """A home on a tmpfs that only commands run with `prefix` see. It is unmounted when the holder process ends."""

    def __init__(self, holder: subprocess.Popen[bytes], home: Path, flags: tuple[str, ...]) -> None:
        self.home = home
        self.prefix = ("nsenter", *flags, "--target", str(holder.pid), "--mount", "--")

    def inside(self, script: str) -> None:
        subprocess.run([*self.prefix, "sh", "-c", script], check=True, cwd="/", timeout=20)

    def fill(self) -> None:
        self.inside(f"cat /dev/zero > {self.home}/ballast 2>/dev/null || true")

    def free(self) -> None:
        self.inside(f"rm {self.home}/ballast")


@contextmanager
def small_disk(swarm: Swarm, name: str, size: str) -> Iterator[SmallDisk]:
    home = swarm.home(name)
    home.mkdir()
    flags = () if os.getuid() == 0 else ("--user", "--preserve-credentials")
    script = f"mount -t tmpfs -o size={size},mode=700 none {home} && echo ready && exec sleep 300"
    holder = subprocess.Popen(
        ["unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)), "sh", "-c", script],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield SmallDisk(holder, home, flags)
    finally:
        holder.kill()
        holder.wait()


def ended(swarm: Swarm, name: str) -> Ended:
    """Wait until a background process ends; its exit code and log."""
    code = swarm.ends(name)
    return Ended(code, "", swarm.log(name), 0.0)


def test_a_seed_reports_a_full_disk_and_continues_once_there_is_room(tmp_path: Path) -> None:
    base, next_one = checkpoint(tmp_path / "base", FIRST), checkpoint(tmp_path / "step_1", SECOND)
    with swarm_in(tmp_path) as swarm, small_disk(swarm, "seed", "24m") as disk:
        options = {"prefix": disk.prefix}
        words = ("seed", "--base", str(base), *LOOPBACK, "--preset", "loopback")
        swarm.start("seed", *words, **options)
        swarm.until_logged("seed", '"serving"')
        ticket = swarm.command("seed", "invite", **options).out.strip()
        swarm.node("box", ticket)
        swarm.until_logged("seed", '"held"')
        disk.fill()
        refused = swarm.command("seed", "publish", str(next_one), **options)
        assert refused.code in (1, 2), refused
        check(refused, refused.code, "full", "[Ff]ree")
        if swarm.running["seed"].poll() is not None:
            check(ended(swarm, "seed"), 2, "full")
        disk.free()
        if "seed" not in swarm.running:
            swarm.start("seed", *words, **options)
            swarm.until_logged("seed", '"serving"')
        published = swarm.command("seed", "publish", str(next_one), "--wait", **options)
        assert published.code == 0, published
        swarm.until("box", lambda state: state["nodes"][0]["root"] == root_of(SECOND))
        assert "Traceback" not in swarm.log("seed", 1 << 20)


def test_a_node_reports_a_full_disk_and_catches_up_once_there_is_room(tmp_path: Path) -> None:
    base, next_one = checkpoint(tmp_path / "base", FIRST), checkpoint(tmp_path / "step_1", SECOND)
    with swarm_in(tmp_path) as swarm, small_disk(swarm, "box", "2m") as disk:
        options = {"prefix": disk.prefix}
        swarm.seed(base)
        words = ("join", swarm.ticket(), *NODE)
        full = swarm.command("box", *words, **options)  # the model does not fit
        check(full, 2, "full", "[Ff]ree|larger")
        disk.inside(f"mount -o remount,size=16m {disk.home}")
        swarm.start("box", *words, **options)
        swarm.until("seed", all_hold([0, 0], 1))
        swarm.until_logged("box", '"checkpointed"')
        disk.fill()
        swarm.publish(next_one)
        check(ended(swarm, "box"), 2, "full")
        disk.free()
        swarm.start("box", *words, **options)
        state = swarm.until("seed", all_hold([0, 1], 1))
        assert state["root"] == root_of(SECOND)
