"""What a training run computes, from an input file in which every number names its source.

A leaf is `{ value = ..., from = "..." }`; one without a source is refused.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from codec import chunk_target
from codec.errors import UsageError

__all__ = ["PUBLISHED", "Compute", "Figures", "Run"]

PUBLISHED: Final = Path(__file__).parents[2] / "rl" / "compute" / "published.toml"


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run computes, and how long that takes, in seconds, bytes and tokens."""

    name: str
    nodes: int
    rows: int
    """Sequences that a node generates at once."""
    samples: int
    """Samples of a step."""
    group: int
    """Samples of one prompt."""
    tokens: int
    """Mean length of a completion. One simulated token stands for `grain` real ones."""
    grain: int
    spread: float
    """A completion's length differs from the mean by at most this share of it, uniformly distributed."""
    continuous_batching: bool
    """True: a finished sequence is replaced at once. False: a batch ends when its longest sequence does."""
    prompt_tokens: int
    tokens_s: float
    """Speed of one sequence, in simulated tokens."""
    train_s: float
    extract_s: float
    job_s: float
    """Time in which a node verifies and decodes one chunk."""
    stage_s: float
    pause_s: float
    """The engine's pause at a commit."""
    delta_bytes: int
    full_bytes: int

    @property
    def ideal_tokens_s(self) -> float:
        """Real tokens per second that the nodes generate when none ever waits."""
        return self.nodes * self.rows * self.tokens_s * self.grain


class Figures:
    """One table of the input file: numbers with their sources."""

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        self._name, self._table = name, table
        for key, leaf in table.items():
            if key != "name" and not (isinstance(leaf, dict) and {"value", "from"} == set(leaf) and leaf["from"]):
                raise UsageError(f'[{name}] {key}: write {{ value = ..., from = "where it comes from" }}.')

    def __getitem__(self, key: str) -> Any:
        """Return the value. Raises `UsageError` when the table lacks it."""
        if key not in self._table:
            raise UsageError(f"[{self._name}] lacks {key}.")
        return self._table[key]["value"]

    def get(self, key: str, default: Any = None) -> Any:
        return self._table[key]["value"] if key in self._table else default

    def source(self, key: str) -> str:
        """Return the source that the file names."""
        return self._table[key]["from"]


class Compute:
    """An input file. Raises `UsageError` when it cannot be read or a number has no source."""

    def __init__(self, path: Path = PUBLISHED) -> None:
        try:
            found = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"Cannot read {path}: {error}.") from error
        self.path = path
        self.names = {key: table.get("name", key) for key, table in found.get("models", {}).items()}
        self.models = {key: Figures(f"models.{key}", table) for key, table in found.get("models", {}).items()}
        self.published = {key: Figures(f"published.{key}", t) for key, t in found.get("published", {}).items()}
        self.job, self.node, self.codec, self.wan, self.reach, self.gpu, self.store = (
            Figures(name, found.get(name, {})) for name in ("job", "node", "codec", "wan", "reach", "gpu", "store")
        )

    def run(self, model: str, *, payload: str = "published", synchronous: bool = False, grain: int = 16) -> Run:
        """Return the run of a model of the file.

        `payload` is `published` (the delta's published size) or `swarm` (its size in our codec). Where the file gives
        the duration of a step (`step_s`), rollouts take all of it, or with `synchronous` what training leaves of it.
        `grain` real tokens are simulated as one.
        """
        if model not in self.models:
            raise UsageError(f"{self.path.name} has no model {model}: {', '.join(self.models)}.")
        figures, job, node = self.models[model], self.job, self.node
        params, nodes = figures["params"], figures["nodes"]
        rollout_s = figures.get("step_s", job["rollout_s"])
        train_token_s = job["flops_token"] * params / (
            figures["trainer_gpus"] * job["trainer_flops"] * job["trainer_share"]
        )  # fmt: skip
        if synchronous and figures.get("step_s") is not None:
            # rollout_s + rollout_s * tokens_s * train_token_s + extract_s is the whole step
            rollout_s = (rollout_s - job["extract_s"]) / (1 + figures["tokens_s"] * train_token_s)
        tokens = max(1, round(figures["tokens_s"] * rollout_s / job["samples_step"] / grain))
        changed = params * figures["density"]
        delta = figures["delta_bytes"] if payload == "published" else changed * self.codec["bits_changed"] / 8
        rows = -(-job["samples_step"] // (nodes * job["waves"]))
        return Run(
            name=self.names[model],
            nodes=nodes,
            rows=rows,
            samples=job["samples_step"],
            group=job["group_n"],
            tokens=tokens,
            grain=grain,
            spread=job["length_spread"],
            continuous_batching=True,
            prompt_tokens=job["prompt_tokens"],
            tokens_s=figures["tokens_s"] / (nodes * rows * grain),
            train_s=job["samples_step"] * tokens * grain * train_token_s,
            extract_s=job["extract_s"],
            job_s=figures["full_bytes"] / node["decode_bytes_s"] / chunks_of(int(delta)),
            stage_s=changed * node["patch_bytes"] / node["stage_bytes_s"],
            pause_s=changed * node["pause_s_element"],
            delta_bytes=int(delta),
            full_bytes=int(figures["full_bytes"]),
        )


def chunks_of(payload_bytes: int) -> int:
    """Return the number of chunks that a payload is cut into."""
    return max(1, round(payload_bytes / min(chunk_target(payload_bytes), payload_bytes)))
