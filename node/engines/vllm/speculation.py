"""How a vLLM is told to propose tokens by the swarm's draft model, and how well that goes."""

import http.client
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from codec import Layout
from codec.parts import draft_layout

__all__ = ["DraftModel", "Drafts", "count_drafts", "drafts_of", "method_of"]

_ASK_WITHIN_S: Final = 5.0
"""For vLLM's metrics, on loopback."""
_MAX_BYTES: Final = 4 << 20
"""Of vLLM's metrics: some hundred kilobytes."""
_COUNT: Final = re.compile(r"vllm:spec_decode_num_(drafts|accepted_tokens)(?:_total)?(?:\{[^\n]*\})? (\d[\d.eE+]*)")


class DraftModel(NamedTuple):
    """The swarm's draft model as a vLLM loads it.

    `folder`: its small files. `method`: vLLM's name for how it proposes.
    """

    folder: Path
    method: str

    @classmethod
    def of(cls, folder: Path, layout: Layout) -> "DraftModel":
        """`layout`: has the draft's tensors. A configuration that cannot be read counts as empty; vLLM refuses it."""
        try:
            config = msgspec.json.decode((folder / "config.json").read_bytes())
        except (OSError, msgspec.DecodeError, ValueError, RecursionError):
            config = {}
        own = draft_layout(layout)
        names = [spec.name for spec in own.tensors] if own is not None else []
        return cls(folder, method_of(config if isinstance(config, dict) else {}, names))

    def speculative_config(self, tokens: int, ranks: int) -> str:
        """The value of vLLM's `--speculative-config`. `tokens`: proposed at a time. `ranks`: tensor-parallel ranks, the
        same for both models."""
        value = {"method": self.method, "model": str(self.folder), "num_speculative_tokens": tokens}
        return json.dumps(value | {"draft_tensor_parallel_size": ranks})


def method_of(config: dict[str, Any], names: Iterable[str]) -> str:
    """vLLM's name for the way in which a model with this configuration and these tensors proposes tokens.

    EAGLE's heads often have the configuration of their policy, so they are known by the projection `fc` of hidden
    states. Heads for next tokens (MTP) say so in the configuration. Anything else is a model of its own.
    """
    names = list(names)
    if any(name.split(".")[-2:] == ["fc", "weight"] for name in names):
        return "eagle3" if any("midlayer" in name or name == "d2t" for name in names) else "eagle"
    layers = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers")
    return "mtp" if layers or "mtp" in str(config.get("model_type", "")).lower() else "draft_model"


class Drafts(NamedTuple):
    """Counts since a vLLM started. `steps`: of the policy that had proposed tokens to read. `accepted`: of these
    tokens."""

    steps: float = 0.0
    accepted: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """The acceptance length: tokens that such a step gives on average, at least 1. None: there was no step."""
        return 1 + self.accepted / self.steps if self.steps else None


def count_drafts(metrics: str) -> Drafts:
    """The counts in vLLM's metrics, summed over what they are labelled by."""
    found = {"drafts": 0.0, "accepted_tokens": 0.0}
    for name, value in _COUNT.findall(metrics):
        found[name] += float(value)
    return Drafts(found["drafts"], found["accepted_tokens"])


def drafts_of(url: str) -> Drafts:
    """Ask the vLLM at `url`. No counts while it does not answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_ASK_WITHIN_S)
    try:
        connection.request("GET", "/metrics")
        return count_drafts(connection.getresponse().read(_MAX_BYTES).decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return Drafts()
    finally:
        connection.close()
