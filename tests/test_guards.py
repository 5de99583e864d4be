"""Every function that reads bytes of other processes is in a table with the guard that catches its errors.

A change that adds such a function must add a line here with its guard; otherwise a test fails.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from swarm.guard import Source

HOUSE = Path(__file__).parents[1]
PLUGINS = ("node/engines/vllm/plugin/", "node/engines/sglang/plugin/")
"""Distributions of their own, inside the engine's process: their threads end alone
(`tests/node/engines/vllm/test_vllm_front.py`)."""
READS = {
    *("receive_some", "receive_at_least", "receive_exactly", "recv", "recvmsg", "recv_into", "readv", "begins_with"),
    *("read_exactly", "accept_stream", "select"),
}
"""Names of the methods that receive bytes of other processes."""
UNPACKS = {"msgspec.msgpack.decode", "msgspec.json.decode"}
OWN_FILES = {
    *(
        "node/ledger/book.py",
        "node/settings/contact.py",
        "node/host/daily.py",
        "node/tools/demo.py",
        "node/coordinator/draft.py",
        "node/engines/vllm/server.py",
        "node/engines/vllm/speculation.py",
        "node/engines/sglang/front.py",
    ),
    *(
        "node/settings/ticket.py",
        "node/trainers/prime_rl.py",
        "node/trainers/skyrl.py",
        "node/trainers/skyrl_deltas.py",
        "node/trainers/slime.py",
        "node/trainers/slime_engine.py",
        "node/coordinator/handover.py",
        "node/coordinator/leading.py",
        "node/coordinator/rotation.py",
        "node/council/journal.py",
    ),
}
"""They decode data of this machine's disk, its user or a child process."""

CALLER = "caller"
"""A primitive: its caller, which is in this table too, handles its errors."""
OWN = "own"
"""The other end is a process of the same user: errors are reported to the caller, or end a child process."""

GUARDED_BY: dict[str, Source | str] = {
    "node/coordinator/rank_group.py::RankGroup._take_turn": Source.TRAINER,
    "node/coordinator/trainer_server.py::TrainerServer._converse": Source.TRAINER,
    "node/coordinator/trainer_server.py::TrainerServer._gateway": Source.TRAINER,
    "node/coordinator/trainer_server.py::TrainerServer._publish_part": Source.TRAINER,
    "node/coordinator/trainer_server.py::TrainerServer._rollouts": Source.TRAINER,
    "node/engines/host.py::EngineHost._serve_engine": Source.ENGINE,
    "node/engines/link.py::EngineLink.receive_answers": CALLER,
    "node/engines/sglang/front.py::_Speaker.serve": OWN,
    "node/engines/sglang/front.py::_read": OWN,
    "node/engines/vllm/links.py::PluginLink._receive": OWN,
    "node/engines/vllm/links.py::Listener._greet": OWN,
    "node/engines/worker.py::Worker._receive": OWN,
    "node/gateway/front/backend.py::Backend.run": Source.TRAINER,
    "node/gateway/front/seed_link.py::SeedLink._receive": OWN,
    "node/http/connection.py::HttpConnection._receive_or_nothing": Source.HTTP,
    "node/http/connection.py::HttpConnection._receive": Source.HTTP,
    "node/ipc/channel.py::Channel.recv": CALLER,
    "node/ipc/async_channel.py::AsyncChannel.recv": CALLER,
    "node/rewards/host.py::_Process.receive": CALLER,
    "node/rewards/worker.py::_serve": OWN,
    "node/status/query.py::ask": OWN,
    "node/status/sleeping.py::_ask": OWN,
    "node/status/query.py::serve": Source.STATUS,
    "node/trainers/rollouts.py::_Batch._receive": OWN,
    "node/trainers/connection/seedlink.py::expect": OWN,
    "node/trainers/publish_files.py::_ask": OWN,
    "node/coordinator/file_publisher.py::_stop_at_hang_up": Source.TRAINER,
    "node/coordinator/state_saver.py::_end_at_hang_up": Source.TRAINER,
    "node/trainers/save_state.py::_ask": OWN,
    "node/trainers/watch.py::main": OWN,
    "swarm/runtime/framing.py::ByteReader._fill": CALLER,
    "swarm/runtime/framing.py::ByteReader.exactly": CALLER,
    "swarm/transport/base.py::Stream.receive_at_least": CALLER,
    "swarm/transport/base.py::Stream.receive_exactly": CALLER,
    "swarm/transport/nat/circuit.py::read_exactly": CALLER,
    "swarm/transport/observed.py::observed_by": CALLER,
    "swarm/transport/lanes.py::LaneStream._check_answer": CALLER,
    "swarm/transport/lanes.py::LaneStream.receive_at_least": CALLER,
    "swarm/transport/lanes.py::LaneStream.receive_exactly": CALLER,
    "swarm/transport/lanes.py::LaneStream.receive_some": CALLER,
    "swarm/transport/lanes.py::StreamChannel.read": CALLER,
    "swarm/transport/nat/relayed_links.py::RelayedLinks._replace_circuits": Source.CIRCUIT,
    "swarm/transport/nat/relayed_links.py::RelayedLinks.on_continue": Source.STREAM,
    "swarm/transport/bulk_connections.py::BulkConnections._ask_peer": CALLER,
    "swarm/transport/bulk_connections.py::BulkConnections.serve_request": Source.STREAM,
    "swarm/transport/connection/muxer.py::MuxedStream.read": CALLER,
    "swarm/transport/connection/migrating_connection.py::RelayedLink.read": CALLER,
    "swarm/transport/pubsub.py::_Frames.next": Source.GOSSIP,
    "swarm/transport/nat/punch.py::Puncher._dial": Source.PUNCH,
    "swarm/transport/nat/punch.py::Puncher.follow": Source.STREAM,
    "swarm/transport/connection/reception.py::Reception._watch_silent": Source.CONNECTION,
    "swarm/transport/connection/reception.py::Reception._look_at_first_byte": Source.CONNECTION,
    "swarm/transport/nat/relay.py::Relay._copy": Source.CIRCUIT,
    "swarm/transport/connection/tcp.py::CountedSocket.begins_with": CALLER,
    "swarm/transport/connection/tcp.py::CountedSocket.read": CALLER,
    "swarm/transport/connection/tcp.py::CountedSocket.read_into": CALLER,
    "swarm/transport/connection/tcp.py::TcpTransport._read_token": Source.HANDSHAKE,
    "swarm/transport/connection/tcp.py::TcpTransport._serve_connection": Source.HANDSHAKE,
    "swarm/transport/yamux/link.py::StreamLink.receive": CALLER,
    "swarm/transport/yamux/stream.py::YamuxStream.receive_some": CALLER,
}


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Each function of a file with its qualified name; one inside another belongs to the outer."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            else:
                yield from walk(child, prefix)

    yield from walk(ast.parse(path.read_text()), "")


def sources(*words: str) -> Iterator[tuple[str, Path]]:
    """The files in which one of these words is; to parse all of them for each test takes long."""
    for package in ("swarm", "node"):
        for path in sorted((HOUSE / package).rglob("*.py")):
            name = path.relative_to(HOUSE).as_posix()
            if not name.startswith(PLUGINS) and any(word in path.read_text() for word in words):
                yield name, path


def readers() -> set[str]:
    return {
        f"{name}::{function}"
        for name, path in sources(*READS)
        for function, body in functions(path)
        if any(
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in READS
            for call in ast.walk(body)
        )
    }


def guards() -> dict[Source, set[str]]:
    """The files that name each `Source`: in `guarded(Source.X, ...)`, or passed to a function that guards with it."""
    found: dict[Source, set[str]] = {}
    for name, path in sources("Source"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Source":
                found.setdefault(Source[node.attr], set()).add(name)
    return found


def test_every_reader_of_what_others_send_has_a_guard() -> None:
    seen = readers()
    assert seen - GUARDED_BY.keys() == set(), "say here which guard stops what these raise"
    assert GUARDED_BY.keys() - seen == set(), "these read nothing any more"


def test_every_source_has_its_guard_in_the_code() -> None:
    assert guards().keys() == set(Source)
    assert {guard for guard in GUARDED_BY.values() if guard not in (CALLER, OWN)} <= set(Source)


def test_bytes_of_others_are_unpacked_in_one_way() -> None:
    """A decoder that is called directly raises four kinds of error, so a caller may forget one."""
    direct = [
        f"{name}:{node.lineno}"
        for name, path in sources("decode")
        if name not in OWN_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNPACKS
    ]
    assert direct == [], "use codec.unpack.unpack"


def test_a_decoder_object_is_handed_to_unpack_and_never_called() -> None:
    called = [
        f"{name}:{node.lineno}"
        for name, path in sources("decode")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"
        if "decoder" in ast.unparse(node.func.value).lower()
    ]
    assert called == []
