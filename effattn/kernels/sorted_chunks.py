"""Attention of sorted chunks: what LSH attention computes once hashing has put likely pairs side by side.

In each round the rows and the keys stand in an order of their own; a chunk of neighbouring rows attends to a
window of neighbouring keys. Rounds are joined as they come by the online softmax, so nothing of size rounds x n x d
exists. A pair that several rounds find is counted in the first of them alone, or, on request, in each. The
backward pass recomputes the tiles from the output and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dropout import keep_scale
from ..masks import Mask

__all__ = ["ChunkPlan", "Chunks", "chunked_rounds"]

_WORKSPACE_BYTES = 2**20  # of scores at a time


@dataclass(frozen=True)
class ChunkPlan:
    """Who meets whom: for each round the order of rows and keys, and each chunk's window of keys.

    Ranks are places in a round's order of keys. ``row_order`` is filled up with -1 to whole chunks.
    """

    row_order: Tensor  # [rounds, batch, heads, num_chunks * chunk_size], rows
    key_order: Tensor  # [rounds, batch, kv_heads, key_len], keys
    key_rank: Tensor  # [rounds, batch, kv_heads, key_len], the inverse of key_order
    chunk_start: Tensor  # [rounds, batch, heads, num_chunks], the rank of a window's first key
    row_start: Tensor  # [rounds, batch, heads, query_len], the same by row
    chunk_size: int
    width: int  # keys in a window

    @property
    def num_rounds(self) -> int:
        return self.row_order.shape[0]

    def meets(self, index: int, batch: Tensor, head: Tensor, kv_head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Whether round ``index`` puts the key into the row's window."""
        ahead = self.key_rank[index, batch, kv_head, key] - self.row_start[index, batch, head, row]
        return (ahead >= 0) & (ahead < self.width)


@dataclass(frozen=True)
class Chunks:
    """All of a chunked problem but its tensors."""

    plan: ChunkPlan
    mask: Mask
    scale: float
    query_offset: int
    exclude_self: bool
    once: bool  # count a pair once, however many rounds find it
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


def chunked_rounds(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in at least float32; a row that meets no allowed key gives 0 and -inf.

    Both are differentiable, once. Time and memory O(rounds x n x width) and O(n).
    """
    output, lse = _ChunkedRounds.apply(query, key, value, chunks)
    return output, lse


class _ChunkedRounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
        output, lse = _forward(query, key, value, chunks)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None):  # type: ignore[no-untyped-def]
        query, key, value, output, lse = ctx.saved_tensors
        if grad_output is None and grad_lse is None:
            return (None,) * 4
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        return (*_backward(query, key, value, output, lse, grad_output, grad_lse, ctx.chunks), None)


@dataclass
class _Tile:
    """Some chunks of one head in one round."""

    ranks: slice  # of the rows, in the round's order
    rows: Tensor  # [chunks, chunk_size], -1 where filled up
    windows: Tensor  # [chunks, width], ranks of the keys
    keys: Tensor  # [chunks, width]


class _Head:
    """One query head: its tiles in each round, and which pairs of a tile count."""

    def __init__(self, chunks: Chunks, batch: int, head: int, group: int, dtype: torch.dtype) -> None:
        plan = chunks.plan
        self.chunks, self.plan = chunks, plan
        self.batch, self.head, self.kv_head = batch, head, head // group
        device = plan.row_order.device
        self._batch, self._head, self._kv_head = (torch.tensor(i, device=device) for i in (batch, head, self.kv_head))
        self._span = torch.arange(plan.width, device=device)
        tile_bytes = plan.chunk_size * plan.width * dtype.itemsize
        self._chunks_at_once = max(1, _WORKSPACE_BYTES // tile_bytes)

    def tiles(self, index: int) -> Iterator[_Tile]:
        plan, size = self.plan, self.plan.chunk_size
        order = plan.row_order[index, self.batch, self.head].view(-1, size)
        starts = plan.chunk_start[index, self.batch, self.head]
        key_order = plan.key_order[index, self.batch, self.kv_head]
        for first in range(0, len(order), self._chunks_at_once):
            last = min(first + self._chunks_at_once, len(order))
            windows = starts[first:last, None] + self._span
            yield _Tile(slice(first * size, last * size), order[first:last], windows, key_order[windows])

    def allowed(self, index: int, tile: _Tile) -> Tensor:
        """Which pairs of the tile count in this round, ``[chunks, chunk_size, width]``."""
        rows, keys = tile.rows[:, :, None], tile.keys[:, None, :]
        real = rows.clamp(min=0)
        allowed = self.chunks.mask.allows(self._batch, self._head, real, keys, self.chunks.query_offset)
        allowed = allowed & (rows >= 0)
        if self.chunks.exclude_self:
            allowed &= keys != rows + self.chunks.query_offset
        if self.chunks.once:
            for earlier in range(index):
                allowed &= ~self.plan.meets(earlier, self._batch, self._head, self._kv_head, real, keys)
        return allowed

    def keep(self, tile: _Tile) -> Tensor:
        chunks = self.chunks
        assert chunks.dropout_seed is not None
        rows, keys = tile.rows[:, :, None].clamp(min=0), tile.keys[:, None, :]
        return keep_scale(chunks.dropout_p, chunks.dropout_seed, self._batch, self._head, rows, keys)


def _heads(query: Tensor, key: Tensor, chunks: Chunks, dtype: torch.dtype) -> Iterator[_Head]:
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            yield _Head(chunks, batch, head, group, dtype)


def _forward(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch_size, num_heads, query_len, _ = query.shape
    plan, lowest = chunks.plan, torch.finfo(dtype).min
    output = query.new_empty(batch_size, num_heads, query_len, value.shape[3], dtype=dtype)
    lse = query.new_empty(batch_size, num_heads, query_len, dtype=dtype)
    padded_len = plan.row_order.shape[3]
    # One round's result in its own order, and the running result of all rounds in the rows' order.
    sorted_output = query.new_empty(padded_len, value.shape[3], dtype=dtype)
    sorted_peak, sorted_total = (query.new_empty(padded_len, dtype=dtype) for _ in range(2))
    for head in _heads(query, key, chunks, dtype):
        q = query[head.batch, head.head].to(dtype) * chunks.scale
        k, v = (t[head.batch, head.kv_head].to(dtype) for t in (key, value))
        accumulated = torch.zeros_like(output[0, 0])
        peak, total = q.new_full((query_len,), lowest), q.new_zeros(query_len)
        for index in range(plan.num_rounds):
            for tile in head.tiles(index):
                s = torch.bmm(q[tile.rows.clamp(min=0)], k[tile.keys].mT)
                s.masked_fill_(~head.allowed(index, tile), -torch.inf)
                # A row of -inf keeps a finite peak, so that its weights are exp(-inf) = 0 and not NaN.
                tile_peak = s.amax(-1, keepdim=True).clamp_(min=lowest)
                s.sub_(tile_peak).exp_()
                sorted_peak[tile.ranks] = tile_peak.flatten()
                sorted_total[tile.ranks] = s.sum(-1).flatten()
                if chunks.dropout_p:
                    s *= head.keep(tile)
                sorted_output[tile.ranks] = torch.bmm(s, v[tile.keys]).flatten(0, 1)
            order = plan.row_order[index, head.batch, head.head]
            rank = torch.empty_like(order[:query_len]).scatter_(
                0, order[:query_len], torch.arange(query_len, device=order.device)
            )
            round_peak = sorted_peak[rank]
            new_peak = torch.maximum(peak, round_peak)
            shrink, weight = (peak - new_peak).exp_(), (round_peak - new_peak).exp_()
            accumulated.mul_(shrink[:, None]).addcmul_(sorted_output[rank], weight[:, None])
            total.mul_(shrink).addcmul_(sorted_total[rank], weight)
            peak = new_peak
        lse[head.batch, head.head] = peak + total.log()
        output[head.batch, head.head] = accumulated.div_(total.masked_fill(total == 0, 1)[:, None])
    return output, lse


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    d_query, d_key, d_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (query, key, value))
    for head in _heads(query, key, chunks, dtype):
        at, kv_at = (head.batch, head.head), (head.batch, head.kv_head)
        q = query[at].to(dtype) * chunks.scale
        k, v, d_out = key[kv_at].to(dtype), value[kv_at].to(dtype), grad_output[at].to(dtype)
        delta = (d_out * output[at]).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse[at]
        row_lse = lse[at].masked_fill(lse[at] == -torch.inf, torch.inf)
        for index in range(chunks.plan.num_rounds):
            for tile in head.tiles(index):
                rows = tile.rows.clamp(min=0)
                q_tile, k_tile, d_out_tile = q[rows], k[tile.keys], d_out[rows]
                weights = torch.bmm(q_tile, k_tile.mT)
                weights.masked_fill_(~head.allowed(index, tile), -torch.inf)
                weights.sub_(row_lse[rows][..., None]).exp_()
                d_weights = torch.bmm(d_out_tile, v[tile.keys].mT)
                if chunks.dropout_p:
                    keep = head.keep(tile)
                    d_weights *= keep
                    d_v = torch.bmm((weights * keep).mT, d_out_tile)
                else:
                    d_v = torch.bmm(weights.mT, d_out_tile)
                d_scores = d_weights.sub_(delta[rows][..., None]).mul_(weights)
                d_query[at].index_add_(0, rows.flatten(), torch.bmm(d_scores, k_tile).flatten(0, 1))
                d_key[kv_at].index_add_(0, tile.keys.flatten(), torch.bmm(d_scores.mT, q_tile).flatten(0, 1))
                d_value[kv_at].index_add_(0, tile.keys.flatten(), d_v.flatten(0, 1))
    d_query.mul_(chunks.scale)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)
