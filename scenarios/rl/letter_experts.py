"""A small mixture of experts that sorts letters, for scenarios and tests of routes."""

from pathlib import Path

__all__ = ["make_letter_experts"]


def make_letter_experts(
    folder: Path,
    *,
    layers: int = 2,
    experts: int = 8,
    chosen: int = 2,
    hidden: int = 32,
    letters: int = 3,
    steps: int = 2,
) -> Path:
    """Make, train for `steps` steps and save a Qwen3-MoE with the tokenizer of `tiny`. Returns `folder`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from node.trainers.grpo.task import SortLetters
    from node.trainers.grpo.tiny import TinyRecipe, answers, letters_tokenizer
    from node.trainers.grpo.warmup import fit, save_bf16

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=hidden // 2,
        num_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1, norm_topk_prob=True,
        tie_word_embeddings=False, eos_token_id=SortLetters.END, pad_token_id=SortLetters.END + 1, bos_token_id=None,
        head_dim=16,  # pyright: ignore[reportCallIssue] - the model reads it, the configuration does not declare it
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        batches = answers(TinyRecipe(letters=letters, rows=32))
        fit(model, batches, steps=steps, lr=2e-3, warmup_steps=2, progress=lambda line: None, what="experts")
    save_bf16(model, folder)
    letters_tokenizer().save_pretrained(folder)
    return folder
