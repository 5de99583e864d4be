"""Which peer can dial which, and which end of an edge dials. Pure.

An address is multiaddr text. A *direct* one (/ip4/203.0.113.7/tcp/4001) stands in the roster once the authority has
dialed it and its owner has answered there. A *circuit* (/ip4/198.51.100.9/tcp/4001/p2p-circuit, perhaps with the
relay's /p2p/ID before the last part) leads to a peer that has a reservation at that relay; it is the last resort.

The end that dials need not be the end that sends. An edge needs one end that the other can dial, or else a circuit.
"""

import ipaddress
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

__all__ = [
    "CIRCUIT",
    "Located",
    "Location",
    "Scope",
    "can_connect",
    "circuit",
    "direct",
    "is_circuit",
    "is_name",
    "relay_of",
    "scope",
    "to_dial",
]

CIRCUIT: Final = "/p2p-circuit"
_SCOPES_KEPT: Final = 1 << 14
"""Addresses whose scope is remembered: a member asks for those of its neighbours several times a second."""


class Scope(IntEnum):
    """From how far away an address can be dialed; of a peer: where the authority sees it.

    Peers that the authority sees at private addresses share a private network with it and with one another.
    """

    HERE = 0
    """The authority's own machine."""
    NEAR = 1
    """Its private network."""
    WORLD = 2


class Located(Protocol):
    """A peer whose addresses and scope are known: a roster's member, or a `Location`."""

    @property
    def addrs(self) -> tuple[str, ...]: ...

    @property
    def scope(self) -> int: ...


class Location(NamedTuple):
    """The addresses and scope of a peer. The authority's own scope is `HERE`."""

    addrs: tuple[str, ...]
    scope: int = Scope.WORLD


def is_circuit(address: str) -> bool:
    return address.endswith(CIRCUIT)


def is_name(address: str) -> bool:
    """Whether a name server decides where it leads: /dns4/..., or a circuit whose relay is named so."""
    return address.startswith("/dns")


def circuit(relay: str, relay_id: str = "") -> str:
    """The circuit address of a peer that has a reservation at the relay that listens at `relay`."""
    return f"{relay}/p2p/{relay_id}{CIRCUIT}" if relay_id else relay + CIRCUIT


def relay_of(address: str) -> tuple[str, str]:
    """Of a circuit: the relay's own address and its PeerId (empty: any relay that answers there)."""
    relay, _, id_ = address.removesuffix(CIRCUIT).partition("/p2p/")
    return relay, id_


@lru_cache(_SCOPES_KEPT)
def scope(address: str | None) -> Scope:
    """From where `address` can be dialed; of a circuit: from where its relay can be. Names and unknown addresses are
    `WORLD`.

    `NEAR` is every address that the internet does not route, which includes carrier-grade NAT (RFC 6598).
    """
    _, kind, host, *_ = ((address or "") + "///").split("/")
    if kind not in ("ip4", "ip6"):
        return Scope.WORLD
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return Scope.WORLD
    ip = _embedded(ip)
    if ip.is_loopback or ip.is_unspecified:
        return Scope.HERE
    return Scope.WORLD if ip.is_global and not ip.is_multicast else Scope.NEAR


_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


def _embedded(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 one leads to (mapped, 6to4, Teredo, NAT64), or `ip` itself."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo is not None else None)
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return inner or ip


def direct(source: Located, target: Located) -> tuple[str, ...]:
    """The addresses of `target` that `source` can dial without a relay."""
    return tuple(a for a in target.addrs if not is_circuit(a) and scope(a) >= source.scope)


def can_connect(a: Located, b: Located) -> bool:
    """Whether the two can have an edge without a relay: one can dial the other."""
    return bool(direct(a, b) or direct(b, a))


def to_dial(me: Located, other: Located) -> tuple[str, ...]:
    """The addresses at which `me` should dial `other`, best first. Empty: `other` should dial, or neither can. A
    circuit only where neither end can be dialed directly."""
    mine = direct(me, other)
    if mine or direct(other, me):
        return mine
    return tuple(a for a in other.addrs if is_circuit(a) and scope(a) >= me.scope)
