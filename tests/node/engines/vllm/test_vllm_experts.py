"""Mixtures of experts on a real vLLM: written in place in the order in which its kernel keeps them."""

from pathlib import Path

import pytest

from codec import write_checkpoint
from node.engines.vllm.installed import installed
from scenarios.engines.engine_bench import SMALL, bench
from scenarios.engines.engine_models import make_experts, step_of

PROMPTS = [list(range(3 + i, 40 + i)) for i in range(3)]


@pytest.mark.vllm
@pytest.mark.long
def test_repacked_experts_follow_in_place(python: Path, fresh, tmp_path: Path) -> None:
    """Also experts whose rows the kernel pads; also after everything was loaded again, by the kernel's own code."""
    folder = make_experts(tmp_path / "experts", narrow=48)
    with bench(folder, tmp_path / "home", python, threads=1) as live:
        assert live.engine.classes.loaded == {}
        assert live.engine.unreadable == ""  # its memory can be the replica
        for number in range(3):
            live.update(step_of(live.replica, number, 0.3))
            assert (live.engine.live_hashes() == live.replica.hashes).all()
        after = live.greedy(PROMPTS, 16)
        assert live.reload() == live.replica.root
        assert (live.engine.live_hashes() == live.replica.hashes).all()
        assert live.greedy(PROMPTS, 16) == after
        experts = [t.name for t in live.replica.layout.tensors if ".experts.3." in t.name]
        live.update(step_of(live.replica, 9, 0.5, names=experts))
        assert (live.engine.live_hashes() == live.replica.hashes).all()
        write_checkpoint(tmp_path / "now", live.replica.layout, live.replica.bits, live.checkpoint.files)
        assert fresh([tmp_path / "now"], PROMPTS, 16) == [live.greedy(PROMPTS, 16)]


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "flashinfer_cutlass", "flashinfer_trtllm"])
def test_experts_in_the_order_of_a_gpus_kernel_follow_in_place(python: Path, tmp_path: Path, kernel: str) -> None:
    if installed(python).cpu:
        pytest.skip("not run: this vLLM is for CPUs")
    folder = make_experts(tmp_path / "experts")
    with bench(folder, tmp_path / "home", python, more=(*SMALL, "--moe-backend", kernel)) as live:
        assert live.engine.classes.loaded == {}
        for number in range(3):
            live.update(step_of(live.replica, number, 0.3))
            assert (live.engine.live_hashes() == live.replica.hashes).all()
        assert live.reload() == live.replica.root
        assert (live.engine.live_hashes() == live.replica.hashes).all()
