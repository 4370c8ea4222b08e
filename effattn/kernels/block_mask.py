"""Which tiles of a mask are empty, mixed or full: the block mask that sparse kernels run over.

A leaf of the mask is answered for all tiles at once, from tile corners or from one pass over the tensor that it
holds; ``&`` is the minimum and ``|`` the maximum of what the parts say, as for ``Mask.coverage``. No n x n grid
of single pairs is ever evaluated: 131072 tokens are 1024 x 1024 tiles.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from ..masks import And, Coverage, Dense, Documents, Everything, Global, Mask, Or, Padding, Window

__all__ = ["order_tiles", "tile_coverage", "token_table"]


def tile_coverage(
    mask: Mask,
    query_len: int,
    key_len: int,
    query_offset: int,
    tile_len: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """``Coverage`` of every tile of ``tile_len`` rows and keys, as int8 ``[batch or 1, heads or 1, rows, keys]``.

    May be cautious (``SOME`` where the tile is in truth empty or full), never wrong. Costs O(tiles) time and
    memory, and one pass over the mask's tensors; nothing is copied to the host.
    """
    match mask:
        case And() | Or():
            join = torch.minimum if isinstance(mask, And) else torch.maximum
            return reduce(
                join,
                (tile_coverage(m, query_len, key_len, query_offset, tile_len, device) for m in mask.masks),
            )
        case Everything():
            return _filled(Coverage.ALL, query_len, key_len, tile_len, device)
        case Window():
            rows, keys = (_corners(n, tile_len, device) for n in (query_len, key_len))
            least = (rows[0] + query_offset)[:, None] - keys[1]  # how far the last key lies behind the first row
            most = (rows[1] + query_offset)[:, None] - keys[0]
            left, right = (
                float("inf") if reach is None else reach * mask.dilation for reach in (mask.left, mask.right)
            )
            full = (most <= left) & (least >= -right) & (mask.dilation == 1)
            return _grade((least <= left) & (most >= -right), full)
        case Padding():
            low, high = _extremes(mask.keep[:, None, None], 3, tile_len)
            return _grade(high, low).expand(-1, -1, -(-query_len // tile_len), -1)
        case Global():
            positions = torch.arange(query_len, device=device) + query_offset
            row_low, row_high = _extremes(token_table(mask, positions)[:, None, :, None], 2, tile_len)
            keys_table = token_table(mask, torch.arange(key_len, device=device))
            key_low, key_high = _extremes(keys_table[:, None, None], 3, tile_len)
            return _grade(row_high | key_high, row_low | key_low)
        case Documents():
            row_ids = mask.ids[:, query_offset : query_offset + query_len]
            row_low, row_high = _extremes(row_ids[:, None, :, None], 2, tile_len)
            key_low, key_high = _extremes(mask.ids[:, None, None], 3, tile_len)
            meet = (row_low <= key_high) & (key_low <= row_high)
            return _grade(meet, meet & (row_low == row_high) & (key_low == key_high))
        case Dense():
            low = high = mask.allowed
            for dim in (2, 3):
                low, high = _extremes(low, dim, tile_len)[0], _extremes(high, dim, tile_len)[1]
            sizes = (-(-query_len // tile_len), -(-key_len // tile_len))
            return _grade(high, low).expand(*high.shape[:2], *sizes)
        case _:
            return _filled(Coverage.SOME, query_len, key_len, tile_len, device)


def order_tiles(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles chose, and their indices in ascending order before those of the others.

    ``chosen`` is bool ``[..., rows, keys]``; the results are int32 ``[..., rows]`` and ``[..., rows, keys]``.
    """
    indices = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def token_table(mask: Global, positions: Tensor) -> Tensor:
    """Whether each of ``positions`` is global: bool ``[batch or 1, n]``. Positions off the table are not."""
    if not isinstance(mask.tokens, Tensor):
        return torch.isin(positions, torch.tensor(mask.tokens, device=positions.device, dtype=torch.int64))[None]
    size = mask.tokens.shape[1]
    return mask.tokens[:, positions.clamp(0, size - 1)] & (positions >= 0) & (positions < size)


def _filled(level: Coverage, query_len: int, key_len: int, tile_len: int, device: torch.device | str) -> Tensor:
    sizes = (1, 1, -(-query_len // tile_len), -(-key_len // tile_len))
    return torch.full(sizes, int(level), dtype=torch.int8, device=device)


def _grade(any_allowed: Tensor, all_allowed: Tensor) -> Tensor:
    """NONE, SOME or ALL as int8, in four dimensions."""
    levels = any_allowed.to(torch.int8) + all_allowed.to(torch.int8)
    return levels if levels.dim() == 4 else levels[None, None]


def _corners(length: int, tile_len: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, length, tile_len, device=device)
    return first, (first + tile_len - 1).clamp(max=length - 1)


def _extremes(table: Tensor, dim: int, tile_len: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over each tile along ``dim``; a dimension of size 1 broadcasts and stays 1."""
    length = table.shape[dim]
    if length == 1:
        return table, table
    # A repeated last entry fills up the last tile: it changes neither minimum nor maximum.
    index = torch.arange(-(-length // tile_len) * tile_len, device=table.device).clamp(max=length - 1)
    tiles = table.index_select(dim, index).unflatten(dim, (-1, tile_len))
    return tiles.amin(dim + 1), tiles.amax(dim + 1)
