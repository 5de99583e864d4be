"""Where the world reaches this machine: as its user says, as a rented box's environment says, or as the system does.

Rented boxes are containers behind a shared public address, a few of whose ports lead inside, under other numbers as a
rule. Vast.ai and RunPod say which in the environment, by one pattern: a variable with the public address, and for each
inside port a variable with the outside one, `VAST_TCP_PORT_22=31022`. An inside port from 70000 up exists nowhere; it
asks for a pair of equal numbers, and the variable's value is that number, inside and out.
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

__all__ = ["BoxPorts", "announced", "box_ports", "reached_at", "resolved", "with_box_ports"]

_BOXES: Final = (
    ("Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_"),
    ("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"),
)
_FIRST_ASKED_FOR: Final = 70_000
_log = structlog.get_logger(__name__)

Config = TypeVar("Config", bound=PeerConfig)


class BoxPorts(NamedTuple):
    """What a rented box's environment says."""

    provider: str
    host: str
    outside: dict[int, int]
    """By inside port."""
    pairs: tuple[int, ...]
    """Inside ports with the same number outside that were asked for, and are nobody else's."""


def box_ports(environment: Mapping[str, str]) -> BoxPorts | None:
    """None where there is no such box, or no port of it leads inside."""
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
            if int(inside) >= _FIRST_ASKED_FOR:
                pairs.append(int(port))
            else:
                outside[int(inside)] = int(port)
        if outside or pairs:
            return BoxPorts(provider, host, outside | {port: port for port in pairs}, tuple(sorted(pairs)))
    return None


def with_box_ports(config: Config, environment: Mapping[str, str]) -> Config:
    """`config` with what the box's environment says, unless the user said where the world reaches us.

    Whoever may take any port takes one that leads inside: a pair that was asked for, or libp2p's customary one. Other
    ports (22, 8080) are somebody else's.
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
    """`with_box_ports` of this process's environment, and say so."""
    made, box = with_box_ports(config, os.environ), box_ports(os.environ)
    if box is not None and not made.announce:
        mapped = ", ".join(str(port) for port in sorted(box.outside))
        _log.warning("no_port_for_us", provider=box.provider, mapped=mapped, hint=f"map port {SEED_PORT}, or --listen")
    elif made is not config:
        _log.info("announcing", addrs=", ".join(made.announce))
    return made


def resolved(config: Config) -> Config:
    """`config` with the addresses that its names (`--announce`, `--via`) have now. The seed dials nobody by name, since
    a name could lead it to any host of its own network. Asks the name server, so call it off the loop.

    Raises `UsageError` for a name that leads nowhere.
    """
    announce = tuple(_resolve(text) for text in config.announce)
    via = tuple(_resolve(text) for text in config.via)
    return replace(config, announce=announce, via=via)


def _resolve(text: str) -> str:
    """An address, perhaps with /p2p/ID behind it, whose host is no name any more."""
    if not is_name(text):
        return text
    _, kind, host, rest = text.split("/", 3)
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"The name {host} of --announce or --via leads nowhere ({error.strerror or error}). "
            "Give the address itself, or mend the name."
        ) from error
    ip = str(found[0][4][0])
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/{rest}"


def reached_at(config: PeerConfig, listening: Sequence[str]) -> tuple[str, ...]:
    """Where others reach whoever listens at `listening`, the best first.

    Who keeps a place at a relay (`via`) is taken to be out of reach, but for what was announced on purpose.
    """
    circuits = tuple(circuit(relay) for relay in config.via)
    direct = config.announce or (() if circuits else dialable(listening))
    return tuple(dict.fromkeys(direct + circuits))[:MAX_ADDRESSES]


def _port(address: str) -> int:
    return int(address.rpartition("/")[2])
