"""The trainer's API. Three lines make a training loop a publisher whose rollouts come from the swarm:

    swarm = Swarm.attach(model, base="Qwen/dir")
    pub = swarm.publish(model, step=step)
    for group in swarm.rollouts(prompts, n=8, sampling=...): ...

Synchronous and typed. Every call that waits has a deadline, every failure is a typed error or a field of `swarm.state`,
and `publish` returns as soon as the weights are copied. Needs codec and numpy, and torch where the tensors are torch
tensors; neither libp2p nor trio, because the seed is a process of its own, found by its Unix socket. Every rank of a
model that FSDP2 shards attaches and publishes, with the same calls in the same order.
"""

import os
from collections.abc import Callable, Iterable, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from codec import Layout
from codec.bits import Bits
from codec.errors import SwarmError, UsageError
from codec.parts import policy_base
from node.engines.base import SamplingParams
from node.ledger.terms import Terms
from node.rewards.outcome import Reward
from node.trainers.attach import attach, find_or_start
from node.trainers.connection.patience import log
from node.trainers.connection.seedlink import SeedProcess, ask_state, home_folder
from node.trainers.errors import PromptRefused, SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.messages import OpenGateway, OpenRollouts, VersionRef
from node.trainers.own_rewards import own_rewards
from node.trainers.prompts import Prompt, PromptSpec, Tokens, check_prompts
from node.trainers.publish.line import OnBusy
from node.trainers.publish.lines import PublishLines
from node.trainers.publish.publication import Publication
from node.trainers.readiness import NodeReadiness, NodeState, Readiness, wait_ready
from node.trainers.rollout_group import Check, RefusedPrompt, Rollout, RolloutGroup
from node.trainers.rollout_stream import RolloutStream
from node.trainers.rollouts import Choice, rollouts
from node.trainers.save_state import StateSaving, StateSource, save_state
from node.trainers.shared_gpu import sleep, wake
from node.trainers.standing import standing
from node.trainers.tensors.drafted import Drafted

if TYPE_CHECKING:
    from node.trainers.held_gateway import HeldGateway

__all__ = [
    "Check",
    "NodeReadiness",
    "NodeState",
    "PromptRefused",
    "PromptSpec",
    "Publication",
    "Readiness",
    "RefusedPrompt",
    "Rollout",
    "RolloutGroup",
    "RolloutStream",
    "SamplingParams",
    "StateSaving",
    "Swarm",
    "SwarmBusy",
    "SwarmDown",
    "SwarmTimeout",
]

NEWER_THAN_ALL: Final = 1 << 62
"""A number that no version reaches."""
STATE_WITHIN_S: Final = 5.0
"""How long `Swarm.state` waits for the seed: a training loop that logs it must not wait for a seed that is stuck."""


def _source(model: Any, draft: Any) -> Any:
    """What a publish line copies."""
    return model if draft is None else Drafted(model, draft)


class Swarm:
    """A trainer's handle on its swarm. Make one with `Swarm.attach`.

    Use it from one thread; iterators of rollouts may be used in other threads, each in one. It is a context manager,
    whose end calls `close`.
    """

    def __init__(self, lines: PublishLines, base: Path | None, seed: SeedProcess | None, max_lag: int) -> None:
        """For `attach`, which callers use instead."""
        self._home = lines.home
        self._lines = lines
        self._tokens = Tokens(base)
        self._seed = seed
        self._max_lag = max_lag
        self._gateway: HeldGateway | None = None
        self._saving: StateSaving | None = None
        self._trained: set[str] = set()
        """Adapters (empty: the base) that were trained since they were published last."""

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
        """Attach to the seed on this host, or start one on the checkpoint folder `base`.

        `model`: what will be published, as in `publish`. It is compared with the base's tensors now rather than at the
        first `publish`, and the memory for its copies is reserved now. A model that `fully_shard` has sharded must be
        given, and every rank must attach (a collective). A process that only publishes adapters gives none.

        `base`: the checkpoint folder that training started from. A seed is started on it if none runs, and prompts that
        are text are read by its tokenizer. A seed started here ends with `close`, or with this process.

        `max_lag`: how many versions older than the newest sealed one a rollout's tokens may be when you get them, at
        least 0. Versions that are sealed later, or are on their way while you gather a batch, add to the lag behind the
        weights that you train: `RolloutGroup.oldest` tells it, and `publish(...).wait()` before you gather rules it
        out. With 0, training is synchronous: no token is older than the version that you published last, sealed or not.

        `home`: the seed's SWARM_HOME; by default the environment's, else that of `swarm-node`. `threads`: encoder
        threads of each rank; by default half the cores divided among the ranks, at most 4. `start`: False: never start
        a seed.

        Raises `UsageError` when there is no seed and none can be started, the model differs from the base, or its ranks
        are on several hosts; `SwarmTimeout` when the seed or another rank does not come in time; `SwarmDown` when the
        seed ends during the call.
        """
        folder = home_folder(home)
        base = None if base is None else Path(base).expanduser().absolute()
        if model is None:
            seed = find_or_start(folder, base if start else None)
            try:
                lines = PublishLines(folder, threads, seed)
            except BaseException:
                if seed is not None:
                    seed.stop()
                raise
        else:
            attachment = attach(model, folder, base if start else None)
            seed = attachment.seed
            lines = PublishLines(folder, threads, seed, attachment)
        return cls(lines, base, seed, max_lag)

    def publish(
        self,
        model: Any,
        *,
        step: int,
        adapter: str | None = None,
        draft: Any = None,
        on_busy: OnBusy = "wait",
        timeout_s: float = 600.0,
    ) -> Publication:
        """Publish these weights as the next version. Returns when they are copied; a thread does the rest.

        `model`: a `torch.nn.Module`, a mapping, or an iterable of (checkpoint name, tensor), with the base's names and
        shapes. Adapters are published merged, without touching the model. Once this returns, the weights may change.
        `step`: your own count, for people.

        `adapter`: a name (1 to 64 characters of A-Z a-z 0-9 . _ -): publish only the adapter in `model`, as a version
        that changes this adapter and nothing else; the seed needs room for it (`--adapters`). `model` is then a module
        with plain LoRA (of peft, for example; of several adapters, the one of this name, else the active one), a pair
        (peft config, tensors by peft's names), or the path of a folder that peft saved. Rank, alpha and modules may
        change from one version to the next.

        `draft`: the draft model's weights, given as `model` is, by the names of the folder that the seed was started
        with (`--draft`). Both become one version. None: the draft stays as it is. Of several ranks, rank 0 gives all of
        it. A version that "coalesce" replaces takes its draft with it.

        At most two versions are unsealed at a time, of the base and of each adapter. `on_busy`: what a third does.
        "wait": wait for the oldest to be sealed. "coalesce": replace the one that has not begun, which becomes
        `superseded`. `timeout_s`: for that wait, and for the wait for a seed that has ended; a seed is waited for at
        most a minute after its end.

        Nothing is published by itself: with gradient accumulation, call this after the steps that should become
        versions.

        Raises `UsageError` when the tensors are not the base's, or the adapter is of another base, needs more than its
        slot has, or is more than plain LoRA; `SwarmBusy` when two versions are still unsealed after `timeout_s`;
        `SwarmDown` when the seed stays down (then every call raises it at once); `PublishFailed` or `SwarmTimeout` when
        another rank ended or does not publish, or another process publishes this adapter. A failure after this call has
        returned is in the publication's `error` and in `state`, and is logged.
        """
        if adapter is None:
            publication = self._lines.base(step, timeout_s).publish(_source(model, draft), step, on_busy, timeout_s)
        elif draft is not None:
            raise UsageError("A version of an adapter changes nothing else: publish the draft model with the base.")
        else:
            publication = self._lines.adapter(adapter, step, timeout_s).publish(model, step, on_busy, timeout_s)
        self._trained.discard(adapter or "")
        return publication

    def resume(self, root: bytes, model: Any = None, *, draft: Any = None, timeout_s: float = 600.0) -> tuple[int, int]:
        """Bring the swarm back to the version with this root, after the trainer has loaded its checkpoint.

        If that version is the head, nothing happens. Else it becomes the head again, under its number in a new epoch:
        every node goes back to it, and rollouts of later versions are refused. `root`: `Publication.root`, 32 bytes.
        `model`: your own weights, which must have this root; without it the seed uses the versions that it keeps, at
        least eight. `draft`: with `model`, the draft model's weights in that version; None: it has not changed since.
        `timeout_s`: for each wait, the versions on their way among them. Returns (epoch, version) of the head.

        Raises `UsageError` when no version has this root, the seed no longer has its bits, or `model` has another root;
        `SwarmTimeout`; and what `publish` raises.
        """
        return self._go_back(VersionRef(root=root), model, draft, timeout_s)

    def rollback(
        self, version: int, model: Any = None, *, draft: Any = None, timeout_s: float = 600.0
    ) -> tuple[int, int]:
        """As `resume`, by a version's number in the history of the head."""
        return self._go_back(VersionRef(version=version), model, draft, timeout_s)

    def _go_back(self, wanted: VersionRef, model: Any, draft: Any, timeout_s: float) -> tuple[int, int]:
        line = self._lines.base(timeout_s=timeout_s)
        if model is None:
            line.go_back(wanted, timeout_s)
        elif wanted.root != line.drain(timeout_s):
            line.publish(_source(model, draft), 0, "wait", timeout_s, again=wanted).wait(timeout_s=timeout_s)
        return self._lines.head

    def rollouts(
        self,
        prompts: Iterable[Prompt | PromptSpec],
        n: int,
        sampling: SamplingParams,
        *,
        adapter: str | None = None,
        key: str | None = None,
        whole: bool = False,
        routes: bool = False,
        reward: str | Reward | None = None,
        verify_rewards: float = 0.0,
        check: Check | None = None,
        keep: Callable[[RolloutGroup], bool] | None = None,
        take: int | None = None,
        partial_after_s: float | None = None,
        least: int = 1,
        lag_from: Literal["sealed", "trained"] = "sealed",
        purpose: Literal["train", "evaluate"] = "train",
        priority: int = 0,
        timeout_s: float = 600.0,
    ) -> RolloutStream:
        """`n` accepted samples of every prompt: an iterator of groups in the order in which they are complete.

        Of several complete groups, the one with the earliest prompt comes first. The iterator is for `for` loops and
        for `async for` (under asyncio and trio). Closing it withdraws the prompts that are left; its `abort` withdraws
        one.

        `prompts`: each is token ids, a text, or chat messages (for the base folder's tokenizer and chat template), or a
        `PromptSpec` with one of these and with `n`, sampling or metadata of its own. They
        are taken as fast as you take groups, so an endless iterator is fine. The nodes know how long a list is, and
        finish it together. For a prompt that cannot be generated for (it is none of these, or longer than the model
        reads), the iterator yields a `RefusedPrompt` instead of a group, and goes on. Check `group.refused`, or use the
        group: a refused one then raises `PromptRefused`.

        `n`: samples of each prompt, 1 to 4096. `sampling`: how to sample; see `SamplingParams`.

        `adapter`: the name of a published adapter, which draws the samples; None: the base alone. `max_lag` then counts
        the versions that changed this adapter or the base, and no others. Only nodes that have loaded it get this work.

        `key`: 1 to 128 characters. With a key, finished work outlives this process and the seed: a later call with the
        same key continues it. From its first use the key is bound to these prompts, `n`, `sampling`, `whole` and
        `max_lag`, so give each step its own. The prompts of a list are all compared before any work is given out, those
        of another iterable each in its turn.

        `whole`: each group is generated by one node in one batch, so that with a `key` its bits do not depend on the
        node. `routes`: each rollout says which experts every token took (`Rollout.routes`), for `replayed_routes`; only
        of a mixture of experts. `check`: compares samples with your own scores before you get them; see `Check`.

        `reward`: the name of a reward that nodes compute, by a function that they have under this name; "NAME@DIGEST":
        only by the function of that digest. Each rollout has the number as `Rollout.reward`. The function gets the
        texts of prompt and completion, and `PromptSpec.reward_metadata`. A function of yours stands for its name
        (`__name__`). `verify_rewards`: the share of the rewards, 0 to 1, that this process computes too, and of those
        that no other node has checked all: by the function that is given, or by the one that has the name here. A node
        that signed another one is quarantined, and other samples take the place of its own.

        `keep`: a filter: you do not get the groups for which `keep(group)` is false. `take`: the iterator ends after
        this many groups; when the last of them is complete, the other groups are aborted: their leases end, and nodes
        stop generating them. So `take=12` of 16 prompts gives the 12 groups that are complete first.

        `partial_after_s`: this long after its prompt was offered, a group comes with the samples that it has by then,
        or as soon as it has `least`; nodes stop generating the others. `RolloutGroup.is_partial` says so.

        `lag_from`: "trained": `max_lag` counts from the weights that you are training, so versions on their way count,
        and weights that you have announced with `mark_trained`. "sealed": from the newest sealed version.

        `purpose`: "evaluate": samples for an evaluation beside the training, from another thread or task. The status
        counts their groups apart, and how fast you take them limits neither them nor the training's. `priority`: -8 to
        8; nodes begin work of a higher one first. `timeout_s`: the longest time without a complete group.

        Raises `UsageError` when `prompts` is a single prompt, `n` or `key` is out of range, the key is bound to other
        work, the swarm has no such adapter, or the model has no experts whose routes could be given; `SwarmTimeout`
        when no group was completed for `timeout_s`, with the cause; `SwarmDown` when the seed stays down that long;
        `RolloutsFailed` when the seed refuses the whole batch.
        """
        check_prompts(prompts)
        try:  # default options are left out, so that nodes of every release can do it
            wanted = {} if adapter is None else {"adapter": adapter}
            sampling = sampling.with_options(**wanted, **({"routes": True} if routes else {}))
        except ValueError as error:
            raise UsageError(f"rollouts: {error}.") from error
        if take is not None and take < 1:
            raise UsageError("rollouts: take is at least 1.")
        rewards = own_rewards(reward, verify_rewards, self._tokens.base)
        session = os.urandom(16).hex() if key is None else key
        total = len(prompts) if isinstance(prompts, Sized) else None
        arbitrates = rewards.local is not None
        terms = Terms(partial_after_s, least, priority, lag_from == "trained", purpose == "evaluate", arbitrates)
        request = OpenRollouts(
            session, n, sampling, self._max_lag, keep=key is not None, whole=whole, total=total, refusals=True,
            terms=terms,
        )  # fmt: skip
        try:
            request = msgspec.convert(msgspec.to_builtins(request), OpenRollouts)
        except msgspec.ValidationError as error:
            raise UsageError(f"rollouts: {error} (session: the key; 1 to 128 characters).") from error
        return rollouts(
            self._home,
            request,
            prompts,
            self._tokens.of,
            timeout_s,
            check,
            partial(self._trained_version if terms.from_trained else self._lag_base, sampling.extra.adapter),
            Choice(keep, take),
            rewards,
        )

    def mark_trained(self, adapter: str | None = None) -> None:
        """The weights (of this adapter, or of the base) have changed since they were published last, and will be
        published. Until then `rollouts(lag_from="trained")` counts them as one version more.

        Call it after an optimizer step that you do not publish at once. `publish` takes it back.
        """
        self._trained.add(adapter or "")

    def _trained_version(self, adapter: str) -> tuple[int, int]:
        """The version that the trainer's weights are at: the newest published one, sealed or not, or one more."""
        epoch, version = self._lines.head_of(adapter)
        unsealed = [pub for pub in self._lines.unsealed_of(adapter) if not pub.superseded]
        known = [pub.version for pub in unsealed if pub.version is not None]
        coming = sum(pub.version is None for pub in unsealed) + bool({adapter, ""} & self._trained)
        return epoch, max([version, *known]) + coming

    def _lag_base(self, adapter: str) -> tuple[int, int]:
        """The version that lags of `adapter` (empty: of the base) are counted from; see `attach`. Of two unsealed
        versions, the second has not begun. The number of one that other trainers' may precede is not known: it counts
        as newer than all."""
        epoch, version = self._lines.head_of(adapter)
        unsealed = [] if self._max_lag else [pub for pub in self._lines.unsealed_of(adapter) if not pub.superseded]
        if not any(pub.version is None or pub.version > version for pub in unsealed):
            return epoch, version
        return epoch, NEWER_THAN_ALL if adapter else version + 1

    def wait_ready(
        self,
        nodes: int | None = None,
        *,
        tokens_per_second: float | None = None,
        max_lag: int = 0,
        timeout_s: float = 600.0,
        tell: Callable[[str], None] | None = None,
    ) -> Readiness:
        """Wait until the swarm is ready to generate, and return which nodes are.

        A node is ready when its engine has proven the newest sealed version, or one at most `max_lag` versions older,
        and the node is neither silent nor in quarantine.

        `nodes`: wait for this many ready nodes; without it, for one. `tokens_per_second`: wait until the ready nodes
        make this much together, by the ledger's measurements; of a node that has not generated yet, by the test that it
        ran when its engine was loaded. `tell(sentence)`: called with what is missing, at first and whenever that
        changes; without it, a warning is logged at growing intervals.

        Raises `SwarmTimeout` after `timeout_s`, with what is missing; `SwarmDown` when no seed answers by then;
        `UsageError` for a number that is out of range.
        """
        return wait_ready(self._home, nodes, tokens_per_second, timeout_s, max_lag, tell)

    def sleep(self, node: str | Path, *, within_s: float = 60.0) -> bool:
        """Free the GPU memory of the engines of a node on this machine, so that training can use it. Returns when it is
        free. `node`: that node's SWARM_HOME.

        The node takes no work until `wake`. It first finishes what it has, for at most `within_s` seconds, and gives
        the rest back to the swarm; the answer is whether it finished all. It goes on receiving versions. Raises
        `UsageError` where there are no engines to stop, `SwarmDown` when no node answers there.
        """
        return sleep(Path(node), within_s)

    def wake(self, node: str | Path, *, within_s: float = 600.0) -> None:
        """Start the engines of a node on this machine again, and wait until one has proven the node's newest weights.

        Raises as `sleep` does, and `SwarmTimeout` when none is ready after `within_s` seconds; they go on loading.
        """
        wake(Path(node), within_s)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the trainer's side and of the swarm, as plain values; `docs/trainers.md` lists the keys.

        Never raises, and answers within `STATE_WITHIN_S`. When the seed is down or does not answer, the keys that only
        it knows are missing, and `error` says why.
        """
        state: dict[str, Any] = {
            "head": self._lines.head,
            "unsealed": [publication.step for publication in self._lines.unsealed()],
        }
        try:
            state |= standing(ask_state(self._home, STATE_WITHIN_S))
        except SwarmError as error:
            state["error"] = str(error)
        if self._lines.last_error is not None:
            state["publish_error"] = str(self._lines.last_error)
        return state

    @property
    def head(self) -> tuple[int, int]:
        """(epoch, version) that was sealed last, as far as this process knows."""
        return self._lines.head

    @property
    def layout(self) -> Layout:
        """The names, shapes and dtypes of the base's tensors."""
        return policy_base(self._lines.base().layout)

    def bits(self, name: str) -> Bits:
        """The bits of a tensor of the base in the newest sealed version: unsigned integers, in one dimension.

        Of the seed's memory, which this process cannot write to, and which the next version changes: copy what you
        keep. Raises `KeyError` when the base has no tensor of this name.
        """
        return self._lines.base().bits(name)

    @property
    def openai_url(self) -> str:
        """The URL, ending with /v1, at which OpenAI clients get completions from the swarm as the model "policy".

        Served on this machine only, from the first use of this property until `close`. While the seed is down, new
        requests are answered with 503 and Retry-After, and those in flight wait for it. Raises `SwarmDown`,
        `SwarmTimeout`, and `UsageError` when the seed cannot serve a gateway.
        """
        if self._gateway is None:
            request = OpenGateway("127.0.0.1", 0, "policy", "", self._max_lag, 4096)
            from node.trainers.held_gateway import HeldGateway  # it imports trio

            self._gateway = HeldGateway(self._home, request, log.warning)
            self._gateway.run_in_thread()
        return self._gateway.url

    def save_state(self, source: StateSource, *, step: int) -> StateSaving:
        """Save a state of yours (the optimizer's, for example) into the swarm, so that it outlives this machine.
        Returns at once; a thread does the rest. It replaces the state before it, once it is whole.

        `source`: bytes, an open file (the whole, if it can be set back), an iterable of bytes, or the path of a regular
        file; it must not change until the state is saved, and an empty one is refused. `step`: your own count, for
        people. Only the swarm's key (`SWARM_HOME/authority.key`) opens it: the nodes hold encrypted fragments, of which
        half are enough. `swarm-node rescue` brings it back.

        A failure is in the saving's `error`, and `StateSaving.wait` raises it: `UsageError` when there is no node, the
        source cannot be read, the disk is full or no node takes it; `SwarmDown` when the seed ends and is not started
        again in a minute.
        """
        self._saving = save_state(self._home, source, step)
        return self._saving

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait at most `timeout_s` until what was published is sealed, then disconnect. Safe to call twice. A state
        that is being saved is waited for, too, as long as that.

        Also stops the gateway, and a seed that `attach` started. Raises, after all of that, the error of the first
        version that was not sealed: `SwarmTimeout` for one that was given up after `timeout_s`.
        """
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None
        saving, self._saving = self._saving, None
        try:
            self._lines.close(timeout_s)
            if saving is not None:
                saving.wait(timeout_s)
        finally:
            if self._seed is not None:
                self._seed.stop()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except SwarmError:  # the line has logged it
            if kind is None:
                raise
