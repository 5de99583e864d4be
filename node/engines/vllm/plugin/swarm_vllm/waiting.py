"""How the processes of a vLLM on a CPU wait for one another.

vLLM's readers of shared memory poll for a second before they sleep, so the engine core keeps a core busy for as long as
a worker computes. On a GPU box this saves microseconds. On CPUs it takes a core from the threads that compute. These
wait for one another at every kernel, so a step whose two threads share a core takes ten times as long; and once a third
thread, such as the one that prepares weights, has moved them there, they stay for some hundred milliseconds.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

__all__ = ["sleep_between_reads"]

_BUSY_S = 1.0
"""Seconds after a read in which the next one is near: vLLM polls as long."""
_BUSY_WAIT_MS = 1
"""A reader looks again after this time then, because vLLM may lose a notification that closely follows another one.
Later it looks as seldom as vLLM has it."""

_wait = SpinCondition.wait


def sleep_between_reads() -> None:
    """On a CPU, have this process's readers sleep until the writer notifies them. A second call does nothing."""
    if current_platform.is_cpu():
        SpinCondition.wait = _sleep


def _sleep(condition: Any, timeout_ms: int | None = None) -> None:
    condition.busy_loop_s = 0
    if time.monotonic() <= condition.last_read + _BUSY_S:
        timeout_ms = _BUSY_WAIT_MS
    _wait(condition, timeout_ms)
