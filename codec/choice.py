"""The choice of a version's coder: rice, which is smaller, or pco, which decodes faster."""

from collections.abc import Sequence
from typing import Final

from codec.chunk import CODER_PCO, CODER_RICE
from codec.layout import Layout

__all__ = ["arrival_mbit", "choose_coder", "usual_changes", "usual_payload_bytes"]

_BITS_A_CHANGE: Final = {CODER_RICE: 7.2, CODER_PCO: 9.75}
"""Bits on the wire for each changed element at 1 % density, with headers (docs/codec.md, section 11, made-up step).
Both fall about equally as density rises."""
_DECODE_BYTES_S: Final = {CODER_RICE: 4.5e9, CODER_PCO: 5.5e9}
"""Bytes of weights a second on one core of a Zen 5, from verified chunk to predicted block hash; BLAKE3 alone reaches
10e9 there. Both coders hash every block. Rice also finds the class of every old weight; pco only copies it."""


_USUAL_DENSITY: Final = 0.01
"""Assumed share of elements that the first RL step changes; later steps are known by the step before."""


def usual_changes(layout: Layout) -> int:
    """How many elements a first version is assumed to change."""
    return round(sum(spec.elements for spec in layout.tensors) * _USUAL_DENSITY)


def usual_payload_bytes(layout: Layout) -> int:
    """The bytes that a first version is assumed to have."""
    return round(usual_changes(layout) * _BITS_A_CHANGE[CODER_RICE] / 8)


def arrival_mbit(seed_up_mbit: float, node_up_mbits: Sequence[float], node_down_mbits: Sequence[float] = ()) -> float:
    """The highest rate in Mbit/s at which a version can reach all N nodes, with every uplink in use:

        min(u_s, min d_i, (u_s + sum of u_i) / N)

    The seed (uplink u_s) must send each chunk at least once, and the slowest downlink d_i must receive all of them.
    `node_down_mbits`: downlinks of the nodes that decode; relays do not.
    """
    together = seed_up_mbit + sum(node_up_mbits)
    return min(seed_up_mbit, together / max(1, len(node_up_mbits)), *node_down_mbits)


def choose_coder(full_bytes: int, changed: int, link_mbit: float, cores: int) -> int:
    """`CODER_RICE` or `CODER_PCO`: the coder with which a node finishes sooner.

    `full_bytes`: bytes of the model. `changed`: elements that the last version changed. `link_mbit`: Mbit/s at which
    chunks reach the slowest node (see `arrival_mbit`). `cores`: cores of a node that decode.

    A node decodes chunks while later ones arrive, so it finishes after the longer of the two times:

        T(coder) = max(changed * bits(coder) / link, full_bytes / (cores * decode(coder)))

    A tie goes to rice, which sends fewer bytes. Example: an 8B model (16.4 GB, 82 million changes) is 590 Mbit and 3.6
    core seconds with rice, 800 Mbit and 3.0 core seconds with pco. Rice wins unless the link brings 800 Mbit in less
    time than rice takes to decode: above 219 Mbit/s for one core, above 878 Mbit/s for four.
    """

    def seconds(coder: int) -> float:
        transfer_s = changed * _BITS_A_CHANGE[coder] / (link_mbit * 1e6) if link_mbit > 0 else float("inf")
        return max(transfer_s, full_bytes / (cores * _DECODE_BYTES_S[coder]))

    return CODER_PCO if seconds(CODER_PCO) < seconds(CODER_RICE) else CODER_RICE
