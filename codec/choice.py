"""Which coder a publisher should use: the small one, or the one that decodes at the speed of the changes."""

from typing import Final

from codec.chunk import CODER_PCO, CODER_RICE

__all__ = ["choose_coder"]

_BITS_A_CHANGE: Final = {CODER_RICE: 7.2, CODER_PCO: 9.8}
"""At 1 % density, everything on the wire counted. Both fall by about the same as density rises."""
_DECODE_BYTES_S: Final = {CODER_RICE: 2.5e9, CODER_PCO: 4.5e9}
"""Bytes of weights that one core takes from verified chunk to predicted block hash. Both must hash every block (6 to 7
GB/s); rice must also find the class of every old weight, pco must only copy it."""


def choose_coder(full_bytes: int, changed: int, down_mbit: float, cores: int) -> int:
    """`CODER_RICE` or `CODER_PCO`, whichever lets a node finish sooner.

    `full_bytes`: bytes of the model. `changed`: elements that the last version changed. `down_mbit`: Mbit/s that the
    slowest node can take in. `cores`: that it can spend on decoding.

    Chunks are decoded while later ones arrive, so a node is done after the longer of the two:

        T(coder) = max(changed * bits(coder) / down, full_bytes / (cores * decode(coder)))

    Ties go to rice, which spares everybody's links. An 8B model (16.4 GB, 82 million changes, so 590 or 800 Mbit; 6.6
    or 3.6 core seconds): rice, unless the link brings 800 Mbit in less than rice's decoding takes, that is above 122
    Mbit/s for one core, 490 for four.
    """

    def seconds(coder: int) -> float:
        transfer_s = changed * _BITS_A_CHANGE[coder] / (down_mbit * 1e6)
        return max(transfer_s, full_bytes / (cores * _DECODE_BYTES_S[coder]))

    return CODER_PCO if seconds(CODER_PCO) < seconds(CODER_RICE) else CODER_RICE
