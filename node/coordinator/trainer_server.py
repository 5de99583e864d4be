"""Answers trainers over a Unix socket of the seed's host: they publish, get rollouts and ask for the status.

Each connection has one purpose, named by its first message; see `node.trainers.messages`. A trainer may die at any
byte: the version that it was publishing is abandoned, and work that only it wanted is withdrawn.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import trio

from codec import shared
from codec.base_sample import sample_base
from codec.errors import PeerError, SwarmError, UsageError
from codec.manifest import open_manifest
from codec.part_view import PartView
from codec.parts import Part, base_layout
from node.coordinator.file_publisher import FilePublisher
from node.coordinator.publisher import Publisher, VersionSink
from node.coordinator.rank_group import RankGroups
from node.coordinator.removal import remove_adapter
from node.coordinator.slots import SlotRecords, Slots
from node.coordinator.state_saver import StateSaver
from node.coordinator.turns import Busy, Turns
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import ChannelClosed, close_fds
from node.ipc.ring import RingReader
from node.ipc.sockets import process_named
from node.ledger.binding import Binding
from node.ledger.model_limits import limits_of
from node.ledger.service import VOLATILE, LedgerService
from node.ledger.session import WorkSession
from node.ledger.state import Group
from node.settings.config import GatewayConfig
from node.settings.extras import how_to_get, lacking
from node.status.schema import SeedReport, SeedStatus
from node.trainers.adapter_messages import AskAdapters, RemoveAdapter
from node.trainers.messages import (
    MAX_RANKS,
    PROTOCOL,
    ROLLOUTS,
    Abort,
    Accuse,
    AskState,
    Attach,
    Attached,
    Evict,
    Evicted,
    FromTrainer,
    GatewayOpened,
    GoBack,
    Judge,
    Judged,
    Offer,
    OfferRefused,
    OpenGateway,
    OpenRollouts,
    PublishBegin,
    PublishBlocks,
    PublishEnd,
    PublishFiles,
    PublishShared,
    Refusal,
    Room,
    Sample,
    SaveState,
    Stale,
    State,
    Taken,
    Trained,
    VersionSeal,
)
from swarm.guard import Source

__all__ = ["TrainerServer"]

MOST_CONNECTIONS: Final = MAX_RANKS + 64
"""Every rank that a trainer may have, and some for rollouts, gateways and commands."""
SAY_WITHIN_S: Final = 60.0
"""Until the first message. A process sends it at once; one that was stopped (SIGSTOP) may need a moment."""
HANG_UP_WITHIN_S: Final = 2.0
"""A trainer that asks again with the same key has just closed its last connection; wait this long for its end."""
LOOK_S: Final = 0.05
"""Interval between two looks whether the trainer that was attached to an adapter has ended."""
LEAVE_WITHIN_S: Final = 10.0
"""To drop the open version and tell the other ranks."""


class Host(VersionSink, Protocol):
    """What the trainer server asks of the running seed."""

    async def evict(self, request: Evict) -> Evicted:
        """Remove a member or revoke a ticket, or undo that; returns when it is durable."""
        ...

    def status(self) -> SeedStatus: ...

    @property
    def records(self) -> SlotRecords:
        """Durable records of the seed."""
        ...


class TrainerServer:
    """Serves trainers. `files`: the base checkpoint's small files by name, for a gateway's tokenizer. `is_ready()`:
    the coder is loaded in this process."""

    def __init__(
        self,
        seed: Host,
        ledger: LedgerService,
        files: Callable[[], Mapping[str, bytes]] = dict,
        is_ready: Callable[[], bool] = lambda: True,
        classes: Sequence[int] | None = None,
        keys: Path | None = None,
        state_saver: StateSaver | None = None,
    ) -> None:
        """`classes`: of each block of the model, its class; see `Publisher`. `keys`: the file of a gateway's keys with
        quotas. `state_saver`: None: no states are saved."""
        self._files, self._keys, self._state_saver = files, keys, state_saver
        self._seed = seed
        self._ledger = ledger
        publisher = self._publisher = Publisher(seed, classes)
        self._turns = Turns()
        self._slots = Slots(lambda: seed.replica, seed.records)
        self._rank_groups = RankGroups(publisher, self._turns)
        self._file_publisher = FilePublisher(publisher, self._turns, is_ready)

    async def run(self, path: Path, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve `path` until cancelled; see `node.ipc.async_channel.serve_socket`."""
        await serve_socket(
            path, self._converse, receives=FromTrainer, source=Source.TRAINER,
            max_connections=MOST_CONNECTIONS, farewell=Refusal,
            task_status=task_status,
        )  # fmt: skip

    async def _converse(self, channel: AsyncChannel) -> None:
        with trio.fail_after(SAY_WITHIN_S):
            message, fds = await channel.recv()
        if not isinstance(message, OpenGateway | Attach):
            close_fds(fds)
        try:
            match message:
                case Attach():
                    await self._publishing(channel, message, _ring_of(message, fds))
                case OpenRollouts():
                    await self._rollouts(channel, message)
                case AskState():
                    await channel.send(State(SeedReport(swarm=self._seed.status(), work=self._ledger.status())))
                case OpenGateway(requests=True):
                    with _front(fds) as front:
                        await self._gateway(channel, message, [], front)
                case OpenGateway():
                    with _listening(fds) as sockets:
                        await self._gateway(channel, message, sockets)
                case Judge(node, release, why):
                    await channel.send(await self._judge(node, release, why))
                case Evict():
                    await channel.send(await self._seed.evict(message))
                case AskAdapters():
                    await channel.send(self._slots.report())
                case RemoveAdapter(name):
                    who = process_named(channel.pid)
                    await channel.send(await remove_adapter(self._publisher, self._slots, self._turns, name, who))
                case PublishFiles():
                    await self._file_publisher.converse(channel, message)
                case SaveState() if self._state_saver is not None:
                    await self._state_saver.converse(channel, message)
                case _:
                    raise PeerError(f"first message: {type(message).__name__}")
        except ChannelClosed:
            raise
        except SwarmError as error:  # told to the trainer; anything else is a bug of ours
            await channel.send(Refusal(str(error), usage=isinstance(error, UsageError)))

    # ------------------------------------------------------------ work

    async def _gateway(
        self,
        channel: AsyncChannel,
        asked: OpenGateway,
        listening: list[socket.socket],
        front: socket.socket | None = None,
    ) -> None:
        """Serve until the process that asked hangs up."""
        if asked.listening and not listening:
            raise UsageError("gateway: it listens already, but its sockets were not sent")
        if missing := lacking(("h11",)):
            raise UsageError(f"A gateway needs {' and '.join(missing)} where the seed runs: {how_to_get('gateway')}")
        from node.gateway import Gateway  # most seeds do not need it
        from node.gateway.front.messages import ToSeed

        config = GatewayConfig(
            at=f"[{asked.host}]:{asked.port}" if ":" in asked.host else f"{asked.host}:{asked.port}",
            model_name=asked.model_name,
            api_key=asked.api_key,
            max_lag=asked.max_lag,
            in_flight=asked.in_flight,
            inexact_seeds=asked.inexact_seeds,
            images=asked.images,
        )
        requests = None if front is None else AsyncChannel.adopt(front, ToSeed)
        gateway = Gateway(self._ledger, self._files, lambda: self._seed.head, config, listening, self._keys, requests)
        try:
            async with trio.open_nursery() as nursery:
                url = await nursery.start(gateway.run)
                await channel.send(GatewayOpened(url))
                await channel.recv()
                raise PeerError("gateway: no further message is allowed here")
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _judge(self, node: bytes, release: bool, why: str) -> Judged:
        changed = False
        if node and release:
            changed = self._ledger.release(node, why)
        elif node:
            changed = self._ledger.quarantine(node, why)
        await self._ledger.wait_durable()
        return Judged(changed, self._ledger.reputation())

    # ------------------------------------------------------------ publishing

    async def _publishing(self, channel: AsyncChannel, attach: Attach, ring: RingReader | None) -> None:
        if attach.protocol != PROTOCOL:
            raise UsageError(
                f"The trainer speaks protocol {attach.protocol}, this seed {PROTOCOL}: "
                "install the same version of swarm-node."
            )
        if not attach.adapter:
            await self._publish_part(channel, attach, ring, Part.parse(attach.part))
            return
        if attach.world != 1:
            raise UsageError("An adapter is published from one process: gather it there.")
        part = await self._take_slot(attach.adapter)
        try:
            await self._publish_part(channel, attach, ring, part)
        finally:
            self._slots.detach(attach.adapter)

    async def _take_slot(self, adapter: str) -> Part:
        """The slot of an adapter. Raises `Busy` when another trainer is attached to it, `UsageError` without a slot."""
        deadline = trio.current_time() + HANG_UP_WITHIN_S
        while self._slots.is_attached(adapter):
            if trio.current_time() > deadline:
                raise Busy(
                    f"Another process publishes the adapter {adapter!r}: end it, or have it close the swarm. Publish "
                    "each adapter from one process."
                )
            await trio.sleep(LOOK_S)
        return await self._slots.attach(adapter)

    async def _publish_part(self, channel: AsyncChannel, attach: Attach, ring: RingReader | None, part: Part) -> None:
        await self._hand_replica(channel, self._publisher.view(part), attach)
        rank_group = self._rank_groups.join(attach, part, channel)
        why: SwarmError | None = None
        try:
            while True:
                message, fds = await channel.recv()
                close_fds(fds)
                match message:
                    case PublishBegin() if attach.rank == 0 and not rank_group.open:
                        await rank_group.begin(message)
                    case PublishBlocks(deltas) if rank_group.open and rank_group.has(attach.rank, channel):
                        await rank_group.add(deltas)
                    case PublishShared(deltas) if ring and rank_group.open and rank_group.has(attach.rank, channel):
                        await rank_group.add_shared(deltas, ring)
                    case PublishEnd() if rank_group.open and rank_group.has(attach.rank, channel):
                        await rank_group.end(attach.rank, message)
                    case GoBack() if attach.rank == 0 and not rank_group.open:
                        await rank_group.go_back(message)
                    case _:
                        raise PeerError(f"publish: {type(message).__name__} out of turn")
        except ChannelClosed:
            raise
        except SwarmError as error:
            why = error
            raise
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(LEAVE_WITHIN_S):
                await self._rank_groups.leave(rank_group, attach, channel, why)

    async def _unheard(self, name: tuple[int, int] | None) -> VersionSeal | None:
        """The seal of a version, (epoch, number), in the history of the head."""
        if name is None:
            return None
        try:
            seal = await self._seed.find(None, name[1])
        except UsageError:
            return None
        if seal.id != name:
            return None
        changed = open_manifest(seal.manifest, self._seed.key.public).changed
        return VersionSeal(seal.root, seal.payload_bytes, changed)

    async def _hand_replica(self, channel: AsyncChannel, view: PartView, attach: Attach) -> None:
        unheard = await self._unheard(attach.unheard)
        replica, hashes = self._seed.replica, view.hashes
        hashes_fd, memory = shared.reserve("swarm-hashes", hashes.nbytes)
        if hashes_fd is None:
            raise shared.no_sharing()
        try:
            memory[: hashes.nbytes] = hashes.tobytes()
            epoch, version = self._seed.head
            base = base_layout(replica.layout) if attach.adapter else None
            attached = Attached(
                epoch, version, view.root, view.layout.to_bytes(), replica.root, view.part.offset,
                b"" if base is None else base.to_bytes(), unheard,
                b"" if base is None else sample_base(base, replica.bits),
            )  # fmt: skip
            await channel.send(attached, [replica.seal_for_readers(view.part.offset), hashes_fd])
        finally:
            memory.close()
            close_fds([hashes_fd])

    # ------------------------------------------------------------ rollouts

    async def _rollouts(self, channel: AsyncChannel, asked: OpenRollouts) -> None:
        if asked.session.startswith(VOLATILE):
            raise UsageError(f"The rollouts key {asked.session!r} begins with {VOLATILE!r}: choose another key.")
        if asked.sampling.extra.top_logprobs:
            raise UsageError("top_logprobs: rollouts do not have them; only answers of the gateway do.")
        if asked.sampling.extra.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs: rollouts do not have them; only answers of the gateway do.")
        if asked.sampling.extra.routes and (why := self._ledger.why_no_routes(1, asked.sampling)) is not None:
            raise UsageError(why)
        with trio.move_on_after(HANG_UP_WITHIN_S):
            await self._ledger.wait_closed(asked.session)
        session = self._ledger.open(
            asked.session,
            Binding(asked.n, asked.sampling, asked.max_lag, asked.whole, asked.prompts, asked.count),
            keep=asked.keep,
            total=asked.total,
            paced=not asked.terms.evaluates,
            limits=limits_of(self._files()),
            terms=asked.terms,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, channel, session, asked.refusals)
                while True:
                    message, fds = await channel.recv()
                    close_fds(fds)
                    match message:
                        case Offer():
                            self._offer(session, message)
                        case Taken(group):
                            self._ledger.taken(group)
                        case Accuse(group, sample, why):
                            self._ledger.accuse(group, sample, why)
                        case Stale(group, epoch, version):
                            self._ledger.stale(group, (epoch, version))
                        case Abort(groups):
                            for group in groups:
                                self._ledger.withdraw(session, group)
                        case Trained(epoch, version):
                            self._ledger.trained((epoch, version), session.part)
                        case _:
                            raise PeerError(f"rollouts: {type(message).__name__} out of turn")
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            self._ledger.close(session)

    def _offer(self, session: WorkSession, offer: Offer) -> None:
        if offer.skipped:
            self._ledger.skip(session, offer.skipped)
        try:
            sampling = session.own_sampling(offer.sampling)
            self._ledger.offer(session, offer.group, offer.prompt, n=offer.n, sampling=sampling)
        except PeerError as error:
            session.refused[offer.group] = (str(error), False)
            session.wake()

    async def _tell(self, channel: AsyncChannel, session: WorkSession, refusals: bool) -> None:
        """Send what happens in `session`. `refusals`: the trainer understands `OfferRefused`; otherwise a refused
        prompt ends the session."""
        allowed = 0
        while True:
            news = session.news
            while session.impossible:
                group, why = session.impossible.popitem()
                session.refused[group] = (f"No node can do this work: {why}", False)
            while session.refused:
                group, (why, usage) = session.refused.popitem()
                if not refusals:
                    raise (UsageError if usage else PeerError)(why)
                await channel.send(OfferRefused(group, why, usage))
            while session.groups:
                await self._send_group(channel, session.groups.popleft())
            if session.allowed != allowed:
                allowed = session.allowed
                await channel.send(Room(allowed, ROLLOUTS))
            await news.wait()

    async def _send_group(self, channel: AsyncChannel, group: Group) -> None:
        for left, (sample, done) in zip(reversed(range(group.size)), sorted(group.done.items()), strict=True):
            rollout = done.rollout
            counted, lag = self._ledger.lag_of(group, done)
            await channel.send(
                Sample(
                    group=group.id,
                    sample=sample,
                    left=left,
                    token_ids=rollout.token_ids,
                    logprobs=rollout.logprobs,
                    finish_reason=rollout.finish_reason,
                    spans=tuple((span.epoch, span.version, span.end) for span in rollout.spans),
                    node=done.node,
                    own=done.own,
                    counted=counted,
                    lag=lag,
                    routes=rollout.routes,
                    prompt_routes=rollout.prompt_routes,
                    reward=None if rollout.reward is None else rollout.reward.value,
                    no_reward="" if rollout.reward is None else rollout.reward.why,
                    reward_check=group.reward_checks.get(sample, "unchecked"),
                )
            )


def _ring_of(attach: Attach, fds: Sequence[int]) -> RingReader | None:
    """The ring that came with the message; None without one. Closes the descriptors. Raises `PeerError`."""
    try:
        if not attach.ring_bytes:
            return None
        if len(fds) != 1:
            raise PeerError(f"attach.ring: {len(fds)} descriptors")
        return RingReader(fds[0], attach.ring_bytes)
    finally:
        close_fds(fds)


@contextlib.contextmanager
def _listening(fds: Sequence[int]) -> Iterator[list[socket.socket]]:
    """The sockets of these descriptors, closed at the end. Raises `UsageError` for one that does not listen for TCP."""
    sockets: list[socket.socket] = []
    try:
        for fd in fds:
            try:
                found = socket.socket(fileno=fd)
            except OSError as error:
                raise UsageError("gateway: a descriptor is no socket") from error
            sockets.append(found)
            if found.family not in (socket.AF_INET, socket.AF_INET6) or not found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                raise UsageError("gateway: a socket does not listen for TCP")
        yield sockets
    finally:
        for listener in sockets:
            listener.close()
        close_fds(fds[len(sockets) :])


@contextlib.contextmanager
def _front(fds: Sequence[int]) -> Iterator[socket.socket]:
    """The socket of this descriptor, closed at the end. Raises `UsageError` unless it is one local socket."""
    try:
        if len(fds) != 1:
            raise UsageError(f"gateway: {len(fds)} descriptors")
        try:
            found = socket.socket(fileno=fds[0])
        except OSError as error:
            raise UsageError("gateway: a descriptor is no socket") from error
    except UsageError:
        close_fds(fds)
        raise
    with found:  # it closes the descriptor; another thread may get the number at once, so nobody closes that again
        if found.family != socket.AF_UNIX:
            raise UsageError("gateway: the socket for requests is not a local one")
        yield found


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The most serious of the errors of a nursery whose tasks failed together."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=lambda error: isinstance(error, trio.Cancelled) + 2 * isinstance(error, ChannelClosed))
