"""The targets, by name. Each is imported on demand, since their dependencies differ."""

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
    "front": ("front", "FrontTarget"),
    "transport": ("transport", "TransportTarget"),
    "bulk": ("bulk", "BulkTarget"),
    "trainer": ("trainer", "TrainerTarget"),
    "engine": ("engine", "EngineTarget"),
    "vllm": ("vllm", "VllmTarget"),
    "peer-authority": ("peer", "PeerAuthority"),
}


def target_of(name: str) -> Target:
    """Return the target of this name. Raises `SystemExit` when there is none."""
    if name not in TARGETS:
        raise SystemExit(f"There is no target {name!r}: use one of {', '.join(TARGETS)}.")
    module, cls = TARGETS[name]
    return getattr(importlib.import_module(f"scenarios.fuzz.targets.{module}"), cls)()
