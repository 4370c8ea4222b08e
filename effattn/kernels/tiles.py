"""The band engine: exact attention in tiles of query rows, over only the keys that a mask lets them see.

A tile of scores is made, used and overwritten in one workspace that stays in the cache, so memory is linear in
the length. Which keys a tile needs comes from ``Mask.key_range`` and ``Mask.coverage``: a band costs what the
band costs, a causal mask half of the square. Keys that do not fit one tile are joined by the online softmax
(Milakov & Gimelshein 2018; Rabe & Staats 2021). The backward pass recomputes each tile from the output and the
log-sum-exp (Dao et al. 2022, algorithm 4) and stores nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..dropout import keep_scale
from ..masks import Coverage, Mask, evaluate, pack, unpack
from .softmax import Part, softmax_in_place

__all__ = ["Problem", "tiled_attention"]

_WORKSPACE_BYTES = 4 * 2**20  # of scores at a time: small enough for a cache, large enough for a matrix product


@dataclass(frozen=True)
class Problem:
    """All of an attention problem but its tensors, and how to cut it into tiles."""

    mask: Mask
    scale: float
    query_offset: int
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    query_tile: int = 64
    key_tile: int = 1024
    wide_output: bool = False  # in at least float32, for outputs that are to be joined, instead of the queries' dtype


def tiled_attention(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    problem: Problem,
    *,
    bias: Tensor | None = None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output and, in at least float32, the log-sum-exp ``[batch, heads, query_len]``.

    Both are differentiable, once. Without ``need_lse`` (and without gradients) the log-sum-exp is left out and
    comes back empty.
    """
    if bias is not None and bias.dim() < 4:
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, bias) if t is not None)
    packed, tensors = pack(problem.mask)
    output, lse = _tiles(
        query,
        key,
        value,
        bias,
        packed,
        tensors,
        problem.scale,
        problem.query_offset,
        problem.dropout_p,
        problem.dropout_seed,
        problem.query_tile,
        problem.key_tile,
        problem.wide_output,
        need_lse or grad,
    )
    return output, lse


# As custom operators, opaque to torch.compile, so that a module around them compiles as one graph.


@torch.library.custom_op("effattn::tiles", mutates_args=())
def _tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    query_tile: int,
    key_tile: int,
    wide_output: bool,
    need_lse: bool,
) -> tuple[Tensor, Tensor]:
    problem = Problem(
        unpack(mask, mask_tensors), scale, query_offset, dropout_p, dropout_seed, query_tile, key_tile, wide_output
    )
    return _forward(query, key, value, bias, problem, need_lse)


@_tiles.register_fake
def _(query, key, value, bias, mask, mask_tensors, scale, query_offset, dropout_p, dropout_seed, *rest):  # type: ignore[no-untyped-def]
    wide_output, need_lse = rest[-2:]
    return _empty_outputs(query, value, wide_output, need_lse)


@torch.library.custom_op("effattn::tiles_backward", mutates_args=())
def _tiles_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    mask: str,
    mask_tensors: list[Tensor],
    scale: float,
    query_offset: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    query_tile: int,
    key_tile: int,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(unpack(mask, mask_tensors), scale, query_offset, dropout_p, dropout_seed, query_tile, key_tile)
    with torch.autocast(query.device.type, enabled=False):  # a backward pass may be called inside one
        return _backward(query, key, value, bias, output, lse, grad_output, grad_lse, problem, need_bias)


@_tiles_backward.register_fake
def _(query, key, value, bias, *rest):  # type: ignore[no-untyped-def]
    need_bias = rest[-1]
    d_bias = torch.empty_like(bias) if need_bias else query.new_empty(0)
    return (*(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)), d_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, mask, mask_tensors, scale, offset, dropout_p, seed, *rest = inputs
    ctx.save_for_backward(query, key, value, bias, *output, seed, *mask_tensors)
    ctx.mask, ctx.numbers, ctx.tile = mask, (scale, offset, dropout_p), tuple(rest[:2])


def _differentiate(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, bias, output, lse, seed, *mask_tensors = ctx.saved_tensors
    need_bias = ctx.needs_input_grad[3]
    *grads, d_bias = _tiles_backward(
        query,
        key,
        value,
        bias,
        output,
        lse,
        grad_output,
        grad_lse,
        ctx.mask,
        mask_tensors,
        *ctx.numbers,
        seed,
        *ctx.tile,
        need_bias,
    )
    others = (None, [None] * len(mask_tensors), *(None,) * 8)
    return *grads, d_bias if need_bias else None, *others


_tiles.register_autograd(_differentiate, setup_context=_save)


def _empty_outputs(query: Tensor, value: Tensor, wide_output: bool, need_lse: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    batch_size, num_heads, query_len, _ = query.shape
    dtype = wide if wide_output else query.dtype
    output = query.new_empty(batch_size, num_heads, query_len, value.shape[3], dtype=dtype)
    return output, query.new_empty((batch_size, num_heads, query_len) if need_lse else (0,), dtype=wide)


@dataclass
class _HeadBlock:
    """Some key heads of one batch row with the query heads that read them, in the dtype of accumulation."""

    batch: int
    kv_heads: slice
    heads: slice
    key: Tensor  # [kv_heads, key_len, head_dim]
    value: Tensor  # [kv_heads, key_len, value_dim]

    def rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """Those rows of ``[batch, heads, query_len, ...]`` as ``[kv_heads, group * rows, ...]``."""
        tile = tensor[self.batch, self.heads, rows].to(self.key.dtype)
        return tile.reshape(self.key.shape[0], -1, *tile.shape[2:])

    def put(self, out: Tensor, rows: slice, tile: Tensor) -> None:
        """The inverse of ``rows``: write a tile back."""
        target = out[self.batch, self.heads, rows]
        target.copy_(tile.reshape(target.shape))


class _Tiles:
    """Walks the tiles of one problem and makes their scores; shared by the forward and the backward pass."""

    def __init__(self, query: Tensor, key: Tensor, bias: Tensor | None, problem: Problem) -> None:
        self.problem, self.query = problem, query
        self.bias = bias
        self.batch_size, self.num_heads, self.query_len, _ = query.shape
        self.num_kv_heads, self.key_len = key.shape[1:3]
        self.group = self.num_heads // max(self.num_kv_heads, 1)
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.query_tile = min(problem.query_tile, max(self.query_len, 1))
        self.key_tile = self._key_tile()
        tile_bytes = self.group * self.query_tile * self.key_tile * self.dtype.itemsize
        self.heads_at_once = max(1, min(self.num_kv_heads, _WORKSPACE_BYTES // max(tile_bytes, 1)))
        self._elements = self.heads_at_once * tile_bytes // self.dtype.itemsize
        self._relative: dict[tuple[int, int, int], Tensor] = {}

    def _key_tile(self) -> int:
        """The widest range of keys that a row tile needs, at most the problem's ``key_tile``."""
        widest = 1
        for rows in self.row_tiles():
            low, high = self.key_range(rows)
            widest = max(widest, high - low)
            if widest >= self.problem.key_tile:
                return self.problem.key_tile
        return widest

    def workspace(self) -> Callable[[int, int, int], Tensor]:
        """A function that gives a ``[heads, rows, keys]`` view of one buffer, the same one each time."""
        buffer = torch.empty(self._elements, dtype=self.dtype, device=self.query.device)

        def view(heads: int, rows: int, keys: int) -> Tensor:
            return buffer[: heads * rows * keys].view(heads, rows, keys)

        return view

    def head_blocks(self, key: Tensor, value: Tensor) -> Iterator[_HeadBlock]:
        for batch in range(self.batch_size):
            for start in range(0, self.num_kv_heads, self.heads_at_once):
                stop = min(start + self.heads_at_once, self.num_kv_heads)
                yield _HeadBlock(
                    batch,
                    slice(start, stop),
                    slice(start * self.group, stop * self.group),
                    key[batch, start:stop].to(self.dtype),
                    value[batch, start:stop].to(self.dtype),
                )

    def row_tiles(self) -> Iterator[slice]:
        for start in range(0, self.query_len, self.query_tile):
            yield slice(start, min(start + self.query_tile, self.query_len))

    def key_range(self, rows: slice) -> tuple[int, int]:
        return self.problem.mask.key_range((rows.start, rows.stop), self.key_len, self.problem.query_offset)

    def key_tiles(self, rows: slice) -> Iterator[tuple[slice, Coverage]]:
        """The tiles of keys in which some pair with ``rows`` is or may be allowed."""
        low, high = self.key_range(rows)
        for start in range(low, high, self.key_tile):
            keys = slice(start, min(start + self.key_tile, high))
            coverage = self.problem.mask.coverage(
                (rows.start, rows.stop), (keys.start, keys.stop), self.problem.query_offset
            )
            if coverage is not Coverage.NONE:
                yield keys, coverage

    def scores(self, block: _HeadBlock, q: Tensor, rows: slice, keys: slice, coverage: Coverage, out: Tensor) -> Tensor:
        """Scaled, biased and masked scores of a tile; ``q`` is scaled already, ``out`` is the workspace."""
        k = block.key[:, keys].mT
        if coverage is Coverage.SOME and self.problem.mask.is_relative and self.bias is None:
            additive = self._relative_additive(rows, keys)
            return torch.baddbmm(additive.expand_as(out), q, k, out=out)
        torch.bmm(q, k, out=out)
        tile = out.view(block.key.shape[0], self.group, rows.stop - rows.start, keys.stop - keys.start)
        if self.bias is not None:
            tile += self._bias_tile(self.bias, block, rows, keys).view_as(tile)
        if coverage is Coverage.SOME:
            allowed = self._evaluate(*self._batch_and_heads(block), rows, keys)[0]
            tile.masked_fill_(~self._per_group(block, allowed), -torch.inf)
        return out

    def keep(self, block: _HeadBlock, rows: slice, keys: slice) -> Tensor:
        """The dropout factors of a tile, ``[kv_heads, group * rows, keys]``."""
        problem = self.problem
        batch, head = self._batch_and_heads(block)
        row, key = (torch.arange(r.start, r.stop, device=self.query.device) for r in (rows, keys))
        row, key = problem.mask.place(batch, row[:, None], key)
        assert problem.dropout_seed is not None
        factors = keep_scale(problem.dropout_p, problem.dropout_seed, batch, head[:, None, None], row, key)
        return factors.to(self.dtype).reshape(block.key.shape[0], -1, factors.shape[-1])

    def add_bias_grad(self, grad: Tensor, block: _HeadBlock, rows: slice, keys: slice, d_scores: Tensor) -> None:
        """Add a tile's gradient to that of the bias, summed over the dimensions that the bias broadcasts."""
        tile = d_scores.view(1, -1, rows.stop - rows.start, keys.stop - keys.start)
        wholes = (slice(block.batch, block.batch + 1), block.heads, rows, keys)
        target = grad[tuple(w if n > 1 else slice(None) for w, n in zip(wholes, grad.shape, strict=True))]
        target += tile.sum_to_size(target.shape)

    def _relative_additive(self, rows: slice, keys: slice) -> Tensor:
        """0 and -inf for a mask of distances alone, ``[1, group * rows, keys]``; made once for each place."""
        place = (rows.start - keys.start, rows.stop - rows.start, keys.stop - keys.start)
        if place not in self._relative:
            zero = torch.zeros(1, dtype=torch.int64, device=self.query.device)
            allowed = self._evaluate(zero, zero, rows, keys).expand(1, 1, *place[1:])[0]
            additive = torch.zeros(allowed.shape, dtype=self.dtype, device=self.query.device)
            self._relative[place] = additive.masked_fill_(~allowed, -torch.inf).repeat(1, self.group, 1)
        return self._relative[place]

    def _evaluate(self, batches: Tensor, heads: Tensor, rows: slice, keys: slice) -> Tensor:
        i, j = (torch.arange(r.start, r.stop, device=self.query.device) for r in (rows, keys))
        return evaluate(self.problem.mask, batches, heads, i, j, self.problem.query_offset)

    def _batch_and_heads(self, block: _HeadBlock) -> tuple[Tensor, Tensor]:
        device = self.query.device
        heads = torch.arange(block.heads.start, block.heads.stop, device=device)
        return torch.tensor([block.batch], device=device), heads

    def _per_group(self, block: _HeadBlock, tile: Tensor) -> Tensor:
        """``[heads or 1, rows, keys]`` as ``[kv_heads or 1, group or 1, rows, keys]``."""
        return tile[None] if tile.shape[0] == 1 else tile.view(block.key.shape[0], self.group, *tile.shape[1:])

    def _bias_tile(self, bias: Tensor, block: _HeadBlock, rows: slice, keys: slice) -> Tensor:
        whole = bias.expand(self.batch_size, self.num_heads, self.query_len, self.key_len)
        return whole[block.batch, block.heads, rows, keys].to(self.dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, problem: Problem, need_lse: bool
) -> tuple[Tensor, Tensor]:
    tiles = _Tiles(query, key, bias, problem)
    output, lse = _empty_outputs(query, value, problem.wide_output, need_lse)
    workspace = tiles.workspace()
    for block in tiles.head_blocks(key, value):
        for rows in tiles.row_tiles():
            q = block.rows(query, rows) * problem.scale
            joined: Part | None = None
            for keys, coverage in tiles.key_tiles(rows):
                scores = workspace(q.shape[0], q.shape[1], keys.stop - keys.start)
                tiles.scores(block, q, rows, keys, coverage, scores)
                peak, total = softmax_in_place(scores)
                if problem.dropout_p:
                    scores *= tiles.keep(block, rows, keys)
                part = Part(torch.bmm(scores, block.value[:, keys]), peak, total)
                joined = part if joined is None else joined.join(part)
            if joined is None:  # no key in sight
                output[block.batch, block.heads, rows] = 0
                if need_lse:
                    lse[block.batch, block.heads, rows] = -torch.inf
                continue
            block.put(output, rows, joined.output)
            if need_lse:
                block.put(lse, rows, joined.lse)
    return output, lse


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    problem: Problem,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = _Tiles(query, key, bias, problem)
    d_query, d_key, d_value = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))
    d_bias = torch.zeros(bias.shape, dtype=tiles.dtype, device=bias.device) if need_bias and bias is not None else None
    make_scores, make_d_weights = tiles.workspace(), tiles.workspace()
    for block in tiles.head_blocks(key, value):
        heads = block.key.shape[0]
        dk, dv = torch.zeros_like(block.key), torch.zeros_like(block.value)
        for rows in tiles.row_tiles():
            q = block.rows(query, rows) * problem.scale
            d_out = block.rows(grad_output, rows)
            # Softmax's gradient needs, of each row, only sum(dO * O) (Dao et al. 2022, equation 4).
            delta = (d_out * block.rows(output, rows)).sum(-1, keepdim=True)
            if grad_lse is not None:
                delta -= block.rows(grad_lse, rows)[..., None]
            row_lse = block.rows(lse, rows)[..., None]
            row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)
            dq = torch.zeros_like(q)
            for keys, coverage in tiles.key_tiles(rows):
                k, v = block.key[:, keys], block.value[:, keys]
                weights = make_scores(heads, q.shape[1], keys.stop - keys.start)
                tiles.scores(block, q, rows, keys, coverage, weights).sub_(row_lse).exp_()
                d_weights = make_d_weights(heads, q.shape[1], keys.stop - keys.start)
                torch.bmm(d_out, v.mT, out=d_weights)
                if problem.dropout_p:
                    keep = tiles.keep(block, rows, keys)
                    dv[:, keys] += torch.bmm((weights * keep).mT, d_out)
                    d_weights *= keep
                else:
                    # Not baddbmm_: on a slice it goes head by head.
                    dv[:, keys] += torch.bmm(weights.mT, d_out)
                d_scores = d_weights.sub_(delta).mul_(weights)
                dq.baddbmm_(d_scores, k)
                dk[:, keys] += torch.bmm(d_scores.mT, q)
                if d_bias is not None:
                    tiles.add_bias_grad(d_bias, block, rows, keys, d_scores)
            block.put(d_query, rows, dq.mul_(problem.scale))
        d_key[block.batch, block.kv_heads] = dk.to(key.dtype)
        d_value[block.batch, block.kv_heads] = dv.to(value.dtype)
    return d_query, d_key, d_value, query.new_empty(0) if d_bias is None or bias is None else d_bias.to(bias.dtype)
