"""A swarm of real processes that learns by GRPO, with honest nodes and nodes that can be told to cheat.

The model is random but for some warm-up steps, so its texts are varied; its task has a reward that it can gain from the
first step on. Between two versions the swarm waits until the samples of the first one are judged.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from node.engines.base import Completion
from node.status.schema import MemberStatus
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.tiny import TinyRecipe, make_tiny
from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer, SampleGroup
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in
from scenarios.verification.cheating import attack_file

__all__ = ["LEASED_TOP_P", "RealSwarm", "WordsInOrder", "real_swarm"]

RECIPE: Final = TinyRecipe(letters=8, hidden=128, inner=128, layers=2, heads=2, kv_heads=1, steps=25, rows=32)
"""Attention heads of 64 elements, as vLLM requires."""
MAX_TOKENS: Final = 16
"""Most texts end before it."""
LEASED_TOP_P: Final = 0.95
ENGINES_WITHIN_S: Final = 600.0
"""For all engines to start: several vLLMs on two cores take minutes."""
JUDGED_WITHIN_S: Final = 60.0
"""For the samples of a version to be judged, before the next is published."""
COMMITTED_WITHIN_S: Final = 120.0
LOOK_EVERY_S: Final = 0.05
PROMPTS: Final = 4
"""Of a step, for each node."""
SAMPLES: Final = 2
"""Of each prompt. The ledger leases groups whole where it can: of larger ones, slow nodes would get none."""
CHEATING: Final = "scenarios.verification.cheating"


class WordsInOrder(SortLetters):
    """As `SortLetters`, with a reward for each token that is right, and room for texts that do not end."""

    def __init__(self) -> None:
        super().__init__(RECIPE.letters)
        self.max_tokens = MAX_TOKENS

    def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        """The share of tokens that are those of the right answer."""
        right = self.answer(prompt)
        return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))


class RealSwarm:
    """`swarm`: the processes. `trainer`: in this process. `handle`: what it reaches the seed by."""

    def __init__(self, swarm: Swarm, trainer: GrpoTrainer, handle: Any, honest: Sequence[str], cheats: Sequence[str]):
        self.swarm, self.trainer = swarm, trainer
        self.honest, self.cheats = tuple(honest), tuple(cheats)
        self.top_p = 1.0
        """That the next steps are leased with."""
        self.density = 0.0
        """Share of the model's elements that the last step changed."""
        self._handle = handle

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self.trainer.step_done

    def tell(self, cheat: str, attack: str) -> None:
        """Have a node cheat in this way from now on; "": be honest from the next version on."""
        attack_file(self.swarm.home(cheat)).write_text(attack)

    def release(self, name: str) -> None:
        """Release a node from quarantine, as a person does."""
        self.swarm.json("seed", "quarantine", name, "--release")

    def member(self, name: str) -> MemberStatus:
        """What the seed says of a node."""
        return next(node for node in self.swarm.seed_status().nodes if node.name == name)

    def step(self) -> None:
        """Sample, train, wait until the samples are judged, publish, and wait until all engines have the version."""
        trainer = self.trainer
        number = trainer.step_done + 1
        sampling = msgspec.structs.replace(trainer.sampling(number), top_p=self.top_p)
        answers = self._handle.rollouts(trainer.prompts(number), trainer.config.samples, sampling)
        groups = [_group(group) for group in sorted(answers, key=lambda group: group.index)]
        self._wait_until_judged()
        self.density = trainer.step(groups).density
        shaped = ((name, bits.reshape(trainer.layout.tensor(name).shape)) for name, bits in trainer.policy_bits())
        self._handle.publish(shaped, step=number).wait(quorum=1.0, timeout_s=COMMITTED_WITHIN_S)
        version = (0, number)
        self.swarm.wait(
            f"all engines have version {number}",
            lambda: all(node.engine is not None and self._engine_of(node) >= version for node in self._nodes()),
            COMMITTED_WITHIN_S,
        )

    def _nodes(self) -> list[MemberStatus]:
        return self.swarm.seed_status().nodes

    @staticmethod
    def _engine_of(node: MemberStatus) -> tuple[int, int]:
        return node.engine or (0, -1)

    def _wait_until_judged(self) -> None:
        """At most `JUDGED_WITHIN_S`: a checker that never answers is passed over after half of it."""
        deadline = time.monotonic() + JUDGED_WITHIN_S
        while self.swarm.seed_status().work.checks.judging and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)


def _group(group: Any) -> SampleGroup:
    return SampleGroup(
        group.prompt,
        tuple(Completion(r.token_ids, r.logprobs, r.finish_reason, r.spans) for r in group.rollouts),
    )


@contextlib.contextmanager
def real_swarm(
    folder: Path,
    *,
    honest: int,
    cheats: int,
    engine: Sequence[str],
    lr: float,
    check_share: float = 1.0,
    seed: int = 0,
) -> Iterator[RealSwarm]:
    """A seed, and nodes whose engines have version 0. `engine`: flags of `join`."""
    import torch

    from node.trainers.api import Swarm as Handle

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny(base := folder / "base", RECIPE, lambda line: None)
    config = GrpoConfig(lr=lr, lr_warmup_steps=1, prompts=PROMPTS * (honest + cheats), samples=SAMPLES)
    trainer = GrpoTrainer(base, WordsInOrder(), config, seed=seed, device="cpu")
    names = [[f"{kind}{i}" for i in range(1, count + 1)] for kind, count in (("honest", honest), ("cheat", cheats))]
    with swarm_in(folder / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(base, "--check-share", str(check_share))
        ticket = swarm.ticket("--nodes", str(honest + cheats))
        for name in (*names[0], *names[1]):
            words = ("join", ticket, "--model", str(base), *LOOPBACK, "--name", name, "--threads", "1", *engine)
            swarm.start(name, *words, module="node.cli" if name in names[0] else CHEATING)
        swarm.wait(
            "all engines run",
            lambda: sum(node.engine is not None for node in swarm.seed_status().nodes) == honest + cheats,
            ENGINES_WITHIN_S,
        )
        with Handle.attach(base=base, home=swarm.home(), start=False) as handle:
            yield RealSwarm(swarm, trainer, handle, *names)
