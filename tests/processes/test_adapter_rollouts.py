"""Two adapters of different ranks and modules train in turn over real nodes that judge one another's samples. A node is
killed, and another draws by the base alone. Every token is that of the adapter and the version that it names."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec import Checkpoint
from codec.adapter import linear_layers
from node import SamplingParams
from node import Swarm as Trainer
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in
from scenarios.verification.cheating import BASE_ALONE, attack_file
from swarm.transport.identity import peer_id

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="engines need torch")]

HONEST = ("a", "b", "c", "killed")
ALPHA = 16
ADAPTERS = {"math": (4, ("q_proj", "v_proj")), "code": (8, ("o_proj", "up_proj", "down_proj"))}
"""Rank and adapted layers of each."""
STEPS = 6
KILLED_IN = 4
MORE_STEPS = 10
"""Until the cheat is found, at most."""
PROMPTS, SAMPLES, TOKENS = 8, 4, 96
NATS = 1e-4
"""By which float32 sums in another order may differ."""


def bits_of(name: str, own: int, base: Path) -> dict[str, np.ndarray]:
    """The tensors of an adapter's version, by peft's names: bfloat16 bits. A step moves all of them."""
    rank, targets = ADAPTERS[name]
    found = {}
    for module, (out, in_) in sorted(linear_layers(Checkpoint.open(base).layout).items()):
        if module.endswith(targets):
            for matrix, shape in (("A", (rank, in_)), ("B", (out, rank))):
                rng = np.random.default_rng([*name.encode(), own, *module.encode(), ord(matrix)])
                values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
                found[f"base_model.model.{module}.lora_{matrix}.weight"] = (values.view(np.uint32) >> 16).astype(
                    np.uint16
                )
    return found


class Reference:
    """Log-probabilities by torch and transformers alone."""

    def __init__(self, base: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._base = torch, base
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._changed: dict[tuple[str, int], dict[str, Any]] = {}

    def of(self, name: str, own: int, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> np.ndarray:
        """(texts, tokens): of each token, by this adapter (empty: none) at this version of its own."""
        torch = self._torch
        if (name, own) not in self._changed:
            self._changed[name, own] = self._merged(name, own) if name else {}
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens] for tokens in texts])
            made = torch.func.functional_call(self._model, self._changed[name, own], kwargs={"input_ids": ids})
            logprobs = made.logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            return logprobs.gather(-1, torch.tensor(texts)[..., None]).squeeze(-1).numpy()

    def _merged(self, name: str, own: int) -> dict[str, Any]:
        """The weights that the adapter changes, by name."""
        found, scaling = {}, ALPHA / ADAPTERS[name][0]
        wide = {
            key: self._torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32))
            for key, bits in bits_of(name, own, self._base).items()
        }
        for key in (key for key in wide if ".lora_A." in key):
            weight = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            product = wide[key.replace(".lora_A.", ".lora_B.")] @ wide[key]
            found[weight] = self._model.get_parameter(weight).detach() + scaling * product
        return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    folder = tmp_path / "base"
    recipe = TinyRecipe(vocabulary=300, hidden=64, inner=96, layers=2, heads=2, kv_heads=1, spread=0.2)
    save_bf16(random_model(recipe, eos_token_id=None, bos_token_id=None, pad_token_id=None), folder)
    return folder


def start(swarm: Swarm, base: Path) -> None:
    swarm.seed(base, "--adapters", "2", "--adapter-rank", "8", "--check-share", "1")
    ticket = swarm.ticket("--nodes", str(len(HONEST) + 1))
    words = ("--model", str(base), "--device", "cpu", "--threads", "1", *LOOPBACK)
    for name in HONEST:
        swarm.start(name, "join", ticket, "--name", name, *words)
    swarm.start("cheat", "join", ticket, "--name", "cheat", *words, module="scenarios.verification.cheating")
    swarm.until_seed("all engines run", lambda seed: sum(node.engine is not None for node in seed.nodes) == 5)


class Training:
    """`groups` of every step: (adapter, group). `own`: the newest own version of each adapter."""

    def __init__(self, trainer: Trainer, base: Path) -> None:
        self.trainer, self.base = trainer, base
        self.own = dict.fromkeys(ADAPTERS, 0)
        self.of_version: dict[tuple[str, int], int] = {}
        """By adapter and the swarm's version that it became then: its own version."""
        self.groups: list[tuple[str, Any]] = []

    def publish(self, name: str, quorum: float = 0.0) -> None:
        own = self.own[name] = self.own[name] + 1
        rank, targets = ADAPTERS[name]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(targets)}
        publication = self.trainer.publish((config, bits_of(name, own, self.base)), step=own, adapter=name)
        publication.wait(quorum, timeout_s=120)
        assert publication.adapter_version == own
        assert publication.version is not None
        self.of_version[name, publication.version] = own

    def draw(self, name: str, number: int, after_one: Callable[[], None]) -> None:
        """Draw a step's groups by an adapter (empty: the base). `after_one`: called when there is one."""
        rng = np.random.default_rng(number)
        prompts = [tuple(rng.integers(3, 300, 4 + i).tolist()) for i in range(PROMPTS)]
        wanted = {"adapter": name} if name else {}
        found = []
        for group in self.trainer.rollouts(prompts, SAMPLES, SamplingParams(TOKENS), timeout_s=120, **wanted):
            found.append(group)
            assert group.prompt == prompts[group.index]
            if len(found) == 1:
                after_one()
        assert sorted(group.index for group in found) == list(range(PROMPTS)), "no group was lost, or came twice"
        self.groups += [(name, group) for group in found]


def test_every_token_is_that_of_the_adapter_and_the_version_that_it_names(tmp_path: Path, base: Path) -> None:
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        start(swarm, base)
        with Trainer.attach(home=swarm.home("seed"), start=False, max_lag=1) as trainer:
            training = Training(trainer, base)
            for name in ADAPTERS:
                training.publish(name, quorum=1.0)
            training.draw("", 0, lambda: None)
            for step in range(1, STEPS + 1):
                name, other = ("math", "code") if step % 2 else ("code", "math")
                if step == 2:
                    attack_file(swarm.home("cheat")).write_text(BASE_ALONE)

                def meanwhile(step: int = step, name: str = name, other: str = other) -> None:
                    if step == KILLED_IN:
                        swarm.kill("killed")
                    training.publish(other)  # which makes nothing of this step older
                    if step % 4 in (1, 2):
                        training.publish(name)  # sequences that run go on with it

                training.draw(name, step, meanwhile)
            training.draw("", 99, lambda: None)
            for more in range(MORE_STEPS):  # of one version, so that every sample can be judged
                swarm.until_seed("all samples are judged", lambda seed: not seed.work.checks.judging)
                if "cheat" in quarantined(status := swarm.seed_status()):
                    break
                training.draw("code", 100 + more, lambda: None)
    assert set(quarantined(status)) == {"cheat"}, f"no honest node is: {status.work}"
    assert status.work.checks.judged > 0
    cheat = next(node.peer for node in status.nodes if node.name == "cheat")
    check_samples(training, base, cheat)


def quarantined(status: Any) -> dict[str, str]:
    return {node.name: node.quarantine.why for node in status.nodes if node.quarantine is not None}


def check_samples(training: Training, base: Path, cheat: str) -> None:
    reference, false, crossed = Reference(base), 0, 0
    gaps: list[float] = []
    for name, group in training.groups:
        assert len(group.rollouts) == SAMPLES
        for rollout in group.rollouts:
            assert rollout.adapter == name
            assert len(rollout.token_ids) == len(rollout.versions) == len(rollout.own_versions) == TOKENS
            assert rollout.lag <= 1
            for (_, version), own in zip(rollout.versions, rollout.own_versions, strict=True):
                newest = max((v for of, v in training.of_version if of == name and v <= version), default=None)
                assert own == (0 if newest is None else training.of_version[name, newest])
        texts = [rollout.token_ids for rollout in group.rollouts]
        owns = np.array([rollout.own_versions for rollout in group.rollouts])
        claimed = np.array([rollout.logprobs for rollout in group.rollouts])
        off = np.full(claimed.shape, np.inf)
        for own in np.unique(owns).tolist():
            computed = reference.of(name, own, group.prompt, texts)
            off = np.where(owns == own, np.abs(computed - claimed), off)
        honest = np.array([peer_id(rollout.node) != cheat for rollout in group.rollouts])
        assert (off[honest] < NATS).all(), (name, owns, off.max(axis=1), honest)
        false += int((off[~honest].max(axis=1, initial=0.0) > NATS).sum())
        crossed += int((owns[honest].min(axis=1, initial=99) < owns[honest].max(axis=1, initial=0)).sum())
        if name and honest.any():
            for other in (("", 0), (name, int(owns.max()) + 1)):
                distance = np.abs(reference.of(*other, group.prompt, texts) - claimed).max(axis=1)
                gaps.append(float(distance[honest].min()))
    assert false > 0, "the cheat delivered samples before it was found"
    assert crossed > 0, "no sample went on with a new version"
    assert min(gaps) > 100 * NATS, "another version explains the samples as well, so this proves nothing"
