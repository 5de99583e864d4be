"""The parts of the picture. Each takes a status and a width, and gives its lines, the most important first."""

from collections.abc import Sequence
from typing import Final

from msgspec import UnsetType
from rich.text import Text

from node.monitor.top.style import bar, count, fit, named, printable, share, size, slot_style, sparkline, time, version
from node.settings.events import say
from node.status.schema import (
    EngineStatus,
    MemberStatus,
    NodeStatus,
    OwnStatus,
    PieceMap,
    RelayStatus,
    SeedStatus,
    Status,
    Step,
    TimeSplit,
)

__all__ = ["egress", "members", "own", "pieces", "trees", "versions", "work"]

TRAINER: Final = -1
NOBODY: Final = -2
GIVERS_NAMED: Final = 8
_STANDING: Final = {"fresh": "green", "soft": "yellow", "dead": "red"}
_FILL: Final = "·░▒▓█"
"""How much of a cell of the piece map is here: nothing, up to a third, up to two thirds, nearly all, all."""


def _names(status: Status) -> dict[int, str]:
    """By slot."""
    names = {node.slot: named(node.name, node.peer) for node in status.nodes}
    return names | {TRAINER: "trainer"}


def _table(rows: Sequence[Sequence[Text]], left: Sequence[int] = (), gap: int = 2) -> list[Text]:
    """Rows as aligned columns; those in `left` are aligned to the left."""
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = Text()
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            pad = " " * (width - cell.cell_len)
            line.append_text(Text(" " * gap if index else ""))
            line.append_text(cell + pad if index in left else Text(pad) + cell)
        lines.append(line)
    return lines


def _cells(texts: Sequence[str], style: str = "") -> list[Text]:
    return [Text(text, style) for text in texts]


# ------------------------------------------------------------ work


def work(status: SeedStatus, width: int, rates: Sequence[float]) -> list[Text]:
    """Tokens, samples and queues, and how the nodes' time divides."""
    ledger = status.work
    refused = sum(ledger.refused.values())
    first = Text.assemble((f"{count(ledger.tokens_per_s)} tokens/s", "bold"), "  ", sparkline(rates, width // 4))
    samples = Text.assemble(
        "samples: ", (f"{count(ledger.accepted)} accepted", "green"), ", ",
        (f"{count(refused)} refused", "yellow" if refused else ""), f", {count(ledger.samples_unused)} never used",
    )  # fmt: skip
    queue = Text(
        f"waiting: {count(ledger.groups_open)} request groups; {count(ledger.samples_leased)} samples at nodes, "
        f"{count(ledger.samples_free)} at none"
    )
    checks = Text(
        f"checks: {ledger.checks.confirmed} of {ledger.checks.begun} confirmed, {ledger.checks.judged} judged, "
        f"{ledger.checks.open + ledger.checks.judging} open"
    )
    lines = [first, samples, _split([node.seconds for node in status.nodes], width), queue, checks]
    return [fit(line, width) for line in lines if line.plain.strip()]


def _split(parts: Sequence[TimeSplit | None], width: int) -> Text:
    """How all nodes' time divides, as a bar with its legend."""
    known = [part for part in parts if part is not None and part.total]
    total = sum(part.total for part in known)
    if not total:
        return Text("")
    kinds = (("generating", "green", "generate"), ("no work", "bright_black", "wait_work"),
             ("old version", "yellow", "wait_version"), ("commits", "cyan", "commit"))  # fmt: skip
    shares = [(word, style, sum(getattr(part, field) for part in known) / total) for word, style, field in kinds]
    text = Text("time: ")
    cells = width // (16 if width < 100 else 8)
    for _, style, part in shares:
        text.append("█" * round(cells * part), style)
    for word, style, part in shares:
        text.append("  ■ ", style).append(f"{word} {share(part)}")
    return text


# ------------------------------------------------------------ versions


def versions(steps: Sequence[Step], width: int, most: int) -> list[Text]:
    """The last versions, the newest first, with their times and, where there is room, on an axis."""
    if not steps:
        return [Text("None was published since the seed started.", "dim")]
    shown = list(steps[: -most - 1 : -1])
    header = ["version", "step", "size", "changed", "first", "half", "last", "pause"]
    rows = [_cells(header, "dim")]
    for step in shown:
        last = f"{step.waiting} wait" if step.publish_to_all_s is None and step.waiting else time(step.publish_to_all_s)
        figures = (
            version(step.version), str(step.trainer_step or "-"), size(step.delta_bytes), share(step.density, 2),
            time(step.publish_to_first_s), time(step.publish_to_half_s), last, time(step.pause_s),
        )  # fmt: skip
        rows.append(_cells(figures))
    lines = _table(rows)
    room = width - max(line.cell_len for line in lines) - 2
    longest = max((_until(step) for step in shown), default=0.0)
    if room >= 12 and longest > 0:
        lines[0].append(f"  0 … {time(longest)}", "dim")
        for line, step in zip(lines[1:], shown, strict=True):
            line.append("  ").append_text(_axis(step, longest, room))
    return [fit(line, width) for line in lines]


def _until(step: Step) -> float:
    return step.publish_to_all_s if step.publish_to_all_s is not None else step.age_s if step.waiting else 0.0


def _axis(step: Step, longest: float, width: int) -> Text:
    """A version's way on an axis of `longest` seconds: encoded until e, first node f, half h, last l."""
    line = ["·"] * width
    until = _until(step)
    for at in range(min(width, round((width - 1) * until / longest) + 1)):
        line[at] = "─"
    marks = (("e", step.extract_s), ("f", step.publish_to_first_s), ("h", step.publish_to_half_s),
             ("l", step.publish_to_all_s))  # fmt: skip
    for mark, at in marks:
        if at is not None and at <= longest:
            line[round((width - 1) * at / longest)] = mark
    return Text("".join(line), "green" if step.publish_to_all_s is not None else "yellow")


def pieces(status: Status, width: int, most: int) -> list[Text]:
    """The newest version, chunk by chunk, coloured by the member that gave it, and whose colour is which."""
    found: PieceMap = status.pieces
    if not found.have:
        return [Text("No version has been on its way here.", "dim")]
    arrived = sum(found.have) / len(found.have)
    head = Text(f"version {version(found.version)}: {share(arrived)} of {found.chunks} chunks")
    head.append("" if found.sealed else ", not sealed yet", "yellow")
    rows = max(1, min(most - 2, -(-len(found.have) // width)))
    cells = _fewer(found, width * rows)
    map_text = Text()
    for have, giver in cells:
        letter = _FILL[4] if have >= 1 else _FILL[0] if have <= 0 else _FILL[1 + min(2, int(3 * have))]
        map_text.append(letter, "dim" if giver == NOBODY else slot_style(giver))
    lines = [map_text[start : start + width] for start in range(0, len(map_text), width)]
    names, legend = _names(status), Text("to " if isinstance(status, SeedStatus) else "from ")
    givers = sorted({giver for _, giver in cells if giver != NOBODY})
    for giver in givers[:GIVERS_NAMED]:
        legend.append("■ ", slot_style(giver)).append(f"{names.get(giver, f'slot {giver}')}  ")
    if len(givers) > GIVERS_NAMED:
        legend.append(f"and {len(givers) - GIVERS_NAMED} more")
    return [fit(line, width) for line in (head, *lines, legend)][:most]


def _fewer(found: PieceMap, most: int) -> list[tuple[float, int]]:
    """The cells, several joined into one where there are more than `most`: (share that is here, giver)."""
    group = -(-len(found.have) // most)
    cells = []
    for start in range(0, len(found.have), group):
        have, givers = found.have[start : start + group], found.giver[start : start + group]
        cells.append((sum(have) / len(have), next((giver for giver in reversed(givers) if giver != NOBODY), NOBODY)))
    return cells


def egress(status: SeedStatus, width: int) -> list[Text]:
    """What the trainer sends of the newest version, against the cap and against a star."""
    step = status.steps[-1] if status.steps else None
    copies = None if step is None else step.trainer_copies
    if copies is None:
        return [fit(Text(f"{size(status.sent_bytes)} since the start"), width)]
    star, cap = max(1, len(status.nodes)), status.egress.copies
    text = Text.assemble((f"{copies:.2f} copies", "bold"), f" of the newest version; a star sends {star}")
    if cap is not None:
        text.append(f"; at most {cap:g} (│)")
    whole = max(cap or 0.0, copies, 1.0) * 1.15
    line = bar(copies, whole, max(10, width // 3), cap)
    line.append(f"  {size(status.sent_bytes)} since the start")
    return [fit(text, width), fit(line, width)]


# ------------------------------------------------------------ trees


def trees(status: Status, width: int, most: int, stripe: int) -> list[Text]:
    """One stripe's tree, drawn; an edge has the Mbit/s at which the child received the last version through it."""
    if not any(status.stripes):
        return [Text("There is no tree yet.", "dim")]
    stripe %= len(status.stripes)
    parents, names = status.stripes[stripe], _names(status)
    rates = {node.slot: node.senders for node in status.nodes if isinstance(node, MemberStatus)}
    relayed = {node.slot for node in status.nodes if isinstance(node, MemberStatus) and node.reached == "circuit"}
    behind = _behind(status)
    children: dict[int | None, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    lines = [Text(f"stripe {stripe + 1} of {len(status.stripes)}: the trainer", "bold")]
    seen: set[int] = set()

    def below(parent: int | None, indent: str) -> None:
        mine = sorted(child for child in children.get(parent, ()) if child not in seen)
        seen.update(mine)
        for index, child in enumerate(mine):
            last = index == len(mine) - 1
            line = Text(indent + ("└" if last else "├"), "dim")
            line.append("┄ " if child in relayed else "─ ", "yellow" if child in relayed else "dim")
            line.append(names.get(child, f"slot {child}"), "yellow" if child in behind else "green")
            rate = rates.get(child, {}).get(TRAINER if parent is None else parent)
            line.append(f"  {rate:.0f} Mbit/s" if rate else "", "dim")
            line.append("  through a relay" if child in relayed else "", "yellow")
            lines.append(line)
            below(child, indent + ("  " if last else "│ "))

    below(None, "")
    lost = sorted(child for child in parents if child not in seen)
    if lost:
        lines.append(Text("in no tree: " + ", ".join(names.get(child, str(child)) for child in lost), "red"))
    if len(lines) > most:
        lines[most - 1 :] = [Text(f"and {len(lines) - most + 1} more", "dim")]
    return [fit(line, width) for line in lines]


def _behind(status: Status) -> set[int]:
    """Slots of members that do not hold the head."""
    head = status.head
    return {node.slot for node in status.nodes if head is not None and (node.held is None or node.held < head)}


# ------------------------------------------------------------ members


def members(status: SeedStatus, width: int, most: int, scroll: int) -> list[Text]:
    """One row each, from number `scroll` on; columns that do not fit are left out, the least important first."""
    if not status.nodes:
        return [Text("None yet: swarm-node invite prints a ticket, with which machines join.", "dim")]
    columns = ["slot", "name", "holds", "tokens/s", "lease", "reached", "engine", "sent", "received", "accepted",
               "refused", "useful", "Mbit/s up"]  # fmt: skip
    room = max(1, most - 2) if len(status.nodes) > most - 1 else len(status.nodes)
    scroll = max(0, min(scroll, len(status.nodes) - room))
    rows = [_cells(columns, "dim")] + [_member(node, status) for node in status.nodes[scroll : scroll + room]]
    keep = len(columns)
    while keep > 3 and max(line.cell_len for line in _table([row[:keep] for row in rows])) > width:
        keep -= 1
    lines = _table([row[:keep] for row in rows], left=(1,))
    if len(status.nodes) > room:
        lines.append(Text(f"{scroll + 1} to {scroll + room} of {len(status.nodes)}; ↑ ↓ show the others", "dim"))
    return [fit(line, width) for line in lines][:most]


def _member(node: MemberStatus, status: SeedStatus) -> list[Text]:
    behind = status.head is not None and (node.held is None or node.held < status.head)
    holds = share(node.catching_up) if node.catching_up < 1 else version(node.held)
    quarantined = node.quarantine is not None
    return [
        Text(str(node.slot)),
        Text(named(node.name, node.peer), slot_style(node.slot)),
        Text(holds, "yellow" if behind or node.catching_up < 1 else "green"),
        Text("quarantine", "red") if quarantined else Text(count(node.tokens_s)),
        Text("-" if node.lease_s is None else f"{node.lease_s:.0f} s", _STANDING.get(node.standing, "")),
        Text(node.reached or "-", "yellow" if node.reached == "circuit" else ""),
        Text(version(node.engine)),
        Text(size(node.sent_bytes), "yellow" if node.saving else ""),
        Text(size(node.received_bytes)),
        Text(count(node.accepted)),
        Text(count(sum(node.refused.values()))),
        Text(share(node.useful)),
        Text(count(node.uplink_mbit)),
    ]


def _engine_line(engine: EngineStatus) -> str:
    """One of several engines: what it does, where, and how often it was started again."""
    does = f"version {version(engine.version)}, {engine.sequences} sequences" if engine.version else ""
    on = f"on {printable(','.join(engine.devices))}" if engine.devices else ""
    restarts = f"{engine.restarts} restarts" if engine.restarts else ""
    return ", ".join(filter(None, (printable(engine.state), does, on, restarts, printable(engine.why))))


def own(status: NodeStatus | RelayStatus, width: int) -> list[Text]:
    """A node or relay as it sees itself."""
    node = status.nodes[0] if status.nodes else OwnStatus()
    facts = [
        ("name", f"{named(node.name, node.peer)}, member {node.slot}" if node.slot >= 0 else "not admitted yet"),
        ("holds", share(node.catching_up) if node.catching_up < 1 else version(node.held)),
        ("head", version(status.head)),
        ("seed", printable(status.seed_reached) or "not reached"),
        ("sent", f"{size(node.sent_bytes)}, of which {size(node.pushed_bytes)} were chunks passed on"),
        ("received", f"{size(node.received_bytes)}, of which {size(node.duplicate_bytes)} came twice"),
    ]
    if node.memory.needs_bytes:
        facts.append(("memory", f"{size(node.memory.used_bytes)} used, {size(node.memory.needs_bytes)} needed at most"))
    if not isinstance(node.engine, UnsetType):
        facts.append(("engine", "not ready" if node.engine is None else f"version {version(node.engine)}"))
    if not isinstance(node.engines, UnsetType) and len(node.engines) > 1:
        facts += [(f"engine {number}", _engine_line(engine)) for number, engine in enumerate(node.engines, 1)]
    if not isinstance(node.work, UnsetType):
        done = node.work
        samples = f"{count(done.accepted)} accepted, {count(sum(done.refused.values()))} refused"
        facts.append(("work", f"{count(done.tokens_per_s)} tokens/s; {done.generating} samples in hand; {samples}"))
        facts.append(("time", _split([done.seconds], width - 9).plain.removeprefix("time: ") or "-"))
    if isinstance(status, RelayStatus):
        facts.append(("relay", f"{status.places} places, {status.circuits} circuits, {size(status.relayed_bytes)}"))
    for relay, why in status.relays.items():
        facts.append(("through", say("no_relay" if why else "reached_through", {"relay": relay, "why": why})))
    return [fit(Text.assemble((f"{word:<9}", "dim"), text), width) for word, text in facts]
