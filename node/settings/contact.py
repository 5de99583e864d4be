"""Where the seed of a SWARM_HOME can be reached: written by `seed` at each start, read by `invite`."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from codec.errors import UsageError
from node.settings.config import MAX_ADDRESSES, Preset
from swarm.store.private import FILE_MODE

__all__ = ["Contact", "dialable", "only_near"]

_NAME: Final = "contact.json"


class Contact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a ticket other than the capability."""

    authority: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Public key of the running seed, so that `invite` notices when it was given another seed's key."""
    addrs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    preset: Preset

    def write(self, home: Path) -> None:
        """Write it to `home`, whole or not at all."""
        fresh = home / f"{_NAME}.new"
        fresh.unlink(missing_ok=True)  # a file of an older version may be readable by other users
        with open(fresh, "xb", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        os.replace(fresh, home / _NAME)

    @classmethod
    def read(cls, home: Path) -> "Contact":
        """The contact that the last seed of `home` wrote. Raises `UsageError`."""
        try:
            return msgspec.json.decode((home / _NAME).read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise UsageError(
                f"No seed has run in {home} yet, so its address is unknown. "
                "Start it (swarm-node seed), or name its folder with --home."
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{home / _NAME} cannot be read ({error}). Start the seed again.") from error


def dialable(addrs: Sequence[str]) -> tuple[str, ...]:
    """`addrs` as others can dial them, at most as many as a ticket holds.

    0.0.0.0 cannot be dialed. It becomes the address from which this machine reaches the internet, and loopback for
    processes on this machine.
    """
    found: list[str] = []
    for text in addrs:
        _, kind, host, *rest = text.split("/")
        if host in ("0.0.0.0", "::"):
            loopback = "127.0.0.1" if kind == "ip4" else "::1"
            found += ["/".join(["", kind, own, *rest]) for own in (_own_address(kind), loopback) if own]
        else:
            found.append(text)
    return tuple(dict.fromkeys(found))[:MAX_ADDRESSES]


def only_near(addrs: Sequence[str]) -> bool:
    """Whether no machine elsewhere can dial any of `addrs`: all are loopback or private."""
    return all(
        kind.startswith("ip") and not ipaddress.ip_address(host).is_global
        for _, kind, host, *_ in (text.split("/") for text in addrs)
    )


def _own_address(kind: str) -> str | None:
    """The source address of packets to the internet; None without a route. Connecting a UDP socket sends nothing."""
    family, far = (socket.AF_INET, "192.0.2.1") if kind == "ip4" else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return sock.getsockname()[0]
    except OSError:
        return None
