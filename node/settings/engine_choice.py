"""Checks of the settings of a node about its engines."""

import re
from typing import Final, Protocol

from codec.errors import UsageError

__all__ = ["SERVER_ENGINES", "check_engine"]

SERVER_ENGINES: Final = ("vllm", "sglang")
"""Engines that are inference servers in an environment of their own."""


class _NodeEngine(Protocol):
    """The settings of a node about its engines."""

    @property
    def engine(self) -> str: ...
    @property
    def engines(self) -> int: ...
    @property
    def engine_url(self) -> tuple[str, ...]: ...
    @property
    def engine_port(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def vllm_arg(self) -> tuple[str, ...]: ...
    @property
    def sglang_arg(self) -> tuple[str, ...]: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def running(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def raw_out(self) -> object: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def device(self) -> str: ...


def check_engine(config: _NodeEngine) -> None:
    """Raise `UsageError` for a setting that is out of range, or that the chosen engine does not have."""
    if config.engine_url and (config.engine not in SERVER_ENGINES or config.engines > 1 or config.tp > 1):
        raise UsageError(
            "--engine-url: once for each server that you run; leave out --engine none, --engines and --tp, which are "
            "for engines that the node starts"
        )
    if config.engine not in SERVER_ENGINES and config.tp > 1:
        raise UsageError("--tp: only with --engine vllm or sglang")
    if config.engine == "none" and config.engines > 1:
        raise UsageError("--engines: there is no engine; leave out --engine none")
    if config.engine == "transformers" and config.engines > 1 and ":" in config.device:
        raise UsageError(f"--engines: {config.device} is one GPU; leave out --device, and each engine gets one")
    if (config.engine != "vllm" and config.vllm_arg) or (config.engine != "sglang" and config.sglang_arg):
        raise UsageError("--vllm-arg, --sglang-arg: only with --engine vllm, or sglang")
    if config.engine == "sglang" and config.running == "drain":
        raise UsageError("--running drain: SGLang cannot hold back requests; use continue or recompute")
    if not 0 <= config.engines <= 64 or not 0 <= config.tp <= 64:
        raise UsageError("--engines, --tp: 1 to 64, or 0 to have them chosen")
    if not 0 <= config.draft_tokens <= 16:
        raise UsageError("--draft-tokens: 1 to 16, or 0")
    if not 0 <= config.engine_port <= 65535 - config.engines:
        raise UsageError("--engine-port: a port, or 0")
    if config.raw_out is not None and config.engine != "none":
        raise UsageError("--raw-out: no engine can generate from a file; add --engine none")
    if config.replica == "none" and config.engine != "none":
        raise UsageError("--replica none: an engine needs a copy of the model; add --engine none")
    if config.replica == "engine" and config.engine == "none":
        raise UsageError("--replica engine: there is no engine; leave out --engine none, or use --replica disk")
    if config.threads is not None and not 1 <= config.threads <= 1024:
        raise UsageError("--threads: 1 to 1024")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,2})?", config.device):
        raise UsageError("--device: auto, cpu, mps, cuda or cuda:N")
