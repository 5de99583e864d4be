"""Requests over the counter: each is a group in the ledger, under leases like any other work, answered once.

A group that is complete was accepted by the ledger's rule and is durable. A request whose client hung up is withdrawn.
After a crash of the seed nobody waits any more, so the session is volatile: the next start forgets it.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from codec.errors import SwarmError
from node.engines.base import EXACT_SEED, OPTIONS, SamplingParams, needs
from node.ledger.messages import pack_tokens
from node.ledger.service import VOLATILE, LedgerService
from node.ledger.state import Group

__all__ = ["Impossible", "NoNodes", "Overloaded", "RequestTracker"]

LOOK_EVERY_S: Final = 1.0
"""So often a waiting request looks whether there are still nodes."""
ABILITIES_WITHIN_S: Final = 5.0
"""A node answers what its engine can do within a round trip; until then nobody knows whether a request can be done."""
_LACKING: Final = {
    OPTIONS: "no node here can draw by it. Install a newer swarm-node on the nodes.",
    EXACT_SEED: "no engine here draws the same tokens again whatever else it draws meanwhile. Engines of transformers "
    "do, and vLLM on GPUs if its node was started with VLLM_BATCH_INVARIANT=1. Leave seed out, or let it be inexact "
    "(swarm-node gateway --inexact-seeds).",
}


class NoNodes(SwarmError):
    """No node of this swarm generates at the moment. swarm-node status shows who is there."""


class Overloaded(SwarmError):
    """As many requests are in flight as this gateway takes. Try again in a moment."""


class Impossible(SwarmError):
    """No engine can do this; the message says why. `lacking`: the ability that none has, where that is it."""

    def __init__(self, why: str, lacking: str = "") -> None:
        super().__init__(why)
        self.lacking = lacking


@dataclass(eq=False)
class _Waiting:
    group: Group | None = None
    why: str | None = None
    done: trio.Event = field(default_factory=trio.Event)


class RequestTracker:
    """`most`: sequences in flight at a time. `without_nodes_s`: a request outlives the last node by so long, for the
    next to come."""

    def __init__(
        self, ledger: LedgerService, *, max_lag: int = 1, most: int = 1024, without_nodes_s: float = 30.0
    ) -> None:
        self._ledger = ledger
        self.most = most
        """Sequences that may be in flight."""
        self._without_nodes_s = without_nodes_s
        name = f"{VOLATILE}gateway-{os.urandom(8).hex()}"
        self._session = ledger.open(name, 1, SamplingParams(1), max_lag)
        self._waiting: dict[bytes, _Waiting] = {}
        self.in_flight = 0
        """Sequences asked for and not yet answered."""
        self.answered = 0
        self.refused = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hand out what is done, until cancelled; then nothing is wanted any more."""
        task_status.started()
        try:
            while True:
                news = self._session.news
                while self._session.groups:
                    group = self._session.groups.popleft()
                    self._ledger.taken(group.id)
                    self._tell(group.id, group=group)
                for group_id, why in list(self._session.impossible.items()):
                    self._tell(group_id, why=why)
                    self._session.impossible.pop(group_id, None)
                await news.wait()
        finally:
            self._ledger.close(self._session)

    def _tell(self, group_id: bytes, *, group: Group | None = None, why: str | None = None) -> None:
        waiting = self._waiting.pop(group_id, None)
        if waiting is not None:
            waiting.group, waiting.why = group, why
            waiting.done.set()

    def check(self, samples: int) -> None:
        """Raises `NoNodes` or `Overloaded` when so many more sequences cannot be taken now."""
        if not self._ledger.capacity:
            self.refused += 1
            raise NoNodes(
                "No node of this swarm generates at the moment. Start one (swarm-node join TICKET), or wait until one "
                "has loaded its model; swarm-node status shows who is there."
            )
        if self.in_flight + samples > self.most:
            self.refused += 1
            raise Overloaded(f"{self.in_flight} sequences are in flight, and this gateway takes {self.most}.")

    async def check_abilities(self, sampling: SamplingParams) -> None:
        """Raises `Impossible` when no engine of the nodes that generate can draw by `sampling`. Nodes that have not
        said what theirs can do are asked; one of an older release never answers."""
        wanted = needs(sampling)
        found = self._ledger.abilities.able(wanted) if wanted else True
        with trio.move_on_after(ABILITIES_WITHIN_S):
            while found is None:
                heard = self._ledger.abilities.heard
                with trio.move_on_after(LOOK_EVERY_S):
                    await heard.wait()
                found = self._ledger.abilities.able(wanted)
        if not found:
            self.refused += 1
            lacking = EXACT_SEED if self._ledger.abilities.able(wanted - {EXACT_SEED}) else OPTIONS
            raise Impossible(_LACKING[lacking], lacking)

    def kinds(self, groups: Iterable[Group]) -> str:
        """The kinds of engine that drew these, as far as their nodes were asked."""
        nodes = {done.node for group in groups for done in group.done.values()}
        return "+".join(sorted({kind for node in nodes if (kind := self._ledger.abilities.kind(node))}))

    async def ask(self, prompt: Sequence[int], n: int, sampling: SamplingParams, affinity: bytes = b"") -> Group:
        """All `n` samples of `prompt`. Raises `Overloaded`, `NoNodes` or `Impossible`; `PeerError` for what no node
        could do. Cancelled: the work is withdrawn."""
        self.check(n)
        group_id = os.urandom(16)
        self._ledger.offer(self._session, group_id, pack_tokens(prompt), n=n, sampling=sampling, affinity=affinity)
        waiting = self._waiting[group_id] = _Waiting()
        self.in_flight += n
        try:
            await self._wait(waiting, needs(sampling))
        finally:
            self.in_flight -= n
            if self._waiting.pop(group_id, None) is not None:
                self._ledger.withdraw(self._session, group_id)
        if waiting.group is None:
            raise Impossible(waiting.why or "nobody can do this")
        self.answered += 1
        return waiting.group

    async def _wait(self, waiting: _Waiting, wanted: frozenset[str]) -> None:
        """`wanted`: abilities that a node needs for it."""
        alone_since = None
        while not waiting.done.is_set():
            with trio.move_on_after(LOOK_EVERY_S):
                await waiting.done.wait()
                return
            now = trio.current_time()
            someone = self._ledger.capacity and (not wanted or self._ledger.abilities.able(wanted))
            alone_since = None if someone else alone_since or now
            if alone_since is not None and now - alone_since >= self._without_nodes_s:
                raise NoNodes("The last node that generates has gone, and no other came. swarm-node status shows more.")
