"""A scheduler process's side: `--custom-weight-loader swarm_sglang.rank.apply`.

SGLang calls `apply` between two steps, in every process that has a part of the model. The driver asks for everything
else directly, over a socket; a thread of low priority answers while steps go on (`swarm_vllm.serving`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from swarm_vllm.channel import Channel, connect
from swarm_vllm.fingerprint import device_name, fingerprint
from swarm_vllm.messages import Failed, FromDriver, Mapped, Model, Rank
from swarm_vllm.serving import serve_driver
from swarm_vllm.shared import map_sealed
from swarm_vllm.sources import FolderSource, ReplicaSource
from swarm_vllm.weights import LiveWeights, NotStaged

from .alike import rows_alike
from .calls import TENSOR, Answer, Call, decoded
from .requests import name_prefixes

__all__ = ["apply"]

_log = logging.getLogger(__name__)
_ANSWER_WITHIN_S = 10.0


class _Attached:
    """This process's connection to a driver."""

    channel: Channel | None = None
    weights: LiveWeights | None = None
    written: bool = False
    """A driver, perhaps one before this, wrote live weights: they are no longer those of SGLang's folder."""


_attached = _Attached()


def apply(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Do what the one tensor says, and answer the driver. Never raises: SGLang would end."""
    try:
        ((name, tensor),) = named_tensors
        if name != TENSOR:
            raise ValueError(f"a tensor named {name}")
        call = decoded(bytes(tensor.to("cpu", torch.uint8).tolist()))
    except Exception as error:  # another program called SGLang's route
        _log.warning("swarm-node updates this engine; this update was not its own: %s", error)
        return
    started = time.perf_counter()
    error, touched = "", False
    try:
        with torch.no_grad():
            touched = _do(model, call)
    except NotStaged as failure:
        error = str(failure)
    except Exception as failure:
        error, touched = f"{type(failure).__name__}: {failure}", _attached.written
    _answer(call, Answer(call.number, _rank()[0], error, touched, time.perf_counter() - started))


def _do(model: Any, call: Call) -> bool:
    """Returns whether live weights were written."""
    if call.do == "connect":
        _connect(model, call)
        return _attached.written
    weights = _attached.weights
    if weights is None:
        raise NotStaged("nothing is attached")
    _attached.written |= call.do in ("commit", "load")
    match call.do:
        case "commit":
            weights.commit(call.version)
        case "load":
            weights.load(None, model.load_weights)
            weights.remember(weights.sources)
        case "name":
            name_prefixes(call.version)
            return False
        case _:
            raise NotStaged(f"this plugin does not know the call {call.do!r}: install it again")
    return True


def _connect(model: Any, call: Call) -> None:
    """Connect to the driver, get the layout and the replica from it, and map every tensor.

    The driver proves the map by bits that SGLang's own loader put there: those of the folder, or of the replica, which
    are loaded here if the folder's are gone.
    """
    if _attached.channel is not None:
        _attached.channel.close()
    _attached.channel = _attached.weights = None
    channel = connect(call.driver, FromDriver)
    rank, ranks = _rank()
    parameter = next(model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    how = fingerprint(parameter.device, parameter.dtype), dtype, _attention(parameter.device)
    channel.send(Rank(os.getpid(), rank, ranks, device_name(parameter.device), *how))
    message, fds = channel.recv()
    if not isinstance(message, Model) or len(fds) != 1:
        raise RuntimeError("the driver did not begin with the model")
    started = time.perf_counter()
    try:
        replica = ReplicaSource(map_sealed(fds[0]), message.block_elements)
        weights = LiveWeights(model, message.tensors, replica)
        if call.fill or _attached.written:
            _attached.written = True
            weights.load(None, model.load_weights)
        else:
            weights.hash(FolderSource(Path(_folder()), message.block_elements))
    except Exception as error:
        channel.send(Failed(message.number, str(error)))
        channel.close()
        raise
    found = (weights.covered, weights.opaque, weights.modules, time.perf_counter() - started, weights.device)
    channel.send(Mapped(message.number, *found))
    _attached.channel, _attached.weights = channel, weights
    serve_driver(channel, weights, _other)


def _other(message: Any, fds: list[int]) -> Any:
    for fd in fds:
        os.close(fd)
    raise RuntimeError(f"{type(message).__name__} is not for a rank of SGLang")


def _answer(call: Call, answer: Answer) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_ANSWER_WITHIN_S)
            sock.connect(call.answer)
            sock.sendall(msgspec.msgpack.encode(answer))
    except OSError as error:
        _log.warning("the swarm-node that called is gone: %s", error)


def _rank() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)


def _attention(device: torch.device) -> str:
    from sglang.srt.runtime_context import get_server_args

    name = str(getattr(get_server_args(), "attention_backend", "") or "default")
    return "blocks" if rows_alike() and (device.type, name) == ("cpu", "torch_native") else name


def _folder() -> str:
    from sglang.srt.runtime_context import get_server_args

    return str(get_server_args().model_path)
