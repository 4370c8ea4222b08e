"""Memory for temporaries that is used again, since fresh pages can cost more than the work done in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Gives tensors of any shape; the same memory for the same name each time, so the last one is overwritten."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size, place = math.prod(shape), (name, dtype or self._dtype)
        if place not in self._buffers or self._buffers[place].numel() < size:
            self._buffers[place] = torch.empty(size, dtype=place[1], device=self._device)
        return self._buffers[place][:size].view(shape)

    def convert(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``tensor`` in the workspace's dtype or ``dtype``: itself, or a copy under ``name``."""
        if tensor.dtype == (dtype or self._dtype):
            return tensor
        return self(name, *tensor.shape, dtype=dtype).copy_(tensor)
