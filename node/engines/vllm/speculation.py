"""How a vLLM is told to propose tokens by the swarm's draft model, and how well that goes."""

import http.client
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

__all__ = ["Drafts", "count_drafts", "drafts_of", "method_of", "speculative_config"]

_ASK_WITHIN_S: Final = 5.0
"""For vLLM's metrics, on loopback."""
_MAX_BYTES: Final = 4 << 20
"""Of vLLM's metrics: some hundred kilobytes."""
_COUNT: Final = re.compile(r"vllm:spec_decode_num_(drafts|accepted_tokens)(?:_total)?(?:\{[^\n]*\})? (\d[\d.eE+]*)")


def method_of(config: dict[str, Any]) -> str:
    """vLLM's name for the way in which a model with this configuration proposes tokens.

    A head that reads the policy's hidden states says so by its architecture (EAGLE) or by its number of layers for next
    tokens (MTP). Anything else is a model of its own.
    """
    architectures = config.get("architectures")
    names = "".join(name for name in architectures if isinstance(name, str)) if isinstance(architectures, list) else ""
    if re.search("eagle-?3", names, re.IGNORECASE):
        return "eagle3"
    if "eagle" in names.lower() or config.get("model_type") == "eagle":
        return "eagle"
    layers = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers")
    if "mtp" in str(config.get("model_type", "")).lower() or "MTP" in names or layers:
        return "mtp"
    return "draft_model"


def speculative_config(folder: Path, tokens: int, ranks: int) -> str:
    """The value of vLLM's `--speculative-config`. `folder`: the draft model's small files. `tokens`: proposed at a time.
    `ranks`: tensor-parallel ranks, the same for both models."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        config = {}  # vLLM's own message names the problem
    method = method_of(config if isinstance(config, dict) else {})
    value = {"method": method, "model": str(folder), "num_speculative_tokens": tokens}
    return json.dumps(value | {"draft_tensor_parallel_size": ranks})


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
