"""Where the seed of this SWARM_HOME can be reached: written by `seed` at each start, read by `invite`."""

import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from codec.errors import UsageError
from node.config import MAX_ADDRESSES, Preset

__all__ = ["Contact"]

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
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
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
