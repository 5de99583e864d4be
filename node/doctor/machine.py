"""The probes of this machine: what its kernel, its container and its Python say. Each ends within a deadline."""

import importlib.metadata
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from codec import Checkpoint
from codec.errors import UsageError
from node.doctor.facts import GpuFacts, MachineFacts, SglangFacts, VllmFacts
from node.engines.devices import needs_of_folder
from node.engines.sglang.installed import installed
from node.engines.visible_gpus import ask_gpus
from node.engines.vllm.installed import packages_of
from node.host.announce import box_ports, provider_of
from node.settings.config import JoinConfig
from node.settings.engine_choice import SERVER_ENGINES
from node.settings.extras import how_to_get, lacking
from node.settings.gpus import gpu_files
from node.settings.groups import control_groups, lines_of, number_in
from node.settings.memory import disk_free_bytes, free_bytes

__all__ = ["ENGINE_NEEDS", "look_at_machine"]

ENGINE_NEEDS: Final = ("torch", "transformers")
_WRITTEN: Final = bytes(1 << 16)
"""Written to the home to see whether it can be: more than a file system keeps without a block of its own."""
_NO_LIMIT: Final = 1 << 60


def look_at_machine(
    config: JoinConfig,
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
) -> MachineFacts:
    """All that the rules want to know of this machine. Blocks, for a minute at most. `root`: where /proc, /sys and /dev
    are."""
    model_bytes, model_error = _model(config.model)
    box = box_ports(environment)
    wants_torch = config.engine == "transformers"
    return MachineFacts(
        home=str(config.home),
        home_error=_why_not_writable(config.home),
        disk_free_bytes=disk_free_bytes(config.home),
        memory_free_bytes=free_bytes(root),
        file_limit=_ulimit(resource.RLIMIT_NOFILE),
        address_space_bytes=_ulimit(resource.RLIMIT_AS),
        file_size_bytes=_ulimit(resource.RLIMIT_FSIZE),
        process_limit=_ulimit(resource.RLIMIT_NPROC),
        machine_cpus=len(os.sched_getaffinity(0)),
        cpus=_cpus(root),
        pids_limit=min((limit for limit in _pids(root) if limit is not None), default=None),
        shared_memory_bytes=_size_of(root / "dev/shm"),
        unix_time=clock(),
        missing_modules=tuple(lacking(ENGINE_NEEDS)) if wants_torch else (),
        torch_advice=how_to_get("torch"),
        gpu=_gpu(config, gpu_files(root)),
        vllm=_vllm(config),
        sglang=_sglang(config),
        model_bytes=model_bytes,
        model_error=model_error,
        needs=None if model_bytes is None or config.model is None else needs_of_folder(config, config.model),
        provider=provider_of(environment),
        mapped_ports=() if box is None else tuple(sorted(box.outside)),
    )


def _model(folder: Path | None) -> tuple[int | None, str]:
    """The bytes of the checkpoint in `folder`, and why there are none."""
    if folder is None:
        return None, ""
    try:
        return Checkpoint.open(folder).layout.full_bytes, ""
    except UsageError as error:
        return None, str(error)


def _why_not_writable(home: Path) -> str:
    """Why nothing can be written to the home, or made where it will be; empty: it can."""
    while not home.exists() and home != home.parent:
        home = home.parent
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(_WRITTEN)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ulimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY or soft >= _NO_LIMIT else soft


def _cpus(root: Path) -> float | None:
    """The cores' time that the control groups allow; None: all of it."""
    found: list[float] = []
    for group, version in control_groups(root, "cpu"):
        if version == 2:
            quota, _, period = next(iter(lines_of(group / "cpu.max")), "max").partition(" ")
        else:
            quota = str(number_in(group / "cpu.cfs_quota_us") or "max")  # -1: no limit
            period = str(number_in(group / "cpu.cfs_period_us") or 100_000)
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _pids(root: Path) -> list[int | None]:
    return [number_in(group / "pids.max") for group, _ in control_groups(root, "pids")]


def _size_of(folder: Path) -> int | None:
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_blocks * size.f_frsize


def _gpu(config: JoinConfig, device_files: bool) -> GpuFacts:
    if config.engine in SERVER_ENGINES:
        if not device_files or config.engine_url:
            return GpuFacts(device_files=device_files)
        python = config.vllm_python if config.engine == "vllm" else config.sglang_python
        return _asked(python or Path(sys.executable), GpuFacts(device_files=device_files))
    if config.engine != "transformers" or lacking(["torch"]):
        return GpuFacts(device_files=device_files)
    version = importlib.metadata.version("torch")
    if not device_files and not config.device.startswith("cuda"):
        return GpuFacts(torch=version)  # importing torch takes seconds, and has nothing to tell
    return _asked(Path(sys.executable), GpuFacts(device_files=device_files, torch=version))


def _asked(python: Path, known: GpuFacts) -> GpuFacts:
    """`known`, with what the torch of this Python sees."""
    found = ask_gpus(python)
    return replace(
        known,
        torch_cuda=found.cuda,
        usable=found.usable,
        names=found.models,
        memory_bytes=tuple(gpu.nbytes for gpu in found.gpus),
        indices=tuple(gpu.name for gpu in found.gpus),
        error=found.error,
    )


def _vllm(config: JoinConfig) -> VllmFacts | None:
    if config.engine != "vllm" or config.engine_url:
        return None
    python = config.vllm_python or Path(sys.executable)
    try:
        found = packages_of(python)
    except UsageError as error:
        return VllmFacts(python=str(python), error=str(error))
    return VllmFacts(python=str(python), vllm=found.vllm, plugin=found.plugin)


def _sglang(config: JoinConfig) -> SglangFacts | None:
    if config.engine != "sglang" or config.engine_url:
        return None
    try:
        return SglangFacts(version=installed(config.sglang_python or Path(sys.executable)).version)
    except UsageError as error:
        return SglangFacts(error=str(error))
