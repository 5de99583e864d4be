"""Which coder a publisher should use: the small one, or the one that decodes at the speed of the changes."""

from collections.abc import Sequence
from typing import Final

from codec.chunk import CODER_PCO, CODER_RICE

__all__ = ["arrival_mbit", "choose_coder"]

_BITS_A_CHANGE: Final = {CODER_RICE: 7.2, CODER_PCO: 9.75}
"""At 1 % density, everything on the wire counted. Both fall by about the same as density rises."""
_DECODE_BYTES_S: Final = {CODER_RICE: 4.5e9, CODER_PCO: 5.5e9}
"""Bytes of weights that one core takes from verified chunk to predicted block hash, where BLAKE3 alone takes 10e9. Both
must hash every block; rice must also find the class of every old weight, pco must only copy it."""


def arrival_mbit(seed_up_mbit: float, node_up_mbits: Sequence[float], node_down_mbits: Sequence[float] = ()) -> float:
    """Mbit/s at which a version reaches all nodes at best: every uplink works, the seed sends each chunk once, and the
    slowest downlink must take all of it. `node_down_mbits`: of those that decode (relays do not).

        min(u_s, min d_i, (u_s + sum of u_i) / N)
    """
    together = seed_up_mbit + sum(node_up_mbits)
    return min(seed_up_mbit, together / max(1, len(node_up_mbits)), *node_down_mbits)


def choose_coder(full_bytes: int, changed: int, link_mbit: float, cores: int) -> int:
    """`CODER_RICE` or `CODER_PCO`, whichever lets a node finish sooner.

    `full_bytes`: bytes of the model. `changed`: elements that the last version changed. `link_mbit`: Mbit/s at which
    chunks reach the slowest node (see `arrival_mbit`). `cores`: that it can spend on decoding.

    Chunks are decoded while later ones arrive, so a node is done after the longer of the two:

        T(coder) = max(changed * bits(coder) / link, full_bytes / (cores * decode(coder)))

    Ties go to rice, which spares everybody's links. An 8B model (16.4 GB, 82 million changes, so 590 or 800 Mbit; 3.6
    or 3.0 core seconds): rice, unless the link brings 800 Mbit in less than rice's decoding takes, that is above 219
    Mbit/s for one core, 878 for four.
    """

    def seconds(coder: int) -> float:
        transfer_s = changed * _BITS_A_CHANGE[coder] / (link_mbit * 1e6) if link_mbit > 0 else float("inf")
        return max(transfer_s, full_bytes / (cores * _DECODE_BYTES_S[coder]))

    return CODER_PCO if seconds(CODER_PCO) < seconds(CODER_RICE) else CODER_RICE
