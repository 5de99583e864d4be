"""How peers are reached, in the status and in the log."""

import io
from types import SimpleNamespace
from typing import Any

import structlog
import trio
import trio.testing
from rich.console import Console

from node.status import terminal
from node.status.reached import add_relay_counts, how_reached, log_reservations
from node.status.schema import MemberStatus, RelayStatus, SeedStatus, Status
from swarm.transport.base import PathKind


def transport(**parts: Any) -> Any:
    return SimpleNamespace(path_kind=lambda peer: None, relay=None) if not parts else SimpleNamespace(**parts)


def shown(status: Status) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(terminal.view(terminal.Picture(status)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_connections_path_has_precedence_over_the_roster() -> None:
    for kind in PathKind:
        assert how_reached(transport(path_kind=lambda peer, kind=kind: kind), b"", False) == kind.value
    assert [how_reached(transport(), b"", dialable) for dialable in (True, False, None)] == [
        "can be dialed", "cannot be dialed", "",
    ]  # fmt: skip


def test_a_relay_counts_reservations_circuits_and_bytes() -> None:
    status = RelayStatus()
    relay: Any = SimpleNamespace(reservations=[b"a", b"b"], circuits=3, relayed_bytes=1_200_000)
    add_relay_counts(status, relay)
    assert (status.places, status.circuits, status.relayed_bytes) == (2, 3, 1_200_000)


def test_the_terminal_shows_how_peers_are_reached() -> None:
    place = "/ip4/203.0.113.9/tcp/4001"
    text = shown(SeedStatus(nodes=[MemberStatus(name="box", reached="punched")], relays={place: ""}))
    assert "punched" in text
    assert f"reached through {place}\n" in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert "not now, no answer" in shown(SeedStatus(relays={place: "no answer"}))
    text = shown(RelayStatus(places=2, circuits=3, relayed_bytes=1_200_000, seed_reached="circuit"))
    assert "relay: 2 places, 3 circuits, 1.2 MB relayed" in text
    assert "the seed is reached: circuit" in text


async def test_a_missing_reservation_is_logged_once_and_its_return(autojump_clock: trio.testing.MockClock) -> None:
    state = {"there": "no answer"}
    with structlog.testing.capture_logs() as logs, trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_reservations, transport(reservations=SimpleNamespace(state=state)))
            await trio.sleep(20)
            state["there"] = ""
            await trio.sleep(20)
            nursery.cancel_scope.cancel()
    assert [(entry["event"], entry["relay"]) for entry in logs] == [("no_relay", "there"), ("reached_through", "there")]
