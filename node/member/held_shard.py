"""What of the model a node's home holds: it is written down at the first start, and does not change."""

from codec.errors import UsageError
from codec.formats.share import Share
from codec.formats.spec import FORMATS
from swarm.store import Store

__all__ = ["keep_to"]

_RECORD = "shard"
_WHOLE = "the whole model"


def keep_to(store: Store, shard: Share | None) -> None:
    """Note that the home holds this shard (None: the whole model). Raises `UsageError` when it holds something else:
    its blocks would have to be fetched again, and ranks of another division mean other blocks."""
    wanted = str(shard or "")
    found = store.records.get(_RECORD)
    if found is None and store.newest() is None:
        store.records.put([(_RECORD, wanted.encode())])
        return
    held = (found or b"").decode()
    if held != wanted:
        raise UsageError(
            f"{store.folder.parent} holds {_named(held)}, not {_named(wanted)}. Use another folder (--home) for that, "
            f"or {_how(held)}."
        )


def _named(shard: str) -> str:
    if shard in FORMATS:
        return f"the model in {shard}"
    return f"the blocks of {shard}" if shard else _WHOLE


def _how(held: str) -> str:
    if not held:
        return "leave out --shard and --format"
    return f"join with --{'format' if held in FORMATS else 'shard'} {held}"
