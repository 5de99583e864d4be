"""The image's steps, taken in a fresh root made from Debian's packages; then processes of that root join a swarm."""

import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from deploy_kit import HOUSE
from kit import checkpoint, weights

from scenarios.harness.swarm import swarm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # it downloads some 300 MB and compiles
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("debootstrap") is None, reason="needs root, and debootstrap"),
]

RELEASE = "bookworm"
DEBOOTSTRAP_S = 600
SETUP_S = 1800
ENTRY = "/opt/swarm-node/deploy/image/entrypoint.sh"


def inside(root: Path, *words: str, user: str = "root", **environment: str) -> list[str]:
    """The words that run a command in the root folder, in namespaces of its own for mounts and processes."""
    mounts = (
        f'mount -t proc none {root}/proc && mount --rbind /dev {root}/dev && exec chroot --userspec={user} {root} "$@"'
    )
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TMPDIR": "/tmp"} | environment
    assigned = [f"{name}={value}" for name, value in variables.items()]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*namespaces, "sh", "-c", mounts, "sh", "env", "-i", *assigned, *words]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder after all steps of the image without torch. Certificates of this machine count there too."""
    root = tmp_path_factory.mktemp("image") / "root"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", RELEASE, root], capture_output=True, text=True, timeout=DEBOOTSTRAP_S
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    copy_sources(root / "opt" / "swarm-node")
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    authorities = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    assert authorities is not None
    shutil.copy(authorities, root / "authorities.crt")
    for step in ("build", "run"):
        words = inside(
            root, "/opt/swarm-node/deploy/image/setup.sh", step, EXTRAS="none", PIP_CERT="/authorities.crt"
        )  # fmt: skip
        ran = subprocess.run(words, capture_output=True, text=True, timeout=SETUP_S)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return root


def copy_sources(target: Path) -> None:
    """What `COPY . /opt/swarm-node` would copy: the files of the clone but for those in .dockerignore."""
    listed = ["git", "-C", str(HOUSE), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
    for name in filter(None, names):
        if not name.startswith("tests/") and (HOUSE / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HOUSE / name, target / name)


def run(root: Path, words: Sequence[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    command = inside(root, ENTRY, *words, user="swarm:swarm", **environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_the_commands_of_the_image_run_as_its_user(root: Path) -> None:
    ran = run(root, ["--version"])
    assert (ran.returncode, ran.stderr) == (0, "")
    looked = run(root, ["doctor", "--engine", "none", "--json"])
    assert looked.returncode == 0, looked
    disk = next(line for line in json.loads(looked.stdout)["checks"] if line["check"] == "disk")
    assert (disk["verdict"], "/data" in disk["found"]) == ("ok", True)


def test_kernels_are_compiled_in_the_image(root: Path) -> None:
    cache = root / "opt" / "swarm-node" / ".cache" / "kernels"
    assert {path.name for path in cache.rglob("compiled-*")} == {"compiled-BF16", "compiled-F32"}
    owners = {(path.stat().st_uid, path.stat().st_mode & 0o022) for path in cache.rglob("*")}
    assert owners == {(1000, 0)}


def test_a_relay_of_the_image_joins_with_its_ticket_and_leaves(root: Path, tmp_path: Path) -> None:
    with swarm_in(tmp_path / "swarm", patience_s=120.0) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", weights()))
        words = ["relay", "--listen", "127.0.0.1:0", "--name", "boxed"]
        swarm.start_command("relay", inside(root, ENTRY, *words, TICKET=swarm.ticket()))
        swarm.until_seed("it has joined", lambda seed: [node.name for node in seed.nodes] == ["boxed"])
        started = next(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_relay(pid))
        assert Path(f"/proc/{started}").stat().st_uid == 1000  # root has become the image's user
        assert b"swarm1" not in Path(f"/proc/{started}/cmdline").read_bytes()
        os.kill(started, signal.SIGTERM)
        assert swarm.ends("relay") == 143
        swarm.until_seed("it has left", lambda seed: not seed.nodes)


def is_relay(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"boxed" in words and words[0].endswith(b"python3") | words[0].endswith(b"python")
