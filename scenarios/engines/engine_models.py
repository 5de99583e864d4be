"""Small models and made-up steps to test engines with: random weights in real architectures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec import Replica
from codec.staging import StagedBlock, StagedChunk, block_hash

__all__ = [
    "make_eagle",
    "make_experts",
    "make_latent",
    "make_llama",
    "make_qwen3",
    "make_seeing",
    "make_tokenizer",
    "make_wide_norms",
    "step_of",
]


def make_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a tokenizer of bytes and three markers, with a chat template: enough for an endpoint that handles text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, 300), initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def _save(model: Any, folder: Path, vocabulary: int, seed: int) -> Path:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # wide enough that greedy text does not repeat itself
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                spread = 0.5 if "embed" in name else 1.3 / parameter.shape[-1] ** 0.5
                parameter.normal_(0, spread, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder, vocabulary)
    return folder


def make_qwen3(
    folder: Path,
    *,
    hidden: int = 256,
    layers: int = 4,
    wide: int = 768,
    vocabulary: int = 512,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """Save a Qwen3 of random bf16 weights in `folder`: 3.4 million parameters by default."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64), num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=tied, eos_token_id=2, pad_token_id=0, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    return _save(Qwen3ForCausalLM(config), folder, vocabulary, seed)


def make_experts(
    folder: Path, *, family: str = "qwen3_moe", experts: int = 8, narrow: int = 128, seed: int = 0
) -> Path:
    """Save a Qwen3-MoE (2.2 million random bf16 parameters by default), or a Mixtral, of the same sizes.

    `narrow`: rows of each expert's gate.
    """
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 2048, "eos_token_id": 2,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "dtype": "bfloat16",
    }  # fmt: skip
    if family == "mixtral":
        config: Any = MixtralConfig(intermediate_size=narrow, num_local_experts=experts, sliding_window=None, **sizes)
        return _save(MixtralForCausalLM(config), folder, 512, seed)
    sizes["head_dim"] = 64
    config = Qwen3MoeConfig(intermediate_size=512, moe_intermediate_size=narrow, num_experts=experts, **sizes)
    return _save(Qwen3MoeForCausalLM(config), folder, 512, seed)


def make_llama(folder: Path, *, seed: int = 0) -> Path:
    """Save a Llama of 3.3 million random bf16 parameters."""
    from transformers import LlamaForCausalLM

    return _save(LlamaForCausalLM(_llama_config(4)), folder, 512, seed)


def make_eagle(folder: Path, *, seed: int = 1) -> Path:
    """Save an EAGLE head for `make_llama`: one layer of its shape, and a projection of two hidden states to one."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaModel

    config = _llama_config(1)
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden_size
    weights = {"fc.weight": torch.cat([torch.eye(width), torch.eye(width)], 1)}
    for name, parameter in LlamaModel(config).named_parameters():
        if name.startswith("layers.") and "input_layernorm" not in name:  # vLLM's EAGLE layer has no such norm
            small = torch.empty_like(parameter).normal_(0, 0.1 / parameter.shape[-1] ** 0.5, generator=generator)
            weights[name] = small if parameter.ndim == 2 else torch.ones_like(parameter)
    folder.mkdir(parents=True)
    kept = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def _llama_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=2,
        pad_token_id=0, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip


def make_latent(folder: Path, *, seed: int = 0) -> Path:
    """Save a DeepSeek-V2 without experts, of 3 million random bf16 parameters.

    vLLM keeps the weights that its attention absorbs twice.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, first_k_dense_replace=2, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None,
        dtype="bfloat16",
    )  # fmt: skip
    return _save(DeepseekV2ForCausalLM(config), folder, 512, seed)


def make_seeing(folder: Path, *, seed: int = 0) -> Path:
    """Save an Idefics3, which reads images, of half a million random bf16 parameters, with its tokenizer and image
    processor.

    Of the families that read images it is one that vLLM for CPUs runs without torchvision. An image has four tokens.
    """
    import json

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=special[3:],
    )  # fmt: skip
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)
    text = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(seed)
    joint = {"image_token_id": 3, "scale_factor": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    model = Idefics3ForConditionalGeneration(Idefics3Config(vision_config=vision, text_config=text, **joint))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.bfloat16().save_pretrained(folder)
    side = {"longest_edge": 56}
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "do_resize": True, "size": side, "max_image_size": side,
        "do_image_splitting": False, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "do_pad": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    named = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(named))
    return folder


def make_wide_norms(base: Path, folder: Path) -> Path:
    """Save `base` with the first layer's norms as float32, which an engine in bf16 cannot update in place."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(base / "model.safetensors")
    wide = {name: w.to(torch.float32) for name, w in weights.items() if "layers.0." in name and "layernorm" in name}
    assert wide
    save_file(weights | wide, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def step_of(replica: Replica, seed: int, share: float = 0.01, names: Sequence[str] | None = None) -> list[StagedChunk]:
    """Return a step that moves about `share` of the elements to a neighbouring value, in the form a node stages."""
    rng = np.random.default_rng(seed)
    out: list[StagedBlock] = []
    for block in range(replica.layout.n_blocks):
        spec = replica.layout.block(block)
        if names is not None and spec.name not in names:
            continue
        old = replica.block(block)
        count = max(1, rng.binomial(old.size, share))
        positions = np.unique(rng.integers(0, old.size, count)).astype(np.uint32)
        new: NDArray[Any] = old.copy()
        new[positions] ^= new.dtype.type(1)
        digest = block_hash(new)
        out.append(StagedBlock(block, positions, new[positions], replica.hashes[block].tobytes(), digest))
    return [StagedChunk(tuple(out))]
