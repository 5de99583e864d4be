"""The memory that a process needs and uses, for its status."""

from node.settings.memory import free_bytes, used_bytes
from node.settings.memory_plan import Plan
from node.status.schema import MemoryStatus

__all__ = ["memory_status"]


def memory_status(plan: Plan | None) -> MemoryStatus:
    """`plan`: what this process needs; None: it is not known yet."""
    status = MemoryStatus(used_bytes=used_bytes(), free_bytes=free_bytes())
    if plan is not None:
        status.needs_bytes = plan.nbytes
        status.parts = {part.what: part.nbytes for part in plan.parts if part.nbytes}
    return status
