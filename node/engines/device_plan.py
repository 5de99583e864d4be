"""Which devices of a machine each engine of a node gets. Pure arithmetic: devices, model and flags in, a plan out.

A model goes on as few GPUs as have room for it (its ranks, tensor-parallel), and the machine gets an engine for each
such group of GPUs: two engines of one rank generate more than one of two ranks, which exchange activations in every
layer. `--tp` and `--engines` replace either choice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from codec.errors import UsageError

__all__ = [
    "ANY_DEVICE",
    "DevicePlan",
    "DeviceShare",
    "Gpu",
    "Machine",
    "ModelNeeds",
    "cores_of_ranks",
    "needs_of",
    "plan_devices",
    "share_of",
]

RANKS: Final = (1, 2, 4, 8)
"""Ranks that are tried without `--tp`, the fewest first: machines have powers of two GPUs, and models such heads."""
USED_SHARE: Final = 0.9
"""The share of a GPU's memory that an engine takes: vLLM's default of `--gpu-memory-utilization`; SGLang takes less for
its weights and cache, and the rest for activations."""
CACHE_SHARE: Final = 0.2
"""The share of a GPU's memory that keys, values and activations get at least. With less, few sequences run at once."""
CACHE_BYTES: Final = 2
"""Of a key's or value's element: both servers keep them in the model's dtype, bf16."""


class Gpu(NamedTuple):
    """A GPU, or a part of one (MIG), that this process may use.

    `name`: as `CUDA_VISIBLE_DEVICES` names it: an index or a UUID. `nbytes`: of its memory.
    """

    name: str
    nbytes: int


class Machine(NamedTuple):
    """What there is to share: `cores` are used where there are no `gpus`."""

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]


class ModelNeeds(NamedTuple):
    """What an engine needs for one model.

    `weights_bytes`: of all ranks together. `heads`: attention heads, which the ranks divide; None: it has none, or its
    config does not say. `cache_bytes`: keys and values of the longest sequence, in all layers; vLLM does not start
    without room for it. `cache_parts`: over how many ranks these can be divided.
    """

    weights_bytes: int
    heads: int | None = None
    cache_bytes: int = 0
    cache_parts: int = 1

    def rank_bytes(self, ranks: int, gpu_bytes: int) -> float:
        """Memory that one of `ranks` ranks needs on a GPU with `gpu_bytes`, in bytes."""
        cache = self.cache_bytes / min(ranks, self.cache_parts)
        return self.weights_bytes / ranks + max(cache, CACHE_SHARE * gpu_bytes)

    def fits(self, ranks: int, gpu_bytes: int) -> bool:
        return self.rank_bytes(ranks, gpu_bytes) <= USED_SHARE * gpu_bytes

    def divides(self, ranks: int) -> bool:
        """Whether the attention heads can be divided among so many ranks."""
        return self.heads is None or self.heads % ranks == 0


class DeviceShare(NamedTuple):
    """What one engine gets. `gpus`: their names; empty on a CPU. `cores`: empty: the engine chooses."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


ANY_DEVICE: Final = DeviceShare()
"""The engine chooses among all that it sees."""


def share_of(gpus: str, cores: str) -> DeviceShare:
    """The share that a driver's flags name: commas between the names of GPUs, and between the numbers of cores."""
    return DeviceShare(
        tuple(name for name in gpus.split(",") if name), tuple(int(core) for core in cores.split(",") if core)
    )


class DevicePlan(NamedTuple):
    """`ranks`: of each engine. `shares`: one for each engine. `idle`: names of GPUs that no engine gets."""

    ranks: int
    shares: tuple[DeviceShare, ...]
    idle: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = len(self.shares)
        engines = "1 engine" if count == 1 else f"{count} engines"
        if not self.shares[0].gpus:
            ranks = (
                "" if self.ranks == 1 else f", each of {self.ranks} ranks" if count > 1 else f" of {self.ranks} ranks"
            )
            return f"{engines} on the CPU{ranks}"
        each = "1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs"
        idle = f"; idle: {', '.join(self.idle)}" if self.idle else ""
        groups = " | ".join(",".join(share.gpus) for share in self.shares)
        return f"{engines} on {each}{' each' if count > 1 else ''} ({groups}){idle}"


def plan_devices(machine: Machine, model: ModelNeeds | None, engines: int = 0, ranks: int = 0) -> DevicePlan:
    """Which devices each engine gets. `engines`, `ranks`: what the user chose; 0: chosen here.

    `model` None: it is not known yet, so that only the numbers of devices are looked at. Raises `UsageError`, with a
    sentence for the user, for a choice that is impossible and for a model that has no room.
    """
    if model is not None and ranks and not model.divides(ranks):
        raise UsageError(
            f"--tp {ranks}: the model has {model.heads} attention heads, which {ranks} ranks cannot divide"
        )
    if not machine.gpus:
        return DevicePlan(ranks or 1, _core_shares(machine.cores, engines or 1))
    count = len(machine.gpus)
    if max(engines, 1) * max(ranks, 1) > count:
        wanted = f"--engines {engines} --tp {ranks}" if engines and ranks else f"--engines {engines}"
        wanted = wanted if engines else f"--tp {ranks}"
        raise UsageError(f"{wanted}: this machine has {_gpus(count)} that this process may use")
    most = count // max(engines, 1)
    ranks = ranks or _fewest_ranks(machine.gpus, model, most, engines)
    shares = _gpu_shares(machine.gpus, engines or count // ranks, ranks)
    if model is not None:
        _check_room(machine.gpus, model, ranks)
    return DevicePlan(ranks, shares, tuple(gpu.name for gpu in machine.gpus[len(shares) * ranks :]))


def _fewest_ranks(gpus: Sequence[Gpu], model: ModelNeeds | None, most: int, engines: int) -> int:
    """The fewest ranks that have room for the model, at most `most`."""
    if model is None:
        return 1
    least = _least_bytes(gpus)
    possible = [ranks for ranks in RANKS if ranks <= most and model.divides(ranks)]
    for ranks in possible:
        if model.fits(ranks, least):
            return ranks
    needs = model.rank_bytes(possible[-1], least)
    each = f"each of {_gpus(possible[-1])}" if possible[-1] > 1 else "the GPU"
    raise UsageError(
        f"The model has {_gb(model.weights_bytes)}, and an engine needs {_gb(needs)} on {each}, which may take "
        f"{_gb(USED_SHARE * least)} of its {_gb(least)}: {_remedy(engines)}."
    )


def _check_room(gpus: Sequence[Gpu], model: ModelNeeds, ranks: int) -> None:
    """Raise `UsageError` if the weights alone have no room: the user's --tp may leave less for the cache than ours."""
    least = _least_bytes(gpus)
    if model.weights_bytes / ranks > USED_SHARE * least:
        raise UsageError(
            f"--tp {ranks}: the model's {_gb(model.weights_bytes)} are {_gb(model.weights_bytes / ranks)} for each of "
            f"{_gpus(ranks)} with {_gb(least)}: choose a larger --tp."
        )


def _remedy(engines: int) -> str:
    return "choose fewer --engines, or larger GPUs" if engines > 1 else (
        "use larger GPUs, a shorter context (--vllm-arg=--max-model-len=4096, --sglang-arg=--context-length=4096), or "
        "--tp to try it anyway"
    )  # fmt: skip


def _gpu_shares(gpus: Sequence[Gpu], engines: int, ranks: int) -> tuple[DeviceShare, ...]:
    """Neighbours together: machines link neighbouring GPUs faster."""
    names = [gpu.name for gpu in gpus]
    return tuple(DeviceShare(tuple(names[i * ranks : (i + 1) * ranks])) for i in range(engines))


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """The cores of each of an engine's ranks, as vLLM and SGLang read them: `4,5|6,7`."""
    return "|".join(",".join(map(str, part)) for part in _divided(cores, ranks))


def _core_shares(cores: Sequence[int], engines: int) -> tuple[DeviceShare, ...]:
    """Each engine's cores."""
    if engines == 1:
        return (ANY_DEVICE,)
    return tuple(DeviceShare(cores=part) for part in _divided(cores, engines))


def _divided(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """The cores in order; with more parts than cores, several parts share one."""
    count = len(cores)
    return [tuple(cores[i * count // parts : (i + 1) * count // parts]) or (cores[i % count],) for i in range(parts)]


def _least_bytes(gpus: Sequence[Gpu]) -> int:
    """Of the smallest GPU: ranks hold equal parts."""
    return min(gpu.nbytes for gpu in gpus)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


# ------------------------------------------------------------ what a model's config says


def needs_of(weights_bytes: int, config: Mapping[str, Any], longest: int | None = None) -> ModelNeeds:
    """What an engine needs for the model of this Hugging Face config. `longest`: tokens of the longest sequence, where
    the user limits it; otherwise the config's `max_position_embeddings`.

    Keys and values of a token take `2 * layers * kv_heads * head_dim` elements; with latent attention (DeepSeek's)
    `layers * (kv_lora_rank + qk_rope_head_dim)`, which every rank holds. Layers with a window or without attention are
    counted in full. A value that the config lacks, or that is no positive integer, is not reckoned with.
    """
    inner = config.get("text_config")
    found = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def number(name: str) -> int | None:
        value = found.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    heads, layers, hidden = number("num_attention_heads"), number("num_hidden_layers"), number("hidden_size")
    tokens = longest or number("max_position_embeddings")
    if heads is None or layers is None or hidden is None or tokens is None:
        return ModelNeeds(weights_bytes, heads)
    if (latent := number("kv_lora_rank")) is not None:
        elements = layers * (latent + (number("qk_rope_head_dim") or 0))
        return ModelNeeds(weights_bytes, heads, tokens * elements * CACHE_BYTES)
    kv_heads = number("num_key_value_heads") or heads
    elements = 2 * layers * kv_heads * (number("head_dim") or hidden // heads)
    return ModelNeeds(weights_bytes, heads, tokens * elements * CACHE_BYTES, kv_heads)
