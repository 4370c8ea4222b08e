"""Which tiles of scores the band engine makes: rows in runs of tiles, and the spans of keys that they look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..masks import Mask, Range

__all__ = ["Run", "Span", "fits_one_span", "plan_runs"]


@dataclass(frozen=True)
class Span:
    """``width`` keys from ``first`` on for a run's first tile of rows; for each next, a tile's height further."""

    first: int
    width: int


@dataclass(frozen=True)
class Run:
    """``count`` tiles of ``height`` rows, one after the other. Only a single tile may look at several spans."""

    first: int
    height: int
    count: int
    spans: tuple[Span, ...]

    @property
    def rows(self) -> Range:
        return self.first, self.first + self.count * self.height

    def keys(self, span: Span) -> Range:
        """All keys that some tile of the run sees in this span."""
        return span.first, span.first + span.width + (self.count - 1) * self.height


def fits_one_span(mask: Mask, query_len: int, key_len: int, query_offset: int, query_tile: int, widest: int) -> bool:
    """Whether no tile of rows needs more than ``widest`` keys at once."""
    ranges = (mask.key_range(rows, key_len, query_offset) for rows in _tiles(query_len, query_tile))
    return all(high - low <= widest for low, high in ranges)


def plan_runs(
    mask: Mask,
    query_len: int,
    key_len: int,
    query_offset: int,
    *,
    query_tile: int,
    key_tile: int,
    least_count: int,
    most_scores: int,
) -> list[Run]:
    """Cut the rows into tiles of ``query_tile``, their keys into spans of ``key_tile``, and leave out empty ones.

    Tiles whose single spans move along with them become runs, where at least ``least_count`` of them fit
    ``most_scores``.
    """
    tiles = list(_tiles(query_len, query_tile))
    ranges = [mask.key_range(rows, key_len, query_offset) for rows in tiles]
    runs: list[Run] = []
    for start, stop in _moving(tiles, ranges, query_tile):
        low, high = ranges[start]
        width = high - low
        most = most_scores // max(query_tile * width, 1)
        if 0 < width <= key_tile and min(stop - start, most) >= max(least_count, 2):
            for first in range(start, stop, most):
                count = min(most, stop - first)
                runs.append(Run(tiles[first][0], query_tile, count, (Span(ranges[first][0], width),)))
        else:
            for rows, keys in zip(tiles[start:stop], ranges[start:stop], strict=True):
                spans = (Span(k, min(key_tile, keys[1] - k)) for k in range(*keys, key_tile))
                seen = (s for s in spans if mask.coverage(rows, (s.first, s.first + s.width), query_offset))
                runs.append(Run(rows[0], rows[1] - rows[0], 1, tuple(seen)))
    return runs


def _tiles(query_len: int, query_tile: int) -> Iterator[Range]:
    for start in range(0, query_len, query_tile):
        yield start, min(start + query_tile, query_len)


def _moving(tiles: list[Range], ranges: list[Range], step: int) -> Iterator[Range]:
    """Stretches of whole tiles whose ranges of keys have one width and move by ``step``."""
    breaks = [
        index
        for index, (before, after) in enumerate(pairwise(ranges), 1)
        if (after[0] - before[0], after[1] - before[1]) != (step, step) or tiles[index][1] - tiles[index][0] != step
    ]
    yield from pairwise([0, *breaks, len(tiles)])
