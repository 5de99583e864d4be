"""Commands about work: wait, gateway, quarantine. Each asks the seed that runs on this machine."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from codec.errors import UsageError
from node.cli import gateway_keys
from node.cli.asking import connect_to_seed
from node.cli.report import SEE, TRAIN, AsJson, offer, print_json
from node.settings.config import GatewayConfig, default_home

if TYPE_CHECKING:
    from node.status.schema import SeedReport

__all__ = ["register"]


def wait(
    *,
    nodes: int = 1,
    tokens_per_second: float = 0.0,
    max_lag: int = 0,
    timeout: str = "10m",
    home: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Wait until the swarm's nodes are ready to generate, and say on stderr what is missing meanwhile.

    A node is ready when its engine has proven the newest version and it is neither silent nor in quarantine. The exit
    code is 1 if too few nodes are ready within the time, with a sentence that says what the others lack.

    Parameters
    ----------
    nodes
        How many nodes must be ready.
    tokens_per_second
        How many tokens per second the ready nodes must make together, as the ledger has measured or they have tested.
    max_lag
        How many versions older than the newest one an engine may be.
    timeout
        How long to wait at most, as 90s, 10m or 2h.
    home
        The seed's SWARM_HOME.
    """
    from node.settings.addresses import duration_s
    from node.trainers.readiness import wait_ready

    folder, timeout_s = (home or default_home()).expanduser().absolute(), duration_s(timeout)
    connect_to_seed(folder).close()

    def say(text: str) -> None:
        print(f"swarm-node: {text}", file=sys.stderr, flush=True)

    found = wait_ready(folder, nodes, tokens_per_second, timeout_s, max_lag, say)
    if as_json:
        print_json(
            {
                "ready": found.count(),
                "tokens_per_second": found.tokens_per_second,
                "nodes": list(map(asdict, found.nodes)),
            }
        )
    else:
        print(f"{found.count()} nodes are ready, at {found.tokens_per_second:.0f} tokens/s together.")


def gateway(
    *, config: Annotated[GatewayConfig, Parameter(name="*")] = GatewayConfig(), as_json: AsJson = False
) -> None:
    """Serve OpenAI's API from the swarm's nodes, until interrupted.

    Under /v1: models, completions (of text or token ids), chat/completions; with streams, log-probabilities and n. The
    seed of this machine answers; this command listens, and keeps the requests. A request becomes a work lease: it goes
    to the fastest node that has room, and later requests of the same session (X-Session-Id) to the same node. If that
    node dies, another one does the work, and the client gets one answer. While the seed is away, new requests get 503
    and Retry-After, and those in flight wait for it.
    """
    from node.settings.given import api_key
    from node.settings.memory import give_back_promptly
    from node.trainers.errors import SwarmDown
    from node.trainers.held_gateway import HeldGateway
    from node.trainers.messages import OpenGateway
    from swarm.transport.base import Unreachable

    give_back_promptly()
    key = api_key(config.api_key, config.api_key_file)
    asked = OpenGateway(
        config.host,
        config.port,
        config.model_name,
        key,
        config.max_lag,
        config.in_flight,
        config.inexact_seeds,
        images=config.images,
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
            print(f"Serving {config.model_name}. Interrupt to end.", file=sys.stderr)
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
    """Show which nodes get no work, and why; or put a node into quarantine, or release it.

    The ledger puts a node into quarantine when it sends what no honest node sends, when its leases expire without a
    result, or when other nodes compute other probabilities for its samples. The quarantine ends after a while; the last
    kind ends only with --release.

    Parameters
    ----------
    node
        The node's name, its PeerId, or the end of its PeerId, as in swarm-node status. Without it, the record is shown.
    release
        Give the node work again.
    why
        The reason, for the record.
    home
        The seed's SWARM_HOME.
    """
    from node.status.schema import to_plain
    from node.trainers.connection.seedlink import expect, speaking
    from node.trainers.messages import AskState, Judge, Judged, State

    folder = (home or default_home()).expanduser().absolute()
    if release and not node:
        raise UsageError("--release needs a node. swarm-node quarantine lists those in quarantine.")
    with speaking("it was asked about quarantine"), connect_to_seed(folder) as channel:
        channel.send(AskState())
        report = expect(channel, State)[0].info
    key = _key_of(node, report) if node else b""
    with speaking("it was asked about quarantine"), connect_to_seed(folder) as channel:
        channel.send(Judge(key, release, why))
        judged, _ = expect(channel, Judged)
    penalties = {
        key: to_plain(found.quarantine) for key, found in report.work.nodes.items() if found.quarantine is not None
    }
    if node and not release:
        penalties[key.hex()] = {"why": why or "put there by hand", "left_s": None}
    elif node:
        penalties.pop(key.hex(), None)
    peers = _peer_ids(report)
    record = [entry | {"node": peers.get(entry["node"].hex(), entry["node"].hex())} for entry in judged.record]
    quarantined: dict[str, dict[str, Any]] = {peers.get(key, key): penalty for key, penalty in penalties.items()}
    if as_json:
        print_json({"changed": judged.changed, "quarantine": quarantined, "record": record})
        return
    if node:
        outcome = "gets work again" if release else "gets no more work"
        print(f"{node} {outcome}." if judged.changed else f"{node}: nothing to change.")
    elif not penalties:
        print("No node is in quarantine.")
    _show(quarantined, record)


def _show(quarantined: dict[str, dict[str, Any]], record: list[dict[str, Any]]) -> None:
    """The nodes in quarantine on stdout; the last ten entries of the record on stderr."""
    for name, penalty in quarantined.items():
        left = "until released" if penalty["left_s"] is None else f"for another {penalty['left_s']:.0f} s"
        print(f"{name}  {left}: {penalty['why']}")
    for entry in record[-10:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["at"]))
        print(f"  {at}  {entry['node']}  {entry['what']}: {entry['why']}", file=sys.stderr)


def _peer_ids(report: "SeedReport") -> dict[str, str]:
    """PeerIds of the nodes in the ledger, by public key in hex."""
    from swarm.transport.identity import peer_id

    return {key: peer_id(bytes.fromhex(key)) for key in report.work.nodes}


def _key_of(node: str, report: "SeedReport") -> bytes:
    """The public key of the one node that `node` names. Raises `UsageError`."""
    names = {member.peer: member.name for member in report.swarm.nodes}
    found = [
        key
        for key, peer in _peer_ids(report).items()
        if node in (key, names.get(peer)) or (peer.endswith(node) and len(node) >= 4)
    ]
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if found:
        raise UsageError(f"{node!r} matches {len(found)} nodes: give more of the PeerId, as in swarm-node status.")
    raise UsageError(f"No node {node!r} has asked for work. swarm-node status lists names and PeerIds.")


def register(app: App) -> None:
    offer(
        app,
        wait,
        TRAIN,
        "swarm-node wait --nodes 8",
        "swarm-node wait --nodes 2 --tokens-per-second 5000 --timeout 30m && python train.py",
        "swarm-node wait --nodes 8 --timeout 1h --json",
    )
    offer(
        app,
        gateway,
        TRAIN,
        "swarm-node gateway",
        "swarm-node gateway --at 127.0.0.1:9000 --model-name Qwen3-8B",
        "swarm-node gateway --at 0.0.0.0:8000 --api-key-file ~/secrets/gateway --in-flight 4096",
        "SWARM_API_KEY=... swarm-node gateway --at 0.0.0.0:8000",
        "swarm-node gateway key add anna --requests-per-minute 60",
    )
    gateway_keys.register(app["gateway"])
    offer(
        app,
        quarantine,
        SEE,
        "swarm-node quarantine",
        "swarm-node quarantine box-7 --why 'answers too well'",
        "swarm-node quarantine box-7 --release --json",
    )
