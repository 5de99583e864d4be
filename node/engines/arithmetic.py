"""The name that an engine gives its arithmetic class, among its abilities. Needs no torch.

The part that is measured is `node.engines.vllm.plugin.swarm_vllm.fingerprint`, which needs torch and runs where the
model does; vLLM's environment has the plugin and not this package.
"""

import re
from typing import Final

from blake3 import blake3

from node.verification.classes import PREFIX, ArithmeticClass

__all__ = ["MOST_CHARACTERS", "class_label"]

MOST_CHARACTERS: Final = 64
"""Of the name of an ability: see `node.ledger.messages.Abilities`."""
_ENGINE, _VERSION, _DTYPE, _ATTENTION = 12, 8, 8, 10
"""Characters of each part at most. The device's name gets what is left."""
_MOST_RANKS: Final = 9999


def class_label(
    engine: str, version: str, device: str, dtype: str, attention: str, ranks: int, fingerprint: str
) -> str:
    """The ability that names the class: "class:transformers/5.23.0/cpu-avx512-1f3a9c02/float32/sdpa/tp1".

    `device`, `fingerprint`: from `device_name` and `fingerprint` of the plugin. `version`: the engine's. `dtype`: as
    "bfloat16". `attention`: the backend. `ranks`: of tensor parallelism. Where a part has to be cut to fit into the
    name of an ability, the fingerprint is replaced by a hash of all parts, so that different classes stay different.
    """
    whole = [engine, version, device, dtype, attention]
    cut = [_plain(text)[:most] for text, most in zip(whole, (_ENGINE, _VERSION, 999, _DTYPE, _ATTENTION), strict=True)]
    last = min(ranks, _MOST_RANKS)
    room = MOST_CHARACTERS - len(_ability(cut[0], cut[1], f"-{fingerprint}", cut[3], cut[4], last))
    cut[2] = cut[2][: max(0, room)]
    if cut != whole or last != ranks:
        fingerprint = blake3("\0".join([*whole, str(ranks), fingerprint]).encode()).hexdigest()[: len(fingerprint)]
    return _ability(cut[0], cut[1], f"{cut[2]}-{fingerprint}", cut[3], cut[4], last)


def _ability(engine: str, version: str, device: str, dtype: str, attention: str, ranks: int) -> str:
    return PREFIX + ArithmeticClass(engine, version, device, dtype, attention, ranks).name


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "unknown"
