"""What several kernels and their launchers share."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the kernels accept; they sum and compare in float32."""

HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes whose products run on tensor cores without loss."""

# Rows, channels and warps of one program: in half precision 16 bytes a thread, whole cache lines.
BLOCK_ROWS, BLOCK_CHANNELS, BLOCK_WARPS = 8, 64, 2


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, such as 89 for 8.9; 0 for AMD's.

    The interpreter counts as 89, so that it takes the branches that most GPUs take.
    """
    if device.type != "cuda":
        return 89
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_fast_products(compute_capability: int) -> bool:
    """Whether products in half precision run on tensor cores; Triton leaves Turing's unused."""
    return not 0 < compute_capability < 80


def require_tokens(shape: torch.Size, dtype: torch.dtype, name: str) -> None:
    """Raise a ValueError that names a tensor if no kernel accepts its shape and dtype."""
    if len(shape) != 3 or dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tuple(shape)} of {dtype}: it must be [batch, tokens, channels] of "
            "float32, float16 or bfloat16"
        )


def require_heads(shape: torch.Size, heads: int, name: str) -> None:
    """Raise a ValueError that names a tensor if heads cannot share its channels evenly."""
    if shape[2] % heads:
        raise ValueError(f"{name} has {shape[2]} channels, which {heads} heads cannot share evenly")


def padded(count: int) -> int:
    """The next power of two that Triton's matrix product accepts."""
    return max(16, 1 << (count - 1).bit_length())


@triton.jit
def token_outside_windows(index, width, covered_rows, covered_columns):
    """The numbers, row by row, of the tokens of a grid that fill no window.

    Windows cover the rows and columns at the top left. The tokens to the right of them come first,
    then the tokens below.
    """
    beside = width - covered_columns
    columns = tl.maximum(beside, 1)
    return tl.where(
        index < covered_rows * beside,
        index // columns * width + covered_columns + index % columns,
        index + covered_rows * covered_columns,
    )
