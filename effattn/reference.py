"""Dense attention, written to be obviously right: what every backend is measured against.

It works by blocks of query rows, in float64 unless told otherwise, so that memory is O(block x key_len); and on
a sample of rows, so that the exact result is known for some rows at any length. Plain differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from .dropout import keep_scale
from .masks import Everything, Mask, evaluate, hide_padding

__all__ = ["Rows", "attention", "gradients", "grid", "score_rows"]

# A bias may also be a function of (batch, head, row, key) index tensors, so that it need not exist as a whole.
BiasFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Bias = Tensor | BiasFunction

_BLOCK_BYTES = 64 * 2**20  # of scores


@dataclass(frozen=True)
class Rows:
    """Scores and weights of some query rows under a mask; what errors and recall are computed from."""

    index: Int[Tensor, " rows"]
    allowed: Tensor  # bool, broadcastable to the scores
    scores: Float[Tensor, "batch heads rows key_len"]  # -inf where not allowed
    weights: Float[Tensor, "batch heads rows key_len"]  # 0 in rows that see nothing
    lse: Float[Tensor, "batch heads rows"]  # -inf in rows that see nothing


def attention(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    rows: Int[Tensor, " rows"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Exact attention and its log-sum-exp, computed in ``dtype``.

    ``rows`` are the query rows to compute (None: all). Returns ``[batch, heads, rows, value_dim]`` and
    ``[batch, heads, rows]``; a row that sees nothing gives 0 and -inf. Dropout, where asked for, is that of
    ``effattn.dropout`` under ``dropout_seed``. Memory: a block of rows x ``key_len``, twice.
    """
    mask = Everything() if mask is None else mask
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    batch_size, num_heads, query_len, _ = query.shape
    mask.validate(batch_size, num_heads, query_len, key.shape[2], offset)
    key, value = hide_padding(mask, key, value)
    value = _per_query_head(value, query.shape[1]).to(dtype)
    outputs, lses = [], []
    for block in score_rows(
        query, key, mask=mask, bias=bias, scale=scale, query_offset=query_offset, rows=rows, dtype=dtype
    ):
        weights = block.weights
        if dropout_p:
            weights = weights * keep_scale(dropout_p, dropout_seed, *grid(query, key, block.index))
        outputs.append(weights @ value)
        lses.append(block.lse)
    if not outputs:
        return query.new_zeros(*query.shape[:2], 0, value.shape[-1], dtype=dtype), query.new_zeros(
            *query.shape[:2], 0, dtype=dtype
        )
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def score_rows(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    rows: Int[Tensor, " rows"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Rows]:
    """Scores and weights, a block of query rows at a time. Arguments as in ``attention``."""
    mask = Everything() if mask is None else mask
    batch_size, num_heads, query_len, head_dim = query.shape
    key_len = key.shape[2]
    offset = key_len - query_len if query_offset is None else query_offset
    mask.validate(batch_size, num_heads, query_len, key_len, offset)
    scale = head_dim**-0.5 if scale is None else scale
    device = query.device
    rows = torch.arange(query_len, device=device) if rows is None else rows
    (key,) = hide_padding(mask, key)
    key = _per_query_head(key, num_heads).to(dtype)
    batches, heads = torch.arange(batch_size, device=device), torch.arange(num_heads, device=device)
    keys = torch.arange(key_len, device=device)
    if isinstance(bias, Tensor):
        bias = bias.expand(batch_size, num_heads, query_len, key_len)

    bytes_per_row = max(batch_size * num_heads * key_len * dtype.itemsize, 1)
    for index in rows.split(max(_BLOCK_BYTES // bytes_per_row, 1)):
        scores = scale * query[:, :, index].to(dtype) @ key.mT
        if isinstance(bias, Tensor):
            scores = scores + bias[:, :, index].to(dtype)
        elif bias is not None:
            scores = scores + bias(*grid(query, key, index)).to(dtype)
        allowed = evaluate(mask, batches, heads, index, keys, offset)
        scores = scores.masked_fill(~allowed, float("-inf"))
        # A row that sees nothing would give 0/0, in the result and, hidden from it, in the gradients.
        empty = (scores == float("-inf")).all(-1, keepdim=True)
        filled = scores.masked_fill(empty, 0.0)
        weights = filled.softmax(-1).masked_fill(empty, 0.0)
        lse = filled.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
        yield Rows(index, allowed, scores, weights, lse)


def gradients(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    grad_output: Float[Tensor, "batch heads query_len value_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    rows: Int[Tensor, " rows"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``(attention(...) * grad_output).sum()`` for query, key and value, by blocks of rows.

    With ``rows`` the sum is over these query rows alone, and ``grad_output`` has only them. Time
    O(rows x key_len); memory a block of rows x ``key_len``, as in ``attention``.
    """
    inputs = [t.detach().to(dtype).requires_grad_() for t in (query, key, value)]
    totals = [torch.zeros_like(t) for t in inputs]
    bytes_per_row = query.shape[0] * query.shape[1] * key.shape[2] * dtype.itemsize
    rows = torch.arange(query.shape[2], device=query.device) if rows is None else rows
    places = torch.arange(len(rows), device=query.device)
    for place in places.split(max(_BLOCK_BYTES // max(bytes_per_row, 1), 1)):
        with torch.enable_grad():
            output, _ = attention(
                *inputs, mask=mask, bias=bias, scale=scale, query_offset=query_offset, rows=rows[place], dtype=dtype
            )
        for total, grad in zip(
            totals, torch.autograd.grad(output, inputs, grad_output[:, :, place].to(dtype)), strict=True
        ):
            total += grad
    return totals[0], totals[1], totals[2]


def _per_query_head(tensor: Tensor, num_heads: int) -> Tensor:
    return repeat(tensor, "b h_kv s d -> b (h_kv group) s d", group=num_heads // max(tensor.shape[1], 1))


def grid(query: Tensor, key: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch, head, row and key indices that broadcast to the scores of ``rows`` (None: all)."""
    batch, head, row, index = (torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2]))
    row = row if rows is None else rows
    return rearrange(batch, "b -> b 1 1 1"), rearrange(head, "h -> h 1 1"), rearrange(row, "r -> r 1"), index
