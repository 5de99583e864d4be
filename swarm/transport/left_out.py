"""Keeps parts of libraries that a process of ours never uses out of its memory: 21 of 79 MB in a relay.

Importing any module of py-libp2p imports QUIC, WebSocket, mDNS, a DHT, metrics and their dependencies (aioquic,
dnspython, zeroconf, HTTP clients and servers), since its modules name their classes in annotations, `except` clauses
and default arguments. `leave_out` makes those imports give placeholders. A placeholder may be named and constructed;
any other use raises. structlog imports rich, with pygments, if it is there, to draw tracebacks that we draw ourselves
(`node.settings.logs`): it is made to find none. The command line may still use rich.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["leave_out"]

_LEFT_OUT: Final = frozenset({
    "libp2p.bitswap",
    "libp2p.discovery",
    "libp2p.kad_dht",
    "libp2p.metrics",
    "libp2p.observability",
    "libp2p.rcmgr.prometheus_exporter",
    "libp2p.security.tls.autotls",
    "libp2p.transport.quic",
    "libp2p.transport.webrtc",
    "libp2p.transport.websocket",
    "libp2p.transport.webtransport",
    "multiaddr.resolvers",
    "trio_websocket",
})  # fmt: skip
"""Packages of which we use nothing. Names are resolved by the system's resolver, in `connection.tcp`."""


class LeftOutError(RuntimeError):
    """Something used a part of a library that this process has left out: a bug of ours."""


class _Placeholder(Exception):
    """What stands for a class or a function of a module that is left out."""

    def __init__(self, *args: object, **options: object) -> None:
        """The library constructs a few of them and does not use them."""

    def __getattr__(self, name: str) -> Any:
        raise LeftOutError(f"{type(self).__module__}.{type(self).__name__} is left out of this process")

    def __bool__(self) -> bool:
        raise LeftOutError(f"{type(self).__module__}.{type(self).__name__} is left out of this process")


class _LeftOutModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = type(name, (_Placeholder,), {"__module__": self.__name__})
        setattr(self, name, placeholder)
        return placeholder


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        parts = fullname.split(".")
        if any(".".join(parts[:length]) in _LEFT_OUT for length in range(1, len(parts) + 1)):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LeftOutModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A placeholder has no code."""


def leave_out() -> None:
    """Leave these modules out of this process from now on. Call it before py-libp2p and structlog are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        _import_without("structlog", "rich")


def _import_without(name: str, hidden: str) -> None:
    """Import a module as if the package `hidden`, which it can do without, were not installed."""
    modules: dict[str, Any] = sys.modules
    kept = modules.get(hidden)
    modules[hidden] = None  # an import raises `ModuleNotFoundError`
    try:
        import_module(name)
    finally:
        del modules[hidden]
        if kept is not None:
            modules[hidden] = kept
