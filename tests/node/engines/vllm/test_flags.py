"""The flags with which a node starts its vLLM."""

import json
from pathlib import Path

import pytest

from node.engines.vllm.server import flags


@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({"num_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 8}, True),  # DeepSeek's
        ({"moe_num_experts": 8}, True),  # Ernie's
        ({"text_config": {"num_experts": 8}}, True),
        ({"hidden_size": 8, "text_config": None}, False),
    ],
)
def test_on_gpus_experts_get_a_kernel_that_does_not_repack_them(
    tmp_path: Path, config: dict[str, object], has: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = flags(tmp_path, 8000, tmp_path / "socket", 1, False)
    assert ("--moe-backend" in found) == has
    assert "--moe-backend" not in flags(tmp_path, 8000, tmp_path / "socket", 1, True)


@pytest.mark.parametrize(
    ("config", "cpu", "has"),
    [({"kv_lora_rank": 512}, True, True), ({"kv_lora_rank": 512}, False, False), ({}, True, False)],
)
def test_on_cpus_deepseeks_attention_gets_a_backend_that_can_be_reloaded(
    tmp_path: Path, config: dict[str, object], cpu: bool, has: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("CPU_MLA" in flags(tmp_path, 8000, tmp_path / "socket", 1, cpu)) == has
