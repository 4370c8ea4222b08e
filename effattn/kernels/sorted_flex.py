"""The rounds of ``sorted_chunks.py`` by FlexAttention, for CUDA.

In each round the rows and the keys are copied in their sorted order, in which a chunk's window is a range of keys; what
else decides whether a pair counts, where it stands and which earlier rounds found it, is read from tables of the sorted
rows and keys. Windows only ever move forward, so a tile of rows needs a range of tiles of keys, and a tile of keys a
range of tiles of rows: the block mask is two numbers for each tile. As many heads at a time as fill a GPU are copied,
and one round of them, forward and backward: the backward pass runs each round again and gives it its share of the
gradient, so that nothing of size rounds x n x d exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..masks import Everything, Window, band_of
from . import flex_engine
from .merge import merge
from .sorted_chunks import ChunkPlan, Chunks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flex_rounds"]

_TILE = 128  # rows and keys
_AT_ONCE = 2**18  # rows or keys that are copied at a time: 2048 tiles
_MOST_HEADS = 65535  # in CUDA's grid
_NOWHERE = 2**30  # a rank that no key has
_OPTIONS = {"BLOCKS_ARE_CONTIGUOUS": True, "FORCE_USE_FLEX_ATTENTION": True}


def flex_rounds(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp as ``sorted_chunks.chunked_rounds`` gives them, for all that ``flex_engine`` serves.

    Both are differentiable, once. Time O(rounds x n x (width + tile)), and the forward pass once more in the backward
    pass; memory O(n). Within a graph that the caller compiles, PyTorch decides what is kept.

    Raises:
        UnsupportedError: if compilation is switched off.
    """
    batch_size, num_heads, query_len, _ = query.shape
    num_kv_heads = key.shape[1]
    # Each head of keys with the query heads that read it is a problem of its own, [batch * kv_heads, group, n, dim]:
    # a graph is compiled for the size of a group, and serves any batch and any number of heads.
    q, k, v = (t.unflatten(1, (num_kv_heads, -1)).flatten(0, 1) for t in (query, key, value))
    if torch.compiler.is_compiling():
        output, lse, _ = _attend(_Share.of(chunks, num_kv_heads, slice(None)), q, k, v)
    else:
        output, lse = _Rounds.apply(q, k, v, chunks, num_kv_heads)
    return output.reshape(batch_size, num_heads, query_len, -1), lse.reshape(batch_size, num_heads, query_len)


class _Rounds(torch.autograd.Function):
    """Some problems at a time, one round at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, num_kv_heads: int
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        alone = torch.empty_like(lse, dtype=torch.bool)
        for some in _at_once(query, key):
            share = _Share.of(chunks, num_kv_heads, some)
            output[some], lse[some], alone[some] = _attend(share, query[some], key[some], value[some])
        ctx.save_for_backward(query, key, value, output, lse, alone, *chunks.mask.tensors)
        ctx.chunks, ctx.num_kv_heads = chunks, num_kv_heads
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (*ctx.saved_tensors[:6], grad_output, grad_lse)
        inputs = tensors[:3]
        grads = [torch.empty_like(t) for t in inputs]
        with torch.autocast(grad_output.device.type, enabled=False):  # a backward pass may be called inside one
            for some in _at_once(*inputs[:2]):
                share = _Share.of(ctx.chunks, ctx.num_kv_heads, some)
                for grad, part in zip(grads, _differentiate(share, *(t[some] for t in tensors)), strict=True):
                    grad[some] = part
        return *grads, None, None


def _at_once(query: Tensor, key: Tensor) -> Iterator[slice]:
    count = min(max(1, _AT_ONCE // max(query.shape[1] * query.shape[2], key.shape[2])), _MOST_HEADS)
    for first in range(0, len(query), count):
        yield slice(first, min(first + count, len(query)))


@dataclass(frozen=True)
class _Share:
    """Some of the problems, and their part of the plan: ``[rounds, problems, group, n]``, of keys with a group of 1."""

    chunks: Chunks
    plan: ChunkPlan
    num_kv_heads: int
    first: int

    @classmethod
    def of(cls, chunks: Chunks, num_kv_heads: int, some: slice) -> _Share:
        plan = chunks.plan
        tensors = [t.unflatten(2, (num_kv_heads, -1)).flatten(1, 2)[:, some] for t in plan.tensors]
        own = ChunkPlan.of(tensors, plan.chunk_size, plan.width, plan.regular)
        return cls(chunks, own, num_kv_heads, some.start or 0)


def _attend(
    share: _Share,
    query: Float[Tensor, "problems group query_len head_dim"],
    key: Float[Tensor, "problems 1 key_len head_dim"],
    value: Float[Tensor, "problems 1 key_len value_dim"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and which rows fell back to themselves."""
    chunks, joined = share.chunks, None
    for index in range(chunks.plan.num_rounds):
        order = _Round(share, index)
        output, lse = (_take(t, order.row_rank) for t in order.attend(*order.sort(query, key, value)))
        joined = (output.float(), lse) if joined is None else merge([joined, (output, lse)])
    assert joined is not None
    output, lse = joined[0].to(query.dtype), joined[1]
    if not chunks.exclude_self:
        return output, lse, torch.zeros_like(lse, dtype=torch.bool)
    problem, head, row = (torch.arange(n, device=query.device) for n in query.shape[:3])
    place = _place(problem[:, None, None] + share.first, head[:, None], share.num_kv_heads, query.shape[1])
    alone = (lse == -torch.inf) & chunks.mask.allows(*place, row, row, chunks.query_offset)
    own = (query.float() * key.float()).sum(-1) * chunks.scale
    return torch.where(alone[..., None], value, output), torch.where(alone, own, lse), alone


def _differentiate(
    share: _Share,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    alone: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:
    """The gradients of the inputs of ``_attend``, in float32.

    With ``w = exp(lse of a round - lse)``, the output is the sum of ``w`` times the rounds' outputs. So a round's
    output gets ``w dO``, and its log-sum-exp ``w (dO (its output - O) + dlse)``, summed over the values.
    """
    chunks = share.chunks
    grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
    delta = (grad_output.float() * output).sum(-1) - grad_lse
    # Rows that see nothing, or themselves alone, have no share in any round: exp(-inf) = 0.
    whole = lse.masked_fill((lse == -torch.inf) | alone, torch.inf)
    for index in range(chunks.plan.num_rounds):
        order = _Round(share, index)
        inputs = [t.requires_grad_() for t in order.sort(query, key, value)]
        with torch.enable_grad():
            found, found_lse = order.attend(*inputs)
        weight = (found_lse.detach() - _take(whole, order.rows)).exp()
        d_found = (weight[..., None] * _take(grad_output, order.rows)).to(found.dtype)
        d_lse = (d_found.float() * found.detach()).sum(-1) - weight * _take(delta, order.rows)
        d_inputs = torch.autograd.grad((found, found_lse), inputs, (d_found, d_lse))
        for grad, part, rank in zip(grads, d_inputs, (order.row_rank, order.key_rank, order.key_rank), strict=True):
            grad += _take(part, rank)
    if chunks.exclude_self:
        d_own = (chunks.scale * grad_lse * alone)[..., None]
        grads[0] += d_own * key
        grads[1] += d_own * query
        grads[2] += grad_output * alone[..., None]
    return grads


class _Round:
    """One round of some problems: who stands where, and FlexAttention over rows and keys that are sorted so.

    ``rows`` and ``keys`` are the indices in sorted order, filled up with 0 to whole tiles (at least two, lest a graph
    be compiled for the one); the ranks are the way back.
    """

    def __init__(self, share: _Share, index: int) -> None:
        self._share, self._index = share, index
        plan = share.plan
        self.row_rank, self.key_rank = plan.row_rank[index], plan.key_rank[index]
        self._query_len, self._key_len = self.row_rank.shape[2], self.key_rank.shape[2]
        self.rows = _filled(plan.row_order[index][..., : self._query_len])
        self.keys = _filled(plan.key_order[index])

    def sort(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _take(query, self.rows), _take(key, self.keys), _take(value, self.keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, need_lse: bool = True) -> tuple[Tensor, ...]:
        """Output and log-sum-exp of sorted rows over sorted keys."""
        scale = self._share.chunks.scale
        found = flex_engine.run(query, key, value, self.block_mask(), scale, need_lse, kernel_options=_OPTIONS)
        return tuple(t for t in found if t is not None)

    def block_mask(self) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        lengths = self.rows.shape[2], self.keys.shape[2]
        (first_key, num_keys), (first_row, num_rows) = self.tiles()
        q_num = q = None  # they serve the backward pass, which a CPU lacks; and it wants every tile listed
        span = lengths[1] // _TILE
        if not flex_engine.is_cpu(self.rows.device):
            span, q_num, q = 1, num_rows, _listed(first_row, lengths[0] // _TILE, 1)
        kv = _listed(first_key, lengths[1] // _TILE, span)
        full = (None, None)
        return BlockMask(lengths, num_keys, kv, *full, q_num, q, *full, (_TILE, _TILE), self._mask_mod())

    def tiles(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The first tile of keys that each tile of rows needs, and how many; and the other way round.

        int32 ``[problems, group, tiles]`` each. The first one is no tile where none is needed.
        """
        plan, tiles = self._share.plan, torch.arange(self.rows.shape[2] // _TILE, device=self.rows.device)
        starts = plan.chunk_start[self._index]
        first, last = ((tiles * _TILE + at).clamp(max=self._query_len - 1) // plan.chunk_size for at in (0, _TILE - 1))
        is_filled = tiles * _TILE >= self._query_len
        low = (starts[..., first] // _TILE).masked_fill(is_filled, _NOWHERE)
        high = ((starts[..., last] + plan.width - 1) // _TILE).masked_fill(is_filled, _NOWHERE)
        num_keys = (high - low + 1).masked_fill(is_filled, 0)

        key_tiles = torch.arange(self.keys.shape[2] // _TILE, device=self.rows.device, dtype=torch.int32)
        key_tiles = key_tiles.expand(*low.shape[:2], -1).contiguous()
        first_row = torch.searchsorted(high, key_tiles, out_int32=True)
        num_rows = torch.searchsorted(low, key_tiles, out_int32=True, right=True) - first_row
        return (low, num_keys), (first_row, num_rows.clamp(min=0))

    def _mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        chunks, plan = self._share.chunks, self._share.plan
        group, device = self.rows.shape[1], self.rows.device

        def number(value: int) -> Tensor:
            return torch.full((), value, device=device, dtype=torch.int32)

        def starts_in(index: int) -> Tensor:
            """Where the window of each row starts in a round."""
            return _take(plan.chunk_start[index], _take(plan.row_rank[index], self.rows) // plan.chunk_size)

        here = starts_in(self._index)[..., : self._query_len]
        starts = [F.pad(here, (0, self.rows.shape[2] - self._query_len), value=_NOWHERE)]
        ranks = []
        if chunks.once and self._index:
            starts += [starts_in(i) for i in range(self._index)]
            ranks += [_take(plan.key_rank[i], self.keys)[:, 0] for i in range(self._index)]
            # As many tables as 1, 3, 7, ... earlier rounds have: few numbers of rounds are compiled.
            missing = (1 << self._index.bit_length()) - 1 - self._index
            starts += [torch.zeros_like(starts[0]) for _ in range(missing)]
            ranks += [torch.full_like(ranks[0], -1) for _ in range(missing)]
        starts, ranks = ([flex_engine.captured(t) for t in tables] for tables in (starts, ranks))
        rows, keys = (flex_engine.captured(t) for t in (self.rows, self.keys[:, 0]))
        width, offset, first, num_kv_heads = map(
            number, (plan.width, chunks.query_offset, self._share.first, self._share.num_kv_heads)
        )
        band, rest = band_of(chunks.mask)
        mask = flex_engine.lifted(rest if band == Window(None, None) else band & rest, self._key_len, device)
        is_masked = not isinstance(mask, Everything)

        def mask_mod(problem: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            ahead = key - starts[0][problem, head, row]
            allowed = (ahead >= 0) & (ahead < width)
            for start, rank in zip(starts[1:], ranks, strict=True):
                ahead = rank[problem, key] - start[problem, head, row]
                allowed = allowed & ((ahead < 0) | (ahead >= width))
            if chunks.exclude_self or is_masked:
                row, key = rows[problem, head, row], keys[problem, key]
            if chunks.exclude_self:
                allowed = allowed & (key != row + offset)
            if is_masked:
                place = _place(problem + first, head, num_kv_heads, group)
                allowed = allowed & mask.allows(*place, row, key, offset)  # type: ignore[arg-type]  # as a tensor
            return allowed

        return mask_mod


def _place(problem: Tensor, head: Tensor, num_kv_heads: int | Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Batch and query head of the ``head`` in a problem's group."""
    return problem // num_kv_heads, problem % num_kv_heads * group + head


def _filled(order: Tensor) -> Tensor:
    """``order`` ``[..., n]`` with zeros up to whole tiles, at least two."""
    length = order.shape[-1]
    return F.pad(order, (0, max(-(-length // _TILE), 2) * _TILE - length))


def _listed(first: Tensor, num_tiles: int, span: int) -> Tensor:
    """The tiles ``[..., span]`` from the first on."""
    tiles = first[..., None] + torch.arange(span, device=first.device, dtype=torch.int32)
    return tiles.clamp(max=num_tiles - 1)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[i, j, index[i, j]]`` for ``[problems, group, n]`` or ``[problems, group, n, dim]``."""
    num_problems, group, length = tensor.shape[:3]
    first = torch.arange(num_problems * group, device=index.device, dtype=index.dtype).view(num_problems, group, 1)
    taken = tensor.flatten(0, 2).index_select(0, (index + first * length).flatten())
    return taken.view(*index.shape, *tensor.shape[3:])
