"""Where a driver's SGLang comes from: started by the driver, or already running at a URL (see `vllm.launch`)."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from codec.errors import UsageError
from node.engines.base import JUDGES, OPTIONS, PORTABLE_DRAWS, SCORE_OPTIONS
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.sglang.installed import Installed
from node.engines.sglang.plugin.swarm_sglang.calls import ROWS_ALIKE
from node.engines.sglang.server import Server, ServerOptions
from node.engines.vllm.speculation import DraftModel

__all__ = ["RunningSglang", "StartedSglang"]


@dataclass(frozen=True, slots=True)
class StartedSglang:
    """An SGLang that the driver starts in the environment `where`. It ends with the driver's process group."""

    where: Installed
    log: Path
    options: ServerOptions

    @property
    def loads_replica(self) -> bool:
        return False  # its weights are made up until the driver connects

    @property
    def abilities(self) -> frozenset[str]:
        reads_texts = importlib.util.find_spec("tokenizers") is not None  # the driver finds stop texts
        draws = {OPTIONS} if reads_texts else set()
        if self.where.cpu:  # on GPUs none of this was run
            draws |= {PORTABLE_DRAWS} if draws else set()
            return frozenset(draws | {SCORE_OPTIONS, JUDGES})
        return frozenset(draws)

    @property
    def kind(self) -> str:
        return f"sglang/{self.where.version}/{'cpu' if self.where.cpu else 'gpu'}"

    def launch(
        self, folder: Path, socket: Path, adapters: tuple[str, ...] = (), draft: DraftModel | None = None
    ) -> None:
        _refuse_parts(adapters, draft)
        Server(self.where, folder, self.log, self.options).wait_ready()
        speak_for(
            Api(f"http://127.0.0.1:{self.options.port}"), socket, fill=True, alike=ROWS_ALIKE in self.options.flags
        )


@dataclass(frozen=True, slots=True)
class RunningSglang:
    """An SGLang that the user runs. It outlives the driver."""

    url: str

    @property
    def loads_replica(self) -> bool:
        return False

    @property
    def abilities(self) -> frozenset[str]:
        return frozenset()

    @property
    def kind(self) -> str:
        return "sglang"

    def launch(
        self, folder: Path, socket: Path, adapters: tuple[str, ...] = (), draft: DraftModel | None = None
    ) -> None:
        _refuse_parts(adapters, draft)
        speak_for(Api(self.url), socket, fill=False)


def _refuse_parts(adapters: tuple[str, ...], draft: DraftModel | None) -> None:
    if draft is not None:
        raise UsageError("SGLang does not load the swarm's draft model here: use --engine vllm.")
    if adapters:
        raise UsageError(
            "This swarm has slots for adapters, and SGLang's own do not run on CPUs and were not tried on GPUs: use "
            "--engine vllm or transformers."
        )
