"""Attention dropout as a function of the pair (query, key), not of the order of computation.

Whether a weight is dropped follows from a seed and from its batch, head, row and key alone, through an integer
hash. So a backend that works in tiles drops the same weights as one that holds the whole matrix, recomputation
in a backward pass and under activation checkpointing sees the same mask, and a test can compare them exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed", "keep_scale"]

# Odd 31-bit multipliers keep every product of two 32-bit words inside int64. The finalizer has the
# shift-multiply form of MurmurHash3 (Appleby).
_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39, 0x45D9F3B5, 0x119DE1F3)
_MASK = 0xFFFFFFFF


def draw_seed() -> Tensor:
    """A seed from PyTorch's global generator, which activation checkpointing restores: int64, no dimensions."""
    return torch.randint(2**31 - 1, ())


def keep_scale(dropout_p: float, seed: int | Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """What to multiply an attention weight with: 0 with probability ``dropout_p``, else ``1/(1-dropout_p)``.

    The indices are broadcastable int64 tensors; the result is float32 of their common shape.
    """
    state = _mix(batch + seed)
    for index in (head, row, key):
        state = _mix(state ^ ((index * _MULTIPLIERS[3]) & _MASK))
    kept = state >= int(dropout_p * 2**32)
    return kept.float() / (1.0 - dropout_p) if dropout_p < 1 else torch.zeros_like(kept, dtype=torch.float32)


def _mix(word: Tensor) -> Tensor:
    word = word & _MASK
    for multiplier, shift in zip(_MULTIPLIERS, (16, 15, 13), strict=False):
        word = ((word ^ (word >> shift)) * multiplier) & _MASK
    return word ^ (word >> 16)
