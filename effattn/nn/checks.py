"""Checks that several modules share: one message form, raised where the caller can still see why."""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import Dense, Everything, Mask

__all__ = ["as_mask", "check_positive", "check_probability", "check_states", "check_token_ids"]


def as_mask(owner: str, mask: Mask | Tensor | None) -> Mask:
    """``mask`` as a ``Mask``: a bool tensor is ``Dense``, None is ``Everything``."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return Dense(mask)
    if mask is not None and not isinstance(mask, Mask):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{owner}: mask must be a Mask, a bool tensor (True = may attend) or None, got {got}")
    return Everything() if mask is None else mask


def check_positive(owner: str, **sizes: object) -> None:
    """Raise ``ValueError`` unless every size is an integer >= 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{owner}: {name} must be an integer >= 1, got {size!r}")


def check_probability(owner: str, **values: object) -> None:
    """Raise ``ValueError`` unless every value lies in 0..1."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{owner}: {name} must lie in 0..1, got {value!r}")


def check_states(owner: str, name: str, states: Tensor, d_model: int) -> None:
    """Raise ``ValueError`` unless ``states`` is ``[batch, seq, d_model]``."""
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[2] != d_model:
        got = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise ValueError(f"{owner}: {name} must have shape [batch, seq, d_model = {d_model}], got {got}")


def check_token_ids(owner: str, name: str, ids: Tensor, count: int) -> None:
    """Raise ``ValueError`` unless ``ids`` holds integers in 0..count-1, ``[batch, seq]``.

    On a GPU, and while compiling, the values are not looked at: PyTorch's own lookup asserts there.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype}{list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{owner}: {name} must be integers [batch, seq], got {got}")
    if ids.numel() and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= count:
            raise ValueError(f"{owner}: {name} must lie in 0..{count - 1}, got {least if least < 0 else most}")
