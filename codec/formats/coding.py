"""How blocks of a format are coded: as other blocks, but integers by whichever coder is shorter for the block."""

from codec.bits import Bits, DType
from codec.chunk import CODER_PCO, CODER_RICE
from codec.staging import EncodedBlock, encode_changes

__all__ = ["encode_format_block"]


def encode_format_block(block: int, old: Bits, new: Bits, dtype: DType, coder: int = CODER_RICE) -> EncodedBlock | None:
    """As `codec.staging.encode_changes`, with new values: every member of a swarm with formats can read them.

    Codes of integers have no exponent, so the classes of `codec.rice` gain nothing, and its gaps in Rice codes are
    longer than Golomb codes for most densities: `codec.pco` saves 2 to 8 % of an int4 delta. The block is small, and
    hardly any of it changes, so both are tried.
    """
    encoded = encode_changes(block, old, new, dtype, coder, new_values=True)
    if encoded is None or coder != CODER_RICE or dtype.is_float or encoded.delta.coder != CODER_RICE:
        return encoded
    other = encode_changes(block, old, new, dtype, CODER_PCO)
    return other if other is not None and len(other.delta.payload) < len(encoded.delta.payload) else encoded
