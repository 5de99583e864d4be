"""Whether an engine serves the swarm's model, and the sentence for the user when it does not."""

from collections.abc import Sequence

from codec import Layout
from codec.checkpoint import is_model_file
from codec.errors import UsageError
from codec.parts import DRAFT, part_of, policy_base
from node.engines.vllm.plugin.swarm_vllm.messages import Front, Mapped, Tensor

__all__ = ["check_draft", "check_files", "merge_maps", "not_reloadable", "tensors_of"]


def check_files(layout: Layout, facts: Front, program: str) -> None:
    """Raises `UsageError` unless the engine's config, tokenizer and chat template are the swarm's: they give tokens
    their meaning. `program`: what the user knows the engine as, here and below. Files of a draft model are not
    compared: vLLM loads those that the node has written for it."""
    wanted = policy_base(layout).files
    for spec in wanted:
        theirs = facts.files.get(spec.name)
        if theirs is None:
            raise UsageError(
                f"{program}'s model folder lacks the swarm's {spec.name}: serve a copy of the swarm's base."
            )
        if theirs != spec.hash:
            raise UsageError(
                f"{program}'s {spec.name} is not the swarm's: serve a copy of the swarm's base, unchanged."
            )
    ours = {spec.name for spec in wanted}
    for name in sorted(facts.files):
        if is_model_file(name) and name not in ours:  # vLLM prefers a chat template file to the tokenizer's template
            raise UsageError(
                f"{program}'s model folder has a {name} that the swarm's has not: serve a copy of its base."
            )


def tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    """The layout's tensors as the plugin's messages describe them."""
    return tuple(Tensor((t.name, *t.aliases), t.dtype, t.shape, layout.offset(t.name)) for t in layout.tensors)


def merge_maps(maps: Sequence[Mapped], program: str) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """(the modules that each tensor feeds on any rank, why some tensors cannot be scattered), by tensor.

    Raises `UsageError` for a tensor that is on no rank.
    """
    modules = {name: frozenset(module for found in maps for module in found.modules[name]) for name in maps[0].modules}
    opaque = {name: why for found in maps for name, why in found.opaque.items()}
    missing = [name for name in modules if name not in opaque and not any(found.covered[name] for found in maps)]
    if missing:
        raise UsageError(
            f"{program}'s model has no place for the checkpoint's {missing[0]}, so it would not compute what the "
            "trainer does. Use --engine transformers, or a release that has one; or start the swarm from a checkpoint "
            "without it, if the model does not need it."
        )
    return modules, opaque


def check_draft(loaded: dict[str, str]) -> None:
    """Raises `UsageError` when a tensor of the draft model is not written in place. `loaded`: why, by tensor."""
    for name, why in sorted(loaded.items()):
        if part_of(name) == DRAFT:
            raise UsageError(
                f"vLLM cannot keep the draft model up to date: its {name.partition('/')[2]} cannot be written in place "
                f"({why}). Hold it without loading it: --draft-tokens 0."
            )


def not_reloadable(loaded: dict[str, str], error: str, program: str) -> str:
    """The sentence for an engine whose tensors can neither be scattered nor loaded again.

    `loaded`: why each tensor cannot be written in place. `error`: the plugin's message, which may name one of them.
    """
    words = error.split()
    name = next((name for name in sorted(loaded) if name in words), min(loaded))
    return (
        f"This {program} cannot follow the swarm. {name} cannot be written in place ({loaded[name]}), and {error}. "
        "Choose a kernel that leaves weights as they are (for experts, a GPU and --moe-backend triton), or use "
        "--engine transformers."
    )
