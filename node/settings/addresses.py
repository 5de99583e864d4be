"""Addresses and durations as people write them."""

import ipaddress
import re
from typing import Final

from codec.errors import UsageError

__all__ = ["address", "duration_s", "host_and_port", "is_loopback", "relay_address"]

_EXAMPLE: Final = "203.0.113.7:4001"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float:
    """The seconds of "90s", "15m", "24h" or "7d". Raises `UsageError`."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is not a duration; write it like 30m, 24h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def address(text: str) -> str:
    """A TCP address as multiaddr text, from multiaddr text, "host:port", ":port" or "port". Raises `UsageError`."""
    text = text.strip()
    if text.startswith("/"):
        kind, host, tcp, port = (text.split("/")[1:] + [""] * 4)[:4]
        if tcp != "tcp" or text.count("/") != 4 or kind not in ("ip4", "ip6", "dns", "dns4", "dns6"):
            raise UsageError(f"{text!r} is not a TCP address; write it like {_EXAMPLE} or /ip4/203.0.113.7/tcp/4001")
    else:
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")  # without brackets it is unclear where the port begins
        host = (host[1:-1] if bracketed else host) or "0.0.0.0"
        kind = "ip6" if bracketed else "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns"
    if ":" in host and "%" in host:
        raise UsageError(f"{text!r} names a zone (%...), which only this machine knows: give an address without one")
    if not _is_host(kind, host):
        if text.count(":") > 1 and not text.startswith("/"):
            raise UsageError(f"{text!r}: write an IPv6 address in brackets, then the port, like [2001:db8::1]:4001")
        raise UsageError(f"{text!r} names no host; write it like {_EXAMPLE}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{text!r} names no port from 0 to 65535; write it like {_EXAMPLE}")
    return f"/{kind}/{host}/tcp/{int(port)}"


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port to listen on, from "host:port", "[v6]:port" or "port" (then 127.0.0.1). Raises `UsageError`."""
    text = text.strip()
    _, kind, host, _, port = address(text if ":" in text else f"127.0.0.1:{text}").split("/")
    if kind == "dns" and host != "localhost":
        raise UsageError(f"{text!r}: give an IP address of this machine; write it like 127.0.0.1:9464, or 9464")
    return host, int(port)


def relay_address(text: str) -> str:
    """A relay's address: as for `address`, with or without its /p2p/ID. Raises `UsageError`."""
    place, _, id_ = text.strip().partition("/p2p/")
    if id_ and not re.fullmatch(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}", id_):
        raise UsageError(f"{text!r} ends in no PeerId; write it as its relay printed it, or without /p2p/...")
    relay = address(place)
    if relay.endswith("/tcp/0") or "/0.0.0.0/" in relay or "/::/" in relay:
        raise UsageError(f"{text!r} cannot be dialed as a relay; write it like {_EXAMPLE}")
    return relay + f"/p2p/{id_}" * bool(id_)


def _is_host(kind: str, host: str) -> bool:
    try:
        if kind == "ip4":
            return bool(ipaddress.IPv4Address(host))
        if kind == "ip6":
            return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
    return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,200}[A-Za-z0-9])?", host) is not None


def is_loopback(host: str) -> bool:
    """Whether a host, as it is written, is this machine's loopback. Nothing is resolved: a name of another site that
    resolves to 127.0.0.1 (DNS rebinding) is not loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
