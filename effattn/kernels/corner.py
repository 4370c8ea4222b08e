"""A band as libraries are told it: measured from the bottom right corner of the keys that any row sees at all."""

from __future__ import annotations

from dataclasses import dataclass

from ..masks import Coverage, Everything, Mask, band_of

__all__ = ["CornerBand", "corner_band"]


@dataclass(frozen=True)
class CornerBand:
    """Of the keys ``keys[0]`` to ``keys[1] - 1``, the last query stands at the last one, sees itself, ``left`` before
    it and ``right`` after it; the queries before it stand and see accordingly. None means unbounded.
    """

    keys: tuple[int, int]
    left: int | None
    right: int | None


def corner_band(mask: Mask, query_len: int, key_len: int, query_offset: int) -> CornerBand | None:
    """``mask`` as such a band, or None where it is none, or where some row sees nothing."""
    band, rest = band_of(mask)
    if not isinstance(rest, Everything):
        return None
    rows = (0, query_len)
    low, high = band.key_range(rows, key_len, query_offset)
    seen = high - low
    if seen and band.coverage(rows, (low, high), query_offset) is Coverage.ALL:
        return CornerBand((low, high), None, None)
    ahead = query_offset - low - (seen - query_len)  # how far the queries stand off that corner
    left = None if band.left is None else band.left - ahead
    right = None if band.right is None else band.right + ahead
    every_row_sees = seen > 0 and (left is None or left >= 0) and (right is None or right >= max(0, query_len - seen))
    return CornerBand((low, high), left, right) if every_row_sees else None
