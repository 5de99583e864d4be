"""The swarm as a person watches it in a terminal: who holds what, which tree, which step.

`view` is a pure function of the state, a plain dict. Keys, all of which may be missing:

- `swarm` (PeerId), `role`, `head` ([epoch, v]), `sent_bytes`, `control_bytes`, `message` (a line of news)
- `away`: the process does not answer, and all else is how it stood before
- `egress`: `copies` (the cap, None: none), `payload_bytes`, `sent_bytes`, `budget_bytes`, `rescued_bytes` of the newest
  version, `model_sent_bytes`, `model_left_bytes`, `refused`
- `nodes`: list of `slot`, `name`, `peer` (PeerId), `held` and `engine` ([epoch, v] or None), `standing` ("fresh",
  "soft", "dead"), `lease_s`, `catching_up` (0..1), `sent_bytes`, `received_bytes`, `tokens_s`,
  `seconds` (by what its time went into), `reached` (how: direct, dialed us, punched, circuit),
  `saving` (what it may send today is used up)
- `seed_reached`: how a member reaches the seed; `places`, `circuits`, `relayed_bytes`: what a relay does
- `relays`: by relay through which this machine is reached, why it is not so now (empty: it is)
- `stripes`: list, one a stripe, of {child slot: parent slot or None for the trainer}
- `steps`: list of `version`, `density`, `bits_per_change`, `delta_bytes`, `trainer_copies`, `extract_s`,
  `first_chunk_s`, `publish_to_all_s`, `stage_s`, `pause_s` (or `commit_pause_ms`), `resume_s`, `reward`
- `work`: of which `useful` (the share of the nodes' time that made samples which were used) and `samples_unused`
  (drawn, and never to be used)
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["size", "view", "watch"]

State = dict[str, Any]

STEPS_SHOWN: Final = 8
NODES_SHOWN: Final = 40
REFRESH_S: Final = 0.25


def size(count: float | None) -> str:
    """Bytes as people read them, in powers of ten: 999 B, 1.2 kB, 3.4 MB."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _version(held: Any) -> str:
    """A version as [epoch, v], or as v alone."""
    if held is None:
        return "-"
    if isinstance(held, int):
        return f"v{held}"
    epoch, version = held
    return f"v{version}" if epoch == 0 else f"v{version} (epoch {epoch})"


def _plain(text: str) -> str:
    """Text that a peer chose, without what would move the cursor or colour the screen."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _names(state: State) -> list[str]:
    """What to call each node: its name, and the end of its PeerId where several have that name or it has none."""
    nodes = state.get("nodes", ())
    often = Counter(node.get("name", "") for node in nodes)

    def called(node: dict[str, Any]) -> str:
        name, end = node.get("name", ""), node.get("peer", "")[-8:]
        return _plain(name if name and often[name] == 1 else f"{name} {end}" if name else end)

    return [called(node) for node in nodes]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _time(seconds: float | None) -> str:
    """Seconds as people read them: 3.2 ms, 0.45 s, 12.3 s."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.{2 if seconds < 10 else 1}f} s"


def _aside(state: State) -> RenderableType | None:
    """Who is in quarantine, and why."""
    lines = [
        f"{name} is in quarantine: {_plain(node['quarantine']['why'])}"
        for name, node in zip(_names(state), state.get("nodes", ()), strict=True)
        if node.get("quarantine")
    ]
    return Text("\n".join(lines), style="red") if lines else None


def _heading(state: State) -> Text:
    heading = Text()
    heading.append(f"swarm {state.get('swarm', '')[-8:] or '-'}", style="bold")
    heading.append(f"   head {_version(state.get('head'))}", style="bold cyan")
    if "sent_bytes" in state:
        heading.append(f"   trainer sent {size(state['sent_bytes'])}")
        if "control_bytes" in state:
            heading.append(f", of which control {size(state['control_bytes'])}")
    egress = state.get("egress", {})
    if egress.get("copies") is not None:
        spent = egress["budget_bytes"] and egress["sent_bytes"] / egress["payload_bytes"]
        heading.append(f"   {spent or 0:.2f} of {egress['copies']:g} copies sent")
        if egress["refused"]:
            heading.append(f", {egress['refused']} requests wait for more", style="yellow")
    if (useful := state.get("work", {}).get("useful")) is not None:
        heading.append(f"   useful {100 * useful:.0f} % of the nodes' time")
    if unused := state.get("work", {}).get("samples_unused"):
        heading.append(f", {unused:,} samples drawn and never used")
    return heading


_STANDING: Final = {"fresh": "green", "soft": "yellow", "dead": "red"}


def _by_slot(state: State) -> list[tuple[str, dict[str, Any]]]:
    """Each node behind what it is called."""
    return sorted(zip(_names(state), state.get("nodes", ()), strict=True), key=lambda each: each[1]["slot"])


def _nodes(state: State) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("slot", "node", "holds", "engine", "lease", "sent", "received", "tokens/s", "useful", "reached"):
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    nodes = _by_slot(state)
    head = state.get("head")
    for called, node in nodes[:NODES_SHOWN]:
        held = node.get("held")
        lagging = head is not None and held is not None and list(held) < list(head)
        catching_up = node.get("catching_up", 1.0)
        holds = f"{100 * catching_up:.0f} %" if catching_up < 1 else _version(held)
        lease_s = node.get("lease_s")
        table.add_row(
            str(node["slot"]),
            Text(called),
            Text(holds, style="yellow" if lagging or catching_up < 1 else "green"),
            _version(node.get("engine")),
            Text(
                _number(lease_s, ".0f") + (" s" if lease_s is not None else ""),
                _STANDING.get(node.get("standing", ""), ""),
            ),
            Text(size(node.get("sent_bytes")), style="yellow" if node.get("saving") else ""),
            size(node.get("received_bytes")),
            Text("aside", style="red") if node.get("quarantine") else _number(node.get("tokens_s"), ",.0f"),
            _number(node.get("useful"), ".0%"),
            node.get("reached") or "-",
        )
    if len(nodes) > NODES_SHOWN:
        table.add_row("", f"and {len(nodes) - NODES_SHOWN} more")
    return table


def _hours(state: State) -> RenderableType | None:
    """Where each node's time goes: shares of all of it."""
    nodes = [(called, node) for called, node in _by_slot(state) if sum((node.get("seconds") or {}).values())]
    if not nodes:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("time of", "generating", "waits for work", "waits for version", "takes version"):
        table.add_column(name, justify="left" if name == "time of" else "right", no_wrap=True)
    for called, node in nodes[:NODES_SHOWN]:
        seconds = node["seconds"]
        shares = [
            seconds.get(name, 0.0) / sum(seconds.values())
            for name in ("generate", "wait_work", "wait_version", "commit")
        ]
        table.add_row(Text(called), *(_number(share, ".1%") for share in shares))
    return table


def tree(parents: dict[Any, Any]) -> str:
    """One stripe's tree on one line: `T(2(0 3) 1)` is a trainer with children 2 and 1, and 2 has 0 and 3.

    A slot whose parent is not in the tree, or that stands in a ring, is shown after `?`: such a roster is wrong, and a
    view of it must say so and end.
    """
    children: dict[Any, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(None if parent is None else int(parent), []).append(int(child))
    shown: set[int] = set()

    def below(slot: int | None) -> str:
        parts = []
        for child in sorted(children.get(slot, ())):
            shown.add(child)
            parts.append(f"{child}{below(child)}")
        return f"({' '.join(parts)})" if parts else ""

    text = f"T{below(None)}"
    lost = sorted(int(child) for child in parents if int(child) not in shown)
    return text + (f" ? {' '.join(map(str, lost))}" if lost else "")


def _stripes(state: State) -> RenderableType | None:
    stripes = state.get("stripes")
    if not stripes or not any(stripes):
        return None
    same: dict[str, list[int]] = {}
    for index, parents in enumerate(stripes):
        same.setdefault(tree(parents), []).append(index)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stripes", justify="right", no_wrap=True)
    table.add_column("tree (T: trainer)", overflow="ellipsis", no_wrap=True)
    for text, indices in same.items():
        table.add_row(" ".join(map(str, indices)), text)
    return table


def _steps(state: State) -> RenderableType | None:
    steps = state.get("steps")
    if not steps:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("version", "density", "bits/change", "delta", "copies sent", "to all", "pause", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps[-STEPS_SHOWN:]:
        density = step.get("density")
        pause_s = step["commit_pause_ms"] / 1e3 if step.get("commit_pause_ms") is not None else step.get("pause_s")
        table.add_row(
            _version(step["version"]),
            "-" if density is None else f"{100 * density:.2f} %",
            _number(step.get("bits_per_change"), ".2f"),
            size(step.get("delta_bytes")),
            _number(step.get("trainer_copies"), ".3f"),
            _time(step.get("publish_to_all_s")),
            _time(pause_s),
            _number(step.get("reward"), ".3f"),
        )
    return table


def _times(state: State) -> RenderableType | None:
    """What each version's time went into, from the publish's begin to the slowest engine's next token."""
    steps = [step for step in state.get("steps") or () if step.get("extract_s") is not None]
    if not steps:
        return None
    names = ("first_chunk_s", "extract_s", "publish_to_all_s", "stage_s", "pause_s", "resume_s")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("version", "first chunk", "extracted", "last node", "staged in", "paused", "resumed in"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps[-STEPS_SHOWN:]:
        table.add_row(_version(step["version"]), *(_time(step.get(name)) for name in names))
    return table


def view(state: State) -> RenderableType:
    """`state` as something that rich prints."""
    parts: list[RenderableType] = [Text(state["away"], style="bold red"), Text()] if state.get("away") else []
    parts += [_heading(state), Text()]
    if state.get("nodes"):
        parts.append(_nodes(state))
    else:
        parts.append(Text("no nodes yet: swarm-node invite prints a ticket, with which they join", style="dim"))
    for part in (_aside(state), _hours(state), _stripes(state), _steps(state), _times(state)):
        if part is not None:
            parts += [Text(), part]
    if state.get("seed_reached"):
        parts += [Text(), Text(f"the seed is reached: {state['seed_reached']}")]
    for relay, why in state.get("relays", {}).items():
        parts += [Text(), Text(f"reached through {relay}" + (f": not now, {why}" if why else ""))]
    if "circuits" in state:
        text = f"relay: {state['places']} places, {state['circuits']} circuits, {size(state['relayed_bytes'])} relayed"
        parts += [Text(), Text(text)]
    if state.get("message"):
        parts += [Text(), Text(state["message"], style="italic")]
    return Group(*parts)


async def watch(state: Callable[[], State], *, console: Console | None = None, refresh_s: float = REFRESH_S) -> None:
    """Show `state()` live until cancelled; the last picture stays on the screen."""
    with Live(view(state()), console=console or Console(stderr=True), auto_refresh=False) as live:
        try:
            while True:
                await trio.sleep(refresh_s)
                live.update(view(state()), refresh=True)
        finally:
            live.update(view(state()), refresh=True)
