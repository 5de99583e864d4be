"""A status as OpenMetrics text, by the conventions of prometheus.io/docs/practices/naming.

No metric has a peer as a label: a swarm may have 10,000 members, and each label value is a time series. Whoever wants
to look at one member scrapes that member.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import UNSET
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from node.monitor.observations import Histogram, Observations
from node.status.schema import (
    ClientStatus,
    LedgerStatus,
    OwnStatus,
    RelayStatus,
    SeedStatus,
    Status,
    Version,
    versions_behind,
)

__all__ = ["OPENMETRICS", "exposition", "families"]

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
"""What a Prometheus accepts; without it the answer is in the older text format, which promtool checks."""


def exposition(
    status: Status, observations: Observations, release: str, accept: str = OPENMETRICS
) -> tuple[bytes, str]:
    """The text of one scrape, and its content type. `release`: the installed version of swarm-node. `accept`: the
    client's header of that name."""
    encode, content_type = choose_encoder(accept)
    return encode(_Collected(families(status, observations, release))), content_type


class _Collected:
    """What `generate_latest` asks for metrics."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def families(status: Status, observations: Observations, release: str) -> Iterator[Metric]:
    """The metrics of a process."""
    if isinstance(status, SeedStatus):
        yield _info(release, "seed")
        yield from _of_seed(status, observations)
    else:
        yield _info(release, "relay" if isinstance(status, RelayStatus) else "node")
        if status.head is not None:
            yield _gauge("swarm_head_version", "Newest sealed version, by its number in its epoch.", status.head[1])
        if status.nodes:
            yield from _of_member(status.nodes[0], status.head, observations)
        if isinstance(status, RelayStatus):
            yield _gauge("swarm_relay_reservations", "Machines that are reached through this relay.", status.places)
            yield _gauge("swarm_relay_circuits", "Open connections through this relay.", status.circuits)
            yield _counter("swarm_relay_bytes", "Bytes that crossed those connections.", status.relayed_bytes)


def _info(release: str, role: str) -> InfoMetricFamily:
    return InfoMetricFamily("swarm", "The process.", {"version": release, "role": role})


def _of_seed(status: SeedStatus, observations: Observations) -> Iterator[Metric]:
    head = status.head
    if head is not None:
        yield _gauge("swarm_head_version", "Newest sealed version, by its number in its epoch.", head[1])
        yield _gauge("swarm_head_epoch", "Epoch of the newest version; rises with each rollback.", head[0])
    yield _gauge("swarm_model_bytes", "Size of the model.", status.model_bytes)
    yield from _of_members(status)
    yield _histogram("swarm_publish_to_apply_seconds", "From a publish until its last member held it.",
                     observations.apply)  # fmt: skip
    yield _histogram("swarm_engine_pause_seconds", "Longest pause that a version caused on an engine.",
                     observations.pause)  # fmt: skip
    if status.steps:
        step = status.steps[-1]
        yield _gauge("swarm_delta_bytes", "Payload of the newest version.", step.delta_bytes)
        if step.trainer_copies is not None:
            yield _gauge("swarm_trainer_copies", "Copies of the newest version that the seed sent.",
                         step.trainer_copies)  # fmt: skip
    yield _counter("swarm_tx_bytes", "Bytes sent at this process's sockets.", status.sent_bytes)
    yield _counter("swarm_tx_control_bytes", "Of those, everything but payload.", status.control_bytes)
    if status.egress.budget_bytes:
        yield _gauge("swarm_egress_budget_ratio", "Bytes of the newest version sent, by what the cap allows.",
                     status.egress.sent_bytes / status.egress.budget_bytes)  # fmt: skip
    yield _counter("swarm_egress_refused", "Requests that the egress cap did not allow.", status.egress.refused)
    yield from _of_saved_state(status)
    yield from _of_ledger(status.work)


def _of_saved_state(status: SeedStatus) -> Iterator[Metric]:
    """The last whole state that the trainer saved."""
    for state in status.saved_states:
        if state.whole:
            yield _gauge("swarm_saved_state_age_seconds", "Age of the last whole saved state.", state.age_s)
            counts = {"all": state.fragments, "held": state.held, "needed": state.needed}
            yield _gauges("swarm_saved_state_fragments", "All of its fragments, those that nodes have, and those that "
                          "give it back.", "which", counts)  # fmt: skip


def _of_members(status: SeedStatus) -> Iterator[Metric]:
    """One pass over the members: there may be 10,000."""
    standings, paths = Counter[str](), Counter[str]()
    on_head = engines = quarantined = saving = lag = checked = 0
    evidence = 0.0
    head = status.head or (0, 0)
    for node in status.nodes:
        standings[node.standing] += 1
        paths[node.reached] += 1
        held = node.held
        if held is not None:
            if held >= head:
                on_head += 1
            elif node.standing == "fresh":
                lag = max(lag, versions_behind(held, head))
        engines += node.engine is not None
        quarantined += node.quarantine is not None
        saving += node.saving
        if node.evidence is not None:
            evidence, checked = max(evidence, node.evidence.factor), checked + node.evidence.tokens
    yield _gauges("swarm_members", "Members with a lease.", "standing", standings)
    yield _gauges("swarm_peers", "Members by how the seed reaches them.", "path", paths)
    yield _gauge("swarm_members_on_head", "Members that hold the newest version.", on_head)
    yield _gauge("swarm_lag_versions", "Versions that the farthest member with a fresh lease is behind.", lag)
    yield _gauge("swarm_engines_ready", "Members whose engine is ready.", engines)
    yield _gauge("swarm_members_quarantined", "Members that get no work.", quarantined)
    yield _gauge(
        "swarm_evidence_most", "The largest evidence of checks against a member; quarantine at 1.1e6.", evidence
    )
    yield _gauge("swarm_checked_tokens", "Tokens of the present members that were checked.", checked)
    yield _gauge("swarm_members_saving", "Members that have nearly used up what they may send today.", saving)


def _of_ledger(work: LedgerStatus) -> Iterator[Metric]:
    yield _gauge("swarm_tokens_per_second", "Tokens that all members generate, as measured.", work.tokens_per_s)
    yield _samples(work.accepted, work.refused)
    yield _counter("swarm_samples_used", "Samples that a trainer or client has taken.", work.samples_used)
    yield _counters("swarm_samples_unused", "Samples generated and never used, by the reason.", "reason", work.unused)
    yield _gauge("swarm_samples_leased", "Samples that nodes are to generate.", work.samples_leased)
    yield _gauge("swarm_samples_free", "Samples that no node has a lease for.", work.samples_free)
    yield from _clients(work.clients)
    yield _gauge("swarm_groups_open", "Request groups of which samples are still to come.", work.groups_open)
    yield _gauge("swarm_groups_ready", "Complete request groups that nobody has taken.", work.groups_ready)
    checks = work.checks
    verdicts = {"confirmed": checks.confirmed, "given_up": checks.given_up}
    yield _counters("swarm_checks", "Samples that a second node scored, by the outcome.", "verdict", verdicts)
    yield _gauge("swarm_checks_open", "Checks that are not decided yet.", checks.open + checks.judging)
    outcomes = {"judged": checks.judged, "given_up": checks.not_judged}
    yield _counters("swarm_judgements", "Samples that nodes judged, by the outcome.", "outcome", outcomes)
    yield _counter("swarm_evidence_dropped", "Half of a class moved together, so its evidence was dropped.",
                   checks.drifts)  # fmt: skip
    for name, help_, share in (
        ("swarm_generating_ratio", "Share of the nodes' time in which they generated.", work.generating),
        ("swarm_useful_ratio", "The same, times the share of generated tokens that were used.", work.useful),
    ):
        if share is not None:
            yield _gauge(name, help_, share)


def _of_member(own: OwnStatus, head: Version | None, observations: Observations) -> Iterator[Metric]:
    if own.held is not None:
        yield _gauge("swarm_version", "Version that the replica holds, by its number in its epoch.", own.held[1])
        lag = 0 if head is None or own.held >= head else versions_behind(own.held, head)
        yield _gauge("swarm_lag_versions", "Versions that this member is behind.", lag)
    yield _gauge("swarm_catch_up_ratio", "Share of the model that is here.", own.catching_up)
    yield _gauge("swarm_lease_fresh", "1: the lease is fresh.", own.standing == "fresh")
    yield _counter("swarm_tx_bytes", "Bytes sent at this process's sockets.", own.sent_bytes)
    yield _counter("swarm_rx_bytes", "Bytes received at this process's sockets.", own.received_bytes)
    yield _counter("swarm_pushed_bytes", "Payload passed on down the trees.", own.pushed_bytes)
    yield _counter("swarm_duplicate_bytes", "Payload received that was here already.", own.duplicate_bytes)
    if own.uplink_today is not UNSET and own.uplink_today.limit_bytes:
        today = own.uplink_today
        yield _gauge("swarm_egress_budget_ratio", "Bytes sent today, by what --up-gb-day allows.",
                     today.spent_bytes / today.limit_bytes)  # fmt: skip
    if own.engine is UNSET:
        return
    yield _gauge("swarm_engine_ready", "1: the engine generates.", own.engine is not None)
    if own.engine is not None:
        yield _gauge("swarm_engine_version", "Version that the engine generates with.", own.engine[1])
    yield _histogram("swarm_engine_pause_seconds", "Pause of the engine for a version.", observations.pause)
    if own.engine_restarts is not UNSET:
        yield _counter("swarm_engine_restarts", "The engine's process ended and was started again.",
                       own.engine_restarts)  # fmt: skip
    if own.engine_reloads is not UNSET:
        yield _counter("swarm_engine_reloads", "The engine was reloaded from the replica.", own.engine_reloads)
    if own.engines is not UNSET and own.engines:
        engines = {str(number): engine for number, engine in enumerate(own.engines, 1)}
        yield _gauges("swarm_each_engine_ready", "1: this engine gets work.", "engine",
                      {number: int(engine.state == "ready") for number, engine in engines.items()})  # fmt: skip
        yield _gauges("swarm_each_engine_sequences", "Sequences that this engine generates.", "engine",
                      {number: engine.sequences for number, engine in engines.items()})  # fmt: skip
        yield _counters("swarm_each_engine_restarts", "This engine's process ended and was started again.", "engine",
                        {number: engine.restarts for number, engine in engines.items()})  # fmt: skip
    if own.asleep is not UNSET:
        yield _gauge("swarm_engines_asleep", "1: the engines' memory is free, and no work is taken.", own.asleep)
    if own.tokens_s is not UNSET:
        yield _gauge("swarm_tokens_per_second", "Tokens generated, lately.", own.tokens_s)
    if own.work is not UNSET:
        work = own.work
        yield _samples(work.accepted, work.refused)
        yield _counter("swarm_lost_tokens", "Tokens generated in vain.", work.lost_tokens)
        yield _gauge("swarm_samples_generating", "Samples that are being generated.", work.generating)
        yield _counters("swarm_time_seconds", "Time since the start, by what the node did.", "doing", {
            "generate": work.seconds.generate, "wait_work": work.seconds.wait_work,
            "wait_version": work.seconds.wait_version, "commit": work.seconds.commit,
        })  # fmt: skip


def _clients(clients: Mapping[str, ClientStatus]) -> Iterator[Metric]:
    """Of each key of the gateway with a quota. There are as many as an operator makes."""
    requests = CounterMetricFamily(
        "swarm_gateway_requests", "Requests of a key, by what came of them.", labels=["key", "result"]
    )
    tokens = CounterMetricFamily("swarm_gateway_tokens", "Tokens of a key's prompts and answers.", labels=["key"])
    flights = GaugeMetricFamily("swarm_gateway_in_flight", "Sequences of a key that are in flight.", labels=["key"])
    for name, client in sorted(clients.items()):
        requests.add_metric([name, "admitted"], client.requests)
        requests.add_metric([name, "refused"], client.refused)
        tokens.add_metric([name], client.tokens)
        flights.add_metric([name], client.in_flight)
    if clients:
        yield from (requests, tokens, flights)


def _samples(accepted: int, refused: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily("swarm_samples", "Samples, by the ledger's verdict.", labels=["outcome", "reason"])
    family.add_metric(["accepted", ""], accepted)
    for why, count in sorted(refused.items()):
        family.add_metric(["refused", why], count)
    return family


def _gauge(name: str, help_: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_, value=float(value))


def _gauges(name: str, help_: str, label: str, values: dict[str, int] | Counter[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key or "unknown"], value)
    return family


def _counter(name: str, help_: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_, value=float(value))


def _counters(name: str, help_: str, label: str, values: dict[str, int] | dict[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _histogram(name: str, help_: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, help_, buckets=histogram.buckets(), sum_value=histogram.total)
