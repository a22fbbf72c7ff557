"""The hash behind the random picks, which plain torch and the kernels have in common."""

from typing import TypeVar

from torch import Tensor

MASK = 0xFFFFFFFF
"""The 32 bits that a hash keeps."""

# Odd, and below 2**31 so that a product with a 32-bit value stays within a signed 64-bit one.
MULTIPLIERS = (0x7C3A95D3, 0x5D1B6E4B, 0x6A09E667)
"""Of the three rounds of the hash."""

Bits = TypeVar("Bits", int, Tensor)


def scramble(bits: Bits) -> Bits:
    """Mix a 32-bit value so that each input bit moves every output bit."""
    for multiplier in MULTIPLIERS:
        bits = ((bits ^ (bits >> 16)) * multiplier) & MASK
    return bits ^ (bits >> 15)
