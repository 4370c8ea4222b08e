"""Attention of sorted chunks: what LSH attention computes once hashing has put likely pairs side by side.

In each round the rows and the keys stand in an order of their own; a chunk of neighbouring rows attends to a
window of neighbouring keys. One head is sorted at a time and its windows are overlapping views, so a round is a few
batched products. Rounds are joined as they come by their log-sum-exps: nothing of size rounds x n x d exists. A pair
that several rounds find is counted in the first of them alone, or, on request, in each. The backward pass recomputes
the scores from the output and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..dropout import keep_scale
from ..masks import Everything, Mask, pack, unpack
from .overlapping import add_to_windows, windows
from .softmax import Part, softmax_in_place

__all__ = ["ChunkPlan", "Chunks", "chunked_rounds"]

_WORKSPACE_BYTES = 2 * 2**20  # of scores at a time


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
    whole = ChunkPlan(*plan, chunk_size, width, regular)
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
    whole = ChunkPlan(*plan, chunk_size, width, regular)
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

    first: int
    count: int
    chunk_size: int
    width: int
    first_key: int = 0  # of the first chunk, by rank; each next window starts one chunk further
    ranks: Tensor | None = None  # [count, width], where windows start anywhere

    def rows(self, by_rank: Tensor) -> Tensor:
        """Those of ``[num_chunks * chunk_size, ...]`` as ``[count, chunk_size, ...]``, a view."""
        rows = by_rank[self.first * self.chunk_size : (self.first + self.count) * self.chunk_size]
        return rows.view(self.count, self.chunk_size, *by_rank.shape[1:])

    def keys(self, by_rank: Tensor) -> Tensor:
        """Those of ``[key_len, dim]`` as ``[count, width, dim]``."""
        if self.ranks is not None:
            return _rows(by_rank, self.ranks)
        return windows(by_rank[self.first_key :], self.count, self.width, self.chunk_size)

    def add_to_keys(self, by_rank: Tensor, weights: Tensor, rows: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha * weights.mT @ rows`` to the keys of ``[key_len, dim]``."""
        if self.ranks is not None:
            index = self.ranks.flatten().long()[:, None].expand(-1, by_rank.shape[1])
            by_rank.scatter_add_(0, index, torch.bmm(weights.mT, rows).mul_(alpha).flatten(0, 1))
        else:
            add_to_windows(by_rank[self.first_key :], weights, rows, self.chunk_size, alpha)


class _Head:
    """One query head: its orders and tiles in each round, and which pairs of a tile count."""

    def __init__(self, chunks: Chunks, batch: int, head: int, kv_head: int, dtype: torch.dtype) -> None:
        plan = chunks.plan
        self.chunks, self.plan = chunks, plan
        self.at, self.kv_at = (batch, head), (batch, kv_head)
        device = plan.row_order.device
        self._batch, self._head = torch.tensor(batch, device=device), torch.tensor(head, device=device)
        self._query_len, self._key_len = plan.row_rank.shape[3], plan.key_rank.shape[3]
        self._masked = not isinstance(chunks.mask, Everything)
        self._at_once = max(1, _WORKSPACE_BYTES // (plan.chunk_size * plan.width * dtype.itemsize))
        self._workspaces: dict[str, Tensor] = {}

    def tiles(self, index: int) -> Iterator[_Tile]:
        """All tiles of a round."""
        plan = self.plan
        starts = plan.chunk_start[(index, *self.at)]
        size, width = plan.chunk_size, plan.width
        if plan.regular:
            first_keys = starts.tolist()
            breaks = [i for i, (before, after) in enumerate(pairwise(first_keys), 1) if after - before != size]
            for start, stop in pairwise([0, *breaks, len(first_keys)]):
                for first in range(start, stop, self._at_once):
                    yield _Tile(first, min(self._at_once, stop - first), size, width, first_keys[first])
        else:
            span = torch.arange(width, device=starts.device, dtype=torch.int32)
            for first, some in zip(count(0, self._at_once), starts.split(self._at_once), strict=False):
                yield _Tile(first, len(some), size, width, ranks=some[:, None] + span)

    def workspace(self, name: str, tile: _Tile, like: Tensor) -> Tensor:
        """Room for a tile of scores; the same memory for the same name each time."""
        if name not in self._workspaces:
            size = self._at_once * tile.chunk_size * tile.width
            self._workspaces[name] = like.new_empty(size)
        return self._workspaces[name][: tile.count * tile.chunk_size * tile.width].view(tile.count, -1, tile.width)

    def scores(self, index: int, tile: _Tile, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scaled and masked scores in the workspace, and which rows see nothing (None: every row sees).

        The scores of rows that see nothing are not masked, so that their softmax is finite.
        """
        out, scale = self.workspace("scores", tile, q), self.chunks.scale
        if not self._masked and self.plan.regular and self.chunks.exclude_self and not (self.chunks.once and index):
            # The token itself stands on one diagonal of all windows.
            diagonal = torch.zeros(tile.chunk_size, tile.width, dtype=q.dtype, device=q.device)
            diagonal.diagonal(tile.first * tile.chunk_size - tile.first_key).fill_(-torch.inf)
            if tile.width > 1:
                return torch.baddbmm(diagonal.expand_as(out), q, k.mT, alpha=scale, out=out), None
        torch.baddbmm(out, q, k.mT, beta=0, alpha=scale, out=out)
        hidden = self._hidden(index, tile)
        if hidden is None:
            return out, None
        empty = hidden.all(-1, keepdim=True)
        if not empty.any():
            return out.masked_fill_(hidden, -torch.inf), None
        return out.masked_fill_(hidden & ~empty, -torch.inf), empty

    def keep(self, index: int, tile: _Tile) -> Tensor:
        """The dropout factors of a tile."""
        chunks = self.chunks
        assert chunks.dropout_seed is not None
        rows, keys = (t.long() for t in self._positions(index, tile))
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

    def _hidden(self, index: int, tile: _Tile) -> Tensor | None:
        """Which pairs of the tile do not count in this round, ``[count, chunk_size, width]``; None: none."""
        chunks, hidden = self.chunks, []
        rows, keys = self._positions(index, tile)
        if self._masked:
            hidden.append(~chunks.mask.allows(self._batch, self._head, rows, keys, chunks.query_offset))
        if chunks.exclude_self:
            hidden.append(keys == rows + chunks.query_offset)
        if chunks.once:
            hidden += [
                self.plan.within(_key_columns(tile, ranks) - tile.rows(starts)[..., None])
                for starts, ranks in self._met_before(index)
            ]
        if not hidden:
            return None
        total = hidden[0]
        for part in hidden[1:]:
            total = total.logical_or_(part) if total.shape == part.shape else total | part
        return total

    def _positions(self, index: int, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Rows ``[count, chunk_size, 1]`` and keys ``[count, 1, width]``; filled up rows repeat the last one."""
        rows = tile.rows(self.plan.row_order[(index, *self.at)]).clamp(max=self._query_len - 1)
        return rows[..., None], _key_columns(tile, self.plan.key_order[(index, *self.kv_at)])

    def _met_before(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """For each earlier round, in this round's order: where rows' windows start there, and the ranks of keys."""
        if self._met is None or self._met[0] != index:
            plan = self.plan
            rows = plan.row_order[(index, *self.at)].clamp(max=self._query_len - 1)
            keys = plan.key_order[(index, *self.kv_at)]
            dtype = torch.int16 if self._key_len < 2**15 else torch.int32
            met = []
            for earlier in range(index):
                chunk = plan.row_rank[(earlier, *self.at)] // plan.chunk_size
                starts = plan.chunk_start[(earlier, *self.at)].to(dtype)
                met.append((starts[chunk[rows]], plan.key_rank[(earlier, *self.kv_at)].to(dtype)[keys]))
            self._met = (index, met)
        return self._met[1]

    _met: tuple[int, list[tuple[Tensor, Tensor]]] | None = None


def _forward(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    plan, value_dim = chunks.plan, value.shape[3]
    output = query.new_empty(*query.shape[:3], value_dim)
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    alone = torch.zeros(query.shape[:3], dtype=torch.bool, device=query.device)
    for head in _heads(query, key, chunks, dtype):
        q, k, v = query[head.at].to(dtype), key[head.kv_at].to(dtype), value[head.kv_at].to(dtype)
        blank_q, joined = _with_blank_row(q), None
        for index in range(plan.num_rounds):
            row_order, key_order = plan.row_order[(index, *head.at)], plan.key_order[(index, *head.kv_at)]
            sorted_q, sorted_k, sorted_v = _rows(blank_q, row_order), _rows(k, key_order), _rows(v, key_order)
            found = Part(*(q.new_empty(len(row_order), n) for n in (value_dim, 1, 1)))
            for tile in head.tiles(index):
                weights, empty = head.scores(index, tile, tile.rows(sorted_q), tile.keys(sorted_k))
                statistics = softmax_in_place(weights, empty)
                assert statistics is not None
                for whole, part in zip((found.peak, found.total), statistics, strict=True):
                    tile.rows(whole).copy_(part)
                if chunks.dropout_p:
                    weights *= head.keep(index, tile)
                torch.bmm(weights, tile.keys(sorted_v), out=tile.rows(found.output))
            rank = plan.row_rank[(index, *head.at)]
            found = Part(*(_rows(t, rank) for t in (found.output, found.peak, found.total)))
            joined = found if joined is None else joined.join(found)
        assert joined is not None
        row_lse = joined.lse[:, 0]
        if chunks.exclude_self:
            itself = (joined.total[:, 0] == 0).logical_and_(head.may_see_itself())
            if itself.any():
                joined.output[itself] = head.fall_back(itself, v)
                row_lse[itself] = (q[itself] * k[itself]).sum(-1) * chunks.scale
                alone[head.at] = itself
        output[head.at], lse[head.at] = joined.output, row_lse
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
    plan = chunks.plan
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (key, value))
    for head in _heads(query, key, chunks, dtype):
        q, k, v = query[head.at].to(dtype), key[head.kv_at].to(dtype), value[head.kv_at].to(dtype)
        d_out, itself = grad_output[head.at].to(dtype), alone[head.at]
        # Softmax's gradient needs, of each row, only sum(dO * O) (Dao et al. 2022, equation 4).
        delta = (d_out * output[head.at]).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[head.at][:, None]
        # Rows that see nothing, or themselves alone, have no weights here, nor has the blank one: exp(-inf) = 0.
        row_lse = lse[head.at].masked_fill((lse[head.at] == -torch.inf) | itself, torch.inf)[:, None]
        of_rows = [_with_blank_row(t) for t in (q, d_out, delta)]
        of_rows.append(torch.cat([row_lse, row_lse.new_full((1, 1), torch.inf)]))
        dq, dk, dv = torch.zeros_like(q), d_key[head.kv_at], d_value[head.kv_at]
        for index in range(plan.num_rounds):
            row_order, key_order = plan.row_order[(index, *head.at)], plan.key_order[(index, *head.kv_at)]
            sorted_q, sorted_d_out, sorted_delta, sorted_lse = (_rows(t, row_order) for t in of_rows)
            sorted_k, sorted_v = _rows(k, key_order), _rows(v, key_order)
            sorted_dq = torch.empty_like(sorted_q)
            sorted_dk, sorted_dv = torch.zeros_like(sorted_k), torch.zeros_like(sorted_v)
            for tile in head.tiles(index):
                q_tile, d_out_tile, k_tile = tile.rows(sorted_q), tile.rows(sorted_d_out), tile.keys(sorted_k)
                weights, empty = head.scores(index, tile, q_tile, k_tile)
                weights.sub_(tile.rows(sorted_lse)).exp_()
                if empty is not None:
                    weights.masked_fill_(empty, 0.0)
                d_weights = head.workspace("d_weights", tile, q)
                torch.bmm(d_out_tile, tile.keys(sorted_v).mT, out=d_weights)
                if chunks.dropout_p:
                    keep = head.keep(index, tile)
                    tile.add_to_keys(sorted_dv, weights * keep, d_out_tile)
                    d_weights *= keep
                else:
                    tile.add_to_keys(sorted_dv, weights, d_out_tile)
                d_scores = d_weights.sub_(tile.rows(sorted_delta)).mul_(weights)
                torch.bmm(d_scores, k_tile, out=tile.rows(sorted_dq))
                tile.add_to_keys(sorted_dk, d_scores, q_tile, alpha=chunks.scale)
            rank = plan.row_rank[(index, *head.at)], plan.key_rank[(index, *head.kv_at)]
            dq.add_(_rows(sorted_dq, rank[0]), alpha=chunks.scale)
            dk.add_(_rows(sorted_dk, rank[1]))
            dv.add_(_rows(sorted_dv, rank[1]))
        if itself.any():
            dv[itself] += head.fall_back(itself, d_out)
            if grad_lse is not None:
                d_own = chunks.scale * grad_lse[head.at][itself][:, None]
                dq[itself] += d_own * k[itself]
                dk[itself] += d_own * q[itself]
        d_query[head.at] = dq
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


def _key_columns(tile: _Tile, of_keys: Tensor) -> Tensor:
    """One number a key, by rank, as ``[count, 1, width]``."""
    return tile.keys(of_keys[:, None]).mT
