"""Follows each prompt of a gateway request through the ledger, as a request group, until it is complete.

A complete group was accepted by the ledger's rules and is durable. A request whose client disconnects is withdrawn.
The session is volatile: the next start of the seed drops its groups, and `node.gateway.front` asks again.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from codec.errors import SwarmError
from node.engines.base import (
    ADAPTERS,
    EXACT_SEED,
    IMAGES,
    OPTIONS,
    PROMPT_LOGPROBS,
    ROUTES,
    STRUCTURES,
    TOP_LOGPROBS,
    SamplingParams,
    Version,
    needs,
)
from node.gateway.followed_sample import FollowedSample
from node.gateway.wanted_version import WantedVersion
from node.ledger.binding import Binding
from node.ledger.packing import pack_tokens
from node.ledger.service import VOLATILE, LedgerService
from node.ledger.state import Group

__all__ = ["Impossible", "NoNodes", "Overloaded", "RequestTracker"]

CHECK_EVERY_S: Final = 1.0
"""A waiting request checks this often whether there are still nodes."""
NODES_BACK_S: Final = 120.0
"""A request from before a restart of the seed waits this long for the nodes."""
LOOK_S: Final = 0.1
ABILITIES_WITHIN_S: Final = 5.0
"""A node answers what its engine can do within a round trip; a request that depends on it waits at most this long."""
_LACKING: Final = {
    ADAPTERS: "no engine here serves adapters. Install a newer swarm-node on the nodes.",
    OPTIONS: "no node here can draw by it. Engines of transformers and vLLM can, with this release of swarm-node; "
    "SGLang draws by temperature, top_p and stop tokens alone.",
    EXACT_SEED: "no engine here draws the same tokens again whatever else it draws meanwhile. Engines of transformers "
    "do, and vLLM on GPUs if its node was started with VLLM_BATCH_INVARIANT=1. Leave seed out, or let it be inexact "
    "(swarm-node gateway --inexact-seeds).",
    TOP_LOGPROBS: "no engine here tells the likeliest tokens. Engines of transformers and vLLM can, with this release "
    "of swarm-node.",
    PROMPT_LOGPROBS: "no engine here scores prompts. Engines of transformers and vLLM do, with this release of "
    "swarm-node.",
    STRUCTURES: "no engine here can keep a text to a structure. vLLM can with this release of swarm-node, and "
    "transformers where llguidance is installed (the extra torch brings it).",
    IMAGES: "no engine here reads images. vLLM does with this release of swarm-node, if its model does.",
    ROUTES: "no engine here records which experts a token took. Only engines that hold a mixture of experts can.",
}


class NoNodes(SwarmError):
    """No node of this swarm generates at the moment. swarm-node status shows who is there."""


class Overloaded(SwarmError):
    """As many sequences are in flight as this gateway takes. Try again in a moment."""


class Impossible(SwarmError):
    """No engine can do this; the message says why. `lacking`: the ability that no engine has, if that is the reason."""

    def __init__(self, why: str, lacking: str = "") -> None:
        super().__init__(why)
        self.lacking = lacking


@dataclass(eq=False)
class _Pending:
    """A group that was asked for. When `done` is set, it has either a `group` or a reason `why` there is none."""

    group: Group | None = None
    why: str | None = None
    done: trio.Event = field(default_factory=trio.Event)


class RequestTracker:
    """Asks the ledger for request groups on behalf of the gateway's clients."""

    def __init__(
        self, ledger: LedgerService, *, max_lag: int = 1, most: int = 1024, without_nodes_s: float = 30.0
    ) -> None:
        """`most`: sequences that may be in flight. `without_nodes_s`: how long a request waits for a new node after the
        last one has gone."""
        self._ledger = ledger
        self.most = most
        self._without_nodes_s = without_nodes_s
        name = f"{VOLATILE}gateway-{os.urandom(8).hex()}"
        self._session = ledger.open(name, Binding(1, SamplingParams(1), max_lag))
        self._pending: dict[bytes, _Pending] = {}
        self._looking = trio.Lock()
        self.in_flight = 0
        """Sequences that were asked for and are not answered yet."""
        self.answered = 0
        self.refused = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hand out complete groups until cancelled; then close the session, which drops the others."""
        task_status.started()
        try:
            while True:
                news = self._session.news
                while self._session.groups:
                    group = self._session.groups.popleft()
                    self._ledger.taken(group.id)
                    self._finish(group.id, group=group)
                for group_id, why in list(self._session.impossible.items()):
                    self._finish(group_id, why=why)
                    self._session.impossible.pop(group_id, None)
                await news.wait()
        finally:
            self._ledger.close(self._session)

    def _finish(self, group_id: bytes, *, group: Group | None = None, why: str | None = None) -> None:
        pending = self._pending.pop(group_id, None)
        if pending is not None:
            pending.group, pending.why = group, why
            pending.done.set()

    def check(self, samples: int, *, again: bool = False) -> None:
        """Raises `NoNodes` or `Overloaded` when `samples` more sequences cannot be taken now. `again`: a seed that
        ended has let them in, so they are not too many."""
        if not self._ledger.capacity:
            self.refused += 1
            raise NoNodes(
                "No node of this swarm generates at the moment. Start one (swarm-node join TICKET), or wait until one "
                "has loaded its model; swarm-node status shows who is there."
            )
        if not again and self.in_flight + samples > self.most:
            self.refused += 1
            raise Overloaded(f"{self.in_flight} sequences are in flight, and this gateway takes {self.most}.")

    async def wait_for_nodes(self) -> None:
        """Wait until a node generates: after a restart of the seed they come back within seconds. Raises `NoNodes`."""
        with trio.move_on_after(NODES_BACK_S):
            while not self._ledger.capacity:
                async with self._looking:  # one look for all who wait
                    if not self._ledger.capacity:
                        await trio.sleep(LOOK_S)
            return
        self.check(0)

    async def check_abilities(self, sampling: SamplingParams) -> None:
        """Raises `Impossible` when no engine of a generating node can do `sampling`.

        Nodes that have not said what their engines can do are asked; a node of an older release never answers.
        """
        wanted = needs(sampling)
        found = self._ledger.abilities.able(wanted) if wanted else True
        with trio.move_on_after(ABILITIES_WITHIN_S):
            while found is None:
                heard = self._ledger.abilities.heard
                with trio.move_on_after(CHECK_EVERY_S):
                    await heard.wait()
                found = self._ledger.abilities.able(wanted)
        if not found:
            self.refused += 1
            able = self._ledger.abilities.able
            single = (IMAGES, EXACT_SEED, ADAPTERS, ROUTES, TOP_LOGPROBS, PROMPT_LOGPROBS, STRUCTURES)
            lacking = next((each for each in single if able(wanted - {each})), OPTIONS)
            raise Impossible(_LACKING[lacking], lacking)

    def own_versions(self, adapter: str, versions: Sequence[Version]) -> tuple[int, ...]:
        """The own version of `adapter` (empty: of the base) at each of `versions`; empty in a swarm without
        adapters."""
        return self._ledger.own_versions(adapter, versions)

    def kinds(self, groups: Iterable[Group]) -> str:
        """The kinds of the engines that generated `groups`, as far as their nodes have said."""
        return self.kinds_of(done.node for group in groups for done in group.done.values())

    def kinds_of(self, nodes: Iterable[bytes]) -> str:
        """The kinds of the engines of these nodes, as far as they have said."""
        nodes = set(nodes)
        return "+".join(sorted({kind for node in nodes if (kind := self._ledger.abilities.kind(node))}))

    async def ask(
        self,
        prompt: Sequence[int],
        n: int,
        sampling: SamplingParams,
        affinity: bytes = b"",
        wanted: WantedVersion | None = None,
        *,
        images: Sequence[bytes] = (),
        again: bool = False,
    ) -> Group:
        """All `n` samples of `prompt`, of versions that are new enough for `wanted`. `images`: those that `sampling`
        names. `again`: see `check`. When cancelled, the work is withdrawn.

        Raises `Overloaded`, `NoNodes` or `Impossible`, and `PeerError` for work that no node could do.
        """
        self.check(n, again=again)
        group_id = os.urandom(16)
        lag = self._max_lag(sampling, wanted)
        packed = pack_tokens(prompt)
        pending = self._pending[group_id] = _Pending()
        self.in_flight += n
        self._ledger.images.add(group_id, images)
        try:
            self._ledger.offer(self._session, group_id, packed, n=n, sampling=sampling, affinity=affinity, max_lag=lag)
            await self._wait(pending, needs(sampling), sampling.extra.adapter)
        finally:
            self.in_flight -= n
            self._ledger.images.remove(group_id)
            if self._pending.pop(group_id, None) is not None:
                self._ledger.withdraw(self._session, group_id)
        if pending.group is None:
            raise Impossible(pending.why or "no node can do this")
        self.answered += 1
        return pending.group

    def _max_lag(self, sampling: SamplingParams, wanted: WantedVersion | None) -> int | None:
        """How many versions older than the newest a token may be; None: as the session says. A head that moves on
        makes it stricter."""
        lag = None if wanted is None else self._ledger.lag_now(sampling.extra.adapter, wanted.at(self._ledger.head))
        return None if lag is None else min(lag, self._session.work.max_lag)

    async def ask_followed(
        self,
        prompt: Sequence[int],
        sample: FollowedSample,
        affinity: bytes = b"",
        wanted: WantedVersion | None = None,
        *,
        images: Sequence[bytes] = (),
        again: bool = False,
    ) -> None:
        """Have `sample` generated, which gets its tokens as they are drawn, until it was accepted. `images`, `again`:
        see `ask`. When cancelled, the work is withdrawn. Raises as `ask` does."""
        self.check(1, again=again)
        self.in_flight += 1
        try:
            while sample.ending is None:
                await self._ask_part(prompt, sample, affinity, wanted, images)
        finally:
            self.in_flight -= 1
        self.answered += 1

    async def _ask_part(
        self,
        prompt: Sequence[int],
        sample: FollowedSample,
        affinity: bytes,
        wanted: WantedVersion | None,
        images: Sequence[bytes],
    ) -> None:
        """One request group of a followed sample, until it is accepted or the sample needs another."""
        group_id = os.urandom(16)
        pending = self._pending[group_id] = _Pending()
        taken, sampling = sample.begin_group(pending.done.set)
        self._ledger.followers.add(group_id, sample)
        self._ledger.images.add(group_id, images)
        try:
            packed = pack_tokens(prompt) + pack_tokens(taken)
            lag = self._max_lag(sampling, wanted)
            self._ledger.offer(self._session, group_id, packed, n=1, sampling=sampling, affinity=affinity, max_lag=lag)
            await self._wait(pending, needs(sampling), sampling.extra.adapter)
        finally:
            self._ledger.followers.remove(group_id)
            self._ledger.images.remove(group_id)
            if self._pending.pop(group_id, None) is not None:
                self._ledger.withdraw(self._session, group_id)
        if pending.group is not None:
            done = pending.group.done[0]
            if not sample.finish(done.rollout, done.node) and sample.contradicted:
                self._ledger.contradicted(done.node)
        elif not sample.lost:
            raise Impossible(pending.why or "no node can do this")

    async def _wait(self, pending: _Pending, wanted: frozenset[str], adapter: str) -> None:
        """Wait until `pending` is done. Raises `NoNodes` when no generating node has had the abilities in `wanted`, and
        `adapter` if that is given, for `without_nodes_s`."""
        without_since = None
        while not pending.done.is_set():
            with trio.move_on_after(CHECK_EVERY_S):
                await pending.done.wait()
                return
            now = trio.current_time()
            has_node = self._ledger.capacity and (not wanted or self._ledger.abilities.able(wanted, adapter))
            without_since = None if has_node else without_since or now
            if without_since is not None and now - without_since >= self._without_nodes_s:
                if adapter and self._ledger.capacity:
                    raise NoNodes(f"No node has loaded the adapter {adapter!r}. swarm-node status shows more.")
                raise NoNodes("The last node that generates has gone, and no other came. swarm-node status shows more.")
