"""Every adapter of the installed peft: what is published is what its merge gives, or it is refused by name."""

import pytest

pytest.importorskip("peft")
from scenarios.conformance.adapters import EVERYDAY, adapters, run_adapter

REFUSED = {
    "lora_bias, base without": "has no bias",
    "modules_to_save, tied": "tied in the base checkpoint and differ",
    "embedding, tied": "tied in the base checkpoint and differ",
    "lm_head, tied": "tied in the base checkpoint and differ",
    "embedding, tied together": "share one tied weight",
    "alora": "aLoRA does not support merging",
    "layer_replication": "was the model changed",
    "disabled": "switched off",
    "ADAPTION_PROMPT": "ADAPTION_PROMPT",
    "CARTRIDGE": "CARTRIDGE",
    "CPT": "CPT",
    "LILY": "lily",
    "MULTITASK_PROMPT_TUNING": "MULTITASK_PROMPT_TUNING",
    "POLY": "POLY",
    "PREFIX_TUNING": "PREFIX_TUNING",
    "PROMPT_TUNING": "PROMPT_TUNING",
    "P_TUNING": "P_TUNING",
    "SHADOW": "SHADOW",
    "XLORA": "XLORA",
}
"""Adapter, and what the sentence says: no merge is exact for these, or the checkpoint cannot hold it."""
BY_KIND = [
    "lora, f16 base",  # a dtype's rounding
    "dora, bf16 base",  # a scale of the whole merged weight
    "rank and alpha patterns",
    "lora_bias, base without",
    "modules_to_save, tied",
    "trainable tokens, tied",
    "target_parameters",  # experts
    "embedding, tied together",
    "fan_in_fan_out",  # stored transposed
    "two active adapters",
    "model.add_adapter",  # without peft's wrapper
    "merged already",
    "IA3",  # multiplies
    "LN_TUNING",  # no matrix
    "PREFIX_TUNING",  # no weights
    "XLORA",  # depends on the input
]
"""One for each way of merging, and each reason not to."""
OPTIONAL = {"ADAMSS"}
"""peft builds these with further packages only."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_few_adapters(name: str) -> None:
    _is_as_said(name)


@pytest.mark.conformance
@pytest.mark.parametrize("name", BY_KIND)
def test_an_adapter_of_each_kind(name: str) -> None:
    _is_as_said(name)


@pytest.mark.conformance
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(adapters()) - set(EVERYDAY) - set(BY_KIND)))
def test_every_adapter(name: str) -> None:
    _is_as_said(name)


def _is_as_said(name: str) -> None:
    cell = run_adapter(name)
    if name in OPTIONAL and cell.outcome == "not built":
        return
    assert cell.outcome == ("refused" if name in REFUSED else "exact"), cell.why
    assert REFUSED.get(name, "") in cell.why
