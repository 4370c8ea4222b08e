"""Calls of ``F.scaled_dot_product_attention``, from whatever name they are made.

A ``TorchFunctionMode`` sees the call itself, so a name that was bound before the swap is no way around it. The mode
is open while a site's ``forward`` runs, and no longer: what other models do stays as it is, and a layer that
activation checkpointing runs again during the backward pass is served again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..masks import Causal, Dense, Everything, Mask
from .sites import ATTRIBUTE, Site


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a site's ``forward``."""
    with _Interception(getattr(module, ATTRIBUTE)):
        return module._effattn_forward(*args, **kwargs)  # type: ignore[operator]


class _Interception(TorchFunctionMode):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.site.backend is not None:
            with torch._C.DisableTorchFunction():  # a backend that calls it too means PyTorch's own
                return serve(self.site, *args, **(kwargs or {}))
        if torch.compiler.is_compiling() and getattr(func, "__module__", "") == "torch._tensor":
            # Methods of Tensor that are written in Python, such as split: torch.compile knows them as methods alone.
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def serve(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One call by the site's backend. ``is_causal`` is top-left aligned, as PyTorch's; a mask given too is joined.

    Without ``is_causal`` the last query stands at the last key, as where one token is decoded against a cache.

    Raises:
        ValueError: for nested tensors, and where PyTorch itself would refuse the shapes.
    """
    if any(t.is_nested for t in (query, key, value)):
        raise ValueError(f"swap: {site.path} attends over nested tensors; supported are dense ones")
    shape = query.shape
    query, key, value = _four_dims(query, key, value)
    if query.shape[1] != key.shape[1] and not enable_gqa and key.shape[1] != 1:
        raise ValueError(
            f"swap: {site.path} calls {query.shape[1]} query heads on {key.shape[1]} key heads without enable_gqa"
        )
    mask: Mask = Causal() if is_causal else Everything()
    bias = None
    if attn_mask is not None:
        attn_mask = _four_dim_mask(attn_mask, shape)
        if attn_mask.dtype == torch.bool:
            mask = mask & Dense(attn_mask)
        else:
            bias = attn_mask
    output = site.attend(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        dropout_p=dropout_p,
        query_offset=0 if is_causal else None,
    )
    return output.reshape(*shape[:-1], value.shape[-1])


def _four_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[..., heads, seq, dim]`` as ``[batch, heads, seq, dim]``; with three dimensions the first is the batch."""
    tensors = tuple(t.unsqueeze(1) if t.dim() == 3 else t[(None,) * max(0, 4 - t.dim())] for t in tensors)
    if tensors[0].dim() == 4:
        batch = torch.broadcast_shapes(*(t.shape[:1] for t in tensors))
        return tuple(t.expand(*batch, *t.shape[1:]) for t in tensors)
    leading = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    return tuple(t.expand(*leading, *t.shape[-3:]).flatten(0, -4) for t in tensors)


def _four_dim_mask(mask: Tensor, query_shape: torch.Size) -> Tensor:
    if len(query_shape) == 3 and mask.dim() == 3:
        return mask.unsqueeze(1)
    if len(query_shape) > 4 and mask.dim() > 3:
        leading = query_shape[:-3]
        return mask.expand(*leading, *mask.shape[-3:]).reshape(math.prod(leading), *mask.shape[-3:])
    return mask
