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
    """One training run: who computes what, and for how long. Seconds, bytes, tokens."""

    name: str
    nodes: int
    rows: int
    """Sequences that a node draws at once."""
    samples: int
    """A step's."""
    group: int
    """Samples of one prompt."""
    tokens: int
    """A completion's, on average. One stands for `grain` tokens, which come together."""
    grain: int
    spread: float
    """A completion has so much more or less, uniformly, as a share of the mean."""
    continuous_batching: bool
    """Each sequence is drawn by itself, and the next takes its place; else a batch ends with its longest."""
    prompt_tokens: int
    tokens_s: float
    """Of one sequence, in such tokens."""
    train_s: float
    extract_s: float
    job_s: float
    """Of verifying and decoding one chunk, at a node."""
    stage_s: float
    pause_s: float
    """Of a commit in the engine."""
    delta_bytes: int
    full_bytes: int

    @property
    def ideal_tokens_s(self) -> float:
        """What the nodes draw when none ever waits."""
        return self.nodes * self.rows * self.tokens_s * self.grain


class Figures:
    """Numbers with their sources, as a table of the file has them."""

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        self._name, self._table = name, table
        for key, leaf in table.items():
            if key != "name" and not (isinstance(leaf, dict) and {"value", "from"} == set(leaf) and leaf["from"]):
                raise UsageError(f'[{name}] {key}: write {{ value = ..., from = "where it comes from" }}.')

    def __getitem__(self, key: str) -> Any:
        """The value. Raises `UsageError` when the file does not have it."""
        if key not in self._table:
            raise UsageError(f"[{self._name}] lacks {key}.")
        return self._table[key]["value"]

    def get(self, key: str, default: Any = None) -> Any:
        return self._table[key]["value"] if key in self._table else default

    def source(self, key: str) -> str:
        """Where it comes from."""
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
        self.job, self.node, self.codec, self.wan, self.reach = (
            Figures(name, found.get(name, {})) for name in ("job", "node", "codec", "wan", "reach")
        )

    def run(self, model: str, *, payload: str = "published", synchronous: bool = False, grain: int = 16) -> Run:
        """The run of a model of the file.

        `payload`: the delta as published, or as `swarm` codes it. Where the file says how long a step computes
        (`step_s`), rollouts take it all, or what training leaves of it (`synchronous`). `grain`: tokens that are
        simulated as one.
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
    """Chunks that a payload is cut into."""
    return max(1, round(payload_bytes / min(chunk_target(payload_bytes), payload_bytes)))
