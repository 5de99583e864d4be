"""Three lines in a trainer:

    swarm = Swarm.attach(model, base="Qwen/dir")
    pub = swarm.publish(model, step=step)
    for group in swarm.rollouts(prompts, n=8, sampling=...): ...

Synchronous, typed, and never in the way: whatever waits has a deadline, whatever the swarm does ends in a typed error
or in `swarm.state`, and `publish` returns as soon as the weights are copied. Needs codec, numpy, and torch where
tensors are torch's; not libp2p, not trio: the seed is a process of its own, found by its Unix socket. A model that is
sharded by FSDP2 is attached and published by every rank, with the same calls in the same order.
"""

import os
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Final

import msgspec

from codec import Layout
from codec.errors import SwarmError, UsageError
from node.engines.base import SamplingOptions, SamplingParams
from node.trainers.attach import attach, default_threads
from node.trainers.connection.patience import log
from node.trainers.connection.seedlink import SeedProcess, ask_state, home_folder
from node.trainers.errors import PromptRefused, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.held_gateway import HeldGateway
from node.trainers.messages import OpenGateway, OpenRollouts, VersionRef
from node.trainers.prompts import Prompt, Tokens, check_prompts
from node.trainers.publish.publication import Publication
from node.trainers.publish.publishing import OnBusy, PublishLine
from node.trainers.rollouts import Check, RefusedPrompt, Rollout, RolloutGroup, rollouts
from node.trainers.standing import holders, standing

__all__ = [
    "Check",
    "PromptRefused",
    "Publication",
    "RefusedPrompt",
    "Rollout",
    "RolloutGroup",
    "SamplingParams",
    "Swarm",
    "SwarmBusy",
    "SwarmDown",
    "SwarmTimeout",
]

STATE_WITHIN_S: Final = 5.0
"""Whoever looks at `state` in a training loop must not wait for a seed that is stuck."""


class Swarm:
    """A trainer's handle on its swarm. Make one with `attach`; use it from one thread, or as a context manager."""

    def __init__(
        self, home: Path, line: PublishLine, base: Path | None, seed: SeedProcess | None, max_lag: int
    ) -> None:
        self._home = home
        self._line = line
        self._tokens = Tokens(base)
        self._seed = seed
        self._max_lag = max_lag
        self._gateway: HeldGateway | None = None

    @classmethod
    def attach(
        cls,
        model: Any = None,
        *,
        base: str | Path | None = None,
        max_lag: int = 1,
        home: str | Path | None = None,
        threads: int | None = None,
        start: bool = True,
    ) -> "Swarm":
        """Find the seed of `home` (default: SWARM_HOME), or start one on the checkpoint folder `base`.

        `model`, if given, is compared with the base's tensors now rather than at the first `publish`. A model that is
        sharded by `fully_shard` must be given, and every rank must attach (a collective). `max_lag`: how many versions
        older than the newest sealed one a rollout's tokens may be when you get them. What is sealed after that, or is
        on its way while you gather a batch, adds to the lag behind the weights that you train: `RolloutGroup.oldest`
        says it, and `publish(...).wait()` before you gather rules it out. 0 is synchronous: no token is older than the
        version that you published last, sealed or not. `threads`: encoders of each rank (default: half the cores,
        shared by the ranks, at most 4). A seed started here ends with `close`, or with this process. Raises
        `UsageError` when there is no seed and none can be started, the model is another, or its ranks are on several
        hosts; `SwarmTimeout`.
        """
        folder = home_folder(home)
        base = None if base is None else Path(base).expanduser().absolute()
        found = attach(model, folder, base if start else None)
        line = PublishLine(
            found.rank_info,
            found.link,
            found.copies,
            found.ownership,
            threads or default_threads(found.rank_info.world),
            lambda publication, within_s: holders(folder, publication, within_s),
            found.peers,
            found.seed,
        )
        return cls(folder, line, base, found.seed, max_lag)

    def publish(self, model: Any, *, step: int, on_busy: OnBusy = "wait", timeout_s: float = 600.0) -> Publication:
        """Publish these weights as the next version. Returns when they are copied; the rest happens in the background.

        `model`: a `torch.nn.Module`, a mapping, or an iterable of (checkpoint name, tensor). At most two versions are
        not sealed at a time. With a third, "wait" waits for the oldest, at most `timeout_s` (then `SwarmBusy`);
        "coalesce" drops the one that has not begun, which this one replaces. Raises `UsageError` when the tensors are
        not the base's. A seed that has ended is waited for, until a minute after its end and at most `timeout_s`; then
        each call raises `SwarmDown` at once. What goes wrong later is in the publication's `error`, in `state`, and
        logged.

        Adapters are published merged, and the model is not touched for it. Nothing here runs by itself: with
        gradient accumulation, call it after the steps that should become versions.
        """
        return self._line.publish(model, step, on_busy, timeout_s)

    def resume(self, root: bytes, model: Any = None, *, timeout_s: float = 600.0) -> tuple[int, int]:
        """The trainer begins again from the checkpoint that was published with this root: bring the swarm there.

        If that is the head, nothing happens. Else the version becomes the head again, under its number in a new epoch:
        every node goes back to it, and rollouts of versions that came after it are refused. Without `model` from what
        the seed keeps (eight versions at least); with `model`, whose bits must have this root, from any. Gives
        (epoch, version) of the head. Raises `UsageError` when no version has this root, or its bits cannot be had;
        what `publish` raises.
        """
        return self._back(VersionRef(root=root), model, timeout_s)

    def rollback(self, version: int, model: Any = None, *, timeout_s: float = 600.0) -> tuple[int, int]:
        """As `resume`, by the number of a version in the history of the head."""
        return self._back(VersionRef(version=version), model, timeout_s)

    def _back(self, wanted: VersionRef, model: Any, timeout_s: float) -> tuple[int, int]:
        if model is None:
            self._line.go_back(wanted, timeout_s)
        elif wanted.root != self._line.settle(timeout_s):
            self._line.publish(model, 0, "wait", timeout_s, again=wanted).wait(timeout_s=timeout_s)
        return self._line.head

    def rollouts(
        self,
        prompts: Iterable[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        key: str | None = None,
        whole: bool = False,
        check: Check | None = None,
        timeout_s: float = 600.0,
    ) -> Iterator[RolloutGroup | RefusedPrompt]:
        """`n` accepted samples of every prompt, a group at a time, as they are complete; of those that are complete,
        the earliest prompt first.

        `prompts` (token ids, text, or chat messages, for the base folder's tokenizer and chat template) are taken as
        fast as you take groups, so an endless iterator is fine; of a list the nodes know where it ends, and end
        together. A prompt that cannot be drawn (it is none, or longer than the model reads) is not: a `RefusedPrompt`
        comes in the place of its group, and the others go on. Look at `group.refused`, or use the group: one that was
        refused raises `PromptRefused` then.

        With a `key`, work that is done survives this process and the seed: asked again with the same key, it goes on.
        The key stands for these prompts, `n`, `sampling`, `whole` and `max_lag` from its first use on; anything else
        under it raises `UsageError`, so give each step its own. Of a list all prompts are compared before anything is
        drawn, of other iterables each when its turn comes. `whole`: each group is
        drawn by one node in one batch, so that with a `key` its bits do not depend on who draws it. `check`: look at
        samples yourself before you get them. Raises `SwarmTimeout` when no group was completed for `timeout_s`,
        `SwarmDown` when the seed stays away that long. Closing the iterator withdraws the rest.
        """
        check_prompts(prompts)
        if sampling.options == SamplingOptions():  # they ask for nothing, which every node can do
            sampling = msgspec.structs.replace(sampling, options=msgspec.UNSET)
        session = os.urandom(16).hex() if key is None else key
        total = len(prompts) if isinstance(prompts, Sized) else None
        asked = OpenRollouts(
            session, n, sampling, self._max_lag, keep=key is not None, whole=whole, total=total, refusals=True
        )
        try:
            asked = msgspec.convert(msgspec.to_builtins(asked), OpenRollouts)
        except msgspec.ValidationError as error:
            raise UsageError(f"rollouts: {error} (session: the key; 1 to 128 characters).") from error
        return rollouts(self._home, asked, prompts, self._tokens.of, timeout_s, check, self._counted_from)

    def _counted_from(self) -> tuple[int, int]:
        """The version that lags are counted from; see `attach`. Of two that are not sealed the second has not begun."""
        epoch, version = self._line.head
        waiting = [] if self._max_lag else [each for each in self._line.unsealed() if not each.superseded]
        return epoch, version + any(each.version is None or each.version > version for each in waiting)

    @property
    def state(self) -> dict[str, Any]:
        """How things stand, as plain values; see `docs/trainers.md` for each.

        Never raises, and answers within seconds: for a seed that is down or does not answer, what only it knows is
        missing, and `error` says why.
        """
        state: dict[str, Any] = {
            "head": self._line.head,
            "unsealed": [publication.step for publication in self._line.unsealed()],
        }
        try:
            state |= standing(ask_state(self._home, STATE_WITHIN_S))
        except SwarmError as error:
            state["error"] = str(error)
        if self._line.last_error is not None:
            state["publish_error"] = str(self._line.last_error)
        return state

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._line.head

    @property
    def layout(self) -> Layout:
        """The base's tensor table."""
        return self._line.layout

    @property
    def openai_url(self) -> str:
        """Where OpenAI's clients get completions from the swarm (model "policy"), on this machine only, until `close`.

        While the seed is away, requests are answered with 503 and Retry-After. Raises `SwarmDown`, `SwarmTimeout`,
        `UsageError`.
        """
        if self._gateway is None:
            asked = OpenGateway("127.0.0.1", 0, "policy", "", self._max_lag, 4096)
            self._gateway = HeldGateway(self._home, asked, log.warning)
            self._gateway.run_in_thread()
        return self._gateway.url

    def close(self, timeout_s: float = 60.0) -> None:
        """Let what was published be sealed (at most `timeout_s`), then let go. Safe to call twice.

        Raises, after everything was let go, the error of what was on its way and was not sealed: `SwarmTimeout` for
        what was given up after `timeout_s`.
        """
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None
        try:
            self._line.close(timeout_s)
        finally:
            if self._seed is not None:
                self._seed.stop()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except SwarmError:  # it was logged
            if kind is None:
                raise
