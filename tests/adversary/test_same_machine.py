"""What other users of the same machine can read: the process list, and files."""

import os
from pathlib import Path

import pytest
from arena_kit import FIRST, Arena
from kit import checkpoint, holds, root_of

from scenarios.harness.swarm import NODE, swarm_in

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.usefixtures("executed")]


def seen_in_ps(pid: int) -> str:
    """The command line of a process, which every user may read."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


@pytest.mark.parametrize(
    "way", ["-", *(pytest.param(way, marks=pytest.mark.long) for way in ("--ticket-file", "SWARM_TICKET"))]
)
def test_17_ticket_stays_out_of_the_process_list(arena: Arena, way: str, tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text(arena.ticket + "\n")
    file.chmod(0o600)
    words, options = {
        "-": (["join", "-", *NODE], {"prefix": ["/bin/sh", "-c", f'exec "$@" < {file}', "sh"]}),
        "--ticket-file": (["join", "--ticket-file", str(file), *NODE], {}),
        "SWARM_TICKET": (["join", *NODE], {"SWARM_TICKET": arena.ticket}),
    }[way]
    arena.swarm.start("quiet", *words, **options)
    arena.swarm.until("quiet", holds(root_of(FIRST)))
    seen = seen_in_ps(arena.swarm.running["quiet"].pid)
    assert "join" in seen
    assert arena.ticket[:40] not in seen


def test_17_api_key_stays_out_of_the_process_list(arena: Arena) -> None:
    pytest.importorskip("h11")
    home = {"SWARM_HOME": str(arena.swarm.home("seed")), "SWARM_API_KEY": "correct-horse"}
    arena.swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", **home)
    arena.swarm.until_logged("gateway", '"url"')
    assert "correct-horse" not in seen_in_ps(arena.swarm.running["gateway"].pid)
    assert "correct-horse" not in arena.log("seed")


def test_19_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """The modes hold also if the home existed before with mode 0777, and with umask 0."""
    with swarm_in(tmp_path) as swarm:
        swarm.home("seed").mkdir(mode=0o777)
        swarm.home("seed").chmod(0o777)
        before = os.umask(0)
        try:
            swarm.seed(checkpoint(tmp_path / "base", FIRST))
        finally:
            os.umask(before)
        swarm.ticket()
        home = swarm.home("seed")
        open_to_all = [
            str(path.relative_to(home))
            for path in home.rglob("*")
            if path.is_file()
            and not path.is_symlink()
            and path.stat().st_mode & 0o077
            # Files in a folder that only the owner may enter cannot be read by others.
            and all(parent.stat().st_mode & 0o011 for parent in path.parents if parent.is_relative_to(home))
        ]
        assert not open_to_all
