"""BitTorrent clients on emulated hosts: aria2 and libtorrent, for the comparison in `scenarios.emulator.bench_peers`.

One origin has the file and N nodes fetch it, without a DHT or multicast. aria2 finds its peers through a small tracker
on the origin and through peer exchange; libtorrent gets a list of all peers. Both are installed if missing.

    python -m scenarios.emulator.torrents tracker  (started by `fetch_all`, as is `libtorrent`)
    python -m scenarios.emulator.torrents libtorrent TORRENT FOLDER OWN_ADDRESS PEER_ADDRESS ...
"""

import contextlib
import hashlib
import http.server
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.network import Host, Network
from scenarios.emulator.real import QUEUE_MS, Node, bound_s
from scenarios.harness.processes import next_line
from scenarios.harness.usage import machine_cpu_s

__all__ = [
    "SUBJECTS",
    "Fetched",
    "begin",
    "encode",
    "fetch_all",
    "install",
    "main",
    "session_process",
    "sessions",
    "torrent",
]

LIBTORRENT: Final = "2.1.1"
PIECE_BYTES: Final = 256 << 10
PORT, TRACKER_PORT = 6881, 6969
PATIENCE_S: Final = 240.0
SLOTS: Final = 8
"""Peers that each libtorrent session uploads to at a time."""
PACKAGES: Final = Path.home() / ".cache" / "swarm-node" / "bench-peers"
SUBJECTS: Final = ("aria2", "libtorrent")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Times are seconds since the nodes began; `copies` are the bytes past the uplink of the origin over F."""

    bound_s: float
    had_s: tuple[float, ...]
    copies: float
    busy: float


def install(subject: str) -> None:
    """Install the subject unless it is installed. Raises `UsageError` when that fails."""
    if subject == "aria2":
        if shutil.which("aria2c"):
            return
        # A fresh container image has no package lists.
        commands = [["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", "aria2"]]
    else:
        if (PACKAGES / "libtorrent").exists():
            return
        package = f"libtorrent=={LIBTORRENT}"
        commands = [[sys.executable, "-m", "pip", "install", "-q", "--target", str(PACKAGES), package]]
    print(f"installing {subject} ...", file=sys.stderr, flush=True)
    for command in commands:
        try:
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UsageError(f"{subject} could not be installed: {command[0]} is missing.") from None
        if finished.returncode:
            message = (finished.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UsageError(f"{subject} could not be installed: {' '.join(command)} printed: {message[-300:]}")


# ------------------------------------------------------------ the file


def encode(value: Any) -> bytes:
    """Encode as bencode (BEP 3)."""
    if isinstance(value, int):
        return b"i%de" % value
    if isinstance(value, bytes):
        return b"%d:%s" % (len(value), value)
    if isinstance(value, list):
        return b"l" + b"".join(map(encode, value)) + b"e"
    return b"d" + b"".join(encode(key) + encode(value[key]) for key in sorted(value)) + b"e"


def torrent(name: str, content: bytes, tracker: str) -> bytes:
    """Return the torrent file (BEP 3) of a single file."""
    pieces = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
    info = {
        b"length": len(content),
        b"name": name.encode(),
        b"piece length": PIECE_BYTES,
        b"pieces": b"".join(hashlib.sha1(piece, usedforsecurity=False).digest() for piece in pieces),
    }
    return encode({b"announce": tracker.encode(), b"info": info})


# ------------------------------------------------------------ a run


def fetch_all(subject: str, nodes: Sequence[Node], origin: Node, payload_bytes: int, rtt_ms: float = 0.0) -> Fetched:
    """Let every node fetch a random file from one origin, and compare the bytes. Raises `UsageError` on failure."""
    network = Network(rtt_ms=rtt_ms)
    hosts = [
        network.host(name, up_mbit=node.up_mbit, down_mbit=node.down_mbit, queue_ms=QUEUE_MS)
        for name, node in {"origin": origin, **{f"node{i}": node for i, node in enumerate(nodes)}}.items()
    ]
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder, network:
        content = secrets.token_bytes(payload_bytes)
        file = Path(folder, "file.torrent")
        file.write_bytes(torrent("file", content, f"http://{hosts[0].address}:{TRACKER_PORT}/announce"))
        for host in hosts:
            Path(folder, host.name).mkdir()
        Path(folder, "origin", "file").write_bytes(content)
        run = _aria2 if subject == "aria2" else _libtorrent
        before, spent = hosts[0].sums.sent_bytes, machine_cpu_s()
        began, held_at = run(hosts, Path(folder))
        used, idle = (after - earlier for earlier, after in zip(spent, machine_cpu_s(), strict=True))
        sent = hosts[0].sums.sent_bytes - before
        for host in hosts[1:]:
            if Path(folder, host.name, "file").read_bytes() != content:
                raise UsageError(f"{subject}: the file at {host.name} differs from the one that was sent.")
    bound = bound_s(payload_bytes, origin.up_mbit, nodes)
    return Fetched(bound, tuple(at - began for at in held_at), sent / payload_bytes, used / (used + idle))


def _aria2(hosts: Sequence[Host], folder: Path) -> tuple[float, list[float]]:
    """Start aria2 cold on the nodes, as it is used, after the origin has checked its file and announced itself.

    Returns the start time and each node's completion time, in seconds since the epoch.
    """
    tracker = hosts[0].popen(
        [sys.executable, "-m", "scenarios.emulator.torrents", "tracker"], stdout=subprocess.PIPE, text=True
    )
    next_line(tracker, "tracking", PATIENCE_S)
    hook = folder / "done.sh"
    hook.write_text('#!/bin/sh\ndate +%s.%N > "$DONE.part" && mv "$DONE.part" "$DONE"\n')
    hook.chmod(0o755)

    def start(host: Host) -> "subprocess.Popen[Any]":
        command = [
            "aria2c", "--no-conf", f"--dir={folder / host.name}", f"--listen-port={PORT}", "--seed-ratio=0.0",
            "--enable-dht=false", "--bt-enable-lpd=false", "--enable-peer-exchange=true", "--bt-max-peers=0",
            "--bt-request-peer-speed-limit=1000M", "--file-allocation=none", "--check-integrity=true",
            "--summary-interval=0", "--quiet=true", f"--on-bt-download-complete={hook}", str(folder / "file.torrent"),
        ]  # fmt: skip
        return host.popen(command, env={**os.environ, "DONE": str(folder / f"{host.name}.done")})

    start(hosts[0])
    next_line(tracker, "announced", PATIENCE_S)
    began = time.time()
    for host in hosts[1:]:
        start(host)
    marks = [folder / f"{host.name}.done" for host in hosts[1:]]
    deadline = time.monotonic() + PATIENCE_S
    while not all(mark.exists() for mark in marks):
        if time.monotonic() > deadline:
            raise UsageError(f"aria2: not every node had the file within {PATIENCE_S:.0f} s.")
        time.sleep(0.02)
    return began, [float(mark.read_text()) for mark in marks]


def _libtorrent(hosts: Sequence[Host], folder: Path) -> tuple[float, list[float]]:
    """Start a session on every host, then let all begin at once. Returns what `_aria2` returns."""
    processes = [
        session_process(
            folder / "file.torrent", folder / host.name, "0.0.0.0",
            [other.address for other in hosts if other is not host], host.popen,
        )
        for host in hosts
    ]  # fmt: skip
    for process in processes:
        next_line(process, "ready", PATIENCE_S)
    began = time.time()
    for process in processes:
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)
    return began, [float(next_line(process, "had", PATIENCE_S)) for process in processes[1:]]


def session_process(
    torrent_file: Path,
    folder: Path,
    own_address: str,
    peers: Sequence[str],
    popen: "Callable[..., subprocess.Popen[str]]" = subprocess.Popen,
) -> "subprocess.Popen[str]":
    """Start a libtorrent session with a file, or one that fetches it from `peers` once it has read a line.

    It prints "ready", then "had" and the time when it has the whole file.
    """
    words = ("libtorrent", str(torrent_file), str(folder), own_address, *peers)
    return popen(
        [sys.executable, "-m", "scenarios.emulator.torrents", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(PACKAGES)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def sessions(
    folder: Path, file_bytes: int, asks: Mapping[str, str | None]
) -> "Iterator[dict[str, subprocess.Popen[str]]]":
    """Libtorrent sessions on this machine's loopback, each of which waits for a line (`session_process`).

    `asks`: by the name of a session, the one that it fetches a random file from; None: it has the file. All end at
    the end of the block. Raises `UsageError` when libtorrent cannot be installed.
    """
    install("libtorrent")
    content = secrets.token_bytes(file_bytes)
    (folder / "file.torrent").write_bytes(torrent("file", content, ""))
    addresses = {name: f"127.0.1.{number}" for number, name in enumerate(asks, 1)}
    with contextlib.ExitStack() as stack:
        processes: dict[str, subprocess.Popen[str]] = {}
        for name, asked in asks.items():
            (folder / name).mkdir()
            if asked is None:
                (folder / name / "file").write_bytes(content)
            peers = () if asked is None else (addresses[asked],)
            processes[name] = session_process(folder / "file.torrent", folder / name, addresses[name], peers)
            stack.callback(processes[name].send_signal, signal.SIGKILL)
        for process in processes.values():
            next_line(process, "ready", PATIENCE_S)
        yield processes


def begin(processes: "Mapping[str, subprocess.Popen[str]]") -> None:
    """Let all sessions fetch."""
    for process in processes.values():
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)


# ------------------------------------------------------------ the processes on the hosts


class _Tracker(http.server.BaseHTTPRequestHandler):
    """A tracker that answers each announce with all other peers (BEP 3, and BEP 23 for the compact form)."""

    peers: dict[tuple[str, int], bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        at = self.client_address[0], int(query["port"][0])
        others = b"".join(packed for peer, packed in self.peers.items() if peer != at)
        self.peers[at] = bytes(map(int, at[0].split("."))) + at[1].to_bytes(2, "big")
        body = encode({b"interval": 5, b"min interval": 1, b"peers": others})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        print("announced", *at, flush=True)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _track() -> None:
    with http.server.ThreadingHTTPServer(("0.0.0.0", TRACKER_PORT), _Tracker) as server:
        print("tracking", flush=True)
        server.serve_forever()


def _fetch(torrent_file: str, folder: str, own_address: str, peers: Sequence[str]) -> None:
    import libtorrent  # type: ignore[import-not-found]

    session = libtorrent.session(
        {
            "listen_interfaces": f"{own_address}:{PORT}", "enable_dht": False, "enable_lsd": False,
            "enable_upnp": False, "enable_natpmp": False, "enable_outgoing_utp": False, "enable_incoming_utp": False,
            "unchoke_slots_limit": SLOTS, "allow_multiple_connections_per_ip": True,
        }
    )  # fmt: skip
    parameters = libtorrent.add_torrent_params()
    parameters.ti, parameters.save_path = libtorrent.torrent_info(torrent_file), folder
    seeds = Path(folder, "file").exists()
    if seeds:
        handle = session.add_torrent(parameters)
        _until(lambda: handle.status().is_seeding)
    print("ready", flush=True)
    sys.stdin.readline()
    if not seeds:
        handle = session.add_torrent(parameters)
        for peer in peers:
            handle.connect_peer((peer, PORT))
        _until(lambda: handle.status().is_seeding)
        print("had", time.time(), flush=True)
    sys.stdin.read()  # keep seeding until the driver kills this process


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "tracker":
        _track()
    else:
        _fetch(rest[0], rest[1], rest[2], rest[3:])


if __name__ == "__main__":
    main()
