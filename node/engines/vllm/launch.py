"""Where a driver's vLLM comes from: started by the driver, or already running at a URL."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from codec.errors import UsageError
from node.engines.base import EXACT_SEED, JUDGES, OPTIONS, PORTABLE_DRAWS, SCORE_OPTIONS
from node.engines.vllm.installed import PLUGIN, Installed
from node.engines.vllm.server import Server, ServerOptions, attach_to
from node.engines.vllm.speculation import DraftModel

__all__ = ["Launcher", "RunningVllm", "StartedVllm"]


class Launcher(Protocol):
    """Makes one vLLM connect to its driver."""

    @property
    def loads_replica(self) -> bool:
        """The vLLM loads its first weights from the replica, not from a folder of its own."""
        ...

    @property
    def abilities(self) -> frozenset[str]:
        """See `Engine.abilities`."""
        ...

    @property
    def kind(self) -> str:
        """See `Engine.kind`."""
        ...

    def launch(
        self, folder: Path, socket: Path, adapters: tuple[str, ...] = (), draft: DraftModel | None = None
    ) -> None:
        """Return when vLLM's API server has been told to connect to `socket`. `folder`: the swarm's small files.
        `adapters`: the flags that give a vLLM room for the swarm's adapters; empty: it has none. `draft`: the
        model by which a vLLM that is started here proposes tokens; None: it does not.

        Raises `UsageError` with what the user can do.
        """
        ...


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """A vLLM that the driver starts in the environment `where`. It ends with the driver's process group."""

    where: Installed
    log: Path
    options: ServerOptions

    @property
    def loads_replica(self) -> bool:
        return True

    @property
    def abilities(self) -> frozenset[str]:
        # vLLM rounds a token's logits by what else is in its batch, unless it is told not to before it starts. Only
        # vLLMs for GPUs can be told.
        exact = not self.where.cpu and os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        # On GPUs vLLM has a second model runner with a sampler of its own, and none of this was run there.
        judges = self.where.cpu and self.where.judges
        drafts = any(flag.startswith(("--speculative", "-sc")) for flag in self.options.flags)
        named = {EXACT_SEED: exact, JUDGES: judges, PORTABLE_DRAWS: judges and not drafts}
        return frozenset({OPTIONS, SCORE_OPTIONS, *(ability for ability, able in named.items() if able)})

    @property
    def kind(self) -> str:
        return f"vllm/{self.where.version}/{'cpu' if self.where.cpu else 'gpu'}"

    def launch(
        self, folder: Path, socket: Path, adapters: tuple[str, ...] = (), draft: DraftModel | None = None
    ) -> None:
        room = adapters if self.where.adapts else ()  # an older plugin refuses a vLLM with adapters
        if draft is not None and not self.where.drafts:
            raise UsageError(
                f"The plugin in {self.where.python}'s environment is too old for a draft model: install it again "
                f"({PLUGIN}), or use --draft-tokens 0."
            )
        options = replace(self.options, flags=(*room, *self.options.flags))
        server = Server(self.where, folder, self.log, socket, options, draft)
        server.wait_ready()
        attach_to(f"http://127.0.0.1:{self.options.port}", socket)


@dataclass(frozen=True, slots=True)
class RunningVllm:
    """A vLLM that the user runs. It outlives the driver."""

    url: str

    @property
    def loads_replica(self) -> bool:
        return False

    @property
    def abilities(self) -> frozenset[str]:
        return frozenset({OPTIONS, SCORE_OPTIONS})

    @property
    def kind(self) -> str:
        return "vllm"

    def launch(
        self, folder: Path, socket: Path, adapters: tuple[str, ...] = (), draft: DraftModel | None = None
    ) -> None:
        attach_to(self.url, socket)
