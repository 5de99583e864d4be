"""What a process of ours leaves out of its memory, tried in processes of their own."""

import json
import subprocess
import sys

RELAY = """
import json, sys
from swarm.transport.left_out import leave_out
before = len(sys.meta_path)
leave_out()
leave_out()
import node.cli.app, node.member.relay, libp2p.pubsub.gossipsub, swarm.transport.pubsub, swarm.transport.gossip_router
print(json.dumps([sorted({name.split(".")[0] for name in sys.modules}), len(sys.meta_path) - before]))
"""
USE = """
from swarm.transport.left_out import LeftOutError, leave_out
leave_out()
from libp2p.transport.quic.utils import is_quic_multiaddr
from libp2p.transport.quic.exceptions import QUICStreamError
from multiaddr.resolvers import DNSResolver
said = []
resolver = DNSResolver()
for use in (lambda: bool(is_quic_multiaddr("/ip4/1.2.3.4/udp/1/quic-v1")), lambda: resolver.resolve("/dns/x")):
    try:
        use()
    except LeftOutError as error:
        said.append(str(error))
try:
    raise ValueError("ours")
except QUICStreamError:
    said.append("wrong")
except ValueError:
    said.append("right")
print("; ".join(said))
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_relay_imports_nothing_heavy_that_it_never_uses() -> None:
    imported, installed = json.loads(run(RELAY))
    assert {"libp2p", "trio", "structlog"} <= set(imported)
    heavy = {"numba", "llvmlite", "torch", "transformers", "aioquic", "dns", "zeroconf", "requests", "httpx"}
    assert not (heavy | {"numpy", "rich", "pygments", "prometheus_client"}) & set(imported)
    assert installed == 1


def test_the_command_line_can_use_rich_although_structlog_found_none() -> None:
    code = "from swarm.transport.left_out import leave_out\nleave_out()\nimport structlog.dev, rich.console\n"
    assert run(code + "print(structlog.dev.rich, rich.console.Console.__name__)").strip() == "None Console"
    first = "import rich.console\n" + code
    assert run(first + "print(structlog.dev.rich, rich.console.Console.__name__)").strip() == "None Console"


def test_numpy_is_loaded_where_weights_are_handled() -> None:
    code = "import sys, codec.bits, codec.manifest\nwas = 'numpy' in sys.modules\n"
    assert run(code + "print(was, codec.bits.Bits, codec.bits.DTYPES['BF16'].bits)").startswith("False numpy.ndarray")


def test_a_placeholder_may_be_named_and_constructed_and_raises_when_it_is_used() -> None:
    assert run(USE).strip() == (
        "libp2p.transport.quic.utils.is_quic_multiaddr is left out of this process; "
        "multiaddr.resolvers.DNSResolver is left out of this process; right"
    )
