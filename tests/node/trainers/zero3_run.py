"""DeepSpeed ZeRO-3 on the swarm, by the recipe of `docs/trainers.md`: HOME BASE STEPS OUT LOST STAYS, on each rank.

Rank 0 writes OUT/report.json. LOST and STAYS: as for `trl_grpo_run.py`.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from recipe_kit import Killing, draw, live_roots, policy_loss, root_of
from transformers import AutoModelForCausalLM

from node import Swarm
from node.trainers.gathered import in_parts, publish_from_rank_0, whole_tensors


def main() -> None:
    home, base, steps, out, lost, stays = sys.argv[1:]
    torch.set_num_threads(1)
    # it compiles a kernel, which takes minutes, and without it uses gloo
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True,
        },
    }  # fmt: skip
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    swarm = Swarm.attach(home=home, start=False, max_lag=0) if rank == 0 else None
    if swarm is not None:
        swarm.rollouts = killing = Killing(swarm, int(lost))
    versions = []
    for step in range(1, int(steps) + 1):
        rows = draw(swarm)
        engine.backward(policy_loss(lambda ids: engine(ids).logits, rows[rank::world]))
        engine.step()
        assert in_parts(engine.module)
        publication = publish_from_rank_0(swarm, whole_tensors(engine.module), step=step)
        engine.save_16bit_model(out, f"step_{step}.bin")  # DeepSpeed's own gathering, to compare with
        if publication is not None:
            root = publication.wait(timeout_s=60.0).root.hex()
            own = torch.load(Path(out) / f"step_{step}.bin", weights_only=True)
            want = root_of(Path(base), own, Path(out) / f"step_{step}")
            versions.append({"version": publication.version, "changed": publication.changed, "root": root,
                             "want": want, "live": live_roots(Path(stays), step, root)})  # fmt: skip
        dist.barrier()
    if swarm is not None:
        report = {"versions": versions, "samples": killing.samples, "lags": sorted(killing.lags)}
        (Path(out) / "report.json").write_text(json.dumps(report))
        swarm.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
