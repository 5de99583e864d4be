"""The targets, by name. Each is imported when it is asked for: some need what others do not."""

import importlib
from typing import Final

from scenarios.fuzz.target import Target

__all__ = ["TARGETS", "target_of"]

TARGETS: Final = {
    "decoders": ("decoders", "Decoders"),
    "authority": ("authority", "AuthorityTarget"),
    "peer": ("peer", "PeerTarget"),
    "ledger": ("ledger", "LedgerTarget"),
    "gateway": ("gateway", "GatewayTarget"),
    "transport": ("transport", "TransportTarget"),
    "bulk": ("bulk", "BulkTarget"),
    "trainer": ("trainer", "TrainerTarget"),
    "engine": ("engine", "EngineTarget"),
    "vllm": ("vllm", "VllmTarget"),
    "peer-authority": ("peer", "PeerAuthority"),
}


def target_of(name: str) -> Target:
    """The target of this name. `SystemExit` when there is none."""
    if name not in TARGETS:
        raise SystemExit(f"There is no target {name!r}; there are {', '.join(TARGETS)}.")
    module, cls = TARGETS[name]
    return getattr(importlib.import_module(f"scenarios.fuzz.targets.{module}"), cls)()
