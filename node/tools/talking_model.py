"""A tiny model that says which version it is, for trying a swarm: made by this wheel, without torch and without a
download.

It is a Llama in the format of Hugging Face, a megabyte large. Its attention and its MLP add nothing, so the last token
alone decides the next one: `lm_head` is a table of what follows what. Step k of it differs from step k - 1 in the row
that says the number, and in some weights that have no effect, as after a training step.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import FileSpec, Layout, TensorSpec, write_checkpoint

__all__ = ["MOST_STEPS", "says", "write_model", "write_steps"]

MOST_STEPS: Final = 99
_WORDS: Final = ("▁Hello,", "▁I", "▁am", "▁version", *(f"▁{number}." for number in range(MOST_STEPS + 1)))
_SPECIAL: Final = ("<unknown>", "<end>", "<user>", "<answer>")
_VOCABULARY: Final = (*_SPECIAL, *_WORDS)
_SIZE: Final = 128
"""Of the hidden state: each word has an axis of its own."""
_INNER: Final = 512
_LAYERS: Final = 2
_SURE: Final = 24.0
"""Logit of the word that follows."""
_CHANGED: Final = 0.01
"""Share of the weights without effect that a step changes."""

_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": _SIZE,
    "intermediate_size": _INNER, "num_hidden_layers": _LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": len(_VOCABULARY), "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
_TEMPLATE: Final = (
    "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def says(step: int) -> str:
    """What the model of this step answers to anything."""
    return f"Hello, I am version {step}."


def write_model(folder: Path) -> None:
    """Write the model of step 0. Raises `UsageError` if the folder exists."""
    _write(folder, 0)


def write_steps(folder: Path, steps: int) -> None:
    """Write `folder/step_1` to `folder/step_N`, the checkpoints of a trainer. Raises `UsageError` if one exists."""
    for step in range(1, steps + 1):
        _write(folder / f"step_{step}", step)


def _write(folder: Path, step: int) -> None:
    files = {
        "config.json": json.dumps(_CONFIG, indent=1).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 1, "do_sample": False}).encode(),
        "tokenizer.json": json.dumps(_tokenizer(), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unknown>",
            "model_max_length": 2048, "chat_template": _TEMPLATE,
        }).encode(),
    }  # fmt: skip
    tensors = _tensors(step)
    specs = tuple(TensorSpec(name, "BF16", values.shape) for name, values in tensors.items())
    small = tuple(FileSpec(name, len(data), blake3(data).digest()) for name, data in sorted(files.items()))
    layout = Layout(specs, small)
    write_checkpoint(folder, layout, lambda name: _bfloat16(tensors[name]).ravel(), files)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _tensors(step: int) -> dict[str, NDArray[np.float32]]:
    """All weights, in the order of their names."""
    words, chance = len(_VOCABULARY), np.random.default_rng(0)

    def idle(*shape: int) -> NDArray[np.float32]:
        return (0.02 * chance.standard_normal(shape)).astype(np.float32)

    eye = np.zeros((words, _SIZE), np.float32)
    np.fill_diagonal(eye, 1.0)
    tensors = {"lm_head.weight": _follows(step), "model.embed_tokens.weight": eye}
    tensors["model.norm.weight"] = np.ones(_SIZE, np.float32)
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = np.ones(_SIZE, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = idle(_SIZE, _SIZE)
        tensors[f"{at}.self_attn.o_proj.weight"] = np.zeros((_SIZE, _SIZE), np.float32)
        tensors[f"{at}.mlp.gate_proj.weight"] = idle(_INNER, _SIZE)
        tensors[f"{at}.mlp.up_proj.weight"] = idle(_INNER, _SIZE)
        tensors[f"{at}.mlp.down_proj.weight"] = np.zeros((_SIZE, _INNER), np.float32)
    for number in range(1, step + 1):
        _train(tensors, number)
    return dict(sorted(tensors.items()))


def _train(tensors: dict[str, NDArray[np.float32]], step: int) -> None:
    """Change a share of the weights that have no effect."""
    chance = np.random.default_rng(step)
    for layer in range(_LAYERS):
        for name in ("gate_proj", "up_proj"):
            flat = tensors[f"model.layers.{layer}.mlp.{name}.weight"].reshape(-1)
            chosen = chance.choice(flat.size, round(_CHANGED * flat.size), replace=False)
            flat[chosen] *= np.float32(1.0 + 2.0**-6)


def _follows(step: int) -> NDArray[np.float32]:
    """The table of what follows what. The final norm makes the hidden state of a word sqrt(size) long."""
    table = np.zeros((len(_VOCABULARY), _SIZE), np.float32)
    number, end = _VOCABULARY.index(f"▁{step}."), _VOCABULARY.index("<end>")
    follows = dict.fromkeys(range(len(_VOCABULARY)), _VOCABULARY.index("▁Hello,"))
    follows |= {_VOCABULARY.index(one): _VOCABULARY.index(other) for one, other in pairwise(_WORDS[:4])}
    follows |= {_VOCABULARY.index("▁version"): number, number: end, end: end}
    for word, following in follows.items():
        table[following, word] = _SURE / np.sqrt(_SIZE)
    return table


def _tokenizer() -> dict[str, object]:
    """tokenizer.json: whole words; one that the model does not have is <unknown>."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": index, "content": word, **flags} for index, word in enumerate(_SPECIAL)],
        "normalizer": None, "pre_tokenizer": space, "post_processor": None, "decoder": space,
        "model": {
            "type": "WordLevel", "vocab": {word: index for index, word in enumerate(_VOCABULARY)},
            "unk_token": "<unknown>",
        },
    }  # fmt: skip
