"""Why a vLLM ended before it served, in a sentence for whoever started it: out of what its processes wrote."""

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
    (r"address already in use", "its port is taken. Choose another: --engine-port"),
    (
        r"model architectures? .* (is|are) not supported|architectures? .* not supported",
        "it does not know the model's architecture. Install a newer vLLM, or use --engine transformers",
    ),
    (
        r"unrecognized arguments: (?P<what>.*)",
        "it does not know {what}. `--vllm-arg` takes the flags of the vLLM that is installed",
    ),
)
_UNQUANTIZED: Final = (
    "it has no kernel for {quantization} weights on this machine. Leave out --quantization and serve the policy in the "
    "checkpoint's own bits, or use a GPU that vLLM supports {quantization} on"
)


def cause_of(log: str, *, quantization: str = "") -> str | None:
    """What to do about it; None: nobody has seen this end before. `quantization`: that of the model, if any."""
    if quantization and re.search(r"Error: .*(quant|fp8|int8|awq|gptq|_C::)", log):
        return _UNQUANTIZED.format(quantization=quantization)
    for pattern, sentence in _CAUSES:
        if (found := re.search(pattern, log, re.IGNORECASE)) is not None:
            return sentence.format(**found.groupdict())
    return None


def quantization_of(flags: Sequence[str], config: object) -> str:
    """How vLLM is to hold the weights, by its flags or the model's config; empty: as they are."""
    for at, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name in ("--quantization", "-q"):
            return value or (flags[at + 1] if at + 1 < len(flags) else "")
    told = config.get("quantization_config") if isinstance(config, dict) else None
    return str(told.get("quant_method", "")) if isinstance(told, dict) else ""


def last_error(log: str, path: Path) -> str:
    """The line that names the first cause, for whoever must find out."""
    lines = [line.strip() for line in log.splitlines()]
    said = [line for line in lines if re.search(r"\w(Error|Exception): ", line) and "initialization failed" not in line]
    said = said or [line for line in lines if line]
    return f"{said[-1][-300:]} (all of it: {path})" if said else f"it said nothing; see {path}"
