"""The baseline: scores materialised, softmax, product with the values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..backend import Backend, register
from ..dropout import draw_seed, keep_scale
from ..masks import Coverage, Mask, evaluate


@register
@dataclass(frozen=True)
class Full(Backend):
    """Dense attention with its scores materialised.

    The textbook computation (Vaswani et al. 2017, equation 1) in at least float32: one ``torch.baddbmm`` for
    scaled scores plus bias and mask, a softmax, one product. Time and memory O(query_len x key_len).
    """

    name = "full"

    def resolve(self, request: object) -> str:
        return "baddbmm"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        query_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch_size, num_heads, query_len, _ = query.shape
        num_kv_heads, key_len = key.shape[1:3]
        group = num_heads // num_kv_heads
        additive, empty = _additive(query, key_len, mask, bias, query_offset, dtype)

        # Grouped heads share their keys: they become more rows of one product.
        q = rearrange(query.to(dtype), "b (h_kv g) l d -> (b h_kv) (g l) d", g=group)
        k, v = (rearrange(t.to(dtype), "b h_kv s d -> (b h_kv) s d") for t in (key, value))
        if additive is None:
            scores = torch.bmm(q * scale, k.mT)
        else:
            # Repeated for the group alone where all heads share it: else it would be as large as the scores.
            heads = group if additive.shape[1] == 1 else num_heads
            additive = additive.expand(-1, heads, query_len, key_len)
            additive = rearrange(additive, "b (h_kv g) l s -> b h_kv (g l) s", g=group)
            additive = additive.expand(batch_size, num_kv_heads, -1, -1).flatten(0, 1)
            scores = torch.baddbmm(additive, q * scale, k.mT)
        weights = scores.softmax(-1)
        if dropout_p:
            grid = _grid(query, key_len)
            keep = keep_scale(dropout_p, draw_seed(), *grid).to(dtype)
            weights = weights * rearrange(keep, "b (h_kv g) l s -> (b h_kv) (g l) s", g=group)
        output = rearrange(torch.bmm(weights, v), "(b h_kv) (g l) d -> b (h_kv g) l d", b=batch_size, g=group)
        if empty is not None:
            output = output.masked_fill(empty, 0.0)
        if not return_lse:
            return output.to(query.dtype), None
        lse = rearrange(scores.logsumexp(-1), "(b h_kv) (g l) -> b (h_kv g) l", b=batch_size, g=group)
        if empty is not None:
            lse = lse.masked_fill(empty[..., 0], -torch.inf)
        return output.to(query.dtype), lse


def _additive(
    query: Tensor, key_len: int, mask: Mask, bias: Tensor | None, query_offset: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias as one tensor to add to the scores, and the rows that see nothing; both have
    four dimensions, of size 1 where it makes no difference.

    Such rows are not masked: softmax over a row of -inf is NaN, and so would be the gradients behind it.
    """
    batch_size, num_heads, query_len, _ = query.shape
    if mask.coverage((0, query_len), (0, key_len), query_offset) is Coverage.ALL:
        if bias is None:
            return None, None
        additive = bias.to(dtype)
    else:
        b, h, i, j = (torch.arange(n, device=query.device) for n in (batch_size, num_heads, query_len, key_len))
        hidden = ~evaluate(mask, b, h, i, j, query_offset)
        # As small as mask and bias are: heads that share them are not told apart.
        additive = torch.zeros((), dtype=dtype, device=query.device) if bias is None else bias.to(dtype)
        additive = additive.masked_fill(hidden, -torch.inf)
    while additive.dim() < 4:
        additive = additive[None]
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    return additive.masked_fill(empty, 0.0), empty


def _grid(query: Tensor, key_len: int) -> tuple[Tensor, ...]:
    batch_size, num_heads, query_len, _ = query.shape
    b, h, i, j = (torch.arange(n, device=query.device) for n in (batch_size, num_heads, query_len, key_len))
    return b[:, None, None, None], h[:, None, None], i[:, None], j
