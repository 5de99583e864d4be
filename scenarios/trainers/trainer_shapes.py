"""The time of `publish` in a training loop under FSDP2, compared with one copy of the same weights in the same run.

    python -m scenarios.trainers.trainer_shapes [--case 116m|tiny] [--steps 5] [--json]

    116m   a Llama-like model of 116 million parameters, fp32 masters of a bf16 base, two ranks on gloo, a thread each
    tiny   18,000 matrices of 4 x 8, as in a base with many adapters or experts

A real seed and a real node run. The copy is a `torch.Tensor.copy_` of each rank's own part into bf16 memory that is
already mapped. Prints the medians on rank 0 over all steps but the first, in wall-clock time and in CPU time of the
training thread. Wall-clock times need an otherwise idle machine; CPU times hardly depend on other load.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from scenarios.harness.command import json_parser
from scenarios.harness.processes import outputs

__all__ = ["main", "measure"]

CASES: Final = ("116m", "tiny")
WORLD: Final = 2
RANKS_WITHIN_S: Final = 170.0


def make(case: str) -> Any:
    """Return the model, which is the same on every rank."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Module()
    if case == "tiny":
        net.layers = torch.nn.ModuleList(
            torch.nn.ParameterList(torch.nn.Parameter(torch.randn(4, 8)) for _ in range(1800)) for _ in range(10)
        )
        return net
    width, inner = 768, 2560
    shapes = (
        [(width, width)] * 2 + [(width // 4, width)] * 2 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    )
    net.embed = torch.nn.Embedding(32_000, width)
    net.layers = torch.nn.ModuleList(
        torch.nn.ParameterList(torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes) for _ in range(12)
    )
    return net


def write_base(folder: Path, case: str) -> None:
    """Write the bf16 checkpoint of the model before training."""
    import torch

    from codec import Layout, TensorSpec, write_checkpoint

    state = {name: parameter.detach() for name, parameter in make(case).named_parameters()}
    layout = Layout(tuple(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in sorted(state.items())))

    def bits(name: str) -> np.ndarray:
        return state[name].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)

    write_checkpoint(folder, layout, bits, {"config.json": b'{"model_type": "none"}'})


def rank_main(case: str, rank: int, steps: int, home: str, meet: str) -> None:
    """Run one rank. Prints [copy, publish] of each step, each as [wall-clock, CPU] seconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from node import Swarm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=WORLD)
    net = make(case)
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    local = {name: parameter.detach().to_local() for name, parameter in net.named_parameters()}
    into = {name: torch.ones(tensor.shape, dtype=torch.bfloat16) for name, tensor in local.items()}
    rows = []
    with Swarm.attach(net, home=home) as swarm, torch.no_grad():
        for step in range(steps):
            for tensor in local.values():
                tensor.view(-1)[step::100].mul_(1.01)
            dist.barrier()
            began = _now()
            for name, tensor in local.items():
                into[name].copy_(tensor)
            copied = _now()
            dist.barrier()
            asked = _now()
            publication = swarm.publish(net, step=step)
            rows.append([(copied - began).tolist(), (_now() - asked).tolist()])
            publication.wait(timeout_s=RANKS_WITHIN_S)
    print(json.dumps(rows), flush=True)
    os._exit(0)


def _now() -> np.ndarray:
    """Return the seconds of the wall clock, and the CPU seconds of this thread."""
    return np.array([time.perf_counter(), time.thread_time()])


def measure(case: str, steps: int) -> dict[str, Any]:
    """Return the median seconds of the copy and of `publish`, and the median of their ratio."""
    from scenarios.harness.swarm import swarm_on

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base", case)
        with swarm_on(folder, folder / "base", nodes=1) as swarm:
            words = [str(steps), str(swarm.home()), str(folder / "meet")]
            command = [sys.executable, "-m", "scenarios.trainers.trainer_shapes", "--case", case, "--rank"]
            said = outputs([[*command, str(rank), *words] for rank in range(WORLD)], RANKS_WITHIN_S)
    rows = json.loads(said[0])[1:]
    found: dict[str, Any] = {"case": case}
    for i, kind in enumerate(("", "cpu_")):
        found |= {
            f"{kind}copy_s": statistics.median(copy[i] for copy, _ in rows),
            f"{kind}publish_s": statistics.median(publish[i] for _, publish in rows),
            f"{kind}publish_over_copy": statistics.median(publish[i] / copy[i] for copy, publish in rows),
        }
    return found | {
        "cores": os.cpu_count(),
        "load_before": load,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: both")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options.case[0], options.rank, int(options.more[0]), *options.more[1:])
    found = [measure(case, options.steps) for case in options.case or CASES]
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{'case':<6}{'':>6}{'copy, ms':>10}{'publish, ms':>13}{'publish / copy':>16}")
    for row in found:
        for kind, name in (("", "clock"), ("cpu_", "CPU")):
            copy_s, publish_s, ratio = (row[f"{kind}{what}"] for what in ("copy_s", "publish_s", "publish_over_copy"))
            print(f"{row['case']:<6}{name:>6}{1e3 * copy_s:>10.1f}{1e3 * publish_s:>13.1f}{ratio:>16.2f}")
    print(f"{found[0]['cores']} cores, load {found[0]['load_before']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
