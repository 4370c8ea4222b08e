"""Attention of sorted chunks: what LSH attention computes once hashing has put likely pairs side by side.

In each round the rows and the keys stand in an order of their own; a chunk of neighbouring rows attends to a
window of neighbouring keys. Rounds are joined as they come by their log-sum-exps, so nothing of size rounds x n x d
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

from ..dropout import keep_scale
from ..masks import Everything, Mask, pack, unpack
from .softmax import Part, softmax_in_place

__all__ = ["ChunkPlan", "Chunks", "chunked_rounds"]

_WORKSPACE_BYTES = 2**20  # of scores at a time


@dataclass(frozen=True)
class ChunkPlan:
    """Who meets whom: for each round the order of rows and keys, and each chunk's window of keys.

    Ranks are places in a round's order of keys. All tensors are int32.
    """

    row_order: Tensor  # [rounds, batch, heads, num_chunks * chunk_size], filled up with query_len to whole chunks
    key_order: Tensor  # [rounds, batch, kv_heads, key_len]
    key_rank: Tensor  # [rounds, batch, kv_heads, key_len], the inverse of key_order
    chunk_start: Tensor  # [rounds, batch, heads, num_chunks], the rank of a window's first key
    row_start: Tensor  # [rounds, batch, heads, query_len], the same by row
    chunk_size: int
    width: int  # keys in a window

    @property
    def num_rounds(self) -> int:
        return self.row_order.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.row_order, self.key_order, self.key_rank, self.chunk_start, self.row_start

    def meets(self, index: int, batch: Tensor, head: Tensor, kv_head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Whether round ``index`` puts the key into the row's window."""
        return self.within(
            self.key_rank[index, batch, kv_head, key] - self.row_start[index, batch, head, row],
        )

    def within(self, ahead: Tensor) -> Tensor:
        """Whether a key that stands ``ahead`` of a window's first key is in the window."""
        if self.width & (self.width - 1) == 0:
            return (ahead >> (self.width.bit_length() - 1)) == 0  # a negative number keeps its sign bits
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
    packed, tensors = pack(chunks.mask)
    plan = chunks.plan
    output, lse = _sorted_chunks(
        query,
        key,
        value,
        list(plan.tensors),
        plan.chunk_size,
        plan.width,
        packed,
        tensors,
        chunks.scale,
        chunks.query_offset,
        chunks.exclude_self,
        chunks.once,
        chunks.dropout_p,
        chunks.dropout_seed,
    )
    return output, lse


# As custom operators, opaque to torch.compile, so that a module around them compiles as one graph.


@torch.library.custom_op("effattn::sorted_chunks", mutates_args=())
def _sorted_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: list[Tensor],
    chunk_size: int,
    width: int,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    exclude_self: bool,
    once: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    whole = _unpack_plan(plan, chunk_size, width)
    masked = unpack(mask, mask_tensors)
    return _forward(
        query, key, value, Chunks(whole, masked, scale, query_offset, exclude_self, once, dropout_p, dropout_seed)
    )


def _unpack_plan(tensors: list[Tensor], chunk_size: int, width: int) -> ChunkPlan:
    row_order, key_order, key_rank, chunk_start, row_start = tensors
    return ChunkPlan(row_order, key_order, key_rank, chunk_start, row_start, chunk_size, width)


@_sorted_chunks.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3], dtype=wide), query.new_empty(query.shape[:3], dtype=wide)


@torch.library.custom_op("effattn::sorted_chunks_backward", mutates_args=())
def _sorted_chunks_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    plan: list[Tensor],
    chunk_size: int,
    width: int,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    exclude_self: bool,
    once: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    whole = _unpack_plan(plan, chunk_size, width)
    masked = unpack(mask, mask_tensors)
    chunks = Chunks(whole, masked, scale, query_offset, exclude_self, once, dropout_p, dropout_seed)
    with torch.autocast(query.device.type, enabled=False):  # a backward pass may be called inside one
        return _backward(query, key, value, output, lse, grad_output, grad_lse, chunks)


@_sorted_chunks_backward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, plan, size, width, mask, mask_tensors, *numbers, seed = inputs
    ctx.save_for_backward(query, key, value, *output, seed, *plan, *mask_tensors)
    ctx.constants, ctx.numbers, ctx.num_plan = (size, width, mask), numbers, len(plan)


def _differentiate(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, output, lse, seed, *rest = ctx.saved_tensors
    plan, mask_tensors = rest[: ctx.num_plan], rest[ctx.num_plan :]
    grads = _sorted_chunks_backward(
        query, key, value, output, lse, grad_output, grad_lse, plan, *ctx.constants, mask_tensors, *ctx.numbers, seed
    )
    others = ([None] * len(plan), None, None, None, [None] * len(mask_tensors), *(None,) * 6)
    return *grads, *others


_sorted_chunks.register_autograd(_differentiate, setup_context=_save)


@dataclass
class _Tile:
    """Some chunks of one head in one round."""

    rows: Tensor  # [chunks, chunk_size]; query_len where filled up
    keys: Tensor  # [chunks, width]


class _Head:
    """One query head: its tiles in each round, and which pairs of a tile count."""

    def __init__(self, chunks: Chunks, batch: int, head: int, kv_head: int, dtype: torch.dtype) -> None:
        plan = chunks.plan
        self.chunks, self.plan = chunks, plan
        self.at, self.kv_at = (batch, head), (batch, kv_head)
        device = plan.row_order.device
        self._batch, self._head = torch.tensor(batch, device=device), torch.tensor(head, device=device)
        self._span = torch.arange(plan.width, device=device, dtype=torch.int32)
        self._query_len = plan.row_start.shape[3]
        tile_bytes = plan.chunk_size * plan.width * dtype.itemsize
        self._chunks_at_once = max(1, _WORKSPACE_BYTES // tile_bytes)

    def tiles(self, index: int) -> Iterator[_Tile]:
        order = self.plan.row_order[(index, *self.at)].view(-1, self.plan.chunk_size)
        starts = self.plan.chunk_start[(index, *self.at)]
        key_order = self.plan.key_order[(index, *self.kv_at)]
        for first in range(0, len(order), self._chunks_at_once):
            last = min(first + self._chunks_at_once, len(order))
            windows = starts[first:last, None] + self._span
            yield _Tile(order[first:last], _rows(key_order, windows))

    def hidden(self, index: int, tile: _Tile) -> Tensor | None:
        """Which pairs of the tile do not count in this round, ``[chunks, chunk_size, width]``; None: none."""
        chunks, hidden = self.chunks, []
        rows, keys = tile.rows.clamp(max=self._query_len - 1)[:, :, None], tile.keys[:, None, :]
        if not isinstance(chunks.mask, Everything):
            hidden.append(~chunks.mask.allows(self._batch, self._head, rows, keys, chunks.query_offset))
        if chunks.exclude_self:
            hidden.append(keys == rows + chunks.query_offset)
        if chunks.once:
            for earlier in range(index):
                ranks = _rows(self.plan.key_rank[(earlier, *self.kv_at)], tile.keys)
                starts = _rows(self.plan.row_start[(earlier, *self.at)], rows[..., 0])
                hidden.append(self.plan.within(ranks[:, None, :] - starts[:, :, None]))
        if not hidden:
            return None
        total = hidden[0]
        for part in hidden[1:]:
            total = total.logical_or_(part) if total.shape == part.shape else total | part
        return total

    def keep(self, tile: _Tile) -> Tensor:
        chunks = self.chunks
        assert chunks.dropout_seed is not None
        rows, keys = tile.rows[:, :, None].long(), tile.keys[:, None, :].long()
        return keep_scale(chunks.dropout_p, chunks.dropout_seed, self._batch, self._head, rows, keys)


def _forward(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_len, value_dim = query.shape[2], value.shape[3]
    output = query.new_empty(*query.shape[:3], value_dim, dtype=dtype)
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    for head in _heads(query, key, chunks, dtype):
        q = _with_blank_row(query[head.at].to(dtype) * chunks.scale)
        k, v = (t[head.kv_at].to(dtype) for t in (key, value))
        found = Part(*(q.new_empty(query_len + 1, n) for n in (value_dim, 1, 1)))
        for index in range(chunks.plan.num_rounds):
            for tile in head.tiles(index):
                scores = torch.bmm(_rows(q, tile.rows), _rows(k, tile.keys).mT)
                hidden = head.hidden(index, tile)
                if hidden is not None:
                    scores.masked_fill_(hidden, -torch.inf)
                peak, total = softmax_in_place(scores)
                if chunks.dropout_p:
                    scores *= head.keep(tile)
                part = Part(torch.bmm(scores, _rows(v, tile.keys)), peak, total)
                if index:
                    part = Part(*(_rows(t, tile.rows) for t in (found.output, found.peak, found.total))).join(part)
                for whole, tiled in zip(
                    (found.output, found.peak, found.total), (part.output, part.peak, part.total), strict=True
                ):
                    whole.index_copy_(0, tile.rows.flatten().long(), tiled.flatten(0, 1))
        output[head.at], lse[head.at] = found.output[:query_len], found.lse[:query_len, 0]
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
    query_len = query.shape[2]
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (key, value))
    for head in _heads(query, key, chunks, dtype):
        q = _with_blank_row(query[head.at].to(dtype) * chunks.scale)
        d_out = _with_blank_row(grad_output[head.at].to(dtype))
        k, v = (t[head.kv_at].to(dtype) for t in (key, value))
        delta = (d_out[:query_len] * output[head.at]).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse[head.at]
        delta = torch.cat([delta, delta.new_zeros(1)])
        # Rows that see nothing, and the blank one, have no weights: exp(-inf) = 0.
        row_lse = torch.cat([lse[head.at], lse.new_full((1,), torch.inf)])
        row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)
        dq, dk, dv = torch.zeros_like(q), d_key[head.kv_at], d_value[head.kv_at]
        for index in range(chunks.plan.num_rounds):
            for tile in head.tiles(index):
                q_tile, d_out_tile = _rows(q, tile.rows), _rows(d_out, tile.rows)
                k_tile, v_tile = _rows(k, tile.keys), _rows(v, tile.keys)
                weights = torch.bmm(q_tile, k_tile.mT).sub_(_rows(row_lse, tile.rows)[..., None])
                hidden = head.hidden(index, tile)
                if hidden is not None:
                    weights.masked_fill_(hidden, -torch.inf)
                weights.exp_()
                d_weights = torch.bmm(d_out_tile, v_tile.mT)
                if chunks.dropout_p:
                    keep = head.keep(tile)
                    d_weights *= keep
                    _add_rows(dv, tile.keys, torch.bmm((weights * keep).mT, d_out_tile))
                else:
                    _add_rows(dv, tile.keys, torch.bmm(weights.mT, d_out_tile))
                d_scores = d_weights.sub_(_rows(delta, tile.rows)[..., None]).mul_(weights)
                _add_rows(dq, tile.rows, torch.bmm(d_scores, k_tile))
                _add_rows(dk, tile.keys, torch.bmm(d_scores.mT, q_tile))
        d_query[head.at] = dq[:query_len].mul_(chunks.scale).to(query.dtype)
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _heads(query: Tensor, key: Tensor, chunks: Chunks, dtype: torch.dtype) -> Iterator[_Head]:
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            yield _Head(chunks, batch, head, head // group, dtype)


def _with_blank_row(tensor: Tensor) -> Tensor:
    """With a row of zeros at the end, where chunks that are filled up look."""
    return torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]`` for an index of any shape."""
    return tensor.index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:])


def _add_rows(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """``tensor[index] += values``, where the index may repeat."""
    flat = index.flatten().long()[:, None]
    tensor.scatter_add_(0, flat.expand(-1, tensor.shape[1]), values.flatten(0, 1))
