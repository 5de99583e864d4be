"""The code that each rank of `test_fsdp2.py` runs in its own process."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from codec import Layout, TensorSpec, state_root
from codec.errors import SwarmError
from codec.staging import block_hash
from node import Swarm
from node.trainers.publish import sender


class Net(torch.nn.Module):
    """A model with every special case: blocks that cross borders, uneven rows, fewer rows than ranks, ties, a frozen
    layer, a buffer."""

    def __init__(self, width: int = 1024, vocabulary: int = 1500) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(vocabulary, width)
        self.fc = torch.nn.Linear(width, 7)
        self.one = torch.nn.Linear(width, 1)
        self.frozen = torch.nn.Linear(64, 33).requires_grad_(False)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids)
        return self.head(hidden).float().logsumexp(-1).mean() + self.fc(hidden).sum() * 1e-3 + self.one(hidden).mean()


TIED = {"head.weight": "emb.weight"}


def make_net(seed: int = 0, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def layout_of(net: torch.nn.Module) -> Layout:
    """The layout of a bf16 checkpoint of the model: buffers in their own dtype, and the head's weight tied."""
    specs = []
    for name, tensor in net.state_dict().items():
        if name not in TIED:
            aliases = tuple(alias for alias, of in TIED.items() if of == name)
            kind = "F32" if name == "scale" else "BF16"
            specs.append(TensorSpec(name, kind, tuple(tensor.shape), aliases))
    return Layout(tuple(sorted(specs, key=lambda spec: spec.name)))


def bits_of(layout: Layout, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Full tensors as the bits of a checkpoint."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    found = {}
    for spec in layout.tensors:
        tensor = state[spec.name].detach().to(kinds[spec.dtype]).contiguous().reshape(-1)
        found[spec.name] = tensor.view(torch.uint8).numpy().view(spec.type.bits)
    return found


def root_of(layout: Layout, bits: dict[str, np.ndarray]) -> bytes:
    hashes = np.zeros((layout.n_blocks, 32), np.uint8)
    for block in range(layout.n_blocks):
        spec = layout.block(block)
        part = bits[spec.name][spec.start : spec.start + spec.count]
        hashes[block] = np.frombuffer(block_hash(np.ascontiguousarray(part)), np.uint8)
    return state_root(layout.hash, hashes)


def gathered(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor, whole, on every rank: the reference that publishing avoids."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in net.state_dict().items()}


def sharded(net: Net, *, mixed: bool) -> Net:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    fully_shard(net.frozen, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    net(torch.randint(0, 1500, (4, 8), generator=generator)).backward()


def memory_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


# ------------------------------------------------------------ what the tests start


def train(rank: int, world: int, home: str, steps: int, publishing_on: bool, mixed: bool) -> dict[str, Any]:
    """`steps` steps of Adam, each of two backward passes; all are published or none. Returns roots and masters."""
    net = sharded(make_net(), mixed=mixed)
    layout = layout_of(make_net())
    adam = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    swarm = Swarm.attach(net, home=home) if publishing_on else None
    roots, expected, collectives = [], [], 0
    for step in range(steps):
        for part in range(2):
            backward(net, rank, 2 * step + part)
        adam.step()
        adam.zero_grad()
        if swarm is not None:
            with CommDebugMode() as comm:
                publication = swarm.publish(net, step=step).wait(timeout_s=60)
            collectives += sum(comm.get_comm_counts().values())
            roots.append(publication.root)
            expected.append(root_of(layout, bits_of(layout, gathered(net))))
            assert publication.sealed
            assert publication.version == step + 1
    state = {name: tensor.numpy().tobytes() for name, tensor in gathered(net).items()}
    if swarm is not None:
        swarm.close()
    return {"roots": roots, "expected": expected, "collectives": collectives, "state": state}


def train_with_and_without(rank: int, world: int, home: str, steps: int, mixed: bool) -> list[dict[str, Any]]:
    return [train(rank, world, home, steps, on, mixed) for on in (True, False)]


def memory(rank: int, world: int, home: str) -> dict[str, int]:
    """Shared memory that this rank has touched after some steps, and the most that its private memory grew."""
    net = sharded(make_net(vocabulary=48_000), mixed=False)
    layout = layout_of(make_net(vocabulary=48_000))
    before = memory_kb("RssShmem")
    with Swarm.attach(net, home=home, threads=1) as swarm:
        private = most = 0
        for step in range(4):
            with torch.no_grad():
                for parameter in net.parameters():
                    local = parameter.to_local()
                    local.view(-1)[step::97].mul_(1.5)
            publication = swarm.publish(net, step=step)
            while not publication.sealed:
                most = max(most, memory_kb("RssAnon") - private)
                time.sleep(0.002)
            if step == 0:  # the coder's own scratch, the same for every model
                private, most = memory_kb("RssAnon"), 0
        return {"shared": 1024 * (memory_kb("RssShmem") - before), "private": 1024 * most, "model": layout.nbytes}


def columns(rank: int, world: int, home: str) -> tuple[bytes, bytes]:
    """Shards along the second dimension, and a layer that no rank shards."""
    from torch.distributed.tensor import Shard

    net, layout = make_net(), layout_of(make_net())
    fully_shard(net.frozen, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    fully_shard(net, ignored_params=set(net.fc.parameters()))
    with torch.no_grad():
        for parameter in net.parameters():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(1.5)
    with Swarm.attach(net, home=home) as swarm:
        root = swarm.publish(net, step=1).wait(timeout_s=60).root
    assert root is not None
    return root, root_of(layout, bits_of(layout, gathered(net)))


def mirrored(rank: int, world: int, home: str) -> tuple[bytes, bytes]:
    """HSDP: every rank holds every tensor whole, and the ranks divide the work."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    net, layout = make_net(), layout_of(make_net())
    fully_shard(net.frozen, mesh=mesh)
    fully_shard(net, mesh=mesh)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().mul_(1.5)
    with Swarm.attach(net, home=home) as swarm:
        assert 0 < len(swarm._lines.base()._encoder.blocks) < layout.n_blocks
        root = swarm.publish(net, step=1).wait(timeout_s=60).root
    assert root is not None
    return root, root_of(layout, bits_of(layout, gathered(net)))


def mixture(rank: int, world: int, homes: dict[str, str], folder: str) -> dict[str, tuple[bytes, bytes | None]]:
    """A mixture of experts with one tensor per expert in the checkpoint: sharded by experts, across them, and
    adapted."""
    import peft
    from torch.distributed.tensor import Shard
    from transformers import AutoModelForCausalLM

    found = {}
    for how, home in homes.items():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if how == "adapted":
            torch.manual_seed(1)
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, adapter)
        inner = model.get_base_model() if how == "adapted" else model
        across = (lambda parameter: Shard(1) if parameter.dim() == 3 else None) if how == "across" else None
        for layer in inner.model.layers:
            fully_shard(layer, shard_placement_fn=across)
        fully_shard(model)
        with Swarm.attach(model, home=home) as swarm:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().mul_(1.5)
            root = swarm.publish(model, step=1).wait(timeout_s=60).root
        assert root is not None
        found[how] = root, _saved_root(model, Path(folder), rank, how == "adapted")
    return found


def _saved_root(model: Any, folder: Path, rank: int, adapted: bool) -> bytes | None:
    """The root of what transformers saves of the gathered (and merged) model as bf16. None on ranks above 0."""
    import tempfile

    import peft
    from transformers import AutoModelForCausalLM

    from codec import Checkpoint

    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapted:
        plain = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    plain.load_state_dict(gathered(model))
    if rank:
        return None
    plain = plain.merge_and_unload() if adapted else plain
    with tempfile.TemporaryDirectory() as saved:
        plain.to(torch.bfloat16).save_pretrained(saved)
        written = Checkpoint.open(saved)
        layout = Checkpoint.open(folder).layout
        return root_of(layout, {name: np.array(written.bits(name)) for name in written.names})


def a_rank_dies(rank: int, world: int, home: str) -> str:
    """Rank 1 is killed before it publishes. Rank 0 gets an error, and may go on training."""
    net = sharded(make_net(), mixed=False)
    swarm = Swarm.attach(net, home=home)
    swarm.publish(net, step=0).wait(timeout_s=60)  # it may compile kernels first
    sender.OPENED_WITHIN_S = 5.0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{peer(rank)}").exists() and not _zombie(peer(rank)):
        time.sleep(0.01)
    try:
        swarm.publish(net, step=1).wait(timeout_s=60)
    except SwarmError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        swarm.close(timeout_s=1.0)
    return "published"


def one_rank_refuses(rank: int, world: int, home: str) -> list[str]:
    """Rank 1's weights have another dtype once: the step fails on both with a sentence, and the next one works."""
    outcomes = []
    net = sharded(make_net(), mixed=False)
    with Swarm.attach(net, home=home) as swarm:
        for step in range(3):
            source: Any = net.state_dict()
            if rank == 1 and step == 1:
                source["fc.weight"] = source["fc.weight"].to(torch.float16)
            try:
                publication = swarm.publish(source, step=step).wait(timeout_s=30)
                outcomes.append(f"{publication.version}")
            except SwarmError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            dist.barrier()
    return outcomes


def each_refuses(rank: int, world: int, home: str) -> list[str]:
    """In every third step one rank's weights have another dtype. The steps between are always sealed."""
    outcomes = []
    net = sharded(make_net(), mixed=False)
    with Swarm.attach(net, home=home) as swarm:
        for step in range(300):
            source: Any = net.state_dict()
            if step % 3 == 1 and rank == step % world:
                source["fc.weight"] = source["fc.weight"].to(torch.float16)
            try:
                outcomes.append(f"{swarm.publish(source, step=step).wait(timeout_s=30).version}")
            except SwarmError as error:
                outcomes.append(type(error).__name__)
            dist.barrier()
    return outcomes


def busy(rank: int, world: int, home: str) -> list[list[Any]]:
    """Six steps with `on_busy="coalesce"`, without waiting. The same steps are superseded on all ranks."""
    net = sharded(make_net(), mixed=False)
    publications = []
    with Swarm.attach(net, home=home) as swarm:
        for step in range(6):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.to_local().add_(0.01)
            publications.append(swarm.publish(net, step=step, on_busy="coalesce"))
            time.sleep(0.01 * ((step + rank) % 3))
        publications[-1].wait(timeout_s=60)
        layout = layout_of(make_net())
        last = root_of(layout, bits_of(layout, gathered(net)))
        assert publications[-1].root == last
    return [[p.step, p.superseded, p.version, p.root] for p in publications]


def goes_back(rank: int, world: int, home: str) -> list[Any]:
    """Three steps, back to the first by the seed, another step; back to the base with the trainer's weights."""
    net = sharded(make_net(), mixed=False)
    base = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found: list[Any] = []
    with Swarm.attach(net, home=home) as swarm:
        roots = []
        for step in range(3):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.to_local().mul_(1.01)
            roots.append(swarm.publish(net, step=step).wait(timeout_s=60).root)
        found.append(swarm.rollback(1))
        found.append((swarm.publish(net, step=3).wait(timeout_s=60).version, swarm.head))
        found.append(swarm.resume(roots[0], timeout_s=60))
        net.load_state_dict(base)
        found.append(swarm.rollback(0, net))
        found.append(swarm.publish(net, step=4).wait(timeout_s=60).changed)
    return found


def refusals(rank: int, world: int, home: str, boot_id: str) -> list[str]:
    """The errors of attaching without a seed, and of ranks on several hosts."""
    from node.trainers.ranks import meeting

    net, outcomes = sharded(make_net(), mixed=False), []
    for host in (meeting._BOOT_ID, Path(boot_id) if rank else meeting._BOOT_ID):
        meeting._BOOT_ID = host
        try:
            Swarm.attach(net, home=home)
        except SwarmError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def several(rank: int, world: int, homes: dict[str, str]) -> dict[str, Any]:
    """Some of the above, one after the other: it takes seconds to start a rank."""
    return {name: globals()[name](rank, world, home) for name, home in homes.items()}


def peer(rank: int) -> int:
    """The process of the other rank: both are children of one parent, which started them in order."""
    mine, parent = os.getpid(), os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    others = [int(pid) for pid in children if int(pid) != mine and b"ranks_kit" in _command(int(pid))]
    return others[0] if others else -1


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
