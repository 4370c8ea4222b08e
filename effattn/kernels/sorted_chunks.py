"""Attention of sorted chunks: what LSH attention computes once hashing has put likely pairs side by side.

In each round the rows and the keys stand in an order of their own; a chunk of neighbouring rows attends to a
window of neighbouring keys. A tile, some chunks of one head, is gathered into memory that stays in the cache; its
windows are overlapping views. What it gives goes back by index and is joined with earlier rounds there, so nothing of
size rounds x n x d exists. A pair that several rounds find is counted in the first of them alone, or, on request, in
each. The backward pass recomputes the scores from the output and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..dropout import keep_scale
from ..masks import Everything, Mask, pack, unpack
from .overlapping import add_to_windows, windows
from .softmax import Part, calm_empty_rows, product_dtype, softmax_in_place
from .workspace import Workspace

__all__ = ["ChunkPlan", "Chunks", "chunked_rounds"]

_MOST_SCORES = 2**19  # at a time


@dataclass(frozen=True)
class ChunkPlan:
    """Who meets whom: for each round the order of rows and keys, and each chunk's window of keys.

    Ranks are places in a round's order. All tensors are int32.
    """

    row_order: Tensor  # [rounds, batch, heads, num_chunks * chunk_size], filled up with query_len to whole chunks
    row_rank: Tensor  # [rounds, batch, heads, query_len], the inverse of row_order
    key_order: Tensor  # [rounds, batch, kv_heads, key_len]
    key_rank: Tensor  # [rounds, batch, kv_heads, key_len], the inverse of key_order
    chunk_start: Tensor  # [rounds, batch, heads, num_chunks], the rank of a window's first key
    chunk_size: int
    width: int  # keys in a window
    regular: bool  # windows start at the same ranks in all rounds and heads, almost all one chunk apart

    @classmethod
    def of(cls, tensors: Sequence[Tensor], chunk_size: int, width: int, regular: bool) -> ChunkPlan:
        row_order, row_rank, key_order, key_rank, chunk_start = tensors
        return cls(row_order, row_rank, key_order, key_rank, chunk_start, chunk_size, width, regular)

    @property
    def num_rounds(self) -> int:
        return self.row_order.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.row_order, self.row_rank, self.key_order, self.key_rank, self.chunk_start

    def meets(self, index: int, batch: Tensor, head: Tensor, kv_head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Whether round ``index`` puts the key into the row's window."""
        chunk = self.row_rank[index, batch, head, row] // self.chunk_size
        return self.within(self.key_rank[index, batch, kv_head, key] - self.chunk_start[index, batch, head, chunk])

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
    exclude_self: bool  # a token sees itself only where it sees nothing else
    once: bool  # count a pair once, however many rounds find it
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


def chunked_rounds(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp in at least float32, and which rows fell back to themselves ``[batch, heads, query_len]``.

    A row that meets no allowed key gives 0 and -inf. Output and log-sum-exp are differentiable, once. Time O(rounds
    x n x width), memory O(n).
    """
    packed, tensors = pack(chunks.mask)
    plan = chunks.plan
    return _sorted_chunks(
        query,
        key,
        value,
        list(plan.tensors),
        plan.chunk_size,
        plan.width,
        plan.regular,
        packed,
        tensors,
        chunks.scale,
        chunks.query_offset,
        chunks.exclude_self,
        chunks.once,
        chunks.dropout_p,
        chunks.dropout_seed,
    )


# As custom operators, opaque to torch.compile, so that a module around them compiles as one graph.


@torch.library.custom_op("effattn::sorted_chunks", mutates_args=())
def _sorted_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: list[Tensor],
    chunk_size: int,
    width: int,
    regular: bool,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    exclude_self: bool,
    once: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    whole = ChunkPlan.of(plan, chunk_size, width, regular)
    masked = unpack(mask, mask_tensors)
    return _forward(
        query, key, value, Chunks(whole, masked, scale, query_offset, exclude_self, once, dropout_p, dropout_seed)
    )


@_sorted_chunks.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=wide), query.new_empty(query.shape[:3], dtype=torch.bool)


@torch.library.custom_op("effattn::sorted_chunks_backward", mutates_args=())
def _sorted_chunks_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    alone: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    plan: list[Tensor],
    chunk_size: int,
    width: int,
    regular: bool,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    exclude_self: bool,
    once: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    whole = ChunkPlan.of(plan, chunk_size, width, regular)
    masked = unpack(mask, mask_tensors)
    chunks = Chunks(whole, masked, scale, query_offset, exclude_self, once, dropout_p, dropout_seed)
    with torch.autocast(query.device.type, enabled=False):  # a backward pass may be called inside one
        return _backward(query, key, value, output, lse, alone, grad_output, grad_lse, chunks)


@_sorted_chunks_backward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, plan, size, width, regular, mask, mask_tensors, *numbers, seed = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(query, key, value, *output, seed, *plan, *mask_tensors)
    ctx.constants, ctx.numbers, ctx.num_plan = (size, width, regular, mask), numbers, len(plan)


def _differentiate(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    query, key, value, output, lse, alone, seed, *rest = ctx.saved_tensors
    plan, mask_tensors = rest[: ctx.num_plan], rest[ctx.num_plan :]
    saved = (query, key, value, output, lse, alone)
    grads = _sorted_chunks_backward(
        *saved, grad_output, grad_lse, plan, *ctx.constants, mask_tensors, *ctx.numbers, seed
    )
    others = ([None] * len(plan), None, None, None, None, [None] * len(mask_tensors), *(None,) * 6)
    return *grads, *others


_sorted_chunks.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class _Tile:
    """Some chunks of a round, one after the other, and their windows of keys."""

    index: int  # of the round
    rows: Tensor  # [count * chunk_size], int64; query_len where filled up
    keys: Tensor  # int64; [(count - 1) * chunk_size + width], or [count * width] where windows start anywhere
    count: int
    chunk_size: int
    width: int
    overlapping: bool
    ahead: int  # by how many ranks the first row stands before the first key, where that is the same in each round

    def chunks(self, rows: Tensor) -> Tensor:
        """``[count * chunk_size, ...]`` as ``[count, chunk_size, ...]``."""
        return rows.view(self.count, self.chunk_size, *rows.shape[1:])

    def windows(self, keys: Tensor) -> Tensor:
        """One row for each of ``keys``, ``[..., dim]``, as ``[count, width, dim]``; a view."""
        if self.overlapping:
            return windows(keys, self.count, self.width, self.chunk_size)
        return keys.view(self.count, self.width, -1)

    def add_to_windows(self, target: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add ``weights.mT @ rows`` to one row for each of ``keys``, which is 0 so far."""
        if self.overlapping:
            add_to_windows(target, weights, rows, self.chunk_size)
        else:
            torch.bmm(weights.mT, rows, out=self.windows(target))


class _Head:
    """One query head: its orders and tiles in each round, and which pairs of a tile count."""

    def __init__(self, chunks: Chunks, batch: int, head: int, kv_head: int, workspace: Workspace) -> None:
        plan = chunks.plan
        self.chunks, self.plan, self.workspace = chunks, plan, workspace
        self.at, self.kv_at = (batch, head), (batch, kv_head)
        device = plan.row_order.device
        self._batch, self._head = torch.tensor(batch, device=device), torch.tensor(head, device=device)
        self._query_len = plan.row_rank.shape[3]
        self._rounds: list[tuple[Tensor, Tensor]] = []
        self._masked = not isinstance(chunks.mask, Everything)
        self._at_once = max(1, _MOST_SCORES // (plan.chunk_size * plan.width))

    def tiles(self, index: int) -> Iterator[_Tile]:
        """All tiles of a round."""
        plan = self.plan
        size, width = plan.chunk_size, plan.width
        rows = plan.row_order[(index, *self.at)].long()
        keys = plan.key_order[(index, *self.kv_at)].long()
        starts = plan.chunk_start[(index, *self.at)]
        if not plan.regular:
            span = torch.arange(width, device=starts.device)
            for first, some in zip(count(0, self._at_once), starts.split(self._at_once), strict=False):
                in_tile = rows[first * size : (first + len(some)) * size]
                yield _Tile(index, in_tile, keys[some[:, None] + span].flatten(), len(some), size, width, False, 0)
            return
        first_keys = starts.tolist()
        breaks = [i for i, (before, after) in enumerate(pairwise(first_keys), 1) if after - before != size]
        for begin, end in pairwise([0, *breaks, len(first_keys)]):
            for first in range(begin, end, self._at_once):
                stop, first_key = min(first + self._at_once, end), first_keys[first]
                in_tile = rows[first * size : stop * size]
                in_windows = keys[first_key : first_key + (stop - 1 - first) * size + width]
                ahead = first * size - first_key
                yield _Tile(index, in_tile, in_windows, stop - first, size, width, True, ahead)

    def gather(self, name: str, tensor: Tensor, index: Tensor) -> Tensor:
        """``tensor[index]`` ``[n, dim]`` in the workspace, in ``tensor``'s dtype."""
        out = self.workspace(name, len(index), tensor.shape[1], dtype=tensor.dtype)
        return torch.index_select(tensor, 0, index, out=out)

    def gather_wide(self, name: str, tensor: Tensor, index: Tensor) -> Tensor:
        """``tensor[index]`` in the dtype of accumulation."""
        return self.workspace.convert(f"wide {name}", self.gather(name, tensor, index))

    def scores(self, tile: _Tile, q: Tensor, k: Tensor) -> Tensor:
        """Scaled scores in the workspace, -inf where a pair does not count."""
        chunks, scale = self.chunks, self.chunks.scale
        out = self.workspace("scores", tile.count, tile.chunk_size, tile.width)
        if chunks.exclude_self and self.plan.regular:
            # The token itself stands on one diagonal of all windows.
            torch.baddbmm(out, q, k.mT, beta=0, alpha=scale, out=out).diagonal(tile.ahead, 1, 2).fill_(-torch.inf)
        else:
            torch.baddbmm(out, q, k.mT, beta=0, alpha=scale, out=out)
        hidden = list(self._hidden(tile))
        return out.masked_fill_(reduce(torch.logical_or, hidden), -torch.inf) if hidden else out

    def may_have_empty_rows(self, tile: _Tile) -> bool:
        """Whether the scores of some row may all be -inf."""
        only_itself = self.plan.regular and tile.width > 1
        return self._masked or (self.chunks.once and tile.index > 0) or (self.chunks.exclude_self and not only_itself)

    def keep(self, tile: _Tile) -> Tensor:
        """The dropout factors of a tile."""
        chunks = self.chunks
        assert chunks.dropout_seed is not None
        rows, keys = self._positions(tile)
        return keep_scale(chunks.dropout_p, chunks.dropout_seed, self._batch, self._head, rows, keys)

    def fall_back(self, alone: Tensor, tensor: Tensor) -> Tensor:
        """``tensor`` ``[rows, dim]`` of the rows that see themselves, with the factors of dropout."""
        chunks, rows = self.chunks, alone.nonzero()[:, 0]
        if chunks.dropout_seed is None:
            return tensor[rows]
        factors = keep_scale(chunks.dropout_p, chunks.dropout_seed, self._batch, self._head, rows, rows)
        return tensor[rows] * factors[:, None].to(tensor.dtype)

    def may_see_itself(self) -> Tensor:
        """Whether the mask lets each row see the key at its own index."""
        rows = torch.arange(self._query_len, device=self._batch.device)
        return self.chunks.mask.allows(self._batch, self._head, rows, rows, self.chunks.query_offset)

    def _hidden(self, tile: _Tile) -> Iterator[Tensor]:
        """Pairs of the tile that do not count in this round, broadcastable to ``[count, chunk_size, width]``."""
        chunks = self.chunks
        if self._masked:
            rows, keys = self._positions(tile)
            yield ~chunks.mask.allows(self._batch, self._head, rows, keys, chunks.query_offset)
        if chunks.exclude_self and not self.plan.regular:
            rows, keys = self._positions(tile)
            yield keys == rows + chunks.query_offset
        if chunks.once:
            of_rows = tile.rows.clamp(max=self._query_len - 1)
            for starts, ranks in self._earlier(tile.index):
                start, rank = (t.index_select(0, i)[:, None] for t, i in ((starts, of_rows), (ranks, tile.keys)))
                yield self.plan.within(tile.windows(rank).mT - tile.chunks(start))

    def _positions(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Rows ``[count, chunk_size, 1]`` and keys ``[count, 1, width]``; filled up rows repeat the last one."""
        rows = tile.rows.clamp(max=self._query_len - 1)
        return tile.chunks(rows[:, None]), tile.windows(tile.keys[:, None]).mT

    def _earlier(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """For each earlier round, where each row's window starts and the rank of each key."""
        plan = self.plan
        dtype = torch.int16 if plan.key_rank.shape[3] < 2**15 else torch.int32
        while len(self._rounds) < index:
            at, kv_at = (len(self._rounds), *self.at), (len(self._rounds), *self.kv_at)
            starts = plan.chunk_start[at].to(dtype)[plan.row_rank[at] // plan.chunk_size]
            self._rounds.append((starts, plan.key_rank[kv_at].to(dtype)))
        return self._rounds[:index]


def _forward(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    dtype, narrow = torch.promote_types(query.dtype, torch.float32), product_dtype(query.dtype)
    query_len, value_dim = query.shape[2], value.shape[3]
    output = query.new_empty(*query.shape[:3], value_dim)
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    alone = torch.zeros(query.shape[:3], dtype=torch.bool, device=query.device)
    for head in _heads(query, key, chunks, dtype):
        q, k, v = query[head.at], key[head.kv_at], value[head.kv_at].to(narrow)
        blank_q = _with_blank_row(q)
        # Of each row: the output, and peak and total side by side.
        outputs = head.workspace("outputs", query_len + 1, value_dim)
        statistics = head.workspace("statistics", query_len + 1, 2)
        for index in range(chunks.plan.num_rounds):
            for tile in head.tiles(index):
                q_tile = tile.chunks(head.gather_wide("q", blank_q, tile.rows))
                weights = head.scores(tile, q_tile, tile.windows(head.gather_wide("k", k, tile.keys)))
                empty = calm_empty_rows(weights) if head.may_have_empty_rows(tile) else None
                peak_and_total = softmax_in_place(weights, empty)
                assert peak_and_total is not None
                if chunks.dropout_p:
                    weights *= head.keep(tile)
                weights = head.workspace.convert("narrow weights", weights, narrow)
                found = head.workspace("found", *weights.shape[:2], value_dim, dtype=narrow)
                torch.bmm(weights, tile.windows(head.gather("v", v, tile.keys)), out=found)
                found = head.workspace.convert("wide found", found)
                part = Part(*(t.flatten(0, 1) for t in (found, *peak_and_total)))
                if index:
                    before = head.gather("before", statistics, tile.rows)
                    part = Part(head.gather("output before", outputs, tile.rows), *before.split(1, 1)).join(part)
                outputs.index_copy_(0, tile.rows, part.output)
                statistics.index_copy_(0, tile.rows, torch.cat([part.peak, part.total], 1))
        joined = Part(outputs[:query_len], *statistics[:query_len].split(1, 1))
        output[head.at], lse[head.at] = joined.output, joined.lse[:, 0]
        if chunks.exclude_self:
            itself = (joined.total[:, 0] == 0).logical_and_(head.may_see_itself())
            if itself.any():
                alone[head.at] = itself
                output[head.at][itself] = head.fall_back(itself, v).to(output.dtype)
                lse[head.at][itself] = (q[itself].to(dtype) * k[itself].to(dtype)).sum(-1) * chunks.scale
    return output, lse, alone


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    alone: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (key, value))
    for head in _heads(query, key, chunks, dtype):
        q, k, v = query[head.at], key[head.kv_at], value[head.kv_at]
        d_out, itself = grad_output[head.at], alone[head.at]
        # Softmax's gradient needs, of each row, only sum(dO * O) (Dao et al. 2022, equation 4).
        delta = (d_out.to(dtype) * output[head.at]).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[head.at][:, None]
        # Rows that see nothing, or themselves alone, have no weights here, nor has the blank one: exp(-inf) = 0.
        row_lse = lse[head.at].masked_fill((lse[head.at] == -torch.inf) | itself, torch.inf)[:, None]
        blank_q, blank_d_out, blank_delta = (_with_blank_row(t) for t in (q, d_out, delta))
        blank_lse = torch.cat([row_lse, row_lse.new_full((1, 1), torch.inf)])
        dq = head.workspace("dq", *blank_q.shape).zero_()
        dk, dv = head.workspace("dk", *k.shape).zero_(), d_value[head.kv_at]
        for index in range(chunks.plan.num_rounds):
            for tile in head.tiles(index):
                q_tile, d_out_tile, tile_delta, tile_lse = (
                    tile.chunks(head.gather_wide(name, t, tile.rows))
                    for name, t in (("q", blank_q), ("d_out", blank_d_out), ("delta", blank_delta), ("lse", blank_lse))
                )
                k_tile, v_tile = (tile.windows(head.gather_wide(n, t, tile.keys)) for n, t in (("k", k), ("v", v)))
                weights = head.scores(tile, q_tile, k_tile).sub_(tile_lse).exp_()
                d_weights = head.workspace("d_weights", *weights.shape)
                torch.bmm(d_out_tile, v_tile.mT, out=d_weights)
                dropped = weights
                if chunks.dropout_p:
                    keep = head.keep(tile)
                    dropped = weights * keep
                    d_weights *= keep
                d_scores = d_weights.sub_(tile_delta).mul_(weights)
                for target, factors, rows in ((dv, dropped, d_out_tile), (dk, d_scores, q_tile)):
                    in_tile = head.workspace("d_keys", len(tile.keys), target.shape[1]).zero_()
                    tile.add_to_windows(in_tile, factors, rows)
                    target.index_add_(0, tile.keys, in_tile)
                dq_tile = torch.bmm(d_scores, k_tile, out=head.workspace("dq of tile", *q_tile.shape))
                dq.index_add_(0, tile.rows, dq_tile.flatten(0, 1))
        dq = dq[:-1].mul_(chunks.scale)
        dk *= chunks.scale
        if itself.any():
            dv[itself] += head.fall_back(itself, d_out.to(dtype))
            if grad_lse is not None:
                d_own = chunks.scale * grad_lse[head.at][itself][:, None]
                dq[itself] += d_own * k[itself]
                dk[itself] += d_own * q[itself]
        d_query[head.at] = dq
        d_key[head.kv_at] += dk
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _heads(query: Tensor, key: Tensor, chunks: Chunks, dtype: torch.dtype) -> Iterator[_Head]:
    group = query.shape[1] // key.shape[1]
    workspace = Workspace(dtype, query.device)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            yield _Head(chunks, batch, head, head // group, workspace)


def _with_blank_row(tensor: Tensor) -> Tensor:
    """With a row of zeros at the end, where chunks that are filled up look."""
    return torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])
