"""What members may hold besides the whole model: checks of the settings of a seed and of a node about it."""

from pathlib import Path
from typing import Protocol

from codec.adapter import MAX_RANK, MAX_SLOTS
from codec.errors import UsageError
from codec.formats.spec import MAX_FORMATS, format_named
from codec.shards import MAX_RANKS, Shard

__all__ = ["check_parts", "check_share"]


class _SeedParts(Protocol):
    """The settings of a seed that say what members may hold."""

    @property
    def shards(self) -> int: ...
    @property
    def adapters(self) -> int: ...
    @property
    def adapter_rank(self) -> int | None: ...
    @property
    def format(self) -> tuple[str, ...]: ...
    @property
    def raw_mb(self) -> int: ...
    @property
    def draft(self) -> Path | None: ...


class _NodeShare(Protocol):
    """The settings of a node that say what it holds, and those that exclude it."""

    @property
    def shard(self) -> str: ...
    @property
    def format(self) -> tuple[str, ...]: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_holds(self) -> str: ...
    @property
    def engine_url(self) -> tuple[str, ...]: ...
    @property
    def raw_out(self) -> Path | None: ...
    @property
    def replica(self) -> str: ...


def check_parts(config: _SeedParts) -> None:
    """Raise `UsageError` for shards, adapters, formats or a draft model that a seed cannot have."""
    if config.shards and not 2 <= config.shards <= MAX_RANKS:
        raise UsageError(f"--shards: 2 to {MAX_RANKS} ranks, or 0")
    if config.shards and config.raw_mb:
        raise UsageError("--shards: a swarm that carries files has no experts; leave out --raw-mb")
    if config.adapters and not 1 <= config.adapters <= MAX_SLOTS:
        raise UsageError(f"--adapters: 1 to {MAX_SLOTS} slots, or 0")
    if config.adapter_rank is not None and not (config.adapters and 1 <= config.adapter_rank <= MAX_RANK):
        raise UsageError(f"--adapter-rank: 1 to {MAX_RANK}, and only with --adapters")
    if config.adapters and config.raw_mb:
        raise UsageError("--adapters: a file has no layers to adapt; leave out --raw-mb")
    if config.draft is not None and config.raw_mb:
        raise UsageError("--draft: a file has no tokens to propose; leave out --raw-mb")
    for name in config.format:
        format_named(name)
    if len(config.format) > MAX_FORMATS or len(set(config.format)) < len(config.format):
        raise UsageError(f"--format: at most {MAX_FORMATS} formats, each once")
    if config.format and config.raw_mb:
        raise UsageError("--format: a swarm that carries files has no weights to quantise; leave out --raw-mb")


def check_share(config: _NodeShare) -> None:
    """Raise `UsageError` if what a node is to hold is no shard or format, or another setting needs the whole model."""
    if config.format:
        format_named(config.format[0])
        if len(config.format) > 1:
            raise UsageError("--format: a node holds one format")
        if config.shard:
            raise UsageError("--format: a node holds a format or the blocks of some ranks; leave out --shard")
        if config.raw_out is not None:
            raise UsageError("--format: a file has no weights to quantise; leave out --raw-out")
        if config.replica not in ("auto", "ram"):
            raise UsageError(f"--format: its blocks are kept in memory; leave out --replica {config.replica}")
    if config.engine_holds == "format":
        if config.engine_url:
            raise UsageError("--engine-holds format: vLLM must be started with another config; leave out --engine-url")
        if config.format != ("int4-group-e8",) or config.engine != "vllm":
            raise UsageError(
                "--engine-holds format: only a vLLM computes with packed codes, and only with those of int4-group-e8; "
                "add --engine vllm --format int4-group-e8"
            )
    if config.shard:
        Shard.parse(config.shard)
        if config.engine != "none":
            raise UsageError("--shard: an engine needs the whole model; add --engine none")
        if config.raw_out is not None:
            raise UsageError("--shard: a file has no experts; leave out --raw-out")
        if config.replica not in ("auto", "ram"):
            raise UsageError(f"--shard: its blocks are kept in memory; leave out --replica {config.replica}")
