"""Overlapping windows of keys as views: tile i looks at ``width`` keys from ``i * step`` on."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["add_to_windows", "windows"]


def windows(keys: Float[Tensor, "keys dim"], count: int, width: int, step: int) -> Float[Tensor, "count width dim"]:
    """A view; nothing is copied."""
    row, column = keys.stride()
    return keys.as_strided((count, width, keys.shape[1]), (step * row, row, column), keys.storage_offset())


def add_to_windows(
    target: Float[Tensor, "keys dim"],
    weights: Float[Tensor, "count rows width"],
    rows: Float[Tensor, "count rows dim"],
    step: int,
    alpha: float = 1.0,
) -> None:
    """Add ``alpha * weights.mT @ rows`` to ``windows(target, ...)``: what many tiles give one key is summed."""
    count, _, width = weights.shape
    in_place = target.dtype == weights.dtype
    product = None if in_place else torch.bmm(weights.mT, rows)
    # In blocks of ``step`` keys, since those of different tiles do not overlap.
    for start in range(0, width, step):
        stop = min(start + step, width)
        keys = windows(target[start:], count, stop - start, step)
        if product is not None:
            keys.add_(product[:, start:stop], alpha=alpha)
        elif stop - start == step:
            keys.baddbmm_(weights[:, :, start:stop].mT, rows, alpha=alpha)
        else:  # not contiguous, where baddbmm_ would go tile by tile
            keys.add_(torch.bmm(weights[:, :, start:stop].mT, rows), alpha=alpha)
