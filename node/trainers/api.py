"""Three lines in a trainer:

    swarm = Swarm.attach(model, base="Qwen/dir")
    pub = swarm.publish(model, step=step)
    for group in swarm.rollouts(prompts, n=8, sampling=...): ...

Synchronous, typed, and never in the way: whatever waits has a deadline, whatever the swarm does ends in a typed error
or in `swarm.state`, and `publish` returns as soon as the weights are copied. Needs codec, numpy, and torch where
tensors are torch's; not libp2p, not trio: the seed is a process of its own, found by its Unix socket.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from codec import Layout, TensorSpec
from codec.errors import SwarmError, UsageError
from node.engines.base import SamplingParams
from node.trainers.errors import SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import OpenRollouts
from node.trainers.publishing import OnBusy, Publication, PublishLine
from node.trainers.rollouts import Rollout, RolloutGroup, rollouts
from node.trainers.seedlink import SeedProcess, ask_state, home_folder
from node.trainers.weights import named_tensors

__all__ = [
    "Publication",
    "Rollout",
    "RolloutGroup",
    "SamplingParams",
    "Swarm",
    "SwarmBusy",
    "SwarmDown",
    "SwarmTimeout",
]


class Swarm:
    """A trainer's handle on its swarm. Make one with `attach`; use it from one thread, or as a context manager."""

    def __init__(
        self, home: Path, line: PublishLine, base: Path | None, seed: SeedProcess | None, max_lag: int
    ) -> None:
        self._home = home
        self._line = line
        self._base = base
        self._seed = seed
        self._max_lag = max_lag
        self._tokenizer: Any = None

    @classmethod
    def attach(
        cls,
        model: Any = None,
        *,
        base: str | Path | None = None,
        max_lag: int = 1,
        home: str | Path | None = None,
        threads: int | None = None,
        start: bool = True,
    ) -> "Swarm":
        """Find the seed of `home` (default: SWARM_HOME), or start one on the checkpoint folder `base`.

        `model`, if given, is compared with the base's tensors now rather than at the first `publish`. `max_lag`: how
        many versions older than the newest sealed one a rollout's tokens may be when you get them (0: synchronous).
        `threads`: encoders (default: half the cores, at most 4). A seed started here ends with `close`, or with this
        process. Raises `UsageError` when there is no seed and none can be started, or the model is another;
        `SwarmTimeout`.
        """
        folder, seed = home_folder(home), None
        base = None if base is None else Path(base).expanduser().absolute()
        try:
            line = PublishLine(folder, threads, lambda publication: _held(folder, publication))
        except SwarmDown:
            if not start or base is None:
                raise UsageError(
                    f"No seed serves {folder}. Start one (swarm-node seed --base FOLDER), "
                    "or give Swarm.attach the base folder, and it will."
                ) from None
            seed = SeedProcess(folder, base)
            seed.wait_until_serving()
            line = PublishLine(folder, threads, lambda publication: _held(folder, publication))
        swarm = cls(folder, line, base, seed, max_lag)
        if model is not None:
            try:
                _check_names(line.layout, model)
            except UsageError:
                swarm.close()
                raise
        return swarm

    def publish(self, model: Any, *, step: int, on_busy: OnBusy = "wait", timeout_s: float = 600.0) -> Publication:
        """Publish these weights as the next version. Returns when they are copied; the rest happens in the background.

        `model`: a `torch.nn.Module`, a mapping, or an iterable of (checkpoint name, tensor). At most two versions are
        not sealed at a time. With a third, "wait" waits for the oldest, at most `timeout_s` (then `SwarmBusy`);
        "coalesce" drops the one that has not begun, which this one replaces. Raises `UsageError` when the tensors are
        not the base's. What goes wrong later is in the publication's `error`, and in `state`.
        """
        return self._line.publish(model, step, on_busy, timeout_s)

    def rollouts(
        self,
        prompts: Iterable[Sequence[int] | str],
        n: int,
        sampling: SamplingParams,
        *,
        key: str | None = None,
        timeout_s: float = 600.0,
    ) -> Iterator[RolloutGroup]:
        """`n` accepted samples of every prompt, a group at a time, as they are complete.

        `prompts` (token ids, or text for the base folder's tokenizer) are taken as fast as the nodes work them off, so
        an endless iterator is fine. With a `key`, work that is done survives this process: asked again with the same
        key and prompts, it goes on. Raises `SwarmTimeout` when no group was completed for `timeout_s`, `SwarmDown`
        when the seed stays away that long. Closing the iterator withdraws the rest.
        """
        asked = OpenRollouts(key or os.urandom(16).hex(), n, sampling, self._max_lag, keep=key is not None)
        return rollouts(self._home, asked, map(self._token_ids, prompts), timeout_s)

    @property
    def state(self) -> dict[str, Any]:
        """How things stand, as plain values: `head` (epoch, version), `swarm`, `work`, and `error` where there is one.

        Never raises for a seed that is down: then `swarm` is missing and `error` says so.
        """
        state: dict[str, Any] = {"head": self._line.head}
        try:
            state |= ask_state(self._home)
        except SwarmError as error:
            state["error"] = str(error)
        if self._line.last_error is not None:
            state["publish_error"] = str(self._line.last_error)
        return state

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._line.head

    @property
    def layout(self) -> Layout:
        """The base's tensor table."""
        return self._line.layout

    def close(self, timeout_s: float = 60.0) -> None:
        """Let what was published be sealed (at most `timeout_s`), then let go. Safe to call twice."""
        self._line.close(timeout_s)
        if self._seed is not None:
            self._seed.stop()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self, prompt: Sequence[int] | str) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            if self._base is None:
                raise UsageError("Prompts given as text need the base's tokenizer: give Swarm.attach the base folder.")
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._base, local_files_only=True)
        return self._tokenizer(prompt)["input_ids"]


def _held(home: Path, publication: Publication) -> float:
    """The share of live nodes that hold `publication`, verified, or something newer. No nodes: nobody holds it."""
    wanted = [publication.epoch, publication.version]
    nodes = ask_state(home)["swarm"].get("nodes", [])
    held = [node["held"] for node in nodes if node.get("held") is not None]
    return sum(list(version) >= wanted for version in held) / len(nodes) if nodes else 0.0


def _check_names(layout: Layout, model: Any) -> None:
    """Names and shapes only: cheap, whatever the size of the model."""
    known: dict[str, TensorSpec] = {name: spec for spec in layout.tensors for name in (spec.name, *spec.aliases)}
    seen: set[str] = set()
    for name, tensor in named_tensors(model):
        spec = known.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            raise UsageError(
                f"{name} of the model is not in the base checkpoint in this shape: give the folder that training "
                "started from."
            )
        seen.add(spec.name)
    missing = next((spec.name for spec in layout.tensors if spec.name not in seen), None)
    if missing is not None:
        raise UsageError(f"The model lacks {missing}, which the base checkpoint has: give its own base folder.")
