"""The conversation of the ledger with its nodes: reads what they send, and queues what they are told.

Nothing is sent from here. `LedgerService` takes the outbox, and sends it after the facts of the turn are durable.
"""

from collections.abc import Callable, Iterable
from typing import Final

import trio

from codec.errors import PeerError
from node.engines.base import Version
from node.ledger.assignment.abilities import EngineAbilities
from node.ledger.assignment.assigner import MOST_LEASES
from node.ledger.assignment.commit_stats import CommitStats
from node.ledger.assignment.draws import as_judged, sampling_of
from node.ledger.assignment.pending_requests import PendingRequests
from node.ledger.followers import Followers
from node.ledger.held_images import HeldImages
from node.ledger.messages import (
    Abilities,
    Ask,
    AskAbilities,
    AskAdapters,
    AskImage,
    AskReward,
    Cannot,
    Drawn,
    Follow,
    GiveBack,
    JudgeAnswer,
    JudgeRequest,
    LoadedAdapters,
    Reason,
    Renew,
    Renewed,
    RewardAnswer,
    RolloutPart,
    SignedRollout,
    Timesheet,
    Unfit,
    Verdict,
    Withdraw,
    WorkAnswer,
    WorkLease,
    WorkMessage,
    WorkRequest,
    decode,
    open_rollout,
)
from node.ledger.packing import unpack_floats
from node.ledger.rollout_parts import PartialRollouts
from node.ledger.rules import Ledger
from node.ledger.state import Group, LiveLease
from node.ledger.trust.budgets import MessageBudgets
from node.ledger.trust.checks import OpenCheck
from node.ledger.trust.judgements import OpenJudgement
from swarm.guard import Source, guarded

__all__ = ["Expel", "NodeMessages"]

Expel = Callable[[bytes, str], None]
"""`expel(node, why)`: close the session of a node whose messages are malformed. Must not wait, never raises."""

NOT_YET: Final = frozenset({Reason.NO_WORK, Reason.TOO_NEW})
"""With these reasons a request stays pending. TOO_NEW: the node heard of the seal a moment before the ledger did."""
LEASES_A_MESSAGE: Final = 1024
"""Leases in one `Withdraw`."""


class NodeMessages:
    """Reads the nodes' messages and fills `outbox`. It runs on the event loop and never waits."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        wake: Callable[[], None],
        give_up: Callable[[Group, str], None],
        is_member: Callable[[bytes], bool],
        expel: Expel,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """`wake()`: there is something to write or send. `give_up(group, why)`: no node can generate `group`.
        `is_member(node)`: whether a node holds a live membership lease."""
        self._ledger = ledger
        self._wake = wake
        self._give_up = give_up
        self._is_member = is_member
        self._expel = expel
        self._clock = clock
        self.budgets = MessageBudgets(ledger.leases_of)
        self.pending = PendingRequests()
        self.abilities = EngineAbilities(ledger, self._ask_abilities, self._ask_adapters, clock)
        self.parts = PartialRollouts()
        self.followers = Followers(ledger)
        self.images = HeldImages()
        self.commit_stats = CommitStats()
        """The durations of each version's commit at the nodes' engines."""
        self.outbox: list[tuple[bytes, WorkMessage]] = []
        """(node, message), in the order in which they are sent."""

    def take_outbox(self) -> list[tuple[bytes, WorkMessage]]:
        """The messages queued since the last call."""
        outbox, self.outbox = self.outbox, []
        return outbox

    def hear(self, node: bytes, body: bytes) -> None:
        """The body of a `Work` message from `node`, whose key is proven.

        A malformed body is counted, logged and dropped; a node that sends too many of them is expelled. A body beyond
        the node's budget is dropped unread.
        """
        now = self._clock()
        if not self.budgets.allow_message(node, len(body), now):
            return
        if node not in self._ledger.members and self._is_member(node):
            self._ledger.member_up(node)
        if node not in self._ledger.nodes:  # it never was a member, so it has no work and gets none
            return
        message: WorkMessage | None = None
        with guarded(Source.WORK, node) as outcome:
            message = decode(body)
            self._read(node, message)
        if not isinstance(message, Drawn):  # of which nothing is written or sent
            self._wake()
        if outcome.is_rule_broken:
            self._ledger.quarantine.refuse(node, Reason.MALFORMED, now)
            self._count_malformed(node, outcome.why, now, bug=not isinstance(outcome.error, PeerError))

    def _count_malformed(self, node: bytes, why: str, now: float, *, bug: bool = False) -> None:
        """Expel a node whose malformed bodies exceed its budget, or whose body met a `bug` of ours."""
        if bug or not self.budgets.of(node).allows_malformed(now):
            self._expel(node, f"work message: {why}")

    def _read(self, node: bytes, message: WorkMessage) -> None:
        now = self._clock()
        match message:
            case WorkRequest():
                self._serve_within_budget(node, message, now, now)
            case Renew(lease, token, tokens):
                left_s = self._ledger.renew(node, lease, token, tokens, now)
                self.outbox.append((node, Withdraw((lease,)) if left_s is None else Renewed(lease, left_s)))
            case SignedRollout(sealed):
                self._read_rollout(node, sealed, now)
            case RolloutPart():
                self._read_part(node, message, now)
            case Drawn(parts):
                self.followers.hear(node, parts)
            case AskImage():
                self._read_image(node, message, now)
            case GiveBack(leases):
                self.pending.pop(node)  # or it would get the same work at once
                self.budgets.of(node).count_returned(self._ledger.give_back(node, leases, now), now)
            case Cannot(lease, token, why):
                self.budgets.of(node).count_returned(1, now)
                group = self._ledger.refuse_work(node, lease, token, now)
                if group is not None:
                    self._give_up(group, why)
            case WorkAnswer(check, epoch, version, logprobs):
                self._ledger.quarantine.answer_check(node, check, (epoch, version), unpack_floats(logprobs), now)
            case JudgeAnswer():
                self._ledger.quarantine.hear_judgement(node, message, now)
            case RewardAnswer():
                self._ledger.quarantine.rewards.answer(node, message, now)
            case Abilities():
                if self.abilities.hear(node, message):
                    self._ledger.quarantine.nodes_changed()
                    self.pending.try_soon(node)
            case LoadedAdapters(names):
                if self.abilities.hear_adapters(node, names):
                    self.pending.try_soon(node)
            case Timesheet():
                if (found := self._ledger.nodes.get(node)) is not None:
                    found.timesheet = message
                    self.commit_stats.note(node, message, self._ledger.roots)
            case _:
                raise PeerError(f"work message: {type(message).__name__} is not for the ledger")

    def _read_rollout(self, node: bytes, sealed: bytes, now: float) -> None:
        try:
            rollout = open_rollout(node, sealed)
        except PeerError as error:
            self._ledger.quarantine.refuse(node, Reason.BAD_SIGNATURE, now)
            self._count_malformed(node, str(error), now)
            return
        reason = self._ledger.submit(node, rollout, sealed, now)
        self.pending.try_soon(node)
        self.outbox.append((node, Verdict(rollout.lease, rollout.sample, reason)))

    def _read_part(self, node: bytes, message: RolloutPart, now: float) -> None:
        """Read the rollout when its last part came. What is said of one that is not owed needs no other part."""
        lease = self._ledger.leases.get(message.lease)
        if lease is not None and lease.node == node and message.sample in lease.open:
            if (sealed := self.parts.add(node, message)) is not None:
                self._read_rollout(node, sealed, now)
            return
        known = self._ledger.acceptance.verdict_of(message.lease, message.sample)
        reason = known[0] if known is not None else Reason.UNKNOWN_LEASE
        self.outbox.append((node, Verdict(message.lease, message.sample, reason)))

    def _read_image(self, node: bytes, message: AskImage, now: float) -> None:
        """Send a part of an image that a lease of `node` names. A node that is beyond its budget asks again."""
        lease = self._ledger.leases.get(message.lease)
        if lease is None or lease.node != node:
            self.outbox.append((node, Withdraw((message.lease,))))
            return
        part = self.images.part(lease.group, message.digest, message.part)
        if part is not None and self.budgets.of(node).allows_image(len(part.data), now):
            self.outbox.append((node, part))

    def ask_judgements(self, now: float) -> None:
        """Ask for the judgements and rewards that are due, once the rollouts are durable: the outbox is sent after the
        write."""
        for node, check in self._ledger.quarantine.rewards.due(now):
            reward, group, rollout = check.asked, check.group, check.done.rollout
            self.outbox.append((node, AskReward(check.id, reward, group.prompt, rollout.token_ids)))
        for node, check in self._ledger.quarantine.due_judgements(now):
            held = self._ledger.nodes[node].version or check.version
            has_previous = not check.adapter and held == check.version and self._ledger.parts.changes_base(held)
            self.outbox.append((node, _judge_request(check, held, has_previous=has_previous)))

    # ------------------------------------------------------------ requests for work

    def try_pending(self, now: float) -> None:
        """Serve the pending requests that are due."""
        state = (self._ledger.pool.freed, self._ledger.head)
        for node in self.pending.next(state, lambda node: self._ledger.nodes[node].rate.value, now):
            if (found := self.pending.pop(node)) is not None:
                self._serve_within_budget(node, *found, now)

    def _serve_within_budget(self, node: bytes, request: WorkRequest, received: float, now: float) -> None:
        """Serve a request, or keep it pending until its node's budget allows it."""
        if self.budgets.of(node).allows_request(now):
            self._serve(node, request, received)
        elif node in self._ledger.members:
            self.pending.postpone(node, request, received)

    def _serve(self, node: bytes, request: WorkRequest, received: float) -> None:
        self.pending.pop(node)
        now = self._clock()
        found = self._ledger.request_work(node, request, now, received)
        leases = found if isinstance(found, list) else []
        if followed := self.followers.of(node, leases):
            self.outbox.append((node, Follow(followed)))
        self.outbox.extend((node, _lease_message(lease, self._ledger.groups[lease.group], now)) for lease in leases)
        if (check := self._ledger.quarantine.next_check(node, now)) is not None:
            self.outbox.append((node, _check_message(check, self._ledger.nodes[node].version or check.version)))
        holding = tuple(self._ledger.nodes[node].leases) if node in self._ledger.nodes else ()
        unheard = set(holding).difference(request.holding)
        if void := [lease for lease in request.holding if self._ledger.is_void(node, lease)]:
            self.outbox.append((node, Withdraw(tuple(void[:LEASES_A_MESSAGE]))))
        left = request.capacity - sum(len(self._ledger.leases[lease].open) for lease in unheard)
        self.abilities.greet(node)
        if isinstance(found, Reason) and found not in NOT_YET:
            self.outbox.append((node, Unfit(request.serial, found)))
        elif left > 0 and request.serial >= self._ledger.nodes[node].serial:
            self.pending.narrow(node, request, received, left, holding)
            if len(leases) >= MOST_LEASES:  # there may be more for it
                self.pending.try_soon(node)

    # ------------------------------------------------------------ what nodes are told

    def withdraw(self, leases: Iterable[LiveLease]) -> None:
        """Tell the nodes that hold `leases` that these are void."""
        by_node: dict[bytes, list[int]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease.id)
        for node, ids in by_node.items():
            for i in range(0, len(ids), LEASES_A_MESSAGE):
                self.outbox.append((node, Withdraw(tuple(ids[i : i + LEASES_A_MESSAGE]))))
        self._wake()

    def _ask_abilities(self, node: bytes) -> None:
        self.outbox.append((node, AskAbilities()))
        self._wake()

    def _ask_adapters(self, node: bytes) -> None:
        self.outbox.append((node, AskAdapters()))
        self._wake()


def _lease_message(lease: LiveLease, group: Group, now: float) -> WorkLease:
    epoch, version = lease.minimum
    return WorkLease(
        lease=lease.id,
        token=lease.token,
        group=lease.group,
        samples=tuple(sorted(lease.open)),
        prompt=group.prompt,
        sampling=sampling_of(group, bool(lease.portable)),
        deadline_s=max(lease.deadline - now, 0.0),
        epoch=epoch,
        version=version,
        max_lag=group.max_lag,
        whole=group.n if group.whole else 0,
        urgent=bool(group.done),
    )


def _check_message(check: OpenCheck, held: Version) -> Ask:
    """`held`: what the node's engine holds, which has the same bits as the check's version."""
    epoch, version = held
    return Ask(
        check=check.id,
        prompt=check.prompt,
        token_ids=check.rollout.token_ids[: 4 * check.end],
        sampling=as_judged(check.sampling),
        epoch=epoch,
        version=version,
        start=check.start,
        end=check.end,
    )


def _judge_request(check: OpenJudgement, held: Version, *, has_previous: bool) -> JudgeRequest:
    """`held`: what the node's engine holds, which has the same bits as the check's version. `has_previous`: the bits
    before its last commit are those before the check's version. No engine keeps those of an adapter."""
    epoch, version = held
    return JudgeRequest(
        check=check.id,
        prompt=check.prompt,
        token_ids=check.rollout.token_ids[: 4 * check.end],
        sampling=as_judged(check.sampling),
        stream=check.stream,
        epoch=epoch,
        version=version,
        start=check.start,
        end=check.end,
        previous=version > 0 and has_previous and check.replays is None,
        replay=check.replays is not None,
    )
