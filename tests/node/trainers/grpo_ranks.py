"""The code of each rank of `test_end_to_end.py`: GRPO under FSDP2 over a real swarm."""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.fsdp import fully_shard

from codec import Layout, state_root
from node import Swarm
from node.status.query import ask
from node.trainers.grpo.online import _group
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer

WITHIN_S = 180.0
"""Time limit in seconds of calls that take a second on idle cores."""
CONFIG = GrpoConfig(lr=1e-3, prompts=4, samples=4, rows=64, lr_warmup_steps=1)


class Varied(SortLetters):
    """A reward that varies with every answer, so that every step changes the weights."""

    def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        return sum(answer) % 7 / 6


class ShardedTrainer(GrpoTrainer):
    """The reference trainer, with its model, masters and optimizer state sharded over the ranks. Each rank trains on
    its share of the groups, and FSDP averages the gradients."""

    def __init__(self, base: Path) -> None:
        super().__init__(base, Varied(3), CONFIG, device="cpu")
        fully_shard(self.model)
        self._policy = list(self.model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().clone()) for p in self._policy]
        self._adam = torch.optim.AdamW(self._masters, lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=0.0)

    @torch.no_grad()
    def _round(self) -> float:
        for master, parameter in zip(self._masters, self._policy, strict=True):
            parameter.to_local().copy_(master.to_local().to(torch.bfloat16))
        return 0.0

    def save_shards(self, file: Path, root: bytes) -> None:
        """Save this rank's shards of the training state, and the root of their policy."""
        masters = [master.to_local().detach().clone() for master in self._masters]
        adam = [{k: _local(v) for k, v in self._adam.state[m].items()} for m in self._masters]
        part = Path(f"{file}.part")
        torch.save({"masters": masters, "adam": adam, "step": self.step_done, "root": root}, part)
        part.rename(file)

    @torch.no_grad()
    def load(self, file: Path) -> bytes:
        kept = torch.load(file, weights_only=True)
        self.step_done = kept["step"]
        for master, values, state in zip(self._masters, kept["masters"], kept["adam"], strict=True):
            master.to_local().copy_(values)
            own = self._adam.state[master]
            if not own:
                own |= {"step": torch.tensor(0.0), "exp_avg": master * 0, "exp_avg_sq": master * 0}
            for name, tensor in state.items():
                _local(own[name]).copy_(tensor)
        self._round()
        return kept["root"]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered_root(layout: Layout, model: torch.nn.Module) -> bytes:
    """The root of the policy's own bits, without a replica or a delta."""
    state = {name: t.full_tensor() for name, t in model.state_dict().items()}
    hashes = np.zeros((layout.n_blocks, 32), np.uint8)
    for spec in layout.tensors:
        bits = state[spec.name].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        (block,) = layout.blocks_of(spec.name)  # a tiny model
        hashes[block] = np.frombuffer(blake3(bits).digest(), np.uint8)
    return state_root(layout.hash, hashes)


def train(
    rank: int, world: int, home: str, base: str, folder: str, nodes: list[str], until: int
) -> list[dict[str, Any]]:
    """Continue from what `folder` has until step `until`. At step 6, the first time, go back to step 4.

    Returns a row for each version. Rank 0 waits until every engine has proven that it runs on exactly these bits.
    """
    torch.set_num_threads(1)
    trainer, keep, rows = ShardedTrainer(Path(base)), Path(folder), []
    with Swarm.attach(trainer.model, base=base, home=home, start=False) as swarm:
        whole = [s for s in range(1, until) if all((keep / f"step{s:04}.rank{r}").exists() for r in range(world))]
        if whole:
            root = trainer.load(keep / f"step{whole[-1]:04}.rank{rank}")
            rows.append({"resumed": swarm.resume(root), "step": trainer.step_done, "root": root})
            if rank == 0:
                rows[-1]["engines"] = engines_at(nodes, root)
        while trainer.step_done < until:
            if trainer.step_done == 6 and not (keep / f"back.rank{rank}").exists():
                (keep / f"back.rank{rank}").touch()
                root = trainer.load(keep / f"step0004.rank{rank}")
                rows.append({"back": swarm.rollback(4), "step": trainer.step_done, "root": root})
                if rank == 0:
                    rows[-1]["engines"] = engines_at(nodes, root)
            step = trainer.step_done + 1
            box: list[Any] = [None]
            if rank == 0:
                asked = swarm.rollouts(
                    trainer.prompts(step), CONFIG.samples, trainer.sampling(step), timeout_s=WITHIN_S
                )
                box[0] = sorted(asked, key=lambda group: group.index)
            dist.broadcast_object_list(box)
            groups = box[0]
            trainer.step([_group(group) for group in groups[rank::world]])
            publication = swarm.publish(trainer.model, step=step).wait(timeout_s=WITHIN_S)
            assert publication.root is not None
            row: dict[str, Any] = {"version": (publication.epoch, publication.version), "root": publication.root}
            row |= {
                "gathered": gathered_root(swarm.layout, trainer.model),
                "rollouts": sum(len(g.rollouts) for g in groups),
            }
            row["drawn_from"] = sorted({v for g in groups for r in g.rollouts for v in r.versions})
            if rank == 0:
                row["engines"] = engines_at(nodes, publication.root)
            rows.append(row)
            trainer.save_shards(keep / f"step{step:04}.rank{rank}", publication.root)
            (keep / f"done{step:04}.rank{rank}").touch()
            dist.barrier()
        publication.wait(quorum=1.0, timeout_s=WITHIN_S)
        accepted_of = nodes_at_work(swarm, trainer, len(nodes)) if rank == 0 else set()
        state = swarm.state if rank == 0 else {}
    if rank == 0:
        rows.append(
            {
                "accepted_of": len(accepted_of),
                "state": {name: state.get(name) for name in ("sealed", "refused", "nodes", "egress", "error")},
            }
        )
    return rows


def nodes_at_work(swarm: Swarm, trainer: ShardedTrainer, wanted: int) -> set[bytes]:
    """Nodes whose rollouts are accepted, when there is more work than the fastest node can hold: `wanted` of them."""
    prompts = itertools.chain.from_iterable(trainer.prompts(step) for step in itertools.count(trainer.step_done + 1))
    found: set[bytes] = set()
    deadline = time.monotonic() + WITHIN_S
    for group in swarm.rollouts(prompts, CONFIG.samples, trainer.sampling(trainer.step_done), timeout_s=WITHIN_S):
        found |= {rollout.node for rollout in group.rollouts}
        if len(found) == wanted or time.monotonic() > deadline:
            break
    return found


def engines_at(nodes: list[str], root: bytes) -> list[str]:
    """The root of every engine's live parameters, once all are `root`, or after `WITHIN_S`."""
    deadline, found = time.monotonic() + WITHIN_S, [""] * len(nodes)
    while time.monotonic() < deadline and found != [root.hex()] * len(nodes):
        found = [ask(Path(home), prove=True).nodes[0].live_root or "" for home in nodes]
    return found
