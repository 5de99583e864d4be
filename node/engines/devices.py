"""Finds the devices of this machine, and plans which of them each engine of a node gets (`node.engines.device_plan`).

The numbers of devices are compared with the flags before the node joins. How many GPUs the model needs is known once
its layout and its config are here, with `--model` at once.
"""

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from codec import Layout
from codec.errors import PeerError
from codec.parts import base_layout, draft_layout
from codec.unpack import unpack
from node.engines.device_plan import DevicePlan, Gpu, Machine, ModelNeeds, needs_of, plan_devices
from node.engines.visible_gpus import visible_gpus
from node.settings.config import JoinConfig
from node.settings.engine_choice import SERVER_ENGINES
from node.settings.gpus import gpu_files

__all__ = ["check_numbers", "machine_of", "needs_of_folder", "needs_of_layout", "needs_the_model", "plan_of"]

_CONFIG: Final = "config.json"
_JSON: Final = msgspec.json.Decoder()
_LENGTH_FLAGS: Final = ("--max-model-len", "--context-length")
"""By which a user limits the longest sequence of a vLLM or an SGLang."""
_THOUSANDS: Final = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
"""As vLLM reads `--max-model-len 32k`."""


def machine_of(config: JoinConfig) -> Machine:
    """The GPUs and cores that the engines of this node may use. Blocks for seconds on a machine with a GPU."""
    return Machine(_gpus(config), tuple(sorted(os.sched_getaffinity(0))))


def _gpus(config: JoinConfig) -> tuple[Gpu, ...]:
    is_server = config.engine in SERVER_ENGINES
    if config.engine_url or config.device in ("cpu", "mps") or not gpu_files():
        return ()
    if not is_server and config.engines <= 1:
        return ()  # torch chooses, and nothing has to be shared
    python = {"vllm": config.vllm_python, "sglang": config.sglang_python}.get(config.engine)
    return visible_gpus(python or Path(sys.executable)).gpus


def check_numbers(config: JoinConfig) -> None:
    """Raise `UsageError`, with a sentence, for engines that this machine has too few devices for. With `--model` it is
    also known whether the model has room."""
    if config.engine != "none" and not config.engine_url:
        needs = None
        if config.engine in SERVER_ENGINES and config.model is not None:
            needs = needs_of_folder(config, config.model)
        plan_devices(machine_of(config), needs, config.engines, config.tp)


def needs_the_model(config: JoinConfig, machine: Machine) -> bool:
    """Whether the plan depends on the model: on how many GPUs it needs, or what its heads can be divided by."""
    return config.engine in SERVER_ENGINES and (bool(machine.gpus) or config.tp > 1)


def plan_of(config: JoinConfig, machine: Machine, needs: ModelNeeds | None) -> DevicePlan:
    """The plan of this node. `needs`: of the model, where `needs_the_model`. Raises `UsageError`."""
    engines = config.engines
    if config.engine not in SERVER_ENGINES:
        return plan_devices(machine, None, engines or 1, 1)
    return plan_devices(machine, needs, engines, config.tp)


def needs_of_folder(config: JoinConfig, folder: Path) -> ModelNeeds:
    """What an engine needs for the model of a checkpoint folder. Raises `UsageError` for a folder that is none."""
    from codec import Checkpoint

    checkpoint = Checkpoint.open(folder)
    return needs_of(checkpoint.layout.full_bytes, _decoded(checkpoint.files.get(_CONFIG)), _longest(config))


def needs_of_layout(
    config: JoinConfig, layout: Layout, file: Callable[[bytes], bytes | None], *, drafted: bool
) -> ModelNeeds:
    """What an engine needs for the model of the swarm. `file`: a small file by its hash. `drafted`: the engines load
    the swarm's draft model beside it."""
    base = base_layout(layout)
    spec = next((spec for spec in base.files if spec.name == _CONFIG), None)
    nbytes = base.full_bytes
    if drafted and (draft := draft_layout(layout)) is not None:
        nbytes += draft.full_bytes
    return needs_of(nbytes, _decoded(None if spec is None else file(spec.hash)), _longest(config))


def _decoded(config: bytes | None) -> dict[str, Any]:
    """The settings in a `config.json`; none where it is missing or no such file."""
    try:
        found = unpack(_JSON, config or b"{}", _CONFIG)
    except PeerError:
        return {}  # the engine's own message names the problem
    return found if isinstance(found, dict) else {}


def _longest(config: JoinConfig) -> int | None:
    """The tokens of the longest sequence that the user allows; None: as the model's config says."""
    words = [part for word in (*config.vllm_arg, *config.sglang_arg) for part in word.split("=", 1)]
    for flag, value in pairwise(words):
        number, factor = (value[:-1], _THOUSANDS[value[-1]]) if value[-1:] in _THOUSANDS else (value, 1)
        if flag in _LENGTH_FLAGS and number.isdigit() and 0 < len(number) < 12:
            return int(number) * factor
    return None
