"""axolotl, by its own configuration and command, on the swarm: `axolotl_run.py HOME BASE STEPS OUT LOST STAYS`.

The arguments and the report are those of `trl_grpo_run.py`. `axolotl_swarm` is what the configuration names.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import yaml


def configuration(base: str, steps: int, out: Path) -> dict[str, Any]:
    return {
        "base_model": base, "rl": "grpo", "plugins": ["axolotl_swarm.Publishing"], "output_dir": str(out / "trained"),
        "trl": {
            "rollout_func": "axolotl_swarm.rollouts", "reward_funcs": ["axolotl_swarm.reward_sorted"],
            "num_generations": 4, "max_completion_length": 8, "temperature": 1.0, "beta": 0.0,
        },
        "datasets": [{"path": str(out / "prompts.jsonl"), "ds_type": "json", "type": "axolotl_swarm.as_prompts"}],
        "chat_template": "jinja", "chat_template_jinja": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "max_steps": steps, "micro_batch_size": 32, "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
        "optimizer": "adamw_torch", "sequence_len": 64, "bf16": False, "fp16": False, "tf32": False,
        "warmup_steps": 0, "skip_prepare_dataset": True, "val_set_size": 0.0, "logging_steps": 1, "seed": 0,
        "save_strategy": "no", "use_tensorboard": False,
        "dataset_prepared_path": str(out / "prepared"), "gradient_checkpointing": False,
    }  # fmt: skip


def main() -> None:
    _, base, steps, out, *_ = sys.argv[1:]
    os.environ["SWARM_RUN"] = shlex.join(sys.argv[1:])
    folder = Path(out)
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"text": text}) for text in ("dbca=", "acbd=", "bdac=", "cadb=") * 16]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(base, int(steps), folder)))
    torch.set_num_threads(1)
    from axolotl.cli.train import do_cli

    do_cli(str(folder / "config.yaml"))
    from axolotl_swarm import comparing, killing, swarm

    report = {"steps": int(steps), "versions": comparing.rows, "samples": killing.samples}
    swarm.close()
    print(json.dumps(report | {"lags": sorted(killing.lags)}))


if __name__ == "__main__":
    main()
