"""The RL loop over a swarm; and `python -m node.trainers.grpo.online`, which `swarm-node demo` runs.

The program prints one JSON object an event:

    {"event": "base", "folder": ...}        then it waits for a line on stdin, which says that the seed is up
    {"event": "begins", "step": 1}
    {"event": "step", "step": 1, "version": [0, 1], "reward": ..., "density": ..., ...}
    {"event": "done", "root": ...}          root of the policy's own bits, hashed again; then it waits for a line
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3
from cyclopts import App, Parameter

from codec import state_root
from codec.errors import SwarmError
from node.engines.base import Completion
from node.trainers.api import Publication, RefusedPrompt, RolloutGroup, Swarm
from node.trainers.grpo.trainer import GrpoTrainer, SampleGroup

__all__ = ["policy_root", "session_name", "train_online"]

QUORUM_WITHIN_S = 60.0
"""How long a step waits until its version is sealed, and held by every node where that is asked for."""


def train_online(
    trainer: GrpoTrainer,
    swarm: Swarm,
    steps: int,
    *,
    begins: Callable[[int], None] = lambda step: None,
    wait_for_all: bool = False,
    key: str | None = None,
) -> Iterator[tuple[dict[str, Any], Publication]]:
    """Sample through the swarm, train and publish, `steps` times. Yields plain values about each step, and its
    publication.

    A step's samples come from the version before it, or with one version of lag from the one before that. The trainer's
    ratios use the log-probabilities that the nodes reported. `begins(step)`: called when a step begins. `wait_for_all`:
    wait after each step until every live node holds its version. `key`: a name for this run; it decides the samples'
    random numbers, and each group is generated in one batch, so that a synchronous run on one thread a process always
    has the same bits. Raises what `Swarm.rollouts`, `Swarm.publish` and `Publication.wait` raise.
    """
    for _ in range(steps):
        step = trainer.step_done + 1
        begins(step)
        started = time.perf_counter()
        name = None if key is None else session_name(key, step)
        prompts, samples = trainer.prompts(step), trainer.config.samples
        answers = swarm.rollouts(prompts, samples, trainer.sampling(step), key=name, whole=key is not None)
        groups = sorted(answers, key=lambda group: group.index)  # a refused prompt raises `PromptRefused` below
        sampled = time.perf_counter()
        stats = trainer.step([_group(group) for group in groups])
        trained = time.perf_counter()
        shaped = ((name, bits.reshape(trainer.layout.tensor(name).shape)) for name, bits in trainer.policy_bits())
        publication = swarm.publish(shaped, step=step)
        copied = time.perf_counter()
        publication.wait(quorum=1.0 if wait_for_all else 0.0, timeout_s=QUORUM_WITHIN_S)
        yield (
            {
                "step": step,
                "version": [publication.epoch, publication.version],
                "reward": stats.reward,
                "loss": stats.loss,
                "density": publication.density,
                "changed": publication.changed,
                "delta_bytes": publication.bytes,
                "full_bytes": swarm.layout.full_bytes,
                "bits_per_change": 8 * (publication.bytes or 0) / max(1, publication.changed or 0),
                "rollouts": sum(len(group.rollouts) for group in groups),
                "lag": _lag(groups, publication),
                "sample_s": sampled - started,
                "train_s": trained - sampled,
                "copy_s": copied - trained,
                "publish_s": sum(publication.seconds.values()),
            },
            publication,
        )


def session_name(key: str, step: int) -> str:
    """The key of the rollouts of a step of the run `key`; see `node.trainers.rollouts.group_id`."""
    return f"{key}/{step}"


def _group(group: RolloutGroup | RefusedPrompt) -> SampleGroup:
    return SampleGroup(
        group.prompt,
        tuple(Completion(r.token_ids, r.logprobs, _reason(r.finish_reason), r.spans) for r in group.rollouts),
        tuple(r.routes for r in group.rollouts if r.routes is not None),
    )


def _reason(text: str) -> Any:
    return "stop" if text == "stop" else "length"


def _lag(groups: Sequence[RolloutGroup | RefusedPrompt], publication: Publication) -> int:
    """How many versions older than the policy that it trained the oldest token was."""
    newest = (publication.version or 1) - 1
    oldest = min((v for g in groups for r in g.rollouts for _, v in r.versions), default=newest)
    return newest - oldest


def policy_root(trainer: GrpoTrainer) -> bytes:
    """The root of the policy's bits in the trainer's own memory, computed without a replica or a delta."""
    layout = trainer.layout
    hashes = np.zeros((layout.n_blocks, 32), np.uint8)
    for name, bits in trainer.policy_bits():
        flat = np.ascontiguousarray(bits).reshape(-1)
        for block in layout.blocks_of(name):
            spec = layout.block(block)
            data = flat[spec.start : spec.start + spec.count].tobytes()
            hashes[block] = np.frombuffer(blake3(data).digest(), np.uint8)
    return state_root(layout.hash, hashes)


app = App(help="Train a small policy by GRPO over a running swarm; JSON lines on standard output.")


@app.default
def main(
    *,
    home: Annotated[Path, Parameter(help="SWARM_HOME of the seed.")],
    size: str = "tiny",
    steps: int = 5,
    seed: int = 0,
    threads: int = 1,
) -> int:
    """Train beside a seed: print the base checkpoint's folder, wait for a line on stdin, train."""
    import torch

    from node.trainers.grpo.sizes import make_trainer

    torch.set_num_threads(threads)
    base, trainer = make_trainer(size, seed=seed, lr=None, progress=lambda line: _print(event="progress", line=line))
    _print(event="base", folder=str(base), model_bytes=trainer.layout.full_bytes)
    sys.stdin.readline()
    with Swarm.attach(base=base, home=home, start=False) as swarm:
        rows = train_online(
            trainer, swarm, steps, begins=lambda step: _print(event="begins", step=step), wait_for_all=True
        )
        for row, _ in rows:
            _print(event="step", **row)
        _print(event="done", root=policy_root(trainer).hex())
        sys.stdin.readline()  # keeps the trainer attached until the demo has read the seed's final status
    return 0


def _print(**event: Any) -> None:
    print(msgspec.json.encode(event).decode(), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(app(sys.argv[1:], result_action="return_value"))
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
