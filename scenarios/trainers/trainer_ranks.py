"""One rank of the trainer in `scenarios.trainers.overhead`.

    python -m scenarios.trainers.trainer_ranks MEET RANK WORLD STEPS [HOME BASE]

Trains a small model with fp32 masters under FSDP2 over gloo. MEET is the file over which the ranks find each other.
With HOME and BASE it publishes each step to the seed in HOME. Prints one JSON line: the published roots, those of the
gathered bf16 checkpoints, and a hash of the masters at the end.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.fsdp import fully_shard

from codec import Checkpoint, Layout, TensorSpec, state_root, write_checkpoint
from codec.staging import block_hash
from node import Swarm

__all__ = ["Net", "main", "write_base"]

VOCABULARY, WIDTH, LAYERS = 5000, 512, 2
CONFIG = b'{"model_type": "none", "tie_word_embeddings": true}'


class Net(torch.nn.Module):
    """A tied embedding of three blocks, which no number of ranks divides evenly, some layers, and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.frozen = torch.nn.Linear(WIDTH, 33).requires_grad_(False)
        self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return torch.nn.functional.cross_entropy(self.lm_head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def write_base(folder: Path) -> None:
    """Write the bf16 checkpoint of the model before training."""
    net = Net()
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "lm_head.weight"}
    specs = tuple(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in sorted(state.items()))
    write_checkpoint(folder, Layout(specs), lambda name: _bits(state[name]), {"config.json": CONFIG})


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def _gathered(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in net.state_dict().items()}


def _root(layout: Layout, state: dict[str, torch.Tensor]) -> bytes:
    hashes = np.zeros((layout.n_blocks, 32), np.uint8)
    for spec in layout.tensors:
        bits = _bits(state[spec.name])
        for block in layout.blocks_of(spec.name):
            at = layout.block(block)
            hashes[block] = np.frombuffer(block_hash(bits[at.start : at.start + at.count]), np.uint8)
    return state_root(layout.hash, hashes)


def main(words: list[str]) -> dict[str, Any]:
    """Train as the module's description says. `words` are its arguments."""
    meet, rank, world, steps = words[0], int(words[1]), int(words[2]), int(words[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    net = Net()
    fully_shard(net)
    adam = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    swarm = Swarm.attach(net, home=words[4], start=False) if len(words) > 4 else None
    layout = Checkpoint.open(words[5]).layout if len(words) > 5 else None
    roots: list[str] = []
    gathered: list[str] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        net(torch.randint(0, VOCABULARY, (4, 16), generator=generator)).backward()
        adam.step()
        adam.zero_grad()
        if swarm is not None and layout is not None:
            roots.append((swarm.publish(net, step=step).wait(quorum=1.0, timeout_s=60).root or b"").hex())
            gathered.append(_root(layout, _gathered(net)).hex())
    masters = blake3(b"".join(tensor.numpy().tobytes() for tensor in _gathered(net).values())).hexdigest()
    dist.barrier()
    if swarm is not None:
        swarm.close()
    return {"roots": roots, "gathered": gathered, "masters": masters}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])), flush=True)
