"""A node that draws with vLLM, for checkers that read its samples with transformers: two engines, so two classes."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from codec.checkpoint import write_checkpoint
from node.engines.base import Completion, Prompt, SamplingParams
from scenarios.engines.engine_bench import Bench, bench
from scenarios.engines.vllm_environment import vllm_python
from scenarios.verification.models import Versions

__all__ = ["VllmAuthor", "vllm_author"]

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "32")


class VllmAuthor:
    """Draws by the weights of one version."""

    def __init__(self, live: Bench) -> None:
        self._live = live

    def draw(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Completions in the prompts' order."""
        return self._live.generate(prompts, sampling)


@contextmanager
def vllm_author(versions: Versions, version: int) -> Iterator[VllmAuthor]:
    """Run a vLLM with the bits of a version, in the dtype of the checkpoint, while the block runs."""
    with tempfile.TemporaryDirectory() as home:
        folder, bits = Path(home) / "model", versions.bits(version)
        write_checkpoint(folder, versions.layout, lambda name: bits[name], versions.files)
        with bench(folder, Path(home) / "vllm", vllm_python(), more=FLAGS, threads=1) as live:
            yield VllmAuthor(live)
