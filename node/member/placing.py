"""Where a node keeps its replica, decided by what it and its engine will need, before any of it is reserved."""

import structlog

from codec.errors import UsageError
from node.settings import memory_plan
from node.settings.config import JoinConfig
from node.settings.gpus import gpu_files
from node.settings.memory import disk_free_bytes, free_bytes
from node.settings.memory_plan import Plan

__all__ = ["Placing"]

_log = structlog.get_logger(__name__)


class Placing:
    """Decides for one node. `plan`: what it needs; None before the model's size is known."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self.plan: Plan | None = None

    def on_disk(self, held_bytes: int, base_bytes: int) -> bool:
        """Whether the replica is kept on disk. Raises `UsageError` when it fits nowhere, or not where it should be.

        `held_bytes`: of the replica. `base_bytes`: of the model in bf16, which is what the engine of a node with a
        format holds.
        """
        config, memory_bytes = self._config, free_bytes()
        if config.replica == "engine" and config.engine == "transformers" and self._device != "cpu":
            raise UsageError(
                "--replica engine: reading weights back from a GPU has not been proven. Use --device cpu, or --replica "
                "ram or disk."
            )
        # The first time the engine is still to come; later it runs, and its memory is not free any more.
        engine = config.engine if self.plan is None else "none"
        engine_bytes = base_bytes if config.format else None
        in_memory, on_disk = (self._plan(held_bytes, engine_bytes, engine, on_disk=place) for place in (False, True))
        disk_bytes = disk_free_bytes(config.home)
        if config.shard or config.format:
            fewer = "use a machine with more"
            if config.shard:
                fewer = f"name fewer ranks (--shard), or {fewer}"
            elif engine != "none":
                fewer = f"--engine none holds the format and generates nothing, or {fewer}"
            memory_plan.require(in_memory, memory_bytes, fewer)
            chosen = False
        else:
            place = config.replica
            chosen = memory_plan.keep_on_disk(place, in_memory, on_disk, memory_bytes, held_bytes, disk_bytes)
        self.plan = self._plan(held_bytes, engine_bytes, config.engine, on_disk=chosen)
        _log.info(
            "replica",
            place="engine" if config.replica == "engine" else "disk" if chosen else "ram",
            model_bytes=held_bytes,
            memory_bytes=memory_bytes,
            needs_bytes=self.plan.nbytes,
        )
        return chosen

    @property
    def _device(self) -> str:
        device = self._config.device
        return "cpu" if device == "auto" and not gpu_files() else device

    def _plan(self, held_bytes: int, engine_model_bytes: int | None, engine: str, *, on_disk: bool) -> Plan:
        return memory_plan.node(
            held_bytes,
            on_disk=on_disk,
            engine_model_bytes=engine_model_bytes,
            from_engine=self._config.replica == "engine",
            engine=engine,
            device=self._device,
            engines=max(1, self._config.engines),
        )
