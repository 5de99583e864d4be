"""Checks a loop's record by torch, transformers, peft and safetensors alone, without any code of this project.

    python verify_loop.py BASE RECORD SNAPSHOTS --steps 10 --ranks 2 --groups 4 --n 4

RECORD is what the loop wrote. SNAPSHOTS has the bytes of a node's replica in memory after each version
(`EPOCH.VERSION.bin`). Prints one JSON object. The exit code is 1 if anything differs.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ALIGN = 64  # the tensors of a replica are in order of their names, each at a multiple of this many bytes


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def merged(base: Path, adapter: Path, out: Path) -> Path:
    """The adapter merged into a fresh copy of the base, by peft's own `merge_and_unload`."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    return out


def folders(base: Path, record: Path) -> dict[str, Path]:
    """A checkpoint folder of every version."""
    found = {"0.0": base}
    for path in sorted(record.iterdir()):
        kind, _, version = path.name.partition("-")
        if kind == "weights":
            found[version] = path
        elif kind == "adapter":
            found[version] = merged(base, path, record / f"merged-{version}")
    return found


def differing(folder: Path, base: Path, memory: bytes) -> list[str]:
    """The tensors whose bits at the node are not the trainer's."""
    ours, wrong, at = tensors_of(folder), [], 0
    for name, first in sorted(tensors_of(base).items()):
        want = bits(ours[name])
        if ours[name].dtype != first.dtype or memory[at : at + len(want)] != want:
            wrong.append(name)
        at += -(-len(want) // ALIGN) * ALIGN
    return wrong


def scored(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def wanted_prompts(run: str, step: int, rank: int | None, groups: int, vocab: int) -> list[list[int]]:
    """The prompts that the loop must have asked for under this key."""
    rng = random.Random(f"{run}/{step}" if rank is None else f"{run}/{step}/{rank}")
    return [[rng.randrange(vocab) for _ in range(rng.randint(4, 9))] for _ in range(groups)]


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("base", "record", "snapshots"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=0, help="0: the keys name no rank")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--max-lag", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)

    problems: list[str] = []
    of_version = folders(args.base, args.record)
    compared = 0
    for version, folder in of_version.items():
        if version == "0.0":
            continue
        wrong = differing(folder, args.base, (args.snapshots / f"{version}.bin").read_bytes())
        compared += 1
        problems += [f"version {version}: the node's {name} differs" for name in wrong]
    if compared != args.steps:
        problems.append(f"{compared} versions were compared, of {args.steps}")
    roots = [tuple(bits(t) for _, t in sorted(tensors_of(f).items())) for f in of_version.values()]
    if len(set(roots)) != args.steps + 1:
        problems.append("two versions have the same weights, so the check proves nothing")

    models = {v: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for v, f in of_version.items()}
    vocab = models["0.0"].config.vocab_size
    samples, worst, control, lags, nodes, seen = 0, 0.0, [], [], {}, set()
    for step in range(1, args.steps + 1):
        for rank in range(args.ranks) if args.ranks else [None]:
            recorded = json.loads((args.record / f"samples-{step}-{rank or 0}.json").read_text())
            want = wanted_prompts(args.run, step, rank, args.groups, vocab)
            where = f"step {step} rank {rank or 0}"
            if sorted(g["index"] for g in recorded) != list(range(args.groups)):
                problems.append(f"{where}: groups {[g['index'] for g in recorded]}")
            for group in recorded:
                if group["prompt"] != want[group["index"]]:
                    problems.append(f"{where}: the prompt of group {group['index']} is another")
                if len(group["samples"]) != args.n:
                    problems.append(f"{where}: {len(group['samples'])} samples in group {group['index']}")
                for sample in group["samples"]:
                    samples += 1
                    nodes.setdefault(sample["node"], []).append(step)
                    same = (tuple(group["prompt"]), tuple(sample["tokens"]))
                    if same in seen:
                        problems.append(f"{where}: a sample was given twice")
                    seen.add(same)
                    names = [f"{epoch}.{number}" for epoch, number in sample["versions"]]
                    lags.append(step - 1 - min(number for _, number in sample["versions"]))
                    for name in sorted(set(names)):
                        here = torch.tensor([n == name for n in names])
                        claimed = torch.tensor(sample["logprobs"])
                        off = (
                            (scored(models[name], group["prompt"], sample["tokens"]) - claimed).abs()[here].max().item()
                        )
                        worst = max(worst, off)
                        number = int(re.sub(r".*\.", "", name))
                        other = models[f"0.{number + 1 if number < args.steps else number - 1}"]
                        gap = (scored(other, group["prompt"], sample["tokens"]) - claimed).abs()[here].max().item()
                        control.append(gap)
    expected = args.steps * max(args.ranks, 1) * args.groups * args.n
    if samples != expected:
        problems.append(f"{samples} samples, of {expected}")
    if worst > 1e-4:
        problems.append(f"log-probabilities are off by {worst:.2e}")
    if sum(gap > 1e-3 for gap in control) < 0.9 * len(control):
        problems.append("the neighbouring version explains the log-probabilities as well, so the check proves nothing")
    if max(lags) > args.max_lag:
        problems.append(f"a token was {max(lags)} versions old")
    print(json.dumps({
        "versions_equal": compared, "samples": samples, "expected": expected, "worst_nats": worst,
        "median_gap_to_neighbour": sorted(control)[len(control) // 2], "max_lag": max(lags),
        "nodes": {node[:8]: {"samples": len(s), "steps": [min(s), max(s)]} for node, s in nodes.items()},
        "problems": problems,
    }))  # fmt: skip
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
