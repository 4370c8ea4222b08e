"""Which tiles of a mask are empty, mixed or full: the block mask that sparse kernels run over.

``candidate_tiles`` asks ``Mask.key_range`` which tiles can hold anything at all; ``tile_coverage`` grades those, from
tile corners or from one pass over the tensors that the mask holds; ``&`` is the minimum and ``|`` the maximum of
what the parts say, as for ``Mask.coverage``. No n x n grid of single pairs is ever evaluated, and a band costs what
lies along the band: at 131072 tokens, some thousands of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from ..masks import And, Coverage, Dense, Documents, Everything, Global, Mask, Or, Padding, Taken, Window

__all__ = ["candidate_tiles", "order_tiles", "tile_coverage", "token_table"]


def candidate_tiles(
    mask: Mask, query_len: int, key_len: int, query_offset: int, tile_len: int
) -> tuple[Tensor, Tensor]:
    """The tiles outside of which nothing is allowed: tiles of keys for each tile of rows, and the other way round.

    Both int64 ``[tiles, most]``, ascending, filled up with -1, on the CPU. They follow from the mask's numbers alone:
    what a tensor hides is not looked at.
    """
    ranges = [
        mask.key_range((start, min(start + tile_len, query_len)), key_len, query_offset)
        for start in range(0, query_len, tile_len)
    ]
    low, high = np.array(ranges, dtype=np.int64).T
    first = low // tile_len
    of_rows = _runs(first, np.where(high > low, -(-high // tile_len), first))

    rows, places = np.nonzero(of_rows >= 0)
    keys = of_rows[rows, places]
    num_row_tiles, num_key_tiles = len(of_rows), -(-key_len // tile_len)
    first, last = np.full(num_key_tiles, num_row_tiles), np.full(num_key_tiles, -1)
    np.minimum.at(first, keys, rows)
    np.maximum.at(last, keys, rows)
    return torch.from_numpy(of_rows), torch.from_numpy(_runs(first, np.maximum(last + 1, first)))


def tile_coverage(
    mask: Mask,
    query_len: int,
    key_len: int,
    query_offset: int,
    tile_len: int,
    device: torch.device | str = "cpu",
    tiles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``Coverage`` of tiles of ``tile_len`` rows and keys, as int8 ``[batch or 1, heads or 1, ...]``.

    ``tiles`` are the row tiles and the key tiles asked about, indices that broadcast against each other to
    ``[...]``, two dimensions; None: all, ``[row tiles, key tiles]``.

    May be cautious (``SOME`` where the tile is in truth empty or full), never wrong. Costs O(tiles asked about) time
    and memory, and one pass over the mask's tensors; nothing is copied to the host.
    """
    if tiles is None:
        row_tiles, key_tiles = (torch.arange(-(-n // tile_len), device=device) for n in (query_len, key_len))
        tiles = row_tiles[:, None], key_tiles[None]
    rows, keys = (_Side(n, tile_len, t) for n, t in zip((query_len, key_len), tiles, strict=True))
    levels = _coverage(mask, rows, keys, query_offset)
    return levels.expand(*levels.shape[:2], *torch.broadcast_shapes(*(t.shape for t in tiles)))


def order_tiles(chosen: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row chose, and which, in their order, before those that it did not choose.

    ``chosen`` is bool ``[batch, heads, rows, n]``, ``tiles`` are the numbers ``[rows, n]`` of the tiles; the results
    are int32 ``[batch, heads, rows]`` and ``[batch, heads, rows, n]``.
    """
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), tiles.expand(chosen.shape).gather(-1, order).to(torch.int32)


def token_table(mask: Global, positions: Tensor) -> Tensor:
    """Whether each of ``positions`` ``[batch or 1, n]`` is global. Positions off the table are not."""
    if not isinstance(mask.tokens, Tensor):
        return torch.isin(positions, torch.tensor(mask.tokens, device=positions.device, dtype=torch.int64))
    size = mask.tokens.shape[1]
    inside = (positions >= 0) & (positions < size)
    return _look_up(mask.tokens, positions.clamp(0, size - 1)) & inside


@dataclass(frozen=True)
class _Side:
    """The rows or the keys of a problem, in tiles, some of which are asked about.

    ``places`` are the positions at which they stand in the whole problem: the first and the step from one to the
    next, or an index ``[batch or 1, length]`` in which -1 stands for nothing.
    """

    length: int
    tile_len: int
    tiles: Tensor
    places: tuple[int, int] | Tensor = (0, 1)

    def taken(self, selection: slice | Tensor | None) -> _Side:
        """The same rows or keys where ``Taken`` says that they stand."""
        if selection is None:
            return self
        if isinstance(selection, Tensor):
            places = self.read(selection)
            nothing = self.is_nothing()
            return replace(self, places=places if nothing is None else places.masked_fill(nothing, -1))
        start, step = selection.start or 0, selection.step or 1
        if isinstance(self.places, Tensor):
            return replace(self, places=torch.where(self.places < 0, -1, start + self.places * step))
        return replace(self, places=(start + self.places[0] * step, self.places[1] * step))

    def is_nothing(self) -> Tensor | None:
        return self.places < 0 if isinstance(self.places, Tensor) else None

    def positions(self) -> Tensor:
        """``[batch or 1, length]``; 0 for nothing, which makes a tile's bounds wider at most."""
        if isinstance(self.places, Tensor):
            return self.places.clamp(min=0).long()
        first, step = self.places
        return (first + step * torch.arange(self.length, device=self.tiles.device))[None]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest position in each tile."""
        if isinstance(self.places, Tensor):
            return self.extremes(self.positions())
        first, step = self.places
        start = self.tiles * self.tile_len
        stop = (start + self.tile_len).clamp(max=self.length)
        return (first + step * start)[None, None], (first + step * (stop - 1))[None, None]

    def read(self, table: Tensor, shift: int = 0) -> Tensor:
        """``table`` ``[batch or 1, positions]`` at each place moved by ``shift``: ``[batch or 1, length]``."""
        if isinstance(self.places, Tensor):
            return _look_up(table, self.positions() + shift)
        first, step = self.places
        return table[:, first + shift :: step][:, : self.length]

    def extremes(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of ``table`` ``[batch or 1, length]`` in each tile, ``[batch or 1, 1, ...]``."""
        low, high = _extremes(table, 1, self.tile_len)
        return low[:, self.tiles][:, None], high[:, self.tiles][:, None]


def _coverage(mask: Mask, rows: _Side, keys: _Side, query_offset: int) -> Tensor:
    match mask:
        case And() | Or():
            join = torch.minimum if isinstance(mask, And) else torch.maximum
            return reduce(join, (_coverage(m, rows, keys, query_offset) for m in mask.masks))
        case Everything():
            return _filled(Coverage.ALL, rows)
        case Window():
            (row_low, row_high), (key_low, key_high) = rows.bounds(), keys.bounds()
            least = row_low + query_offset - key_high  # how far the last key lies behind the first row
            most = row_high + query_offset - key_low
            left, right = (
                float("inf") if reach is None else reach * mask.dilation for reach in (mask.left, mask.right)
            )
            full = (most <= left) & (least >= -right) & (mask.dilation == 1)
            return _grade((least <= left) & (most >= -right), full)
        case Padding():
            low, high = keys.extremes(keys.read(mask.keep))
            return _grade(high, low)
        case Global():
            row_low, row_high = rows.extremes(token_table(mask, rows.positions() + query_offset))
            key_low, key_high = keys.extremes(token_table(mask, keys.positions()))
            return _grade(row_high | key_high, row_low | key_low)
        case Documents():
            row_low, row_high = rows.extremes(rows.read(mask.ids, query_offset))
            key_low, key_high = keys.extremes(keys.read(mask.ids))
            meet = (row_low <= key_high) & (key_low <= row_high)
            return _grade(meet, meet & (row_low == row_high) & (key_low == key_high))
        case Dense():
            low = high = _look_up_dense(_look_up_dense(mask.allowed, 2, rows), 3, keys)
            for dim in (2, 3):
                low, high = _extremes(low, dim, rows.tile_len)[0], _extremes(high, dim, rows.tile_len)[1]
            one = torch.zeros_like(rows.tiles[:1, :1])  # a dimension of 1 broadcasts
            row_tiles, key_tiles = (side.tiles if low.shape[dim] > 1 else one for dim, side in ((2, rows), (3, keys)))
            return _grade(high[:, :, row_tiles, key_tiles], low[:, :, row_tiles, key_tiles])
        case Taken():
            rows, keys = rows.taken(mask.rows), keys.taken(mask.keys)
            levels = _coverage(mask.mask, rows, keys, query_offset)
            for side in (rows, keys):
                nothing = side.is_nothing()
                if nothing is not None:
                    low, high = side.extremes(~nothing)
                    levels = torch.minimum(levels, _grade(high, low))
            return levels
        case _:
            return _filled(Coverage.SOME, rows)


def _filled(level: Coverage, rows: _Side) -> Tensor:
    return torch.full((1, 1, 1, 1), int(level), dtype=torch.int8, device=rows.tiles.device)


def _grade(any_allowed: Tensor, all_allowed: Tensor) -> Tensor:
    return any_allowed.to(torch.int8) + all_allowed.to(torch.int8)


def _runs(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """``first, first + 1, ..., stop - 1`` in each row, filled up with -1."""
    numbers = first[:, None] + np.arange((stop - first).max())
    return np.where(numbers < stop[:, None], numbers, -1)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[b, index[b]]`` for ``[batch or 1, n]`` each."""
    batch_size = max(table.shape[0], index.shape[0])
    return table.expand(batch_size, -1).gather(1, index.expand(batch_size, -1))


def _look_up_dense(allowed: Tensor, dim: int, side: _Side) -> Tensor:
    """A dense mask's rows or keys in the order of ``side``; a dimension of 1 is left to broadcast."""
    if allowed.shape[dim] == 1 or (not isinstance(side.places, Tensor) and side.places == (0, 1)):
        return allowed
    index = side.positions()
    shape = [index.shape[0], 1, 1, 1]
    shape[dim] = side.length
    return torch.take_along_dim(allowed, index.view(shape), dim)


def _extremes(table: Tensor, dim: int, tile_len: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over each tile along ``dim``; a dimension of size 1 broadcasts and stays 1."""
    length = table.shape[dim]
    if length == 1:
        return table, table
    # A repeated last entry fills up the last tile: it changes neither minimum nor maximum.
    index = torch.arange(-(-length // tile_len) * tile_len, device=table.device).clamp(max=length - 1)
    tiles = table.index_select(dim, index).unflatten(dim, (-1, tile_len))
    return tiles.amin(dim + 1), tiles.amax(dim + 1)
