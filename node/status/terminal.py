"""The swarm as a person watches it in a terminal: who holds what, the trees, the last versions.

`view` is a pure function of a `Picture`, which is a status and what the watching command adds to it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import trio
from msgspec import UNSET, UnsetType
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.settings.text import printable
from node.settings.units import size_text, time_text, version_text
from node.status.schema import MemberStatus, OwnStatus, RelayStatus, SeedStatus, Status, Step, TimeSplit, Version
from node.status.work_schema import SUSPICIOUS

__all__ = ["Picture", "tree", "view", "watch"]

STEPS_SHOWN: Final = 8
NODES_SHOWN: Final = 40
"""What fits a screen."""
REFRESH_S: Final = 0.25
"""Often enough that a person sees no delay."""
_STANDING_STYLE: Final = {"fresh": "green", "soft": "yellow", "dead": "red"}


class Picture(NamedTuple):
    """What to draw."""

    status: Status
    away: str = ""
    """A sentence, when the process does not answer and `status` is its last one; empty: it answers."""
    message: str = ""
    """A line below the tables, instead of the status's own."""
    rewards: Mapping[Version, float] = {}
    """The mean reward of each step, where the trainer tells it."""


class _Row(NamedTuple):
    """A member in the tables. None: the process that was asked does not know."""

    label: str
    slot: int
    held: Version | None
    shard: str
    engine: Version | None
    catching_up: float
    standing: str
    lease_s: float | None
    sent_bytes: int
    received_bytes: int
    saving: bool
    quarantined: str | None
    """Why; None: it is not."""
    tokens_s: float | None
    useful: float | None
    reached: str
    seconds: TimeSplit | None


def _holds(row: _Row) -> str:
    """What a member holds: a version, of the whole model or of some ranks' blocks."""
    held = f"{100 * row.catching_up:.0f} %" if row.catching_up < 1 else _version(row.held)
    return f"{held} of {printable(row.shard)}" if row.shard else held


def _version(version: Version | None) -> str:
    return "-" if version is None else f"v{version_text(version)}"


def _labels(members: Sequence[MemberStatus] | Sequence[OwnStatus]) -> list[str]:
    """Each member's name; with the end of its PeerId where the name is not unique, and only that where it has none."""
    counts = Counter(member.name for member in members)

    def label(name: str, peer_end: str) -> str:
        return printable(name if name and counts[name] == 1 else f"{name} {peer_end}" if name else peer_end)

    return [label(member.name, member.peer[-8:]) for member in members]


def _rows(status: Status) -> list[_Row]:
    """By slot."""
    rows = [
        _row_of_member(label, member) if isinstance(member, MemberStatus) else _row_of_self(label, member)
        for label, member in zip(_labels(status.nodes), status.nodes, strict=True)
    ]
    return sorted(rows, key=lambda row: row.slot)


def _row_of_member(label: str, member: MemberStatus) -> _Row:
    return _Row(
        label=label,
        slot=member.slot,
        held=member.held,
        shard=member.shard if isinstance(member.shard, str) else "",
        engine=member.engine,
        catching_up=member.catching_up,
        standing=member.standing,
        lease_s=member.lease_s,
        sent_bytes=member.sent_bytes,
        received_bytes=member.received_bytes,
        saving=member.saving,
        quarantined=None if member.quarantine is None else member.quarantine.why,
        tokens_s=member.tokens_s,
        useful=member.useful,
        reached=member.reached,
        seconds=member.seconds,
    )


def _row_of_self(label: str, member: OwnStatus) -> _Row:
    return _Row(
        label=label,
        slot=member.slot,
        held=member.held,
        shard=member.shard if isinstance(member.shard, str) else "",
        engine=None if isinstance(member.engine, UnsetType) else member.engine,
        catching_up=member.catching_up,
        standing=member.standing,
        lease_s=None,
        sent_bytes=member.sent_bytes,
        received_bytes=member.received_bytes,
        saving=False,
        quarantined=None,
        tokens_s=None if isinstance(member.tokens_s, UnsetType) else member.tokens_s,
        useful=None,
        reached="",
        seconds=None,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(columns: Sequence[str], left: str = "") -> Table:
    """A table without lines; the column `left` is aligned to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right", no_wrap=True)
    return table


def _heading(status: Status) -> Text:
    heading = Text()
    heading.append(f"swarm {status.swarm[-8:] or '-'}", style="bold")
    heading.append(f"   head {_version(status.head)}", style="bold cyan")
    if not isinstance(status, SeedStatus):
        return heading
    heading.append(
        f"   trainer sent {size_text(status.sent_bytes)}, of which control {size_text(status.control_bytes)}"
    )
    egress = status.egress
    if egress.copies is not None:
        copies = egress.sent_bytes / egress.payload_bytes if egress.payload_bytes else 0.0
        heading.append(f"   {copies:.2f} of {egress.copies:g} copies sent")
        if egress.refused:
            heading.append(f", {egress.refused} requests wait for more", style="yellow")
    if status.work.useful is not None:
        heading.append(f"   useful {100 * status.work.useful:.0f} % of the nodes' time")
    if status.work.samples_unused:
        heading.append(f", {status.work.samples_unused:,} samples generated and never used")
    return heading


def _members(rows: Sequence[_Row], head: Version | None) -> RenderableType:
    if not rows:
        return Text("no nodes yet: swarm-node invite prints a ticket, with which they join", style="dim")
    table = _table(
        ("slot", "node", "holds", "engine", "lease", "sent", "received", "tokens/s", "useful", "reached"), left="node"
    )
    for row in rows[:NODES_SHOWN]:
        lagging = head is not None and row.held is not None and row.held < head
        catching_up = row.catching_up < 1
        lease = "-" if row.lease_s is None else f"{row.lease_s:.0f} s"
        table.add_row(
            str(row.slot),
            Text(row.label),
            Text(
                _holds(row),
                style="yellow" if lagging or catching_up else "green",
            ),
            _version(row.engine),
            Text(lease, _STANDING_STYLE.get(row.standing, "")),
            Text(size_text(row.sent_bytes), style="yellow" if row.saving else ""),
            size_text(row.received_bytes),
            Text("quarantine", style="red") if row.quarantined is not None else _number(row.tokens_s, ",.0f"),
            _number(row.useful, ".0%"),
            row.reached or "-",
        )
    if len(rows) > NODES_SHOWN:
        table.add_row("", f"and {len(rows) - NODES_SHOWN} more")
    return table


def _quarantine(rows: Sequence[_Row]) -> RenderableType | None:
    lines = [
        f"{row.label} is in quarantine: {printable(row.quarantined)}" for row in rows if row.quarantined is not None
    ]
    return Text("\n".join(lines), style="red") if lines else None


def _suspects(status: Status) -> RenderableType | None:
    """The members against which checks hold most, from `SUSPICIOUS` on."""
    if not isinstance(status, SeedStatus):
        return None
    members = [
        (label, member.evidence)
        for label, member in zip(_labels(status.nodes), status.nodes, strict=True)
        if member.evidence is not None and member.evidence.factor >= SUSPICIOUS and member.quarantine is None
    ]
    table = _table(("checked", "evidence", "kind", "tokens checked", "class"), left="checked")
    for label, found in sorted(members, key=lambda pair: -pair[1].factor)[:NODES_SHOWN]:
        kind = max(found.kinds, key=found.kinds.__getitem__, default="-")
        table.add_row(
            Text(label),
            Text(f"{found.factor:.1e}", style="yellow"),
            kind,
            f"{found.tokens:,}",
            printable(found.arithmetic),
        )
    return table if members else None


def _time_split(rows: Sequence[_Row]) -> RenderableType | None:
    """The shares of each node's time."""
    known = [(row.label, row.seconds) for row in rows if row.seconds is not None and row.seconds.total]
    if not known:
        return None
    table = _table(("time of", "generating", "waits for work", "waits for version", "takes version"), left="time of")
    for label, seconds in known[:NODES_SHOWN]:
        parts = (seconds.generate, seconds.wait_work, seconds.wait_version, seconds.commit)
        table.add_row(Text(label), *(_number(part / seconds.total, ".1%") for part in parts))
    return table


def tree(parents: Mapping[int, int | None]) -> str:
    """One stripe's tree on one line: `T(2(0 3) 1)` is a trainer with children 2 and 1, and 2 has 0 and 3.

    A slot whose parent is not in the tree, or that is its own ancestor, is shown after `?`: such a roster is wrong, and
    the view has to show that and end.
    """
    children: dict[int | None, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    shown: set[int] = set()

    def below(slot: int | None) -> str:
        parts = []
        for child in sorted(children.get(slot, ())):
            shown.add(child)
            parts.append(f"{child}{below(child)}")
        return f"({' '.join(parts)})" if parts else ""

    text = f"T{below(None)}"
    lost = sorted(child for child in parents if child not in shown)
    return text + (f" ? {' '.join(map(str, lost))}" if lost else "")


def _stripes(status: Status) -> RenderableType | None:
    """Each tree once, with the stripes that have it."""
    if not any(status.stripes):
        return None
    same: dict[str, list[int]] = {}
    for index, parents in enumerate(status.stripes):
        same.setdefault(tree(parents), []).append(index)
    table = _table(("stripes",))
    table.add_column("tree (T: trainer)", overflow="ellipsis", no_wrap=True)
    for text, indices in same.items():
        table.add_row(" ".join(map(str, indices)), text)
    return table


def _steps(steps: Sequence[Step], rewards: Mapping[Version, float]) -> RenderableType | None:
    if not steps:
        return None
    table = _table(("version", "step", "density", "bits/change", "delta", "copies sent", "to all", "pause", "reward"))
    for step in steps[-STEPS_SHOWN:]:
        table.add_row(
            _version(step.version),
            str(step.trainer_step) if step.trainer_step else "-",
            "-" if step.density is None else f"{100 * step.density:.2f} %",
            _number(step.bits_per_change, ".2f"),
            size_text(step.delta_bytes),
            _number(step.trainer_copies, ".3f"),
            time_text(step.publish_to_all_s),
            time_text(step.pause_s),
            _number(rewards.get(step.version), ".3f"),
        )
    return table


def _experts(steps: Sequence[Step]) -> RenderableType | None:
    """How many of a mixture's experts each version changed."""
    known = [step for step in steps[-STEPS_SHOWN:] if step.experts]
    if not known:
        return None
    versions = "   ".join(f"{_version(step.version)} {step.experts_touched or 0:,}" for step in known)
    return Text(f"experts changed, of {known[-1].experts:,}: {versions}")


def _adapters(status: Status) -> RenderableType | None:
    """The slots for adapters, and what is in them."""
    if not isinstance(status, SeedStatus) or isinstance(status.parts, UnsetType):
        return None
    parts = status.parts
    table = _table(("adapter", "slot", "rank", "version", "size", "root"), left="adapter")
    for adapter in parts.adapters:
        table.add_row(
            adapter.name, str(adapter.slot), str(adapter.rank), str(adapter.version),
            size_text(adapter.weights_bytes), adapter.root[:12],
        )  # fmt: skip
    free = Text(f"{parts.slots_free} of {parts.slots} slots for adapters of rank {parts.slot_rank} are free")
    return Group(table, free) if parts.adapters else free


def _draft(status: Status) -> RenderableType | None:
    """The draft model that the swarm carries."""
    own = status.draft if isinstance(status, SeedStatus) else status.nodes[0].draft if status.nodes else UNSET
    if isinstance(own, UnsetType):
        return None
    words = [f"draft model: {size_text(own.weights_bytes)}, root {own.root[:12]}"]
    words.append(f"changed by {own.versions} versions since the start")
    if own.loaded is False:
        words.append("not loaded")
    elif isinstance(own.acceptance, float):
        words.append(f"acceptance length {own.acceptance:.2f}")
    return Text(", ".join(words))


def _saved_states(status: Status) -> RenderableType | None:
    """The states that the trainer saved into the swarm."""
    if not isinstance(status, SeedStatus) or not status.saved_states:
        return None
    lines = []
    for state in status.saved_states:
        line = Text(f"saved state of step {state.step}: {size_text(state.size_bytes)}, {time_text(state.age_s)} old, ")
        where = f"{state.held} of {state.fragments} fragments at {state.nodes} nodes, {state.needed} are enough"
        line.append(where, style="" if state.held == state.fragments else "yellow")
        if not state.whole:
            line.append(", on its way")
        lines.append(line)
    return Group(*lines)


def _step_times(steps: Sequence[Step]) -> RenderableType | None:
    """Where each version's time went, from the begin of its publish to the slowest engine's next token."""
    known = [step for step in steps if step.extract_s is not None]
    if not known:
        return None
    table = _table(("version", "first chunk", "extracted", "last node", "staged in", "paused", "resumed in"))
    for step in known[-STEPS_SHOWN:]:
        times = (
            step.first_chunk_s, step.extract_s, step.publish_to_all_s, step.stage_s, step.pause_s, step.resume_s,
        )  # fmt: skip
        table.add_row(_version(step.version), *(time_text(seconds) for seconds in times))
    return table


def _lines(picture: Picture) -> list[Text]:
    """What is said below the tables."""
    status, lines = picture.status, list[Text]()
    if not isinstance(status, SeedStatus) and status.seed_reached:
        lines.append(Text(f"the seed is reached: {status.seed_reached}"))
    for relay, why in status.relays.items():
        lines.append(Text(f"reached through {relay}" + (f": not now, {why}" if why else "")))
    if isinstance(status, RelayStatus):
        lines.append(
            Text(
                f"relay: {status.places} places, {status.circuits} circuits, {size_text(status.relayed_bytes)} relayed"
            )
        )
    memory = status.memory if isinstance(status, SeedStatus) else status.nodes[0].memory if status.nodes else None
    if memory is not None and memory.needs_bytes:
        free = "" if memory.free_bytes is None else f", {size_text(memory.free_bytes)} free"
        lines.append(
            Text(f"memory: {size_text(memory.used_bytes)} used, {size_text(memory.needs_bytes)} needed at most{free}")
        )
    message = picture.message or ("" if isinstance(status, SeedStatus) else status.message)
    if message:
        lines.append(Text(message, style="italic"))
    return lines


def view(picture: Picture) -> RenderableType:
    """`picture` as rich prints it."""
    status = picture.status
    rows = _rows(status)
    parts: list[RenderableType] = [Text(picture.away, style="bold red"), Text()] if picture.away else []
    parts += [_heading(status), Text(), _members(rows, status.head)]
    steps = status.steps if isinstance(status, SeedStatus) else []
    for part in (
        _quarantine(rows), _suspects(status), _time_split(rows), _stripes(status), _steps(steps, picture.rewards),
        _experts(steps), _adapters(status), _draft(status), _saved_states(status), _step_times(steps), *_lines(picture),
    ):  # fmt: skip
        if part is not None:
            parts += [Text(), part]
    return Group(*parts)


async def watch(
    picture: Callable[[], Picture], *, console: Console | None = None, refresh_s: float = REFRESH_S
) -> None:
    """Show `picture()` live until cancelled; the last one stays on the screen."""
    with Live(view(picture()), console=console or Console(stderr=True), auto_refresh=False) as live:
        try:
            while True:
                await trio.sleep(refresh_s)
                live.update(view(picture()), refresh=True)
        finally:
            live.update(view(picture()), refresh=True)
