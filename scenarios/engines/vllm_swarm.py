"""A swarm whose nodes run a vLLM each, behind its gateway; and requests to both, in OpenAI's form."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from node.host.port import free_port
from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in

__all__ = ["MODEL", "READY_WITHIN_S", "Served", "ask", "served"]

MODEL: Final = "policy"
READY_WITHIN_S: Final = 600.0
"""For vLLMs to start and to be proven, on two cores."""


@dataclass(frozen=True, slots=True)
class Served:
    """Ports of OpenAI's endpoints on loopback: the gateway's, and the engines' own in the order of the nodes. All of
    them call the model `MODEL`. The nodes are the processes box0, box1, ... of `swarm`."""

    gateway: int
    engines: tuple[int, ...]
    swarm: Swarm


@contextmanager
def served(folder: Path, base: Path, nodes: int, flags: Sequence[str], python: Path | None = None) -> Iterator[Served]:
    """A swarm with the model in `base` and so many nodes, all ready. `flags`: of each vLLM. `python`: of its
    environment; None: that of `vllm_environment`."""
    from scenarios.engines.vllm_environment import vllm_python

    python = vllm_python() if python is None else python
    ports = tuple(free_port() for _ in range(nodes))
    with swarm_in(folder, patience_s=READY_WITHIN_S) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", str(nodes))
        for number, port in enumerate(ports):
            swarm.start(
                f"box{number}", "join", ticket, "--model", str(base), *LOOPBACK, "--engine", "vllm",
                "--vllm-python", str(python), "--engine-port", str(port),
                *(f"--vllm-arg={flag}" for flag in flags),
            )  # fmt: skip
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", SWARM_HOME=str(swarm.home("seed")))
        swarm.until(
            "seed",
            lambda state: sum(node["capacity"] > 0 for node in state["work"]["nodes"].values()) == nodes,
            within_s=READY_WITHIN_S,
        )
        gateway = int(json.loads(swarm.log("gateway"))["url"].split(":")[2].removesuffix("/v1"))
        yield Served(gateway, ports, swarm)


async def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None, session: str = "") -> bytes:
    """The whole answer to one request at loopback, head included. `session`: its name for the gateway."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"X-Session-Id: {session}\r\n" if session else ""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return b"".join([part async for part in stream])
