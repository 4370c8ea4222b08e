"""Attention weights, for models that return them: materialised, because that is what was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import pattern
from ..backend import Backend, UnsupportedError
from ..masks import Mask
from ..reference import score_rows


def attention_weights(
    query: Tensor,
    key: Tensor,
    backend: Backend,
    *,
    mask: Mask,
    bias: Tensor | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
) -> Tensor:
    """The softmax ``[batch, heads, query_len, key_len]`` over the backend's pattern, in the queries' dtype.

    Before dropout; quadratic in time and memory. A row that sees nothing is 0.

    Raises:
        UnsupportedError: the backend is no softmax over a pattern, or its pattern is another at each call.
    """
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    reasons = []
    if not backend.capabilities.pattern:
        reasons.append("requested attention weights; supported the output only")
    if not backend.capabilities.deterministic:
        reasons.append("requested attention weights of a backend that draws anew at each call; supported with a seed")
    own_bias = None if reasons else backend.reference_bias(query, key, mask=mask, query_offset=offset)
    if own_bias is not None and bias is not None:
        reasons.append("requested attention weights with a bias, but the backend weighs its pattern; supported none")
    if reasons:
        raise UnsupportedError(backend, reasons)
    allowed = pattern(query, key, backend=backend, mask=mask, query_offset=offset)
    with torch.autocast(query.device.type, enabled=False):
        rows = score_rows(
            query,
            key,
            mask=allowed,
            bias=bias if own_bias is None else own_bias,
            scale=scale,
            query_offset=offset,
            dtype=torch.promote_types(query.dtype, torch.float32),
        )
        weights = [block.weights for block in rows]
    shape = (*query.shape[:3], key.shape[2])
    return torch.cat(weights, dim=2).to(query.dtype) if weights else query.new_zeros(shape)
