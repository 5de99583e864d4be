"""Multiaddr text of TCP addresses: to host and port, and back."""

from collections.abc import Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from codec.errors import UsageError

__all__ = ["checked_announcements", "host_and_port", "host_and_port_of", "multiaddr_text"]


def host_and_port(address: Multiaddr) -> tuple[str, int] | None:
    """Host and port of /ip4/../tcp/.., /ip6/../tcp/.. or /dns*/../tcp/.. (a trailing /p2p/.. is ignored); else None."""
    parts = {protocol.name: value for protocol, value in address.items()}
    names = [protocol.name for protocol in address.protocols()]
    if len(names) < 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
        return None
    if names[2:] not in ([], ["p2p"]):
        return None
    return str(parts[names[0]]), int(parts["tcp"])


def host_and_port_of(text: str) -> tuple[str, int] | None:
    """As `host_and_port`, for multiaddr text; None for a circuit and for text that is not a multiaddr."""
    try:
        return host_and_port(Multiaddr(text))
    except (MultiaddrError, ValueError):
        return None


def multiaddr_text(sockname: tuple) -> str:
    """The multiaddr text for a socket's (host, port, ...)."""
    host, port = sockname[:2]
    return f"/ip6/{host.partition('%')[0]}/tcp/{port}" if ":" in host else f"/ip4/{host}/tcp/{port}"


def checked_announcements(addresses: Sequence[str]) -> list[str]:
    """Return `addresses`. Raises `UsageError` if a peer could not dial one of them."""
    for text in addresses:
        try:
            target = host_and_port(Multiaddr(text))
        except (MultiaddrError, ValueError):
            target = None
        if target is None or not target[1]:
            raise UsageError(
                f"{text} is no address to announce; write it like /ip4/203.0.113.7/tcp/4701 or /dns4/HOST/tcp/4701."
            )
    return list(addresses)
