"""Damaged files, as after power cuts or bad disks: the next start proves the root, repairs it, or says what is lost."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import check, checkpoint, holds, root_of, step, weights

from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights()
STEPS = [FIRST]
for number in range(1, 6):
    STEPS.append(step(STEPS[-1], number))


def flip(path: Path, rng: random.Random, times: int = 8) -> None:
    """Flip `times` random bits of a file."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(times):
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def files(home: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in home.glob(f"swarm-*/{pattern}") if path.is_file())
    assert found, pattern
    return found


def flip_chunks(home: Path) -> None:
    for path in files(home, "chunks/*"):
        flip(path, random.Random(1))


def cut_chunks(home: Path) -> None:
    for path in files(home, "chunks/*"):
        os.truncate(path, path.stat().st_size * 2 // 3)


def flip_checkpoint(home: Path) -> None:
    for path in files(home, "anchors/*/model.safetensors"):
        before = path.stat()
        flip(path, random.Random(2))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a bad disk would: the marker still matches


def lose_checkpoint(home: Path) -> None:
    for path in files(home, "anchors/*/anchor.json"):
        path.write_bytes(b"{")


def flip_small_files(home: Path) -> None:
    for path in files(home, "files/*") + files(home, "hashes/*"):
        flip(path, random.Random(3))


def garble_database(home: Path) -> None:
    for path in files(home, "swarm.sqlite"):
        path.write_bytes(b"no database at all" * 100)
        for beside in ("swarm.sqlite-wal", "swarm.sqlite-shm"):
            path.with_name(beside).unlink(missing_ok=True)


def lose_database(home: Path) -> None:
    for path in files(home, "swarm.sqlite*"):
        path.unlink()


def flip_database(home: Path) -> None:
    for path in files(home, "swarm.sqlite"):
        flip(path, random.Random(4), times=400)


DAMAGES: tuple[Callable[[Path], None], ...] = (
    flip_chunks,
    cut_chunks,
    flip_checkpoint,
    lose_checkpoint,
    flip_small_files,
)


@pytest.fixture
def swarm(tmp_path: Path):
    """A seed at version 2, and one node that holds it."""
    base = checkpoint(tmp_path / "base", FIRST)
    for number, words in enumerate(STEPS[1:], 1):
        checkpoint(tmp_path / f"step_{number}", words)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base, "--copy-base")
        swarm.node("box", swarm.ticket())
        swarm.until("box", holds(root_of(FIRST)))
        for number in (1, 2):
            swarm.publish(tmp_path / f"step_{number}")
        swarm.until("box", holds(root_of(STEPS[2])))
        yield swarm
        for name in ("seed", "box"):
            assert "Traceback" not in swarm.log(name, 1 << 22)
            assert "This is a bug" not in swarm.log(name, 1 << 22)


def test_a_node_repairs_every_damage_of_its_disk(swarm: Swarm) -> None:
    ticket = swarm.ticket()
    for damage in DAMAGES:
        swarm.until_there("box", "swarm-*/anchors/*/anchor.json")  # a checkpoint is written after each repair
        swarm.signal("box", random.Random(damage.__name__).choice([signal.SIGKILL, signal.SIGTERM]))
        damage(swarm.home("box"))
        swarm.node("box", ticket)
        swarm.until("box", holds(root_of(STEPS[2])), within_s=20.0)
    swarm.publish(swarm.folder / "step_3")
    swarm.until("box", holds(root_of(STEPS[3])), within_s=20.0)
    swarm.signal("box")
    garble_database(swarm.home("box"))
    check(swarm.command("box", "join", ticket, "--engine", "none"), 2, "swarm.sqlite", "move it away")
    for path in files(swarm.home("box"), "swarm.sqlite"):
        path.unlink()
    swarm.node("box", ticket)
    swarm.until("box", holds(root_of(STEPS[3])), within_s=20.0)


def test_a_seed_never_takes_damaged_bits_for_its_own(swarm: Swarm) -> None:
    """The seed has no peer to fetch from: it proves its version or says what is lost."""
    swarm.signal("seed")
    whole = swarm.folder / "whole"
    shutil.copytree(swarm.home("seed"), whole)
    for damage in (*DAMAGES, garble_database, flip_database, lose_database):
        shutil.rmtree(swarm.home("seed"))
        shutil.copytree(whole, swarm.home("seed"))
        damage(swarm.home("seed"))
        process = swarm.start("seed", "seed", "--base", str(swarm.folder / "base"), "--listen", "127.0.0.1:0")
        while not (state := swarm.state("seed")) and process.poll() is None:
            pass
        if state:
            assert state["root"] == root_of(STEPS[2]), damage
            swarm.signal("seed")
        else:
            assert process.wait() in (1, 2), damage
            last = swarm.log("seed").strip().splitlines()[-1]
            assert last.startswith("swarm-node: "), (damage, last)
            assert "bug" not in last, (damage, last)
    shutil.rmtree(swarm.home("seed"))
    shutil.copytree(whole, swarm.home("seed"))
    swarm.seed(swarm.folder / "base")
    assert swarm.state("seed")["root"] == root_of(STEPS[2])


def test_damage_after_a_clean_end_is_found(swarm: Swarm) -> None:
    """A start after a clean end hashes no block. So a running node finds the damage and fetches the block; a seed,
    which trusts no other source, stops, and makes a new replica at the next start."""
    swarm.until_there("box", "swarm-*/anchors/*/anchor.json")
    ticket = swarm.ticket()
    swarm.signal("box", signal.SIGTERM)
    flip_checkpoint(swarm.home("box"))
    swarm.node("box", ticket)
    swarm.until_logged("box", "(?s)replica_damaged.*caught_up")
    swarm.until("box", holds(root_of(STEPS[2])))

    swarm.signal("seed")
    flip_checkpoint(swarm.home("seed"))
    swarm.start("seed", "seed", "--base", str(swarm.folder / "base"), *LOOPBACK, "--preset", "loopback")
    assert swarm.ends("seed") == 1
    assert "have changed on disk" in swarm.log("seed").strip().splitlines()[-1]
    swarm.seed(swarm.folder / "base")
    assert swarm.state("seed")["root"] == root_of(STEPS[2])


@pytest.mark.long
def test_a_base_folder_that_changes_is_copied_in_time_or_asked_for(tmp_path: Path) -> None:
    base, kept = checkpoint(tmp_path / "base", FIRST), checkpoint(tmp_path / "kept", FIRST)
    other, words = checkpoint(tmp_path / "other", STEPS[5]), ("--listen", "127.0.0.1:0")
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        swarm.node("box", swarm.ticket(), "--model", str(kept))
        swarm.until("box", holds(root_of(FIRST)))
        swarm.until_there("box", "swarm-*/anchors/*/anchor.json")
        for name in ("seed", "box"):
            assert not any(swarm.home(name).glob("swarm-*/anchors/*/*.safetensors"))
        swarm.publish(checkpoint(tmp_path / "step_1", STEPS[1]), "--wait")

        # Removed while they run: the seed and the node write what they have in memory.
        shutil.rmtree(base)
        shutil.rmtree(kept)
        for name in ("seed", "box"):
            swarm.until_logged(name, "base_changed")
            swarm.until_there(name, "swarm-*/anchors/0.1/model.safetensors")
        shutil.copytree(other, base)
        assert swarm.signal("seed", signal.SIGKILL) == -9
        swarm.seed(base)  # a folder with the model's tensors is needed, but not its bits
        assert swarm.state("seed")["root"] == root_of(STEPS[1])

    with swarm_in(tmp_path / "second") as swarm:
        # Changed while the seed does not run: it says what it needs, and goes on when it is there.
        shutil.rmtree(base)
        checkpoint(base, FIRST)
        swarm.seed(base)
        swarm.publish(tmp_path / "step_1")
        swarm.signal("seed")
        shutil.rmtree(base)
        shutil.copytree(other, base)
        check(swarm.command("seed", "seed", "--base", str(base), *words), 2, "was changed or removed", "--base")
        swarm.seed(tmp_path / "step_1")
        assert swarm.state("seed")["root"] == root_of(STEPS[1])
