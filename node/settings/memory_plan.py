"""How much memory of the machine each process needs, reckoned before any of it is reserved. Pure arithmetic.

A process reserves its replica as one mapping and fills it afterwards, so the system reports too little memory by
killing the process while it is filled. `shortage` compares the plan with what is free, and says in one sentence what is
needed, what there is, and what helps. `docs/operations.md` has the same table with its reasons.
"""

from typing import Final, Literal, NamedTuple

from codec.errors import UsageError

__all__ = [
    "Part",
    "Plan",
    "ReplicaPlace",
    "engine_bytes",
    "keep_on_disk",
    "node",
    "publisher",
    "relay",
    "require",
    "seed",
    "shortage",
]

STAGE_BYTES: Final = 2 << 30
"""Decoded changes that wait for their seal (`RuntimeLimits.stage_bytes`); later ones stay encoded."""
_STAGED_SHARE: Final = 0.05
"""Decoded changes of a version that changes 1 % of the elements, as a share of the model: 4 to 5 bytes a change. Up to
`STAGE_BYTES`."""
_PATCH_SHARE: Final = 0.05
"""The same changes, once more, in the patch that an engine reads."""
_SEED_BYTES: Final = 300 << 20
_MEMBER_BYTES: Final = 200 << 20
_RELAY_BYTES: Final = 100 << 20
"""Interpreter, libraries and connections of each process (`python -m scenarios.bench.idle`), rounded up."""
_PIECES_BYTES: Final = 64 << 20
"""Pieces whose chunks are not complete (`RuntimeLimits.store_memory_bytes`)."""
_CODING_BYTES: Final = 140 << 20
"""Scratch of one thread that encodes or decodes, at most (`codec.scratch`); it takes a twentieth at 1 % density."""
_FETCHED_BYTES: Final = 32 << 20
"""Blocks on their way while catching up (`Tuning.requests_in_flight` of 2 MiB)."""
_ENGINE_ON_CPU: Final = 2.06
"""transformers on CPU: float32 parameters, twice the bf16 bytes, and buffers."""
_WINDOW_BYTES: Final = 32 << 20
"""Blocks on their way out of an engine whose memory is the replica: in the window that both map, and copied from it."""
_TORCH_BYTES: Final = 700 << 20
"""torch and transformers, imported."""


_DISK_MARGIN: Final = 1.1
"""A replica on disk counts as this many times its bytes: chunks of later versions lie beside it."""

ReplicaPlace = Literal["auto", "ram", "disk", "engine", "none"]


class Part(NamedTuple):
    """One thing that a process keeps in memory."""

    what: str
    nbytes: int


class Plan(NamedTuple):
    """What one process keeps in memory at its peak. `role`: the subject of a sentence, "This seed" for example."""

    role: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __str__(self) -> str:
        parts = " + ".join(f"{part.nbytes / 1e9:.1f} {part.what}" for part in self.parts if part.nbytes >= 50e6)
        return f"{self.nbytes / 1e9:.1f} GB ({parts})"


def seed(model_bytes: int, *, threads: int = 1) -> Plan:
    """A seed: its replica is always in memory, since trainers map it and each version is compared with it."""
    return Plan("This seed", (
        Part("replica", model_bytes),
        Part("staged changes", _staged_bytes(model_bytes)),
        Part("coding", threads * _CODING_BYTES),
        Part("process", _SEED_BYTES),
    ))  # fmt: skip


def publisher(model_bytes: int, copies: int, *, threads: int = 1) -> Plan:
    """A trainer's process beside its own model: `copies` shared copies of the weights, so that the next version can be
    copied while the last one is encoded."""
    return Plan("Publishing", (
        Part("copies of the weights", copies * model_bytes),
        Part("coding", threads * _CODING_BYTES),
    ))  # fmt: skip


def node(
    held_bytes: int,
    *,
    on_disk: bool,
    engine_model_bytes: int | None = None,
    from_engine: bool = False,
    engine: str = "none",
    device: str = "cpu",
    engines: int = 1,
    threads: int = 1,
) -> Plan:
    """A node while it joins and afterwards. `held_bytes`: of its replica: the model, or what it holds of it.

    `on_disk`: where its replica is; a replica on disk is read through the page cache, which the system takes back when
    it needs it. `engine_model_bytes`: of the model that the engine computes with, if these are more: a format's codes
    stand for a whole bf16 model. `from_engine`: the replica is read from the engine's memory.
    """
    model_bytes = held_bytes if engine_model_bytes is None else engine_model_bytes
    return Plan("This node", (
        Part("replica", 0 if on_disk else held_bytes),
        Part("engine", engines * engine_bytes(model_bytes, engine, device)),
        Part("staged changes", _staged_bytes(held_bytes)),
        Part("blocks read from the engine", _WINDOW_BYTES if from_engine else 0),
        Part("patch for the engine", 0 if engine == "none" else _share(held_bytes, _PATCH_SHARE)),
        Part("coding", threads * _CODING_BYTES),
        Part("process", _MEMBER_BYTES + _PIECES_BYTES + _FETCHED_BYTES),
    ))  # fmt: skip


def relay() -> Plan:
    """A relay: no model."""
    return Plan("This relay", (Part("pieces", _PIECES_BYTES), Part("process", _RELAY_BYTES)))


def engine_bytes(model_bytes: int, engine: str, device: str) -> int:
    """Memory of the machine that an engine needs. On a GPU it is the library's; a vLLM reserves its own and says so."""
    if engine != "transformers":
        return 0
    return _TORCH_BYTES + (_share(model_bytes, _ENGINE_ON_CPU) if device == "cpu" else 0)


def shortage(plan: Plan, free_bytes: int | None, helps: str) -> str:
    """A sentence about what is missing; empty if the plan fits into what is free (None: not known). `helps`: what the
    user can do."""
    if free_bytes is None or plan.nbytes <= free_bytes:
        return ""
    return f"{plan.role} needs {plan} of memory, and {free_bytes / 1e9:.1f} GB are free: {helps}."


def require(plan: Plan, free_bytes: int | None, helps: str) -> None:
    """Raise `UsageError` if the plan needs more than is free; see `shortage`."""
    if short := shortage(plan, free_bytes, helps):
        raise UsageError(short)


def keep_on_disk(
    place: ReplicaPlace, ram: Plan, disk: Plan, memory_bytes: int | None, replica_bytes: int, disk_bytes: int
) -> bool:
    """Whether a node keeps its replica on disk. `place`: the user's choice; "auto" prefers memory when there is enough.
    `ram`, `disk`: the node's plan with the replica at either place.

    In memory a version is written in milliseconds and reading is free. On disk (`codec.layered`) a version is not
    written at all; each block is read from the disk and brought forward by up to eight versions. Raises `UsageError`
    when the place that was chosen, or either, has too little room.
    """
    smaller = "swarm-node relay with the same ticket passes chunks on without holding the model"
    if any(part.what == "engine" and part.nbytes for part in ram.parts):
        smaller = f"--engine none holds the model and generates nothing; {smaller}"
    if place in ("disk", "engine"):
        short = shortage(disk, memory_bytes, smaller)
    elif not (short := shortage(ram, memory_bytes, f"--replica disk needs {disk.nbytes / 1e9:.1f} GB; {smaller}")):
        return False
    elif place == "auto":
        short = shortage(disk, memory_bytes, smaller)
        if replica_bytes * _DISK_MARGIN > disk_bytes:
            no_disk = f"on disk there are only {disk_bytes / 1e9:.1f} GB for a replica; {smaller}"
            short = shortage(ram, memory_bytes, no_disk)
    if short:
        raise UsageError(short)
    return True


def _staged_bytes(model_bytes: int) -> int:
    return min(STAGE_BYTES, _share(model_bytes, _STAGED_SHARE))


def _share(model_bytes: int, factor: float) -> int:
    return round(factor * model_bytes)
