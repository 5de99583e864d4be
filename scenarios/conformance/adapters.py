"""The adapter matrix: every kind of adapter that the installed peft builds on a tiny model, and LoRA's options.

Each adapter's weights are moved at random, as if trained, and the model is published. Every bit of the checkpoint is
compared with the result of `merge_and_unload` on a second model that was built and moved in the same way. A merge whose
model computes something else than the adapted model counts as wrong, even if the fault is peft's. Publishing must leave
the trained model unchanged.
"""

import dataclasses
import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import peft
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from codec import Checkpoint
from codec.errors import UsageError
from scenarios.conformance.swarm import LocalSwarm

__all__ = ["EVERYDAY", "AdapterCell", "adapters", "run_adapter"]

TARGETS: Final = ["q_proj", "v_proj"]
MERGE_ATOL: Final = 2e-3
"""Tolerance between the logits of the adapted and the merged model in float32. They usually differ by 1e-6; a lost
adapter changes them by 1."""
EVERYDAY: Final = (
    "lora",
    "lora_bias",
    "dora",
    "alora",
    "modules_to_save",
    "target_parameters, two",
    "disabled",
    "VERA",
)


@dataclass(frozen=True, slots=True)
class AdapterCell:
    """The result for one adapter.

    `outcome`: "exact", "refused" (by us, before anything was published), "not built" (by peft) or "WRONG".
    """

    name: str
    outcome: str
    why: str = ""


def _qwen(dtype: torch.dtype = torch.float32, *, tied: bool = False, bias: bool = False, use_cache: bool = True) -> Any:
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=tied, attention_bias=bias, use_cache=use_cache,
    )  # fmt: skip
    return torch.nn.Module.to(Qwen3ForCausalLM(config), dtype)


def _llama() -> Any:
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
    return LlamaForCausalLM(config)


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def _moe() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8,  # pyright: ignore[reportCallIssue] - the model reads it, the configuration does not declare it
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


Make = Callable[[], Any]


def _lora(**given: Any) -> Any:
    given = {"target_modules": TARGETS, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | given
    return peft.LoraConfig(**given)


def _two(model: Any) -> None:
    model.add_adapter("other", _lora(r=2, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "other"])


def _second_inactive(model: Any) -> None:
    model.add_adapter("other", _lora(r=2))


_LORA: Final[dict[str, tuple[Make, Make, Callable[[Any], None] | None]]] = {
    "lora": (_lora, _qwen, None),
    "lora, bf16 base": (_lora, partial(_qwen, torch.bfloat16), None),
    "lora, f16 base": (_lora, partial(_qwen, torch.float16), None),
    "rslora": (partial(_lora, use_rslora=True), _qwen, None),
    "dora": (partial(_lora, use_dora=True), _qwen, None),
    "dora, bf16 base": (partial(_lora, use_dora=True), partial(_qwen, torch.bfloat16), None),
    "lora_bias": (partial(_lora, lora_bias=True), partial(_qwen, bias=True), None),
    "lora_bias, base without": (partial(_lora, lora_bias=True), _qwen, None),
    "bias=all": (partial(_lora, bias="all"), partial(_qwen, bias=True), None),
    "bias=lora_only": (partial(_lora, bias="lora_only"), partial(_qwen, bias=True), None),
    "modules_to_save": (partial(_lora, modules_to_save=["lm_head"]), _qwen, None),
    "modules_to_save, norm": (partial(_lora, modules_to_save=["norm"]), _qwen, None),
    "modules_to_save, tied": (partial(_lora, modules_to_save=["lm_head"]), partial(_qwen, tied=True), None),
    "rank and alpha patterns": (
        partial(_lora, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}), _qwen, None),
    "embedding": (partial(_lora, target_modules=["embed_tokens", "q_proj"]), _qwen, None),
    "embedding, tied": (partial(_lora, target_modules=["embed_tokens"]), partial(_qwen, tied=True), None),
    "lm_head, tied": (partial(_lora, target_modules=["lm_head"]), partial(_qwen, tied=True), None),
    "embedding, tied together": (
        partial(_lora, target_modules=["embed_tokens"], ensure_weight_tying=True), partial(_qwen, tied=True), None),
    "fan_in_fan_out": (partial(_lora, target_modules=["c_attn"], fan_in_fan_out=True), _gpt2, None),
    "trainable tokens": (partial(_lora, trainable_token_indices=[1, 3]), _qwen, None),
    "trainable tokens, tied": (partial(_lora, trainable_token_indices=[1, 3]), partial(_qwen, tied=True), None),
    "target_parameters": (
        partial(_lora, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]), _moe, None),
    "target_parameters, two": (
        partial(_lora, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]), _moe, None),
    "alora": (partial(_lora, alora_invocation_tokens=[1, 2]), _qwen, None),
    "layer_replication": (partial(_lora, layer_replication=[[0, 2], [1, 2]]), _qwen, None),
    "pissa": (partial(_lora, init_lora_weights="pissa"), _qwen, None),
    "olora": (partial(_lora, init_lora_weights="olora"), _qwen, None),
    "all-linear, exclude_modules": (
        partial(_lora, target_modules="all-linear", exclude_modules=["k_proj"]), _qwen, None),
    "layers_to_transform": (partial(_lora, layers_to_transform=[1]), _qwen, None),
    "monteclora": (lambda: _lora(monteclora_config=peft.MontecloraConfig()), _qwen, None),
    "kasa": (lambda: _lora(kasa_config=peft.KasaConfig()), _qwen, None),
    "bdlora": (
        lambda: _lora(use_bdlora=peft.BdLoraConfig(
            nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"])), _qwen, None),
    "velora": (lambda: _lora(velora_config=peft.VeloraConfig()), _qwen, None),
    "qalora": (partial(_lora, use_qalora=True), _qwen, None),
    "two active adapters": (_lora, _qwen, _two),
    "two adapters, one active": (_lora, _qwen, _second_inactive),
    "disabled": (_lora, _qwen, lambda model: model.base_model.disable_adapter_layers()),
    "merged already": (_lora, _qwen, lambda model: model.merge_adapter()),
    "model.add_adapter": (_lora, _qwen, None),
    "model.add_adapter, modules_to_save": (partial(_lora, modules_to_save=["lm_head"], bias="all"), _qwen, None),
}  # fmt: skip

_INJECTED: Final = "model.add_adapter"
"""Adapters of this name are added by transformers, without peft's wrapper."""

_KINDS: Final[dict[str, dict[str, Any]]] = {
    "ADALORA": {"total_step": 10}, "IA3": {"feedforward_modules": []}, "FOURIERFT": {"n_frequency": 8},
    "VBLORA": {"num_vectors": 8, "vector_length": 4, "topk": 2}, "BOFT": {"boft_block_size": 4},
    "OFT": {"oft_block_size": 4, "r": 0}, "C3A": {"block_size": 8}, "MISS": {"r": 4}, "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2}, "WAVEFT": {"n_frequency": 16}, "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 4, "adapter_layers": 1},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": None},
}  # fmt: skip
"""Settings that a kind needs for a model of this size."""
_BASES: Final[dict[str, Make]] = {"BEFT": partial(_qwen, bias=True), "ADAPTION_PROMPT": _llama}
"""Base models of kinds that the default model cannot have."""


def _kinds() -> dict[str, tuple[Make, Make, Callable[[Any], None] | None]]:
    """Return every tuner of the installed peft except LoRA, by its type."""
    found: dict[str, tuple[Make, Make, Callable[[Any], None] | None]] = {}
    for kind, config in sorted(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items(), key=lambda item: item[0].value):
        if kind.value == "LORA":
            continue
        known = {field.name for field in dataclasses.fields(config)}
        given: dict[str, Any] = {"target_modules": TARGETS} if "target_modules" in known else {}
        given |= {"num_virtual_tokens": 3} if "num_virtual_tokens" in known else {}
        given |= _KINDS.get(kind.value, {})
        given = {key: value for key, value in given.items() if value is not None}
        found[kind.value] = (partial(config, task_type="CAUSAL_LM", **given), _BASES.get(kind.value, _qwen), None)
    found["XLORA"] = (_xlora, partial(_qwen, use_cache=False), None)
    return found


def _xlora() -> Any:
    """Return the config of X-LoRA, which mixes trained adapters: one here."""
    folder = Path(tempfile.gettempdir()) / "xlora"  # within the cell's own folder: see `run_adapter`
    peft.get_peft_model(_qwen(), _lora()).save_pretrained(folder)
    return peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(folder)})


def adapters() -> dict[str, tuple[Make, Make, Callable[[Any], None] | None]]:
    """Map each name to functions that make the adapter's config and the base model, and one that alters the result."""
    return _LORA | _kinds()


def run_adapter(name: str) -> AdapterCell:
    """Publish and compare one adapter."""
    with tempfile.TemporaryDirectory() as top:
        before, tempfile.tempdir = tempfile.tempdir, top
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _run(name, Path(top))
        finally:
            tempfile.tempdir = before
            gc.collect()


def _run(name: str, top: Path) -> AdapterCell:
    def cell(outcome: str, why: object = "") -> AdapterCell:
        return AdapterCell(name, outcome, " ".join(str(why).split())[:260])

    config, make, then = adapters()[name]
    torch.manual_seed(0)
    make().save_pretrained(top / "base")
    try:
        model = _adapted(top / "base", config, then, inject=name.startswith(_INJECTED))
        other = _adapted(top / "base", config, then)
    except Exception as error:  # peft cannot build it
        return cell("not built", f"{type(error).__name__}: {error}")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    try:
        swarm = LocalSwarm(top / "base", model)
    except UsageError as error:
        return cell("refused", error)
    try:
        swarm.publish(model)
        touched = [key for key, tensor in model.state_dict().items() if not _same(tensor, before[key])]
        if touched:
            return cell("WRONG", f"the model was changed: {touched[0]}")
        return cell(*_compare(swarm, other, top / "merged"))
    finally:
        swarm.close()


def _adapted(base: Path, config: Make, then: Callable[[Any], None] | None, *, inject: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    torch.manual_seed(1)
    if inject:
        model.add_adapter(config())
    adapted = (model if inject else peft.get_peft_model(model, config())).eval()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=random) * 0.05).to(parameter.dtype))
    if then is not None:
        then(adapted)
    return adapted


@torch.no_grad()
def _compare(swarm: LocalSwarm, other: Any, folder: Path) -> tuple[str, str]:
    ids = torch.arange(1, 9)[None]
    adapted = other(ids).logits.float()
    try:
        merged = other.merge_and_unload()
    except Exception as error:  # peft refuses a merge that we have published
        return "WRONG", f"peft refuses to merge it: {error}"
    merged.save_pretrained(folder)
    theirs = Checkpoint.open(folder)
    for spec in swarm.layout.tensors:
        if not np.array_equal(theirs.bits(spec.name), swarm.node.bits(spec.name)):
            return "WRONG", f"{spec.name} is not what merge_and_unload gives"
    apart = float((merged(ids).logits.float() - adapted).abs().max())
    if apart > (MERGE_ATOL if merged.dtype == torch.float32 else 10 * MERGE_ATOL):
        return "WRONG", f"the merged model's logits are {apart:.3g} from the adapted one's"
    return "exact", ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
