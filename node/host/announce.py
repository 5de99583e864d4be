"""The addresses at which others reach this machine: from its user, a rented machine's environment, or the system.

A rented machine is usually a container behind a shared public address. A few ports of that address lead inside, mostly
under other numbers. Vast.ai and RunPod describe them in the environment with one pattern: a variable with the public
address, and for each inside port a variable with the outside port, `VAST_TCP_PORT_22=31022`. Inside ports from 70000 up
do not exist; such a number requests a pair of equal ports, and the variable's value is that port, inside and outside.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

import structlog

from codec.errors import UsageError
from node.settings.config import MAX_ADDRESSES, SEED_PORT, PeerConfig
from node.settings.contact import dialable
from swarm.protocol.core.reach import circuit, is_name

__all__ = ["BoxPorts", "announced", "box_ports", "provider_of", "reached_at", "resolved", "with_box_ports"]

_BOXES: Final = (
    ("Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_"),
    ("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"),
)
_FIRST_PAIR: Final = 70_000
"""Inside "ports" from here up are requests for a pair of equal ports."""
_log = structlog.get_logger(__name__)

Config = TypeVar("Config", bound=PeerConfig)


class BoxPorts(NamedTuple):
    """The ports of a rented machine, from its environment."""

    provider: str
    host: str
    outside: dict[int, int]
    """The outside port, by inside port."""
    pairs: tuple[int, ...]
    """Ports with one number inside and outside, which were requested and have no other use."""


def box_ports(environment: Mapping[str, str]) -> BoxPorts | None:
    """None when this is not a rented machine, or none of its ports leads inside."""
    for provider, host_name, prefix in _BOXES:
        try:
            host = str(ipaddress.ip_address(environment.get(host_name, "").strip()))
        except ValueError:
            continue
        outside: dict[int, int] = {}
        pairs: list[int] = []
        for name, value in environment.items():
            inside, port = name.removeprefix(prefix), value.strip()
            if not (name.startswith(prefix) and inside.isdecimal() and port.isdecimal() and 0 < int(port) < 65536):
                continue
            if int(inside) >= _FIRST_PAIR:
                pairs.append(int(port))
            else:
                outside[int(inside)] = int(port)
        if outside or pairs:
            return BoxPorts(provider, host, outside | {port: port for port in pairs}, tuple(sorted(pairs)))
    return None


def provider_of(environment: Mapping[str, str]) -> str:
    """The name of the provider whose variables give this machine's public address; empty if none does. Its ports
    need not be mapped."""
    return next((provider for provider, host_name, _ in _BOXES if environment.get(host_name, "").strip()), "")


def with_box_ports(config: Config, environment: Mapping[str, str]) -> Config:
    """`config` with the addresses from the rented machine's environment, unless the user gave some.

    A process that may listen on any port takes one that leads inside: a requested pair, or libp2p's usual port. Other
    ports (22, 8080) belong to other programs.
    """
    box = box_ports(environment)
    if config.announce or box is None:
        return config
    listen = config.listen
    if all(_port(address) == 0 for address in listen):
        free = [*box.pairs, *(port for port in (SEED_PORT,) if port in box.outside)]
        if not free:
            return config
        listen = (f"/ip4/0.0.0.0/tcp/{free[0]}",)
    kind = "ip6" if ":" in box.host else "ip4"
    outside = [box.outside[_port(address)] for address in listen if _port(address) in box.outside]
    return replace(config, listen=listen, announce=tuple(f"/{kind}/{box.host}/tcp/{port}" for port in outside))


def announced(config: Config) -> Config:
    """`with_box_ports` for this process's environment; the result is logged."""
    with_ports, box = with_box_ports(config, os.environ), box_ports(os.environ)
    if box is not None and not with_ports.announce:
        mapped = ", ".join(str(port) for port in sorted(box.outside))
        _log.warning("no_port_for_us", provider=box.provider, mapped=mapped, hint=f"map port {SEED_PORT}, or --listen")
    elif with_ports is not config:
        _log.info("announcing", addrs=", ".join(with_ports.announce))
    return with_ports


def resolved(config: Config) -> Config:
    """`config` with the present addresses of its host names (`--announce`, `--via`).

    Names are resolved here because the seed dials no member by name: a name could lead it to any host of its own
    network. Asks the name server, so call it in a worker thread. Raises `UsageError` for a name without an address.
    """
    announce = tuple(_resolve(text) for text in config.announce)
    via = tuple(_resolve(text) for text in config.via)
    return replace(config, announce=announce, via=via)


def _resolve(text: str) -> str:
    """An address, with or without /p2p/ID behind it, whose host name is replaced by its IP address."""
    if not is_name(text):
        return text
    _, kind, host, rest = text.split("/", 3)
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"The name {host} of --announce or --via leads nowhere ({error.strerror or error}). "
            "Give the address itself, or correct the name."
        ) from error
    ip = str(found[0][4][0])
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/{rest}"


def reached_at(config: PeerConfig, listening: Sequence[str]) -> tuple[str, ...]:
    """The addresses at which others reach a process that listens at `listening`, the best first.

    A process with a reservation at a relay (`via`) counts as unreachable except at the addresses that it announces.
    """
    circuits = tuple(circuit(relay) for relay in config.via)
    direct = config.announce or (() if circuits else dialable(listening))
    return tuple(dict.fromkeys(direct + circuits))[:MAX_ADDRESSES]


def _port(address: str) -> int:
    return int(address.rpartition("/")[2])
