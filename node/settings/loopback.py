"""Whether a host is this machine's loopback, as it is written: nothing is resolved."""

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """A name of another site that resolves to 127.0.0.1 (DNS rebinding) is none."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
