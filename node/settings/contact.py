"""Where the seed of this SWARM_HOME can be reached: written by `seed` at each start, read by `invite`."""

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
    """What a ticket says beside the capability."""

    authority: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Public key of the running seed, so that `invite` notices that it was given another one's."""
    addrs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    preset: Preset

    def write(self, home: Path) -> None:
        """Put it in `home`, whole or not at all."""
        fresh = home / f"{_NAME}.new"
        fresh.unlink(missing_ok=True)  # an older one may have been open to others
        with open(fresh, "xb", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        os.replace(fresh, home / _NAME)

    @classmethod
    def read(cls, home: Path) -> "Contact":
        """What the last seed of `home` wrote. Raises `UsageError`."""
        try:
            return msgspec.json.decode((home / _NAME).read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise UsageError(
                f"No seed has run in {home} yet, so nobody knows its address. "
                "Start it (swarm-node seed), or name its folder with --home."
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{home / _NAME} cannot be read ({error}). Start the seed again.") from error


def dialable(addrs: Sequence[str]) -> tuple[str, ...]:
    """`addrs` as others can dial them, at most as many as a ticket holds: nobody can dial 0.0.0.0, so it becomes this
    machine's address on its way out, and loopback for whoever is on this machine too."""
    made: list[str] = []
    for text in addrs:
        _, kind, host, *rest = text.split("/")
        if host in ("0.0.0.0", "::"):
            loopback = "127.0.0.1" if kind == "ip4" else "::1"
            made += ["/".join(["", kind, found, *rest]) for found in (_own_address(kind), loopback) if found]
        else:
            made.append(text)
    return tuple(dict.fromkeys(made))[:MAX_ADDRESSES]


def only_near(addrs: Sequence[str]) -> bool:
    """Whether machines elsewhere can dial none of `addrs`: all are loopback or private."""
    return all(
        kind.startswith("ip") and not ipaddress.ip_address(host).is_global
        for _, kind, host, *_ in (text.split("/") for text in addrs)
    )


def _own_address(kind: str) -> str | None:
    """The address that packets to the world would leave from; None without a way out. Connecting UDP sends nothing."""
    family, far = (socket.AF_INET, "192.0.2.1") if kind == "ip4" else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return sock.getsockname()[0]
    except OSError:
        return None
