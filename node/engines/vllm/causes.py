"""Why a vLLM ended before it served, in a sentence for the user, found in the output of its processes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["cause_of", "last_error", "quantization_of"]

_CAUSES: Final = (
    (
        r"kv cache.*larger than|larger than the (maximum|available).*kv cache|max seq len .* is larger",
        "its memory does not hold one sequence of the model's length. Give --vllm-arg=--max-model-len=4096, or as much "
        "as your prompts and answers need",
    ),
    (
        r"out of memory|no available memory for the cache|free memory on device|not enough memory",
        "the model does not fit into its memory. Raise --tp, lower --engines, or change what it may use: "
        "--vllm-arg=--gpu-memory-utilization=0.95",
    ),
    (
        r"does not support LoRA yet|No supported LoRA modules",
        "it cannot serve adapters with this architecture, and this swarm has slots for them. Use --engine transformers",
    ),
    (
        r"LoRA target module (?P<module>\S+) .*could not be wrapped",
        "it cannot put adapters on {module}. Name the layers that it shall adapt: "
        "--vllm-arg=--lora-target-modules --vllm-arg=q_proj, and so on",
    ),
    (r"address already in use", "its port is taken. Choose another: --engine-port"),
    (
        r"model architectures? .* (is|are) not supported|architectures? .* not supported",
        "it does not know the model's architecture. Install a newer vLLM, or use --engine transformers",
    ),
    (
        r"unrecognized arguments: (?P<flags>.*)",
        "it does not know {flags}. `--vllm-arg` takes the flags of the vLLM that is installed",
    ),
)
_UNQUANTIZED: Final = (
    "it has no kernel for {quantization} weights on this machine. Leave out --quantization and serve the policy in the "
    "checkpoint's own bits, or use a GPU that vLLM supports {quantization} on"
)


def cause_of(log: str, *, quantization: str = "") -> str | None:
    """The cause and what to do about it; None for a cause that is not known. `quantization`: the model's, or empty."""
    if quantization and re.search(r"Error: .*(quant|fp8|int8|awq|gptq|_C::)", log):
        return _UNQUANTIZED.format(quantization=quantization)
    for pattern, sentence in _CAUSES:
        if (found := re.search(pattern, log, re.IGNORECASE)) is not None:
            return sentence.format(**found.groupdict())
    return None


def quantization_of(flags: Sequence[str], config: object) -> str:
    """The quantization that vLLM uses, by its flags or else the model's config; empty: none."""
    for at, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name in ("--quantization", "-q"):
            return value or (flags[at + 1] if at + 1 < len(flags) else "")
    section = config.get("quantization_config") if isinstance(config, dict) else None
    return str(section.get("quant_method", "")) if isinstance(section, dict) else ""


def last_error(log: str, path: Path) -> str:
    """The log's last line with an exception, or its last line, with the log's path."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [
        line for line in lines if re.search(r"\w(Error|Exception): ", line) and "initialization failed" not in line
    ]
    found = errors or [line for line in lines if line]
    return f"{found[-1][-300:]} (all of it: {path})" if found else f"it wrote nothing; see {path}"
