"""The keys of a gateway's clients, each with a quota, in a file of the seed's SWARM_HOME.

The file has a BLAKE3 hash of each key and never the key, which is shown once, when it is made. A key has 256 random
bits, so its hash needs neither a salt nor a slow function. While there is a file, each client needs a key, also after
the last key was removed.
"""

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from codec.errors import PeerError, UsageError
from codec.unpack import unpack

__all__ = ["KEYS_FILE", "ClientKey", "Quota", "add_key", "digest_of", "read_keys", "remove_key"]

KEYS_FILE: Final = "gateway-keys.json"
MOST_KEYS: Final = 4096
MOST_BYTES: Final = 4 << 20
_PREFIX: Final = "sk-swarm-"
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")

Limit = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Quota(msgspec.Struct, frozen=True):
    """What one client may use; 0: no limit. `in_flight`: sequences at a time."""

    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    """Of prompts and answers together."""
    in_flight: Limit = 0


NO_LIMIT: Final = Quota()


class ClientKey(msgspec.Struct, frozen=True):
    """A key. `digest`: see `digest_of`. `made`: Unix time, s."""

    name: str
    digest: str
    quota: Quota = NO_LIMIT
    made: int = 0


class _File(msgspec.Struct):
    keys: list[ClientKey] = []


_decoder: Final = msgspec.json.Decoder(_File)


def digest_of(key: str) -> str:
    """The hash under which `key` is kept: BLAKE3 in hex."""
    return blake3(b"swarm-node gateway key\0" + key.encode()).hexdigest()


def read_keys(path: Path) -> list[ClientKey] | None:
    """The keys in `path`; None: there is no such file, and clients need no key of it. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"Cannot read the gateway's keys in {path}: {error.strerror}.") from error
    try:
        return unpack(_decoder, data, "keys").keys
    except PeerError as error:
        raise UsageError(f"{path} is not a file of gateway keys ({error}). Restore it, or delete it.") from error


def add_key(path: Path, name: str, quota: Quota = NO_LIMIT) -> str:
    """Make a key for `name`, and return it. Raises `UsageError`, also when there is a key of this name."""
    if not _NAME.fullmatch(name):
        raise UsageError("The name of a key has 1 to 64 of the characters A-Z a-z 0-9 . _ @ -")
    key = _PREFIX + secrets.token_urlsafe(32)
    with _changing(path) as keys:
        if any(known.name == name for known in keys):
            raise UsageError(f"There is a key {name!r} already: remove it first, or choose another name.")
        if len(keys) >= MOST_KEYS:
            raise UsageError(f"{path} has {MOST_KEYS} keys, the most that there can be. Remove one.")
        keys.append(ClientKey(name, digest_of(key), quota, int(time.time())))
    return key


def remove_key(path: Path, name: str) -> None:
    """Its client gets 401 from now on. Raises `UsageError` when there is no key of this name."""
    with _changing(path) as keys:
        kept = [key for key in keys if key.name != name]
        if len(kept) == len(keys):
            raise UsageError(f"There is no key {name!r} in {path}. swarm-node gateway key list shows those there are.")
        keys[:] = kept


@contextmanager
def _changing(path: Path) -> Iterator[list[ClientKey]]:
    """The keys, for a change that is written when the block ends without an error. One process at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = read_keys(path) or []
            yield keys
            _write(path, keys)
    except OSError as error:
        raise UsageError(f"Cannot write the gateway's keys to {path}: {error.strerror}.") from error


def _write(path: Path, keys: Sequence[ClientKey]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(list(keys)))) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
