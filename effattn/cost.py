"""What a pattern costs and keeps: attended pairs, density and floating point operations.

All of it follows from the mask that ``effattn.pattern`` returns, so a backend has nothing to declare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import Everything, Mask, band_of, evaluate

__all__ = ["attended_pairs", "density", "flops"]

_BLOCK_PAIRS = 2**24


def attended_pairs(
    mask: Mask,
    batch_size: int,
    num_heads: int,
    query_len: int,
    key_len: int,
    query_offset: int | None = None,
    *,
    rows: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> float:
    """How many (query, key) pairs ``mask`` allows, over all batch rows and heads.

    Exact where ``rows`` is None (time O(query_len x key_len), memory a block); otherwise estimated from those
    query rows.
    """
    offset = key_len - query_len if query_offset is None else query_offset
    mask.validate(batch_size, num_heads, query_len, key_len, offset)
    if isinstance(mask, Everything):
        return float(batch_size * num_heads * query_len * key_len)
    band, rest = band_of(mask)
    if rows is None and isinstance(rest, Everything):
        positions = torch.arange(query_len, dtype=torch.int64) + offset
        low = torch.zeros_like(positions) if band.left is None else (positions - band.left).clamp(0, key_len)
        high = torch.full_like(positions, key_len) if band.right is None else positions + band.right + 1
        per_head = (high.clamp(0, key_len) - low).clamp(min=0).sum()
        return float(batch_size * num_heads * per_head)
    index = torch.arange(query_len, device=device) if rows is None else rows
    batches, heads = torch.arange(batch_size, device=device), torch.arange(num_heads, device=device)
    keys = torch.arange(key_len, device=device)
    total = 0
    for block in index.split(max(_BLOCK_PAIRS // max(batch_size * num_heads * key_len, 1), 1)):
        allowed = evaluate(mask, batches, heads, block, keys, offset)
        total += int(allowed.expand(batch_size, num_heads, len(block), key_len).sum())
    return total * query_len / max(len(index), 1)


def density(pattern_pairs: float, mask_pairs: float) -> float:
    """The share of the pairs that the caller's mask allows which the pattern attends to; 1 for exact backends."""
    return pattern_pairs / mask_pairs if mask_pairs else 1.0


def flops(pairs: float, head_dim: int, value_dim: int, *, backward: bool = False) -> float:
    """Floating point operations of the matrix products over ``pairs``: 2 (D + Dv) each forward.

    A backward pass that recomputes the scores adds 2 (3 D + 2 Dv): scores, dV, dP, dQ and dK.
    """
    forward = 2 * pairs * (head_dim + value_dim)
    return forward + (2 * pairs * (3 * head_dim + 2 * value_dim) if backward else 0)
