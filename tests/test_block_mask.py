"""Tiles of a mask against the dense oracle, for every mask and odd lengths; and what making them costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Sizes, examples, masks, problems, sizes
from torch import Tensor

from effattn.kernels.block_mask import candidate_tiles, order_tiles, tile_coverage, token_table
from effattn.masks import Causal, Coverage, Dense, Documents, Everything, Global, Mask, Padding, Taken, Window


def true_coverage(mask: Mask, of: Sizes, tile_len: int) -> Tensor:
    """The oracle: every tile of the dense mask looked at."""
    allowed = mask.dense(of.batch_size, of.num_heads, of.query_len, of.key_len, of.query_offset)
    tiles = [rows.split(tile_len, dim=3) for rows in allowed.split(tile_len, dim=2)]
    levels = [[t.flatten(2).any(-1).int() + t.flatten(2).all(-1).int() for t in row] for row in tiles]
    return torch.stack([torch.stack(row, -1) for row in levels], -2)


def check(mask: Mask, of: Sizes, tile_len: int) -> None:
    true = true_coverage(mask, of, tile_len)
    said = tile_coverage(mask, of.query_len, of.key_len, of.query_offset, tile_len).expand(true.shape)
    assert ((said == true) | (said == Coverage.SOME)).all()

    of_rows, of_keys = candidate_tiles(mask, of.query_len, of.key_len, of.query_offset, tile_len)
    num_rows, num_keys = true.shape[2:]
    inside = torch.zeros(2, num_rows, num_keys, dtype=torch.bool)
    for row, keys in enumerate(of_rows):
        inside[0, row, keys[keys >= 0]] = True
    for key, rows in enumerate(of_keys):
        inside[1, rows[rows >= 0], key] = True
    assert not true[:, :, ~inside[0]].any()
    assert (inside[1] >= inside[0]).all(), "the tiles by key must hold all of those by row"

    # The same levels where only some tiles are asked about.
    asked = of_rows.clamp(min=0)
    some = tile_coverage(
        mask, of.query_len, of.key_len, of.query_offset, tile_len, tiles=(torch.arange(num_rows)[:, None], asked)
    )
    assert torch.equal(
        some.expand(*true.shape[:2], *asked.shape), said.gather(3, asked.expand(*true.shape[:2], -1, -1))
    )


@given(problem=problems(longest=50), tile_len=st.sampled_from([1, 4, 16, 64]))
@examples(150)
def test_tiles_are_never_wrong(problem: tuple[Sizes, Mask], tile_len: int) -> None:
    of, mask = problem
    check(mask, of, tile_len)


@st.composite
def taken_problems(draw: st.DrawFn) -> tuple[Sizes, Mask]:
    """A part of a problem: every n-th row or key, or some by index, with -1 among them; also a part of a part."""
    of = draw(sizes(longest=40))
    mask = draw(masks(of))
    lengths = {"query_len": of.query_len, "key_len": of.key_len}

    def selection(name: str) -> slice | Tensor | None:
        length = lengths[name]
        kind = draw(st.sampled_from(["all", "slice", "index"]))
        if kind == "all":
            return None
        if kind == "slice":
            start, step = draw(st.integers(0, length - 1)), draw(st.integers(1, 4))
            lengths[name] = len(range(start, length, step))
            return slice(start, None, step)
        lengths[name] = draw(st.integers(1, 30))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        shape = (draw(st.sampled_from([1, of.batch_size])), lengths[name])
        return torch.randint(-1, length, shape, generator=generator).sort(1).values

    for _ in range(draw(st.integers(1, 2))):
        mask = Taken(mask, selection("query_len"), selection("key_len"))
    part = Sizes(of.batch_size, of.num_heads, lengths["query_len"], lengths["key_len"], of.query_offset)
    return part, mask


@given(problem=taken_problems(), tile_len=st.sampled_from([1, 4, 16]))
@examples(150)
def test_tiles_of_a_part_are_never_wrong(problem: tuple[Sizes, Mask], tile_len: int) -> None:
    of, mask = problem
    object.__setattr__(mask, "validate", lambda *sizes: None)  # lengths are those of the part, not of the mask
    check(mask, of, tile_len)


@pytest.mark.parametrize(
    "mask",
    [
        Everything(),
        Causal(),
        Window(14, 30),  # reaches that end one key inside a tile of 4 and of 16
        Padding.from_lengths(torch.tensor([49, 16]), 50),
        Global((0, 33)),
        Global(torch.arange(50)[None] >= 20),
        Documents((torch.arange(50) // 17)[None]),
        Dense(torch.arange(50) >= torch.arange(50)[:, None] - 3),
        Dense(torch.arange(50) < 20),
        Taken(Window(14, 30), None, None),
        Taken(Causal(), torch.arange(50)[None], None),
        Taken(Dense(torch.arange(50) >= torch.arange(50)[:, None] - 3), torch.arange(50)[None], None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tile_len", [4, 16])
def test_tiles_of_one_mask_are_exact(mask: Mask, tile_len: int) -> None:
    of = Sizes(batch_size=2, num_heads=2, query_len=50, key_len=50, query_offset=0)
    true = true_coverage(mask, of, tile_len)
    said = tile_coverage(mask, 50, 50, 0, tile_len).expand(true.shape)
    assert torch.equal(said.int(), true)


class _Unknown(Mask):
    """A mask of somebody else's: nothing is known of it but its predicate."""


def test_of_an_unknown_mask_every_tile_is_mixed() -> None:
    assert (tile_coverage(_Unknown(), 50, 70, 0, 16) == Coverage.SOME).all()


def test_candidates_of_a_band_lie_along_the_band() -> None:
    of_rows, of_keys = candidate_tiles(Window(20, 5), 100, 100, 0, 10)
    assert of_rows[5].tolist() == [3, 4, 5, 6]
    assert of_keys[5].tolist() == [4, 5, 6, 7]
    assert of_rows[0].tolist() == [0, 1, -1, -1]
    assert of_keys[9].tolist() == [8, 9, -1, -1]


def test_no_candidates_where_nothing_is_seen() -> None:
    of_rows, of_keys = candidate_tiles(Window(3, 3), 20, 30, 100, 10)
    assert (of_rows.shape, of_keys.shape) == ((2, 0), (3, 0))


def test_chosen_tiles_come_first_and_in_order() -> None:
    chosen = torch.tensor([[False, True, False, True], [True, False, False, False]])[None, None]
    tiles = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 9]])
    counts, numbers = order_tiles(chosen, tiles)
    assert counts.tolist() == [[[2, 1]]]
    assert numbers.tolist() == [[[[4, 6, 3, 5], [7, 8, 9, 9]]]]
    assert counts.dtype == numbers.dtype == torch.int32


def test_positions_off_the_table_are_not_global() -> None:
    positions = torch.tensor([[-3, 0, 1, 4, 9]])
    ragged = torch.tensor([[True, False, False, False, True], [False, True, False, False, False]])
    assert token_table(Global((0, 4)), positions).tolist() == [[False, True, False, True, False]]
    assert token_table(Global(ragged), positions).tolist() == [
        [False, True, False, True, False],
        [False, False, True, False, False],
    ]
