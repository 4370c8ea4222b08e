"""The band engine: exact attention in tiles of query rows, over only the keys that a mask lets them see.

A tile of scores is made, used and overwritten in one workspace that stays in the cache, so memory is linear in
the length. Which keys a tile needs comes from the mask (``tile_plan.py``): a band costs what the band costs, a causal
mask half of the square. The tiles of a band are one batched product over overlapping views of the keys; nothing is
copied. Keys that do not fit one span are joined by the online softmax (Milakov & Gimelshein 2018; Rabe & Staats
2021). The backward pass makes the scores again: from themselves where a row's keys are one span, else from the output
and the log-sum-exp (Dao et al. 2022, algorithm 4). Nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..backend import Request
from ..dropout import keep_scale
from ..masks import Coverage, Dense, Everything, Mask, pack, unpack
from .flex_engine import flex_tiles, serves
from .overlapping import add_to_windows, windows
from .softmax import Part, product_dtype, softmax_gradient_in_place, softmax_in_place
from .tile_plan import Run, Span, fits_one_span, plan_runs
from .workspace import Workspace

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
    key_tile: int = 1024  # where the keys of a tile of rows are cut into spans
    widest: int = 4096  # up to which they are not
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

    Both are differentiable, once. Without ``need_lse`` the log-sum-exp that comes back is not to be used. On CUDA,
    FlexAttention computes the same where it can (``flex_engine.py``).
    """
    if serves(Request.of(query, key, value, dropout_p=problem.dropout_p)):
        return flex_tiles(query, key, value, problem, bias=bias, need_lse=need_lse)
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
        problem.widest,
        problem.wide_output,
        need_lse,
        grad,
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
    widest: int,
    wide_output: bool,
    need_lse: bool,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    numbers = (scale, query_offset, dropout_p, dropout_seed, query_tile, key_tile, widest, wide_output)
    problem = Problem(unpack(mask, mask_tensors), *numbers)
    return _forward(query, key, value, bias, problem, need_lse, differentiable)


@_tiles.register_fake
def _(query, key, value, bias, mask, mask_tensors, scale, query_offset, dropout_p, dropout_seed, *rest):  # type: ignore[no-untyped-def]
    wide_output, need_lse, differentiable = rest[-3:]
    return _empty_outputs(query, value, wide_output, need_lse or differentiable)


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
    widest: int,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = (scale, query_offset, dropout_p, dropout_seed, query_tile, key_tile, widest)
    problem = Problem(unpack(mask, mask_tensors), *numbers)
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
    ctx.mask, ctx.numbers, ctx.tile = mask, (scale, offset, dropout_p), tuple(rest[:3])
    ctx.need_lse = rest[4]


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
        grad_lse if ctx.need_lse else None,
        ctx.mask,
        mask_tensors,
        *ctx.numbers,
        seed,
        *ctx.tile,
        need_bias,
    )
    others = (None, [None] * len(mask_tensors), *(None,) * 10)
    return *grads, d_bias if need_bias else None, *others


_tiles.register_autograd(_differentiate, setup_context=_save)


def _empty_outputs(query: Tensor, value: Tensor, wide_output: bool, has_lse: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    batch_size, num_heads, query_len, _ = query.shape
    dtype = wide if wide_output else query.dtype
    output = query.new_empty(batch_size, num_heads, query_len, value.shape[3], dtype=dtype)
    return output, query.new_empty((batch_size, num_heads, query_len) if has_lse else (0,), dtype=wide)


def _is_whole(query: Tensor, key: Tensor, problem: Problem) -> bool:
    return fits_one_span(
        problem.mask, query.shape[2], key.shape[2], problem.query_offset, problem.query_tile, problem.widest
    )


@dataclass(frozen=True)
class _Unit:
    """What one batched product does: all tiles of a run for one head, or a single tile for some heads."""

    batch: int
    kv_heads: slice
    heads: slice
    run: Run
    dtype: torch.dtype  # of accumulation
    narrow: torch.dtype  # of products whose result is a sum over many keys or rows

    @property
    def is_run(self) -> bool:
        return self.run.count > 1

    def rows(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The unit's rows of ``[batch, heads, query_len, ...]`` as ``[count, height, ...]`` or ``[kv_heads, group *
        height, ...]``; a view where that is one."""
        tile = tensor[self.batch, self.heads, slice(*self.run.rows)].to(dtype or self.dtype)
        return tile.reshape(self._count, -1, *tile.shape[2:])

    def put(self, target: Tensor, tile: Tensor) -> None:
        """The inverse of ``rows``: write a tile back."""
        rows = target[self.batch, self.heads, slice(*self.run.rows)]
        rows.copy_(tile.view(rows.shape))

    def put_product(self, target: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
        """Write ``alpha * a @ b``; ``b`` is in ``narrow``."""
        a = a.to(self.narrow)
        if self.is_run and target.dtype == self.narrow:
            rows = target[self.batch, self.heads, slice(*self.run.rows)].view(self._count, -1, target.shape[3])
            torch.baddbmm(rows, a, b, beta=0, alpha=alpha, out=rows)
        else:
            self.put(target, torch.bmm(a, b).mul_(alpha))

    def keys(self, tensor: Tensor, span: Span, dtype: torch.dtype | None = None) -> Tensor:
        """The span's keys of ``[batch, kv_heads, key_len, dim]`` as ``[count or kv_heads, width, dim]``."""
        keys = tensor[self.batch, self.kv_heads, slice(*self.run.keys(span))].to(dtype or self.dtype)
        return windows(keys[0], self.run.count, span.width, self.run.height) if self.is_run else keys

    def add_to_keys(self, target: Tensor, span: Span, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha * a.mT @ b`` to the span's keys in ``[kv_heads, key_len, dim]``; ``b`` is in ``narrow``."""
        a = a.to(self.narrow)
        if self.is_run:
            keys = target[self.kv_heads.start, slice(*self.run.keys(span))]
            add_to_windows(keys, a, b, self.run.height, alpha)
        else:
            target[self.kv_heads, slice(*self.run.keys(span))].add_(torch.bmm(a.mT, b), alpha=alpha)

    def grid(self, span: Span, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch, head, row and key of each score; they broadcast to ``[count or heads, height, width]``."""
        row = torch.arange(*self.run.rows, device=device).view(self.run.count, -1, 1)
        first = torch.arange(span.first, self.run.keys(span)[1] - span.width + 1, self.run.height, device=device)
        key = first.view(-1, 1, 1) + torch.arange(span.width, device=device)
        head = torch.arange(self.heads.start, self.heads.stop, device=device).view(-1, 1, 1)
        return torch.full((1, 1, 1), self.batch, device=device), head, row, key

    def merged(self, tile: Tensor) -> Tensor:
        """``[1 or count or heads, height, width]`` in the shape of the scores."""
        if tile.shape[0] == 1:
            return tile.repeat(1, 1 if self.is_run else self._group, 1)
        return tile.reshape(self._count, -1, tile.shape[2])

    @property
    def _group(self) -> int:
        return (self.heads.stop - self.heads.start) // self._num_kv_heads

    @property
    def _num_kv_heads(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start

    @property
    def _count(self) -> int:
        return self.run.count if self.is_run else self._num_kv_heads


@dataclass(frozen=True)
class _Additive:
    """Bias and mask of a unit's scores in a span: what to add to which columns, and the rows that see nothing."""

    parts: list[tuple[slice, Tensor]] = field(default_factory=list)
    empty: Tensor | None = None  # [1 or count or kv_heads, rows, 1], or None where every row sees something


class _Tiles:
    """Walks the tiles of one problem and makes their scores; shared by the forward and the backward pass."""

    def __init__(self, query: Tensor, key: Tensor, bias: Tensor | None, problem: Problem) -> None:
        self.problem, self.bias = problem, bias
        self.batch_size, self.num_heads, self.query_len, _ = query.shape
        self.num_kv_heads, self.key_len = key.shape[1:3]
        self.group = self.num_heads // max(self.num_kv_heads, 1)
        self.device = query.device
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.is_whole = _is_whole(query, key, problem)
        self.narrow = product_dtype(query.dtype)
        self._most_scores = _WORKSPACE_BYTES // self.dtype.itemsize
        self._differs_by_head = any(isinstance(m, Dense) and m.allowed.shape[1] > 1 for m in problem.mask.leaves())
        self.workspace = Workspace(self.dtype, query.device)
        self._relative: dict[object, _Additive] = {}
        self._latest: tuple[object, _Additive] | None = None
        self._mask: Mask = problem.mask  # of the batch row at hand

    def units(self) -> Iterator[_Unit]:
        runs: list[Run] | None = None
        for batch in range(self.batch_size):
            if runs is None or self.problem.mask.tensors:
                self._mask = self.problem.mask.for_batch(batch)
                runs = self._plan()
            for run in runs:
                at_once = 1 if run.count > 1 else self._heads_at_once(run)
                for start in range(0, self.num_kv_heads, at_once):
                    kv_heads = slice(start, min(start + at_once, self.num_kv_heads))
                    heads = slice(kv_heads.start * self.group, kv_heads.stop * self.group)
                    if run.count == 1:
                        yield _Unit(batch, kv_heads, heads, run, self.dtype, self.dtype)
                        continue
                    for head in range(heads.start, heads.stop):
                        yield _Unit(batch, kv_heads, slice(head, head + 1), run, self.dtype, self.narrow)

    def _plan(self) -> list[Run]:
        problem = self.problem
        return plan_runs(
            self._mask,
            self.query_len,
            self.key_len,
            problem.query_offset,
            query_tile=problem.query_tile,
            key_tile=problem.widest if self.is_whole else problem.key_tile,
            # A batch of tiles needs to be larger than the batch of heads would be; and a bias has no such views.
            least_count=self.num_heads if self.bias is None else self.query_len,
            most_scores=self._most_scores,
        )

    def _heads_at_once(self, run: Run) -> int:
        widest = max((span.width for span in run.spans), default=1)
        return max(1, min(self.num_kv_heads, self._most_scores // (self.group * run.height * widest)))

    def scores(self, unit: _Unit, q: Tensor, k: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """Scaled, biased and masked scores in the workspace, and which rows see nothing (None: every row sees).

        The scores of rows that see nothing are not masked, so that their softmax is finite.
        """
        out = self.workspace("scores", *q.shape[:2], span.width)
        additive = self._additive(unit, span)
        torch.baddbmm(out, q, k.mT, beta=0, alpha=self.problem.scale, out=out)
        for columns, part in additive.parts:
            out[:, :, columns].add_(part)
        return out, additive.empty

    def keep(self, unit: _Unit, span: Span) -> Tensor:
        """The dropout factors of the unit's scores."""
        problem = self.problem
        batch, head, row, key = unit.grid(span, self.device)
        row, key = problem.mask.place(batch, row, key)
        assert problem.dropout_seed is not None
        return unit.merged(keep_scale(problem.dropout_p, problem.dropout_seed, batch, head, row, key).to(self.dtype))

    def add_bias_grad(self, grad: Tensor, unit: _Unit, span: Span, d_scores: Tensor) -> None:
        """Add a tile's gradient to that of the bias, summed over the dimensions that the bias broadcasts."""
        rows, keys = slice(*unit.run.rows), slice(*unit.run.keys(span))
        wholes = (slice(unit.batch, unit.batch + 1), unit.heads, rows, keys)
        target = grad[tuple(w if n > 1 else slice(None) for w, n in zip(wholes, grad.shape, strict=True))]
        target += d_scores.view(1, -1, unit.run.height, span.width).sum_to_size(target.shape)

    def _additive(self, unit: _Unit, span: Span) -> _Additive:
        run = unit.run
        mask = self._mask.within(run.rows, run.keys(span), self.problem.query_offset)
        if self.bias is not None:
            return self._whole_additive(mask, unit, span)
        if isinstance(mask, Everything):
            return _Additive()
        if mask.is_relative:  # made once for each place beside the diagonal; all tiles of a run stand in the same
            # A single tile holds the rows of all heads of a group, a run those of one head.
            place = (run.first - span.first, run.height, span.width, mask, unit.is_run)
            if place not in self._relative:
                one = replace(unit, run=replace(run, count=1, spans=(span,)))
                self._relative[place] = self._sparse_additive(mask, one, span)
            return self._relative[place]
        if self._differs_by_head:
            return self._whole_additive(mask, unit, span)
        at = (unit.batch, run, span)
        if self._latest is None or self._latest[0] != at:
            self._latest = (at, self._whole_additive(mask, unit, span))
        return self._latest[1]

    def _sparse_additive(self, mask: Mask, unit: _Unit, span: Span) -> _Additive:
        """Only where columns of the tile hide something; a band's inner columns do not."""
        blocks = [
            Span(first, min(unit.run.height, span.first + span.width - first))
            for first in range(span.first, span.first + span.width, unit.run.height)
        ]
        covered = [
            mask.coverage(unit.run.rows, (b.first, b.first + b.width), self.problem.query_offset) for b in blocks
        ]
        if Coverage.ALL not in covered:
            return self._whole_additive(mask, unit, span)
        return _Additive(
            [
                (slice(b.first - span.first, b.first - span.first + b.width), self._make_additive(mask, unit, b))
                for b, coverage in zip(blocks, covered, strict=True)
                if coverage is not Coverage.ALL
            ]
        )

    def _whole_additive(self, mask: Mask, unit: _Unit, span: Span) -> _Additive:
        additive = self._make_additive(mask, unit, span)
        empty = additive.amax(-1, keepdim=True) == -torch.inf
        if not empty.any():
            return _Additive([(slice(None), additive)])
        return _Additive([(slice(None), additive.masked_fill(empty, 0.0))], empty)

    def _make_additive(self, mask: Mask, unit: _Unit, span: Span) -> Tensor:
        """Bias and mask as one tensor that broadcasts to the scores, -inf where the mask does not allow a pair."""
        batch, head, row, key = unit.grid(span, self.device)
        # A mask that is the same for all heads is made for one.
        head = head if self._differs_by_head else head[:1]
        allowed = mask.allows(batch, head, row, key, self.problem.query_offset)
        if self.bias is None:
            additive = torch.zeros((), dtype=self.dtype, device=self.device)
        else:
            whole = self.bias.expand(self.batch_size, self.num_heads, self.query_len, self.key_len)
            tile = whole[unit.batch, unit.heads, slice(*unit.run.rows), slice(*unit.run.keys(span))]
            additive = tile.to(self.dtype)
        additive = additive.masked_fill(~allowed, -torch.inf)
        return unit.merged(additive.expand(-1, unit.run.height, span.width))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    problem: Problem,
    need_lse: bool,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    tiles = _Tiles(query, key, bias, problem)
    output, lse = _empty_outputs(query, value, problem.wide_output, need_lse or differentiable)
    need_lse = need_lse or (differentiable and not tiles.is_whole)  # where the backward pass needs it
    for unit in tiles.units():
        spans = unit.run.spans
        if not spans:  # no key in sight
            output[unit.batch, unit.heads, slice(*unit.run.rows)] = 0
            if need_lse:
                lse[unit.batch, unit.heads, slice(*unit.run.rows)] = -torch.inf
            continue
        q = unit.rows(query)
        joined: Part | None = None
        for span in spans:
            weights, empty = tiles.scores(unit, q, unit.keys(key, span), span)
            statistics = softmax_in_place(weights, empty, need_statistics=need_lse or len(spans) > 1)
            if problem.dropout_p:
                weights *= tiles.keep(unit, span)
            if len(spans) == 1:
                unit.put_product(output, weights, unit.keys(value, span, unit.narrow))
                if statistics:
                    peak, total = statistics
                    unit.put(lse, peak + total.log())
                continue
            assert statistics is not None
            part = Part(torch.bmm(weights, unit.keys(value, span)), *statistics)
            joined = part if joined is None else joined.join(part)
        if joined is not None:
            unit.put(output, joined.output)
            if need_lse:
                unit.put(lse, joined.lse)
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
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.zeros(t.shape, dtype=tiles.dtype, device=t.device) for t in (key, value))
    d_bias = torch.zeros(bias.shape, dtype=tiles.dtype, device=bias.device) if need_bias and bias is not None else None
    for unit in tiles.units():
        spans = unit.run.spans
        q, d_out = unit.rows(query), unit.rows(grad_output)
        narrow_q, narrow_d_out = unit.rows(query, unit.narrow), unit.rows(grad_output, unit.narrow)
        d_lse = None if grad_lse is None else unit.rows(grad_lse)[..., None]
        row_lse = delta = dq = None
        if not tiles.is_whole:
            # Softmax's gradient needs, of each row, only sum(dO * O) (Dao et al. 2022, equation 4).
            delta = (d_out * unit.rows(output)).sum(-1, keepdim=True)
            row_lse = unit.rows(lse)[..., None]
            row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)
        for span in spans:
            k, v = unit.keys(key, span), unit.keys(value, span)
            weights, empty = tiles.scores(unit, q, k, span)
            if row_lse is None:
                softmax_in_place(weights, empty, need_statistics=False)
            else:
                weights.sub_(row_lse).exp_()
                if empty is not None:
                    weights.masked_fill_(empty, 0.0)
            d_weights = tiles.workspace("d_weights", *weights.shape)
            torch.bmm(d_out, v.mT, out=d_weights)
            if problem.dropout_p:
                keep = tiles.keep(unit, span)
                unit.add_to_keys(d_value[unit.batch], span, weights * keep, narrow_d_out)
                d_weights *= keep
            else:
                unit.add_to_keys(d_value[unit.batch], span, weights, narrow_d_out)
            if delta is None:
                d_scores = softmax_gradient_in_place(d_weights, weights)
            else:
                d_scores = d_weights.sub_(delta).mul_(weights)
            if d_lse is not None:
                d_scores.addcmul_(weights, d_lse)
            unit.add_to_keys(d_key[unit.batch], span, d_scores, narrow_q, alpha=problem.scale)
            if d_bias is not None:
                tiles.add_bias_grad(d_bias, unit, span, d_scores)
            if len(spans) == 1:
                unit.put_product(d_query, d_scores, unit.keys(key, span, unit.narrow), alpha=problem.scale)
            else:
                dq = torch.bmm(d_scores, k) if dq is None else dq.baddbmm_(d_scores, k)
        if not spans:
            d_query[unit.batch, unit.heads, slice(*unit.run.rows)] = 0
        if dq is not None:
            unit.put(d_query, dq.mul_(problem.scale))
    d_bias = query.new_empty(0) if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_bias
