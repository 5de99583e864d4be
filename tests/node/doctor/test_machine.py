"""The probes of this machine, on a made-up /proc, /sys and /dev, and with a made-up torch."""

from pathlib import Path

import pytest

from node.doctor import machine
from node.doctor.machine import look_at_machine
from node.settings.config import JoinConfig

RENTED = {"PUBLIC_IPADDR": "203.0.113.9", "VAST_TCP_PORT_22": "31022", "VAST_TCP_PORT_4001": "31001"}


def put(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def look(tmp_path: Path, files: dict[str, str], **settings: object) -> machine.MachineFacts:
    config = JoinConfig(home=tmp_path / "home", **({"engine": "none"} | settings))  # type: ignore[arg-type]
    return look_at_machine(config, root=put(tmp_path / "root", files), environment={}, clock=lambda: 7.0)


def test_limits_of_control_groups_of_version_2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    seen = look(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}/a/cpu.max": "150000 100000", f"{group}/a/b/cpu.max": "max 100000",
        f"{group}/a/pids.max": "max", f"{group}/a/b/pids.max": "512",
    })  # fmt: skip
    assert (seen.cpus, seen.pids_limit) == (1.5, 512)


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    seen = look(tmp_path, {
        "proc/self/cgroup": "4:cpu,cpuacct:/c\n3:pids:/c\n",
        f"{group}/cpu/c/cpu.cfs_quota_us": "50000", f"{group}/cpu/c/cpu.cfs_period_us": "100000",
        f"{group}/cpu/cpu.cfs_quota_us": "-1", f"{group}/pids/c/pids.max": "64",
    })  # fmt: skip
    assert (seen.cpus, seen.pids_limit) == (0.5, 64)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    seen = look(tmp_path, {})
    assert (seen.cpus, seen.pids_limit, seen.memory_free_bytes, seen.shared_memory_bytes) == (None, None, None, None)
    assert (seen.unix_time, seen.gpu.device_files, seen.vllm) == (7.0, False, None)


def test_the_home_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    assert look(tmp_path, {}).home_error == ""
    assert not (tmp_path / "home").exists()
    (tmp_path / "home").write_text("a file")
    assert "Not a directory" in look(tmp_path, {}).home_error


def test_a_rented_machine_is_known_by_its_environment(tmp_path: Path) -> None:
    config = JoinConfig(home=tmp_path, engine="none")
    seen = look_at_machine(config, environment=RENTED)
    assert (seen.provider, seen.mapped_ports) == ("Vast.ai", (22, 4001))
    seen = look_at_machine(config, environment={"PUBLIC_IPADDR": "203.0.113.9"})
    assert (seen.provider, seen.mapped_ports) == ("Vast.ai", ())


TORCH = """
import types
version = types.SimpleNamespace(cuda="12.8", hip=None)
GPU = types.SimpleNamespace(name="NVIDIA H100", total_memory=80_000_000_000)
cuda = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: GPU
)
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a torch that the child process imports."""
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr(machine, "lacking", lambda modules: [])
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.9.0")
    return tmp_path / "packages" / "torch.py"


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path, torch: Path) -> None:
    torch.write_text(TORCH)
    seen = look(tmp_path, {"dev/nvidia0": ""}, engine="transformers").gpu
    assert (seen.torch, seen.torch_cuda, seen.usable) == ("2.9.0", "12.8", True)
    assert (seen.names, seen.memory_bytes) == (("NVIDIA H100",) * 2, (80_000_000_000,) * 2)


def test_a_torch_that_cannot_be_imported_is_quoted(tmp_path: Path, torch: Path) -> None:
    torch.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    seen = look(tmp_path, {"dev/nvidia0": ""}, engine="transformers").gpu
    assert (seen.usable, "libcudart.so.12" in seen.error) == (False, True)


def test_without_a_gpu_torch_is_not_imported(tmp_path: Path, torch: Path) -> None:
    torch.write_text("raise SystemError('this takes seconds')")
    seen = look(tmp_path, {}, engine="transformers").gpu
    assert (seen.torch, seen.error) == ("2.9.0", "")
