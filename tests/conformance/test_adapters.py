"""Every adapter of the installed peft: the published weights equal peft's merge, or the adapter is refused by name."""

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
"""By adapter: a part of the refusal. No merge is exact for these, or the checkpoint cannot hold it."""
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
"""One adapter for each way of merging, and each reason to refuse."""
OPTIONAL = {"ADAMSS"}
"""peft builds these only with further packages."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_few_adapters(name: str) -> None:
    _check_adapter(name)


@pytest.mark.conformance
@pytest.mark.parametrize("name", BY_KIND)
def test_an_adapter_of_each_kind(name: str) -> None:
    _check_adapter(name)


@pytest.mark.conformance
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(adapters()) - set(EVERYDAY) - set(BY_KIND)))
def test_every_adapter(name: str) -> None:
    _check_adapter(name)


def _check_adapter(name: str) -> None:
    cell = run_adapter(name)
    if name in OPTIONAL and cell.outcome == "not built":
        return
    assert cell.outcome == ("refused" if name in REFUSED else "exact"), cell.why
    assert REFUSED.get(name, "") in cell.why
