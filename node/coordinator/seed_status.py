"""The seed's status, put together from the authority, the runtime, the ledger and the record of versions."""

from collections.abc import Sequence

from node.coordinator.admin import barred_status, ticket_status
from node.coordinator.track import Track
from node.host.endpoint import Endpoint
from node.ledger.service import LedgerService
from node.settings import memory_plan
from node.status.memory import memory_status
from node.status.piece_map import piece_map
from node.status.reached import how_reached
from node.status.roster import stripes_of
from node.status.schema import LedgerNode, LedgerStatus, MemberStatus, SeedStatus
from swarm.protocol.authority import Authority
from swarm.transport.identity import peer_id

__all__ = ["seed_status"]


def seed_status(
    core: Authority, endpoint: Endpoint, ledger: LedgerService, track: Track, *, addrs: Sequence[str], now: float
) -> SeedStatus:
    """`addrs`: where members reach the seed. `now`: local time, s."""
    work = ledger.status()
    state = core.state
    assert state.manifest is not None
    assert state.held is not None
    assert endpoint.jobs is not None
    model = endpoint.jobs.model
    assert model.layout is not None
    return SeedStatus(
        swarm=peer_id(state.swarm),
        head=state.held,
        root=state.manifest.root.hex(),
        model_bytes=model.layout.base_bytes,
        memory=memory_status(memory_plan.seed(model.holding.nbytes(model.layout))),
        addrs=list(addrs),
        relays=endpoint.transport.reservations.state,
        sent_bytes=endpoint.transport.traffic.sent,
        control_bytes=endpoint.runtime.counts.control_sent,
        egress=core.egress.status(),
        nodes=[_member(core, endpoint, work, slot, now) for slot in sorted(core.book.leases)],
        stripes=stripes_of(state.roster),
        steps=track.steps(ledger.commit_stats.slowest),
        work=work,
        tickets=ticket_status(core.book.tickets),
        barred=barred_status(core.book.tickets),
        pieces=piece_map(state, is_seed=True),
    )


def _member(core: Authority, endpoint: Endpoint, work: LedgerStatus, slot: int, now: float) -> MemberStatus:
    lease = core.book.leases[slot]
    listed = core.state.roster.member(slot) if core.state.roster is not None else None
    in_ledger = work.nodes.get(lease.grant.peer.hex(), LedgerNode())
    status = MemberStatus(
        slot=slot,
        peer=peer_id(lease.grant.peer),
        name=listed.name if listed is not None else "",
        reached=how_reached(endpoint.transport, lease.grant.peer, listed.dialable if listed is not None else None),
        standing=core.standing(slot, now).value,
        lease_s=core.lease_left_s(slot, now),
        tokens_s=in_ledger.tokens_per_s,
        accepted=in_ledger.accepted,
        refused=in_ledger.refused,
        useful=in_ledger.useful,
        seconds=in_ledger.seconds,
        quarantine=in_ledger.quarantine,
        evidence=in_ledger.evidence,
        outstanding=in_ledger.outstanding,
        uplink_mbit=listed.up_mbit if listed is not None else 0.0,
        senders=dict(core.replanner.measured.get(slot, {})),
    )
    if lease.grant.shard is not None:
        status.shard = str(lease.grant.shard)
    if (report := lease.report) is not None:
        status.held = report.held
        status.engine = (report.engine_epoch, report.engine_version) if report.engine else None
        status.catching_up = report.catching_up
        status.sent_bytes = report.sent_bytes
        status.received_bytes = report.received_bytes
        status.saving = report.saving
    return status
