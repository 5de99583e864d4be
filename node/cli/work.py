"""Commands about work: gateway, quarantine. Both speak to the seed that runs on this machine."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli.asking import seed_of
from node.cli.report import SEE, TRAIN, AsJson, offer, print_json
from node.settings.config import GatewayConfig, default_home

__all__ = ["register"]


def gateway(
    *, config: Annotated[GatewayConfig, Parameter(name="*")] = GatewayConfig(), as_json: AsJson = False
) -> None:
    """Serve OpenAI's clients from the swarm's nodes, until interrupted.

    Under /v1: models, completions (of text or token ids), chat/completions; streams, log-probabilities, n. The
    seed of this machine does it; this command asks it to, and waits. A request is a work lease like any other: it goes
    to the node that has room and is fastest, stays with it for a session (X-Session-Id), is done again elsewhere if
    that node dies, and is answered once. While the seed is away, requests are answered with 503 and Retry-After.
    """
    from node.settings.given import api_key
    from node.trainers.errors import SwarmDown
    from node.trainers.held_gateway import HeldGateway
    from node.trainers.messages import OpenGateway
    from swarm.transport.base import Unreachable

    key = api_key(config.api_key, config.api_key_file)
    asked = OpenGateway(
        config.host,
        config.port,
        config.model_name,
        key,
        config.max_lag,
        config.in_flight,
        config.inexact_seeds,
    )

    def say(text: str) -> None:
        print(f"swarm-node: {text}", file=sys.stderr, flush=True)

    try:
        gateway = HeldGateway(config.home, asked, say)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
    try:
        if as_json:
            print_json({"url": gateway.url, "model": config.model_name})
        else:
            print(gateway.url)
            print(f"serves {config.model_name}. Interrupt to end.", file=sys.stderr)
        sys.stdout.flush()
        gateway.run()
    finally:
        gateway.close()


def quarantine(
    node: str = "",
    /,
    *,
    release: bool = False,
    why: str = "",
    home: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show which nodes get no work, and why; put a node there, or release it.

    A node goes there by itself when it sends what no honest node sends, when its leases run out with nothing to show,
    or when others compute other probabilities for its samples. It comes back after a while, except from the last,
    which needs --release.

    Parameters
    ----------
    node
        Its name, or its PeerId or the end of it, as in swarm-node status; without it, the record is shown.
    release
        Let it work again.
    why
        For the record.
    home
        The seed's SWARM_HOME.
    """
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import AskState, Judge, Judged, State

    folder = (home or default_home()).expanduser().absolute()
    if release and not node:
        raise UsageError("--release: which node? swarm-node quarantine lists them.")
    with speaking("it was asked about quarantine"), seed_of(folder) as channel:
        channel.send(AskState())
        state = expect(channel, State)[0].info
    key = _find(node, state) if node else b""
    with speaking("it was asked about quarantine"), seed_of(folder) as channel:
        channel.send(Judge(key, release, why))
        judged, _ = expect(channel, Judged)
    names = _names(state)
    there = {k: v["quarantine"] for k, v in state["work"]["nodes"].items() if v["quarantine"]}
    if node and not release:
        there[key.hex()] = {"why": why or "put there by hand", "left_s": None}
    elif node:
        there.pop(key.hex(), None)
    record = [entry | {"node": names.get(entry["node"].hex(), entry["node"].hex())} for entry in judged.record]
    aside: dict[str, dict[str, Any]] = {names.get(k, k): penalty for k, penalty in there.items()}
    if as_json:
        print_json({"changed": judged.changed, "quarantine": aside, "record": record})
        return
    if node:
        did = "works again" if release else "gets no more work"
        print(f"{node} {did}." if judged.changed else f"{node}: nothing to change.")
    elif not there:
        print("No node is in quarantine.")
    _show(aside, record)


def _show(there: dict[str, dict[str, Any]], record: list[dict[str, Any]]) -> None:
    """Who is in quarantine, on stdout; what happened lately, on stderr."""
    for name, penalty in there.items():
        left = "until released" if penalty["left_s"] is None else f"for another {penalty['left_s']:.0f} s"
        print(f"{name}  {left}: {penalty['why']}")
    for entry in record[-10:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["at"]))
        print(f"  {at}  {entry['node']}  {entry['what']}: {entry['why']}", file=sys.stderr)


def _names(state: dict[str, Any]) -> dict[str, Any]:
    """PeerIds of the nodes that the ledger knows, by public key in hex."""
    from swarm.transport.identity import peer_id

    return {key: peer_id(bytes.fromhex(key)) for key in state["work"]["nodes"]}


def _name(names: dict[str, str], key: bytes) -> str:
    return names.get(key.hex(), key.hex())


def _find(node: str, state: dict[str, Any]) -> bytes:
    """The one node that is meant. Raises `UsageError`."""
    named = {member.get("peer"): member.get("name") for member in state["swarm"].get("nodes", [])}
    found = [
        key
        for key, peer in _names(state).items()
        if node in (key, named.get(peer)) or (peer.endswith(node) and len(node) >= 4)
    ]
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if found:
        raise UsageError(f"{len(found)} nodes are meant by {node!r}: give more of its PeerId, as in swarm-node status.")
    raise UsageError(f"No node {node!r} has asked for work. swarm-node status lists names and PeerIds.")


def register(app: App) -> None:
    offer(
        app,
        gateway,
        TRAIN,
        "swarm-node gateway",
        "swarm-node gateway --at 127.0.0.1:9000 --model-name Qwen3-8B",
        "swarm-node gateway --at 0.0.0.0:8000 --api-key-file ~/secrets/gateway --in-flight 4096",
        "SWARM_API_KEY=... swarm-node gateway --at 0.0.0.0:8000",
    )
    offer(
        app,
        quarantine,
        SEE,
        "swarm-node quarantine",
        "swarm-node quarantine box-7 --why 'answers too well'",
        "swarm-node quarantine box-7 --release --json",
    )
