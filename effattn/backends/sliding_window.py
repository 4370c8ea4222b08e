"""Longformer's attention: an exact band per token, plus global tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend import Backend, Request, register
from ..dropout import draw_seed
from ..kernels.flex_engine import serves
from ..kernels.merge import merge
from ..kernels.tiles import Problem, tiled_attention
from ..masks import Global, Mask, Padding, Taken, Window

_ROWS_OF_FEW_KEYS = 1024

Selection = slice | Tensor | None
Part = Callable[..., tuple[Tensor, Tensor]]


@register
@dataclass(frozen=True)
class SlidingWindow(Backend):
    """Longformer's sliding window: an exact band per token, plus global tokens.

    Beltagy, Peters & Cohan 2020, "Longformer", section 3.1. A query sees itself, ``left`` keys before it and
    ``right`` after it, at distances that are multiples of ``dilation``; ``None`` means unbounded. The
    ``global_tokens`` see everything and are seen by everything: positions that hold for every batch row, or one
    tuple of positions a row, or a bool tensor ``[batch, key_len]`` (kept as such tuples). Positions past the
    sequence are left out, so a field may name 16 sinks and serve 4 tokens too. Unlike Longformer's own layer,
    one set of projections serves both kinds of attention here. Time and memory O(n (left + right + globals)).
    """

    name = "sliding_window"
    left: int | None = 256
    right: int | None = 256
    dilation: int = 1
    global_tokens: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._require_int("left", 0, optional=True)
        self._require_int("right", 0, optional=True)
        self._require_int("dilation", 1)
        tokens: Any = self.global_tokens
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.dtype == torch.bool:
            tokens = [row.nonzero()[:, 0].tolist() for row in tokens]
        tokens = tuple(tokens) if isinstance(tokens, range) else tokens
        is_sequence = isinstance(tokens, tuple | list)
        self._require(
            is_sequence, "global_tokens", "positions, one tuple of them a batch row, or bool [batch, key_len]"
        )
        per_row = any(isinstance(row, tuple | list) for row in tokens)
        rows = tokens if per_row else [tokens]
        fits = all(
            isinstance(row, tuple | list) and all(type(token) is int and token >= 0 for token in row) for row in rows
        )
        self._require(fits, "global_tokens", "positions >= 0, or one tuple of them a batch row")
        kept = tuple(tuple(sorted(set(row))) for row in rows)
        object.__setattr__(self, "global_tokens", kept if per_row else kept[0])

    def resolve(self, request: Request) -> str:
        return "flex" if serves(request) else "tiles"

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        band: Mask = Window(self.left, self.right, self.dilation)
        tokens = self._tokens(key)
        return mask & (band | Global(_marks(tokens, key.shape[2], key.device)) if tokens else band)

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
        seed = draw_seed() if dropout_p else None
        tokens = self._tokens(key)
        if bias is not None:
            bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))

        def part(
            inner: Mask, rows: Selection, keys: Selection, need_lse: bool, query_tile: int = 64
        ) -> tuple[Tensor, Tensor]:
            """Attention of some rows over some keys, under the mask as the whole problem states it."""
            whole = rows is None and keys is None
            return tiled_attention(
                _take(query, 2, rows),
                _take(key, 2, keys),
                _take(value, 2, keys),
                Problem(
                    inner if whole else Taken(inner, rows, keys),
                    scale,
                    query_offset,
                    dropout_p,
                    seed,
                    query_tile,
                    # Parts to be joined keep their precision until they are.
                    wide_output=bool(tokens),
                ),
                bias=None if bias is None else _take_bias(bias, rows, keys),
                need_lse=need_lse,
            )

        band = mask & Window(self.left, self.right, self.dilation)
        if not tokens:
            output, lse = self._band(part, band, query, value.shape[3], query_offset, return_lse)
            return output.to(query.dtype), lse if return_lse else None

        # Each pair once: the band without the global keys, the global keys, then the rows of global queries whole.
        band = band & Padding(~_marks(tokens, key.shape[2], key.device))
        local = self._band(part, band, query, value.shape[3], query_offset, True)
        output, lse = merge([local, part(mask, None, _index(tokens, key.device), True, _ROWS_OF_FEW_KEYS)])
        rows = [tuple(t - query_offset for t in row if 0 <= t - query_offset < query.shape[2]) for row in tokens]
        if any(rows):
            index = _index(rows, query.device)
            global_output, global_lse = part(mask, index, None, True)
            output = _put_rows(output, rows, global_output)
            lse = _put_rows(lse, rows, global_lse)
        return output.to(query.dtype), lse if return_lse else None

    def _band(
        self, part: Part, band: Mask, query: Tensor, value_dim: int, query_offset: int, need_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """The band; a dilated one falls into one plain band for each residue of the positions."""
        if self.dilation == 1:
            return part(band, None, None, need_lse)
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*query.shape[:3], value_dim, dtype=dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for residue in range(min(self.dilation, query.shape[2])):
            rows = slice(residue, None, self.dilation)
            keys = slice((residue + query_offset) % self.dilation, None, self.dilation)
            output[:, :, rows], lse[:, :, rows] = part(band, rows, keys, True)
        return output, lse

    def _tokens(self, key: Tensor) -> list[tuple[int, ...]]:
        """The global tokens within the sequence, a tuple for all batch rows or for each; empty: there are none."""
        batch_size, key_len = key.shape[0], key.shape[2]
        tokens: Any = self.global_tokens
        per_row = bool(tokens) and isinstance(tokens[0], tuple)
        if per_row and len(tokens) not in (1, batch_size):
            raise ValueError(
                f"{self.name}: global_tokens must have one tuple for each of {batch_size} batch rows, got {len(tokens)}"
            )
        within = [tuple(t for t in row if t < key_len) for row in (tokens if per_row else [tokens])]
        return within if any(within) else []


def _marks(tokens: list[tuple[int, ...]], key_len: int, device: torch.device) -> Tensor:
    """Positions as bool ``[batch or 1, key_len]``."""
    marks = torch.zeros(len(tokens), key_len, dtype=torch.bool)
    for index, row in enumerate(tokens):
        marks[index, list(row)] = True
    return marks.to(device)


def _index(tokens: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Positions as an index ``[batch or 1, most]``, filled up with -1."""
    most = max(len(row) for row in tokens)
    return torch.tensor([row + (-1,) * (most - len(row)) for row in tokens], device=device)


def _take(tensor: Tensor, dim: int, selection: Selection) -> Tensor:
    """A selection along ``dim`` of ``[batch, heads, ...]``; -1 takes anything, a ``Taken`` mask hides it."""
    if selection is None:
        return tensor
    if isinstance(selection, slice):
        return tensor[(slice(None),) * dim + (selection,)]
    index = selection.clamp(min=0)
    if index.shape[0] == 1:
        return tensor.index_select(dim, index[0])
    shape = [index.shape[0], 1, 1, 1]
    shape[dim] = index.shape[1]
    return torch.take_along_dim(tensor, index.view(shape), dim)


def _take_bias(bias: Tensor, rows: Selection, keys: Selection) -> Tensor:
    """A selection of rows and keys; a dimension of 1 is left to broadcast."""
    for dim, selection in ((2, rows), (3, keys)):
        if bias.shape[dim] != 1:
            bias = _take(bias, dim, selection)
    return bias


def _put_rows(tensor: Tensor, rows: list[tuple[int, ...]], values: Tensor) -> Tensor:
    """``tensor`` ``[batch, heads, n, ...]`` with some rows, the same for all batch rows or of each, replaced."""
    if len(rows) == 1:
        rows = rows * tensor.shape[0]
    places = [(batch, row, slot) for batch, of_batch in enumerate(rows) for slot, row in enumerate(of_batch)]
    batch, row, slot = torch.tensor(places, device=tensor.device).T
    put = values.transpose(1, 2)[batch, slot]
    return tensor.transpose(1, 2).index_put((batch, row), put).transpose(1, 2)
