"""A worker process's side: the weight-transfer engine named `swarm`.

The engine core calls everything that changes live weights, between two steps (`commit_on`, `load_on`, `check_on`). The
driver asks for everything else directly, over a socket of the plugin's; a thread of low priority answers while steps go
on.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from . import drafted, loader
from .adapter_messages import Adapted, PrepareAdapter, ProveAdapter
from .channel import Channel, connect
from .experts import repacked_experts
from .fingerprint import device_name, fingerprint
from .linears import repacked_linears
from .messages import Failed, FromDriver, Mapped, Model, Rank, Tensor
from .repacked import Repacked
from .serving import serve_driver
from .shared import map_sealed
from .sinks import follow_sinks
from .sources import FolderSource, OtherSource, ReplicaSource, Source
from .undo import NotUndone
from .unwrapped import reloading, unwrapped
from .waiting import sleep_between_reads
from .weights import LiveWeights, NotStaged

__all__ = [
    "BUSY",
    "SwarmEngine",
    "check_on",
    "commit_on",
    "drop_adapter_on",
    "load_on",
    "redo_on",
    "switch_adapter_on",
    "undo_on",
]

BUSY = "busy: "
"""In the error of an undo that may succeed soon."""


@dataclass
class SwarmInit(WeightTransferInitInfo):
    """`socket`: path of the Unix socket that the driver serves."""

    socket: str = ""


@dataclass
class SwarmUpdate(WeightTransferUpdateInfo):
    """Empty: versions are staged over the socket and committed by the engine core."""


class SwarmEngine(WeightTransferEngine[SwarmInit, SwarmUpdate]):
    """One rank's connection to the driver, and its live weights."""

    init_info_cls = SwarmInit
    update_info_cls = SwarmUpdate
    supports_draft_weight_update = False

    _channel: Channel | None = None
    _weights: LiveWeights | None = None
    _origin: Source | None = None
    _adapters: Any = None
    """`lora.LiveAdapters`; None: this vLLM serves no adapters. They outlive a driver."""

    def init_transfer_engine(self, init_info: SwarmInit) -> None:
        """Connect to the driver, get the layout and the replica from it, and map every tensor."""
        self.shutdown()
        sleep_between_reads()
        parallel = self.parallel_config
        channel = connect(init_info.socket, FromDriver)
        channel.send(Rank(os.getpid(), int(parallel.rank), int(parallel.world_size), *self._rounding()))
        message, fds = channel.recv()
        if not isinstance(message, Model) or len(fds) != 1:
            raise RuntimeError("the driver did not begin with the model")
        started = time.perf_counter()
        try:
            replica = ReplicaSource(map_sealed(fds[0]), message.block_elements)
            for model in filter(None, (self.model, loader.draft_model)):
                follow_sinks(model)
            with unwrapped(self.model):
                repacked = self._repacked()
                model = drafted.both(self.model, loader.draft_model)
                self._weights = weights = LiveWeights(model, message.tensors, replica, self._fed_modules, repacked)
                weights.check_apart(drafted.PREFIX)
            self._find_origin(weights, replica, message.block_elements)
            self._find_adapters()
        except Exception as error:
            channel.send(Failed(message.number, str(error)))
            channel.close()
            raise
        seconds = time.perf_counter() - started
        found = (weights.covered, weights.opaque, weights.modules, seconds, weights.device)
        channel.send(Mapped(message.number, *found))
        self._channel = channel
        serve_driver(channel, weights, self._about_adapters)

    def _repacked(self) -> list[Repacked]:
        """The layers whose kernels keep weights in an order of their own."""
        return [*repacked_experts(self.model, self.vllm_config), *repacked_linears(self.model, self.vllm_config)]

    def _rounding(self) -> tuple[str, str, str, str]:
        """What decides how this rank rounds: device, fingerprint, dtype, attention."""
        device, dtype = next(self.model.parameters()).device, self.model_config.dtype
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        # On CPUs one backend has several kernels, and the layer says which.
        kernels = {
            getattr(layer, "isa", "") or layer.attn_backend.get_name()
            for layer in layers
            if hasattr(layer, "attn_backend")
        }
        return (
            device_name(device),
            fingerprint(device, dtype),
            str(dtype).removeprefix("torch."),
            "-".join(sorted(kernels)),
        )

    def _fed_modules(self, tensors: list[Tensor]) -> dict[str, tuple[set[str], list[str]]]:
        from .modules import fed_modules  # imports vLLM's reload, which engines without quantized weights do not need

        return fed_modules(self.model, self.vllm_config, tensors)

    def _find_origin(self, weights: LiveWeights, replica: ReplicaSource, block_elements: int) -> None:
        """Set where vLLM's first weights came from, and their hashes."""
        if loader.first_load:
            self._origin, weights.sources = replica, dict(loader.first_load)
        else:
            self._origin = FolderSource(Path(self.model_config.model), block_elements)
            weights.hash(self._origin)

    def _find_adapters(self) -> None:
        manager = getattr(self.model, "lora_manager", None)
        if manager is not None and self._adapters is None:
            from .lora import LiveAdapters  # imports vLLM's adapters, which engines without them do not need

            self._adapters = LiveAdapters(manager)

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._weights = None

    def start_weight_update(self) -> None:
        raise RuntimeError("swarm-node updates this engine over its own socket, not by /update_weights")

    def receive_weights(self, update_info: SwarmUpdate) -> None:
        raise RuntimeError("swarm-node updates this engine over its own socket, not by /update_weights")

    def finish_weight_update(self) -> None:
        pass

    # ------------------------------------------------------------ in the thread

    def _about_adapters(self, message: Any, fds: list[int]) -> Adapted:
        match message:
            case PrepareAdapter():
                return self._prepare_adapter(message, fds[0])
            case ProveAdapter():
                return self._adapted(message.number, message.adapter, prepared=False)
        raise RuntimeError(f"{type(message).__name__} is not for a rank")

    def _prepare_adapter(self, message: PrepareAdapter, fd: int) -> Adapted:
        from .lora import Refused

        weights = map_sealed(fd)
        if self._adapters is None:
            return Adapted(message.number, refusal="This vLLM serves no adapters: start it with --enable-lora.")
        try:
            self._adapters.prepare(message.adapter, message.name, message.version, message.layers, weights)
            return self._adapted(message.number, message.adapter, prepared=True)
        except Refused as error:
            return Adapted(message.number, refusal=str(error))

    def _adapted(self, number: int, adapter: int, prepared: bool) -> Adapted:
        differing, covered = self._adapters.differing(adapter, prepared)
        return Adapted(number, tuple(differing), covered)

    # ------------------------------------------------------------ between two steps

    def switch_adapter(self, adapter: int, version: str) -> dict[str, Any]:
        """Serve a prepared version of an adapter. Never raises (see `commit`)."""
        try:
            self._adapters.switch(adapter, version)
        except Exception as error:
            return {"error": str(error), "touched": False}
        return {"error": "", "touched": True, "loaded_s": 0.0}

    def drop_adapter(self, adapter: int) -> dict[str, Any]:
        """Forget an adapter (0: all). Never raises (see `commit`)."""
        try:
            if self._adapters is not None:
                self._adapters.drop(adapter)
        except Exception as error:
            return {"error": str(error), "touched": False}
        return {"error": "", "touched": False, "loaded_s": 0.0}

    def commit(self, version: str, dense: Iterable[str], worker: Any) -> dict[str, Any]:
        """Write the staged changes, then load `dense`.

        Never raises: the core would take another rank's answer for that of the next call.
        """
        touched, loaded_s = False, 0.0
        try:
            if self._weights is None:
                raise NotStaged("nothing is attached")
            self._weights.commit(version)
            touched = True
            if dense:
                started = time.perf_counter()
                self._weights.load(dense, _reloader(worker))
                self._weights.remember(dense)
                loaded_s = time.perf_counter() - started
        except NotStaged as error:
            return {"error": str(error), "touched": False}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {"error": "", "touched": touched, "loaded_s": loaded_s}

    def load(self, names: Iterable[str] | None, worker: Any) -> dict[str, Any]:
        """Load tensors from the replica. Never raises (see `commit`)."""
        started = time.perf_counter()
        try:
            if self._weights is None:
                raise NotStaged("nothing is attached")
            self._weights.load(names, _reloader(worker))
            self._weights.remember(self._weights.sources)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {"error": "", "touched": True, "loaded_s": time.perf_counter() - started}

    def check(self, names: Collection[str], worker: Any) -> dict[str, Any]:
        """Check that loading these tensors works. Never raises (see `commit`).

        Other bits must change everything that is derived from them, and the origin's bits must leave what the first
        load left.
        """
        started = time.perf_counter()
        try:
            if self._weights is None or self._origin is None:
                raise NotStaged("nothing is attached")
            self._weights.remember(names)
            self._weights.load(names, _reloader(worker), OtherSource(self._origin))
            unmoved = self._weights.unmoved(names)
            self._weights.load(names, _reloader(worker), self._origin)
            if unmoved:
                raise NotStaged(f"vLLM's reload leaves {unmoved[0]} as it was")
            if changed := self._weights.changed(names):
                raise NotStaged(f"reloading {changed[0]} does not make of it what its first load did")
        except Exception as error:
            return {"error": str(error), "touched": True}
        return {"error": "", "touched": True, "loaded_s": time.perf_counter() - started}

    def undo(self) -> dict[str, Any]:
        """Make the version before live. Never raises (see `commit`)."""
        try:
            if self._weights is None:
                raise NotUndone("nothing is attached")
            self._weights.rewind.undo()
        except NotUndone as error:
            return {"error": f"{BUSY if error.busy else ''}{error}", "touched": False}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {"error": "", "touched": True, "loaded_s": 0.0}

    def redo(self) -> dict[str, Any]:
        """Make the version live again. Never raises (see `commit`)."""
        try:
            if self._weights is not None:
                self._weights.rewind.redo()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {"error": "", "touched": True, "loaded_s": 0.0}


def _reloader(worker: Any) -> Callable[[Iterable[Any]], None]:
    """vLLM's reload of the policy, and the draft model's own loader: its tensors are written in place or refused."""
    draft = loader.draft_model

    def reload_weights(pairs: Iterable[Any]) -> None:
        policy = lambda some: worker.reload_weights(weights_iterator=some)  # noqa: E731
        drafted.reload(pairs, policy, None if draft is None else draft.load_weights)

    return reload_weights


def _engine_of(worker: Any) -> tuple[SwarmEngine, Any]:
    worker = getattr(worker, "worker", worker)  # an executor within the engine core passes the wrapper
    return worker.weight_transfer_engine, worker


def commit_on(worker: Any, version: str, dense: tuple[str, ...]) -> dict[str, Any]:
    """The engine core calls this on each worker for a commit."""
    engine, worker = _engine_of(worker)
    with torch.no_grad(), reloading(worker):
        return engine.commit(version, dense, worker)


def check_on(worker: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The engine core calls this on each worker to check that loading again is like the first load."""
    engine, worker = _engine_of(worker)
    with torch.no_grad(), reloading(worker):
        return engine.check(names, worker)


def load_on(worker: Any, names: tuple[str, ...] | None) -> dict[str, Any]:
    """The engine core calls this on each worker to load tensors whole."""
    engine, worker = _engine_of(worker)
    with torch.no_grad(), reloading(worker):
        return engine.load(names, worker)


def undo_on(worker: Any) -> dict[str, Any]:
    """The engine core calls this on each worker to make the version before live."""
    engine, _ = _engine_of(worker)
    with torch.no_grad():
        return engine.undo()


def redo_on(worker: Any) -> dict[str, Any]:
    """The engine core calls this on each worker to make the version live again."""
    engine, _ = _engine_of(worker)
    with torch.no_grad():
        return engine.redo()


def switch_adapter_on(worker: Any, adapter: int, version: str) -> dict[str, Any]:
    """The engine core calls this on each worker to serve a prepared version of an adapter."""
    engine, _ = _engine_of(worker)
    return engine.switch_adapter(adapter, version)


def drop_adapter_on(worker: Any, adapter: int) -> dict[str, Any]:
    """The engine core calls this on each worker to forget an adapter."""
    engine, _ = _engine_of(worker)
    return engine.drop_adapter(adapter)
