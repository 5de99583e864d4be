"""Three steps of training as slime does them, on the swarm: HOME ENGINE BASE OUT LOST STAYS.

With SLIME_SOURCE, slime's own `generate_rollout`, from a clone, asks the engine for more samples than it needs and
aborts the rest, and its own `UpdateWeightFromDiskDelta` writes the versions. Without, `Written` asks and writes the
same. `recipe_kit.Policy` stands in for slime's Megatron actor, which needs GPUs. LOST, a node's process, is killed when
the first sample of the second step has come; STAYS: the home of another. Prints JSON.
"""

import importlib
import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import torch
import torch.distributed as dist
from recipe_kit import MAX_TOKENS, PROMPTS, SAMPLES, Policy, Row, live_roots, prompt_ids, root_of, rows_of
from slime_writer import slimes_own, write

from node.status.query import ask
from node.trainers import slime

STEPS = 3


class Arguments(Namespace):
    """slime's arguments: None for those that nothing here sets."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Written:
    """Asks and writes as slime does."""

    def __init__(self, args: Any, engine: str, lost: int) -> None:
        self.args, self.lost, self.step = args, lost, 0
        self.versions: list[list[str]] = []
        """Of each step: those that its samples are of."""
        self._engine = engine
        self._number, self._old = 0, dict(args.tensors)

    def begin(self) -> None:
        """Publish the base."""
        Path(self.args.update_weight_disk_dir).mkdir()
        slime.publish(self.args, self.args.update_weight_disk_dir, [])

    def rollout(self) -> list[Row]:
        """The samples of a step."""
        self.step += 1
        prompts = prompt_ids()
        with ThreadPoolExecutor(len(prompts) * SAMPLES) as pool:
            futures = [pool.submit(self._ask, prompt) for prompt in prompts for _ in range(SAMPLES)]
            for _ in as_completed(futures):
                self.sample_came()
        metas = [future.result()["meta_info"] for future in futures]
        self.versions.append(sorted({meta["weight_version"] for meta in metas}))
        tokens = [[token for _, token, _ in meta["output_token_logprobs"]] for meta in metas]
        groups = [tokens[i : i + SAMPLES] for i in range(0, len(tokens), SAMPLES)]
        return [row for prompt, group in zip(prompts, groups, strict=True) for row in rows_of(prompt, group)]

    def sample_came(self) -> None:
        """Kill the node, in the second step."""
        if self.step == 2 and self.lost:
            os.kill(self.lost, signal.SIGKILL)
            self.lost = 0

    def publish(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write a version, and call the hook."""
        self._number += 1
        folder = Path(self.args.update_weight_disk_dir)
        here = write(folder, self._number, self._old, tensors, "xor", "blake3")
        self._old = dict(tensors)
        slime.publish(self.args, str(here), [])

    def _ask(self, prompt: list[int]) -> Any:
        args = self.args
        sampling = {
            "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip
        asked = {"sampling_params": sampling, "return_logprob": True, "input_ids": prompt}
        return httpx.post(f"{self._engine}/generate", json=asked, timeout=120).raise_for_status().json()


class Own(Written):
    """slime's own functions. It is their source of prompts, and their reward."""

    PACKAGE = "slime"

    def begin(self) -> None:
        rewards = sys.modules[f"{self.PACKAGE}.rollout.rm_hub"] = ModuleType("rm_hub")
        vars(rewards).update(async_rm=self._reward, batched_async_rm=None)  # in place of rewards for mathematics
        self._writer = self.writer()
        self._rollout = self.module("rollout.sglang_rollout")
        self._sample = self.module("utils.types").Sample
        self.module("utils.http_utils").init_http_client(self.args)
        self._writer.update_weights()  # captures the base

    def writer(self) -> Any:
        """What writes the versions, connected to the engine."""
        writer = slimes_own(os.environ["SLIME_SOURCE"], self.args)
        self.module("backends.sglang_utils.external").apply_external_engine_info_to_args(self.args)
        return writer

    def module(self, name: str) -> Any:
        """A module of the trainer's own."""
        return importlib.import_module(f"{self.PACKAGE}.{name}")

    def rollout(self) -> list[Row]:
        self.step += 1
        groups = self._rollout.generate_rollout(self.args, self.step, self).samples
        self.versions.append(sorted({version for group in groups for one in group for version in one.weight_versions}))
        rows: list[Row] = []
        for group in groups:
            assert all(len(one.rollout_log_probs) == one.response_length > 0 for one in group)
            prompt = group[0].tokens[: -group[0].response_length]
            rows += rows_of(prompt, [one.tokens[len(prompt) :] for one in group])
        return rows

    def get_samples(self, count: int) -> list[list[Any]]:
        """`count` groups of samples to be drawn, as slime's data sources give them."""
        return [
            [self._sample(group_index=at, index=at * SAMPLES + i, prompt=PROMPTS[at % len(PROMPTS)], tokens=[])
             for i in range(SAMPLES)]
            for at in range(count)
        ]  # fmt: skip

    def add_samples(self, groups: list[Any]) -> None:
        """Take back what was aborted."""

    def publish(self, tensors: dict[str, torch.Tensor]) -> None:
        self.args.tensors = tensors
        self._writer.update_weights()

    async def _reward(self, args: Any, sample: Any) -> float:
        self.sample_came()
        return 0.0  # `rows_of` has its own


def main(kind: type[Written], policy_kind: Callable[[Path], Any] = Policy, **more: Any) -> None:
    """`kind`: what asks and writes. `policy_kind`: makes what trains of the base. `more`: arguments of the trainer."""
    home, engine, base, out, lost, stays = sys.argv[1:]
    os.environ["SWARM_HOME"] = home
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=0, world_size=1)
    policy, where = policy_kind(Path(base)), httpx.URL(engine)
    args = Arguments(
        hf_checkpoint=base, tensors=policy.tensors, update_weight_disk_dir=f"{out}/updates",
        update_weight_local_checkpoint_dir=f"{out}/local", update_weight_delta_encoding="xor",
        update_weight_delta_checksum="blake3", custom_update_weight_post_write_path="node.trainers.slime.publish",
        rollout_external_engine_addrs=[f"{where.host}:{where.port}"], sglang_router_ip=where.host,
        sglang_router_port=where.port, sglang_server_concurrency=64, rollout_global_dataset=True,
        rollout_batch_size=len(PROMPTS), over_sampling_batch_size=len(PROMPTS) + 2, n_samples_per_prompt=SAMPLES,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=MAX_TOKENS,
        rollout_skip_special_tokens=False, **more,
    )  # fmt: skip
    trainer = kind(args, engine, int(lost))
    trainer.begin()
    rows, drawn = [], []
    for step in range(1, STEPS + 1):
        samples = trainer.rollout()
        drawn.append(len(samples))
        policy.step(samples)
        trainer.publish(policy.tensors)
        root = ask(Path(home)).root
        want = root_of(Path(base), policy.tensors, Path(out) / f"step_{step}")
        rows.append({"root": root, "want": want, "live": live_roots(Path(stays), step, root)})
    print(json.dumps({"versions": rows, "drawn": drawn, "drawn_at": trainer.versions}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Own if os.environ.get("SLIME_SOURCE") else Written)
