"""Folders of models that take time to make, kept in the user's cache folder by the hash of their recipe."""

import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
import platformdirs

__all__ = ["cache_root", "cached_folder"]


def cache_root() -> Path:
    """The folder of the cache: `SWARM_CACHE` if set, else the user's cache folder."""
    configured = os.environ.get("SWARM_CACHE")
    return Path(configured) if configured else platformdirs.user_cache_path("swarm-node")


def cached_folder(name: str, recipe: msgspec.Struct, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` fills for this recipe; made now if the cache does not have it.

    The folder appears complete or not at all: it is made under another name and renamed. Of two processes that make it
    at once, the first to finish wins. Raises what `make` raises.
    """
    key = blake2b(msgspec.json.encode(recipe), digest_size=8).hexdigest()
    place = cache_root() / "models" / f"{name}-{key}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
    try:
        make(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place
