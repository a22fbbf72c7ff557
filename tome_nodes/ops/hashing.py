"""The hash behind the random picks, shared by plain torch and the kernels."""

from typing import TypeVar

from torch import Tensor

MASK = 0xFFFFFFFF
"""Keeps the low 32 bits."""

# Odd, and below 2**31 so that a product with a 32-bit value fits into a signed 64-bit integer.
MULTIPLIERS = (0x7C3A95D3, 0x5D1B6E4B, 0x6A09E667)
"""One for each of the three rounds."""

Bits = TypeVar("Bits", int, Tensor)


def scramble(bits: Bits) -> Bits:
    """Mix a 32-bit value so that each input bit affects every output bit."""
    for multiplier in MULTIPLIERS:
        bits = ((bits ^ (bits >> 16)) * multiplier) & MASK
    return bits ^ (bits >> 15)
