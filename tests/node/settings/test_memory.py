"""The memory of a container, acted out with files of /proc and /sys."""

import subprocess
import sys
from pathlib import Path

from node.settings.memory import disk_free_bytes, free_bytes, give_back_promptly, used_bytes

GB = 10**9


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, available_kb: int = 64_000_000) -> Path:
    return write(root, proc__meminfo=f"MemTotal: 99000000 kB\nMemAvailable: {available_kb} kB\n")


def test_without_limits_the_machine_memory_counts(tmp_path: Path) -> None:
    write(machine(tmp_path), proc__self__cgroup="0::/user.slice\n")
    assert free_bytes(tmp_path) == 64_000_000 * 1024


def test_version_2_with_the_limit_on_a_group_above(tmp_path: Path) -> None:
    write(
        machine(tmp_path),
        proc__self__cgroup="0::/pod/box\n",
        sys__fs__cgroup__pod__box__memory_dot_max="max\n",
        sys__fs__cgroup__pod__box__memory_dot_current="100\n",
        sys__fs__cgroup__pod__memory_dot_max="8000000000\n",
        sys__fs__cgroup__pod__memory_dot_current="5000000000\n",
        sys__fs__cgroup__pod__memory_dot_stat="anon 4000000000\ninactive_file 600000000\nactive_file 400000000\n",
    )
    assert free_bytes(tmp_path) == 4 * GB


def test_version_2_in_a_container_that_sees_only_itself(tmp_path: Path) -> None:
    write(
        machine(tmp_path),
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory_dot_max="2000000000\n",
        sys__fs__cgroup__memory_dot_current="500000000\n",
    )
    assert free_bytes(tmp_path) == 1.5 * GB


def test_version_1_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """A container's own group is mounted at the root; its path is the host's and does not exist inside."""
    write(
        machine(tmp_path),
        proc__self__cgroup="5:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/docker/abc\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="3000000000\n",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="2500000000\n",
        sys__fs__cgroup__memory__memory_dot_stat="cache 1\ntotal_inactive_file 500000000\ntotal_active_file 0\n",
    )
    assert free_bytes(tmp_path) == 1 * GB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    write(
        machine(tmp_path),
        proc__self__cgroup="4:memory:/x\n",
        sys__fs__cgroup__memory__x__memory_dot_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__x__memory_dot_usage_in_bytes="1\n",
    )
    assert free_bytes(tmp_path) == 64_000_000 * 1024


def test_a_machine_without_proc_and_sys(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    assert free_bytes() is not None  # this machine has both


def test_what_this_process_uses_is_its_memory_without_files(tmp_path: Path) -> None:
    write(tmp_path, proc__self__status="VmRSS:\t 900 kB\nRssAnon:\t 500 kB\nRssFile:\t 300 kB\nRssShmem:\t 100 kB\n")
    assert used_bytes(tmp_path) == 600 * 1024
    assert used_bytes() > 0


def test_free_disk_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert disk_free_bytes(tmp_path / "a" / "b") > 0


def test_large_blocks_go_back_to_the_system() -> None:
    """In another process: forty blocks, some of them freed in between, as request bodies are."""
    code = (
        "import sys; from pathlib import Path; from node.settings.memory import give_back_promptly\n"
        "def rss(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096\n"
        "assert give_back_promptly()\n"
        "before = rss()\n"
        "held = []\n"
        "for i in range(40):\n"
        "    held.append(bytearray(b'x' * (4 << 20)))\n"
        "    held.append(bytearray(b'y' * 1000))\n"
        "    if i % 2: del held[i // 2]\n"
        "full = rss() - before\n"
        "kept = [block for block in held if len(block) < 2000]\n"
        "held.clear()\n"
        "print(full, rss() - before)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    full, after = map(int, output.split())
    assert full > 60 << 20
    assert after < 8 << 20


def test_a_libc_without_the_setting_is_accepted() -> None:
    assert give_back_promptly("libnothing.so.9") is False
