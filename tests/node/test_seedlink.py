"""The three-line publish loop: `Swarm.attach` starts a real seed, which ends with the trainer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from seed_kit import random_replica

from codec import write_checkpoint
from codec.errors import UsageError
from node import Swarm
from node.trainers.errors import SwarmTimeout

CONFIG = b'{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}'


@pytest.fixture
def base(tmp_path: Path, monkeypatch) -> Path:
    """A base folder, and a configuration that keeps the seed on loopback with free ports."""
    replica = random_replica()
    write_checkpoint(tmp_path / "base", replica.layout, replica.bits, {"config.json": CONFIG})
    (tmp_path / "swarm.toml").write_text('[seed]\nlisten = ["127.0.0.1:0"]\npreset = "loopback"\n')
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "swarm.toml"))
    return tmp_path / "base"


def seeds_of(home: Path) -> list[int]:
    """Processes whose command line names `home`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if os.fsencode(home) in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.mark.slow
def test_attach_starts_a_seed_and_close_ends_it(base: Path, tmp_path: Path):
    home = tmp_path / "home"
    with Swarm.attach(base=base, home=home) as swarm:
        bits = {t.name: np.zeros(t.shape, t.type.bits) for t in swarm.layout.tensors}
        publication = swarm.publish(bits, step=1).wait(timeout_s=60)
        assert (publication.epoch, publication.version) == (0, 1)
        assert swarm.state["swarm"]["root"] == publication.root.hex()
        with pytest.raises(SwarmTimeout, match="0%"):
            publication.wait(quorum=0.5, timeout_s=0.2)
        assert seeds_of(home)
        with Swarm.attach(base=base, home=home) as other:  # finds the running seed, and does not end it
            assert other.head == (0, 1)
        assert seeds_of(home)
    assert not seeds_of(home)
    with Swarm.attach(base=base, home=home) as swarm:  # it continues at the same version
        assert swarm.head == (0, 1)


def test_the_error_says_why_a_seed_did_not_start(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match=r"The seed did not start: .*nothing"):
        Swarm.attach(base=tmp_path / "nothing", home=tmp_path / "home")
    assert not seeds_of(tmp_path / "home")


@pytest.mark.slow
def test_no_seed_is_left_when_the_trainer_is_killed(base: Path, tmp_path: Path):
    home = tmp_path / "home"
    code = (
        "import sys, time; from node import Swarm\n"
        "swarm = Swarm.attach(base=sys.argv[1], home=sys.argv[2])\n"
        "print(1, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(base), str(home)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 15
    while seeds_of(home) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not seeds_of(home)
