"""FSDP2 in real processes over gloo: the seed's bits equal a gathered checkpoint's, and no rank gathers one."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp2_ranks import bits_of, layout_of, make_net
from ranks_kit import run_ranks
from seed_kit import FakeSeed, running

from codec import Checkpoint, Replica
from node.coordinator import rank_group

WORLDS = [2, pytest.param(3, marks=pytest.mark.long)]


def base(**sizes: int) -> Replica:
    """The model before training, as the seed has it."""
    net = make_net(**sizes)
    layout = layout_of(net)
    bits = bits_of(layout, net.state_dict())
    replica = Replica.create(layout)
    for block in range(layout.n_blocks):
        spec = layout.block(block)
        replica._writable(block)[:] = bits[spec.name][spec.start : spec.start + spec.count]
    replica.rehash()
    return replica


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_root_is_that_of_the_gathered_checkpoint(tmp_path: Path, world: int):
    """fp32 masters, two backward passes a step, ties, a frozen layer, uneven shards, and no collective. The masters are
    the same, bit for bit, as without a swarm."""
    with running(tmp_path, FakeSeed(base())) as there:
        ranks = run_ranks(world, "fsdp2_ranks:train_with_and_without", str(tmp_path), 3, world == 3)
        assert len(set(ranks[0][0]["roots"])) == 3
        for on, off in ranks:
            assert on["roots"] == on["expected"] == ranks[0][0]["roots"]
            assert on["collectives"] == 0
            assert on["state"] == off["state"]
        assert there.seed.receiver.root == ranks[0][0]["roots"][-1]
        assert there.seed.receiver.rehash() == []
        assert [manifest.version for manifest in there.seed.manifests] == [1, 2, 3]
        assert there.seed.abandoned == 0


@pytest.mark.slow
@pytest.mark.long
def test_no_rank_ever_holds_the_model(tmp_path: Path):
    """A rank touches its own share of two copies and of the replica. Gathering would touch three whole models."""
    with running(tmp_path, FakeSeed(base(vocabulary=48_000))) as there:
        for found in run_ranks(3, "fsdp2_ranks:memory", str(there.home)):
            share = found["model"] / 3
            assert found["shared"] < 3 * share + 0.2 * found["model"]
            assert found["private"] < found["model"]  # the coder's scratch, which is the same for every model


SEVERAL = ("columns", "mirrored", "one_rank_refuses", "each_refuses", "busy", "goes_back")


@pytest.mark.slow
def test_two_ranks_shard_refuse_coalesce_and_go_back(tmp_path: Path):
    with contextlib.ExitStack() as stack:
        there = {}
        for name in SEVERAL:
            (tmp_path / name).mkdir()
            there[name] = stack.enter_context(running(tmp_path / name, FakeSeed(base())))
        homes = {name: str(tmp_path / name) for name in SEVERAL}
        first, second = run_ranks(2, "fsdp2_ranks:several", homes)

        for name in ("columns", "mirrored"):
            for root, expected in (first[name], second[name]):
                assert root == expected == there[name].seed.receiver.root

        for outcomes in (first["each_refuses"], second["each_refuses"]):
            assert [each for step, each in enumerate(outcomes) if step % 3 != 1] == [str(n) for n in range(1, 201)]
            assert set(outcomes[1::3]) == {"UsageError", "PublishFailed"}

        rank_0, rank_1 = first["one_rank_refuses"], second["one_rank_refuses"]
        assert (rank_0[0], rank_0[2]) == (rank_1[0], rank_1[2]) == ("1", "2")
        assert "Rank 1 of 2 could not copy" in rank_0[1]
        assert "fc.weight is torch.float16" in rank_1[1]

        assert first["busy"] == second["busy"], "the same steps are superseded on all ranks"
        assert not first["busy"][0][1]
        assert not first["busy"][-1][1]
        assert there["busy"].seed.receiver.root == first["busy"][-1][3]

        assert first["goes_back"] == second["goes_back"] == [(1, 1), (2, (1, 2)), (2, 1), (3, 0), 0]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.long
def test_a_mixture_of_experts_is_published_as_its_checkpoint_names_it(tmp_path: Path, world: int):
    """Four experts of one parameter, over two and three ranks: by experts, across them, and with adapters merged."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    folder = tmp_path / "base"
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    with contextlib.ExitStack() as stack:
        homes = {}
        for how in ("experts", "across", "adapted"):
            homes[how] = str(tmp_path / how)
            (tmp_path / how).mkdir()
            stack.enter_context(running(tmp_path / how, FakeSeed(Replica.from_checkpoint(Checkpoint.open(folder)))))
        first, *others = run_ranks(world, "fsdp2_ranks:mixture", homes, str(folder))
        for how, (root, expected) in first.items():
            assert root == expected, how
            assert all(other[how][0] == root for other in others)


@pytest.mark.slow
def test_a_dead_rank_is_a_typed_error_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_group, "RETURN_WITHIN_S", 0.5)
    with running(tmp_path, FakeSeed(base())) as there:
        outcomes = run_ranks(2, "fsdp2_ranks:a_rank_dies", str(tmp_path), dies=(1,))[0]
        assert "Rank 1 of 2" in outcomes
        assert there.seed.head == (0, 1)
        assert there.seed.abandoned == len(there.seed.attempts) - 1


@pytest.mark.slow
@pytest.mark.long
def test_every_rank_gets_the_reason_why_it_cannot_attach(tmp_path: Path):
    (tmp_path / "boot_id").write_text("elsewhere\n")
    for no_seed, hosts in run_ranks(2, "fsdp2_ranks:refusals", str(tmp_path), str(tmp_path / "boot_id")):
        assert "UsageError" in no_seed
        assert "swarm-node seed --base" in no_seed
        assert "The ranks are on 2 hosts" in hosts


def test_the_masters_are_rounded_as_torch_rounds():
    net = make_net()
    layout = layout_of(net)
    words = bits_of(layout, net.state_dict())["emb.weight"]
    master = net.emb.weight.detach().numpy().view(np.uint32).astype(np.uint64).reshape(-1)
    nearest_even = ((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(words, nearest_even)
    assert torch.get_default_dtype() is torch.float32
