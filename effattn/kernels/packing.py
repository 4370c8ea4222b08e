"""Padding and packed documents as libraries are told them: blocks of rows and keys, end to end for the whole batch.

A ``Block`` is what one document, or one padded sequence, is: some rows of one batch row and the keys that all of them
see. With a band, the rows before, beside and behind the keys of their block are blocks of their own, since libraries
measure a band from a block's corner; blocks whose bands are said alike make one ``Pack``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..masks import Documents, Everything, Mask, Padding, Window, band_of, conjuncts

__all__ = ["Block", "Pack", "blocks_of", "pack_rows", "packs_of", "tables_of", "unpack_lse", "unpack_rows"]


@dataclass(frozen=True)
class Block:
    """Some rows of one batch row, and the keys that all of them see (within the band)."""

    batch: int
    rows: slice
    keys: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def is_one_piece(self) -> bool:
        """Whether no key is missing between the first and the last."""
        return len(self.keys) == self.keys[-1] - self.keys[0] + 1


@dataclass(frozen=True)
class Pack:
    """Blocks end to end, and the band within each: its last row stands at its last key, sees itself, ``left`` before it
    and ``right`` after it, and the rows before it accordingly. None is unbounded. Every row sees some key.
    """

    rows: Tensor  # bool [batch, query_len]
    keys: Tensor  # bool [batch, key_len]
    row_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    left: int | None
    right: int | None


def blocks_of(
    masks: Sequence[Mask], batch_size: int, query_len: int, key_len: int, query_offset: int
) -> list[Block] | None:
    """The blocks that padding and documents make, in order, or None where a document is not in one piece.

    Blocks without rows or keys are left out. The masks' tensors are read on the host.
    """
    keep = np.ones((batch_size, key_len), dtype=bool)
    edges = np.zeros((batch_size, key_len), dtype=bool)
    has_documents = any(isinstance(mask, Documents) for mask in masks)
    for mask in masks:
        table = mask.tensors[0].expand(batch_size, -1).cpu().numpy()
        if isinstance(mask, Padding):
            keep &= table
        else:
            edges[:, 1:] |= table[:, 1:] != table[:, :-1]
            if any(len(np.unique(row)) != 1 + (row[1:] != row[:-1]).sum() for row in table):
                return None
    blocks = []
    for batch in range(batch_size):
        for start, stop in pairwise([0, *np.flatnonzero(edges[batch]).tolist(), key_len]):
            keys = start + np.flatnonzero(keep[batch, start:stop])
            rows = slice(0, query_len)
            if has_documents:
                rows = slice(max(start - query_offset, 0), min(stop - query_offset, query_len))
            if len(keys) and rows.start < rows.stop:
                blocks.append(Block(batch, rows, keys))
    return blocks


def packs_of(
    mask: Mask,
    batch_size: int,
    query_len: int,
    key_len: int,
    query_offset: int,
    device: torch.device | str = "cpu",
) -> list[Pack] | None:
    """``mask`` as packs that each row is in once or, where it sees nothing, not at all; None: it cannot be said so.

    What can are a band, padding and documents, joined by ``&``; each document in one piece, and beside a band the keys
    of each block too.
    """
    band, rest = band_of(mask)
    masks = [part for part in conjuncts(rest) if not isinstance(part, Everything)]
    if not all(isinstance(part, Padding | Documents) for part in masks):
        return None
    blocks = blocks_of(masks, batch_size, query_len, key_len, query_offset)
    is_plain = band == Window(None, None)
    if blocks is None or not (is_plain or all(block.is_one_piece for block in blocks)):
        return None
    groups: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        if is_plain:
            groups.setdefault((None, None), []).append(block)
            continue
        for side in (-1, 0, 1):
            part = _beside(block, side, band, query_offset)
            if part is not None:
                groups.setdefault((*_corner(part, side, band, query_offset), side), []).append(part)
    return [
        Pack(
            *tables_of(group, batch_size, query_len, key_len, device),
            tuple(block.num_rows for block in group),
            tuple(len(block.keys) for block in group),
            *said[:2],  # type: ignore[arg-type]
        )
        for said, group in groups.items()
    ]


def tables_of(
    blocks: Sequence[Block], batch_size: int, query_len: int, key_len: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """The rows ``[batch, query_len]`` and the keys ``[batch, key_len]`` of the blocks, as bool."""
    rows, keys = np.zeros((batch_size, query_len), bool), np.zeros((batch_size, key_len), bool)
    for block in blocks:
        rows[block.batch, block.rows] = True
        keys[block.batch, block.keys] = True
    return torch.from_numpy(rows).to(device), torch.from_numpy(keys).to(device)


def pack_rows(tensor: Tensor, chosen: Tensor | None) -> Tensor:
    """The chosen rows (or keys) of ``[batch, seq, ...]``, or all of them, end to end: ``[total, ...]``."""
    return tensor.flatten(0, 1) if chosen is None else tensor[chosen]


def unpack_rows(rows: Tensor, chosen: Tensor | None, batch_size: int, seq_len: int, fill: float) -> Tensor:
    """Packed rows ``[total, ...]`` back as ``[batch, seq, ...]``, with ``fill`` for those that were not chosen."""
    if chosen is None:
        return rows.unflatten(0, (batch_size, seq_len))
    whole = rows.new_full((batch_size, seq_len, *rows.shape[1:]), fill)
    whole[chosen] = rows
    return whole


def unpack_lse(lse: Tensor, lengths: tuple[int, ...], is_packed: bool) -> Tensor:
    """The log-sum-exp of packed rows as ``[total, heads]``.

    Libraries give it packed too, ``[heads, total]``, or as ``[blocks, heads, most rows]``.
    """
    if is_packed:
        return lse.T
    index = torch.arange(lse.shape[2], device=lse.device)
    return lse.transpose(1, 2)[index < torch.tensor(lengths, device=lse.device)[:, None]]


def _beside(block: Block, side: int, band: Window, query_offset: int) -> Block | None:
    """The rows of a block before (-1), beside (0) or behind (1) its keys, and the keys that they see; None: nothing."""
    first, last = int(block.keys[0]), int(block.keys[-1])
    low, high = block.rows.start + query_offset, block.rows.stop - 1 + query_offset  # positions
    if side < 0:
        high = min(high, first - 1)
    elif side > 0:
        low = max(low, last + 1)
    else:
        low, high = max(low, first), min(high, last)
    # The rows that see a key, and the keys that such a row sees.
    low = low if band.right is None else max(low, first - band.right)
    high = high if band.left is None else min(high, last + band.left)
    if low > high:
        return None
    least = first if band.left is None else max(first, low - band.left)
    most = last if band.right is None else min(last, high + band.right)
    return replace(block, rows=slice(low - query_offset, high + 1 - query_offset), keys=np.arange(least, most + 1))


def _corner(block: Block, side: int, band: Window, query_offset: int) -> tuple[int | None, int | None]:
    """Left and right from the block's corner. Beside the keys, a reach that bounds nothing there is said to be none."""
    low, high = block.rows.start + query_offset, block.rows.stop - 1 + query_offset
    first, last = int(block.keys[0]), int(block.keys[-1])
    left = None if band.left is None or (side and high - first <= band.left) else band.left - (high - last)
    right = None if band.right is None or (side and last - low <= band.right) else band.right + (high - last)
    return left, right
