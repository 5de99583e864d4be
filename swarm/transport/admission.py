"""Who may begin a handshake: so many a second from one address, so many at a time. Pure; the clock is an argument.

A handshake costs milliseconds of CPU time before we know who is there. Known peers are limited by their grants; this is
for strangers. An IPv6 host owns a /64 as a rule, so that is its address here.
"""

import ipaddress
import math
from dataclasses import dataclass
from typing import Final

__all__ = ["Admission", "AdmissionRules", "origin"]

_MAX_HOSTS: Final = 4096
"""Addresses remembered. When all are busy at once, unknown ones are refused: an attack from everywhere."""
_SWEEP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    per_s: float = 50.0
    """Handshakes a second from one address, in the long run: a site of fifty nodes behind one NAT joins in seconds."""

    burst: int = 256
    """And so many at once, after a quiet time."""

    pending_per_address: int = 64
    pending: int = 512
    """Handshakes under way. More: the new one is closed at once, and its dialer backs off."""


@dataclass(slots=True)
class _Host:
    tokens: float
    at_s: float
    pending: int = 0


class Admission:
    """Counts handshakes by remote address."""

    def __init__(self, rules: AdmissionRules | None = None) -> None:
        self._rules = rules or AdmissionRules()
        self._hosts: dict[str, _Host] = {}
        self._pending = 0
        self._next_sweep_s = -math.inf
        self.refused = 0
        """So far; for metrics."""

    def begin(self, address: str, now_s: float) -> bool:
        """Whether a handshake from `address` (an IP) may begin; if so, `end` must follow."""
        rules, name = self._rules, origin(address)
        host = self._hosts.get(name)
        if host is None and len(self._hosts) >= _MAX_HOSTS and now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + _SWEEP_S  # not for each stranger: that would be an attack of its own
            self._forget(now_s)
        if host is None and len(self._hosts) < _MAX_HOSTS:
            host = self._hosts[name] = _Host(rules.burst, now_s)
        if host is not None:
            host.tokens = min(rules.burst, host.tokens + (now_s - host.at_s) * rules.per_s)
            host.at_s = now_s
        if (
            host is None
            or host.tokens < 1
            or host.pending >= rules.pending_per_address
            or self._pending >= rules.pending
        ):
            self.refused += 1
            return False
        host.tokens -= 1
        host.pending += 1
        self._pending += 1
        return True

    def end(self, address: str) -> None:
        """A handshake that `begin` allowed is over, well or badly."""
        self._hosts[origin(address)].pending -= 1
        self._pending -= 1

    def _forget(self, now_s: float) -> None:
        rules = self._rules
        for name, host in list(self._hosts.items()):
            if not host.pending and host.tokens + (now_s - host.at_s) * rules.per_s >= rules.burst:
                del self._hosts[name]


def origin(address: str) -> str:
    """What `address` counts as: itself, or of IPv6 its /64. What is no IP (a relay) is itself."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 6:
        if ip.ipv4_mapped:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False).network_address)
    return str(ip)
