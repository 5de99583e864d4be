"""The publish lines of one process: of the base and of each adapter that it publishes, each made at its first use."""

import time
from functools import partial
from pathlib import Path

from codec.errors import SwarmError
from node.trainers.attach import Attachment, attach_adapter, attach_base, default_threads
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedlink import ANSWER_WITHIN_S, SeedProcess, ask_state
from node.trainers.connection.seedwatch import SeedWatch
from node.trainers.errors import SwarmDown
from node.trainers.publish.adapter_line import AdapterLine
from node.trainers.publish.line import PublishLine
from node.trainers.publish.publication import Publication
from node.trainers.standing import holders
from node.trainers.tensors.adapter_slot import check_name

__all__ = ["PublishLines"]


class PublishLines:
    """The lines to the seed of `home`. Its methods are called from the trainer's thread."""

    def __init__(
        self, home: Path, threads: int | None, seed: SeedProcess | None, attachment: Attachment | None = None
    ) -> None:
        """`threads`: encoder threads of each line; None: `default_threads`. `seed`: if this process started it.
        `attachment`: to the base; None: made at the first use, which reserves the memory for its copies.

        Raises `SwarmDown`, `SwarmTimeout`.
        """
        self.home = home
        self._threads, self._seed = threads, seed
        self._watch = SeedWatch(home, seed)
        self._base = None if attachment is None else self._line(attachment)
        self._adapters: dict[str, AdapterLine] = {}
        self._found: tuple[int, int] = (0, 0)
        self._closed = False
        if attachment is None:
            self._found = ask_state(home).swarm.head or (0, 0)

    def base(self, step: int = 0, timeout_s: float = ANSWER_WITHIN_S) -> PublishLine:
        """The line of the base. `step`, `timeout_s`: of the publish that needs it, which waits as long for a seed that
        has ended.

        Raises what `node.trainers.attach.attach_base` raises.
        """
        if self._base is None:
            self._check_open()
            self._watch.wait_until_up(None, step, Wait(timeout_s, lambda: f"publish of step {step} waits for the seed"))
            self._base = self._line(attach_base(self.home, self._seed))
        return self._base

    def adapter(self, name: str, step: int, timeout_s: float) -> AdapterLine:
        """The line of an adapter. `step`, `timeout_s`: as in `base`.

        Raises `UsageError` when it has no slot and none is free, `PublishFailed` when another process publishes it,
        `SwarmDown`, `SwarmTimeout`.
        """
        if name not in self._adapters:
            self._check_open()
            check_name(name)
            what = f"publish of step {step} of the adapter {name!r} waits for the seed"
            self._watch.wait_until_up(None, step, Wait(timeout_s, lambda: what))
            threads = self._threads or default_threads(1)
            attachment = attach_adapter(self.home, name, self._seed)
            self._adapters[name] = AdapterLine(attachment, threads, partial(holders, self.home))
        return self._adapters[name]

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return max((line.head for line in self._all()), default=self._found)

    def head_of(self, adapter: str) -> tuple[int, int]:
        """The newest version, as far as this process knows, that may have changed `adapter` (empty: the base) or the
        base."""
        return max((line.head for line in self._lines_of(adapter)), default=self._found)

    def unsealed_of(self, adapter: str) -> list[Publication]:
        """The publications on their way that change `adapter` (empty: the base) or the base."""
        return [publication for line in self._lines_of(adapter) for publication in line.unsealed()]

    def _lines_of(self, adapter: str) -> list[PublishLine]:
        base = [] if self._base is None else [self._base]
        return base + ([self._adapters[adapter].line] if adapter in self._adapters else [])

    @property
    def last_error(self) -> SwarmError | None:
        """Of the newest publish of the base that failed in the background; if none did, of an adapter."""
        return next((line.last_error for line in self._all() if line.last_error is not None), None)

    def unsealed(self) -> list[Publication]:
        """The publications on their way: of the base, then of each adapter, oldest first."""
        return [publication for line in self._all() for publication in line.unsealed()]

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, at most `timeout_s` in all, then disconnect. Safe to call twice.

        Raises the error of the first publication that was not sealed.
        """
        self._closed = True
        deadline = time.monotonic() + timeout_s
        errors: list[SwarmError] = []
        for line in self._all():
            try:
                line.close(max(0.0, deadline - time.monotonic()))
            except SwarmError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmDown("This swarm was closed.")

    def _line(self, attachment: Attachment) -> PublishLine:
        threads = self._threads or default_threads(attachment.rank_info.world)
        return PublishLine(attachment, threads, partial(holders, self.home))

    def _all(self) -> list[PublishLine]:
        base = [] if self._base is None else [self._base]
        return base + [adapter.line for adapter in self._adapters.values()]
