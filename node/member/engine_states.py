"""What each engine of a node does, for people and programs."""

from node.engines.base import Version
from node.engines.group import GroupedEngine
from node.status.schema import EngineStatus

__all__ = ["engine_status"]


def engine_status(engine: GroupedEngine, head: Version) -> EngineStatus:
    """`head`: the newest version of the node's engines."""
    host = engine.host
    return EngineStatus(
        state=_state(engine, head),
        version=host.version if host.ready else None,
        sequences=engine.sequences,
        restarts=host.restarts,
        reloads=host.reloads,
        devices=list(engine.devices),
        url=engine.url,
        why=engine.out,
    )


def _state(engine: GroupedEngine, head: Version) -> str:
    host = engine.host
    if engine.out:
        return "given up"
    if host.asleep:
        return "asleep"
    if not host.ready:
        return "starting"
    return "ready" if host.version == head else "behind"
