"""Masks as packs of blocks: written out again, they are the mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Sizes, examples
from torch import Tensor

from effattn.kernels.packing import Pack, blocks_of, pack_rows, packs_of, unpack_lse, unpack_rows
from effattn.masks import Causal, Dense, Documents, Everything, Global, Mask, Padding, Window


def said(pack: Pack, of: Sizes) -> Tensor:
    """What a pack allows, bool ``[batch, query_len, key_len]``: by the definition that libraries give of it."""
    allowed = torch.zeros(of.batch_size * of.query_len, of.batch_size * of.key_len, dtype=torch.bool)
    rows, keys = (chosen.flatten().nonzero()[:, 0] for chosen in (pack.rows, pack.keys))
    assert (len(rows), len(keys)) == (sum(pack.row_lengths), sum(pack.key_lengths))
    for own_rows, own_keys in zip(rows.split(pack.row_lengths), keys.split(pack.key_lengths), strict=True):
        row = torch.arange(len(own_rows))[:, None] + len(own_keys) - len(own_rows)
        key = torch.arange(len(own_keys))
        visible = torch.ones(len(own_rows), len(own_keys), dtype=torch.bool)
        if pack.left is not None:
            assert pack.left >= 0
            visible &= key >= row - pack.left
        if pack.right is not None:
            assert pack.right >= 0
            visible &= key <= row + pack.right
        assert visible.any(-1).all(), "a row that sees nothing must be left out"
        allowed[own_rows[:, None], own_keys] = visible
    whole = allowed.view(of.batch_size, of.query_len, of.batch_size, of.key_len)
    own = torch.eye(of.batch_size, dtype=torch.bool)[:, None, :, None]
    assert not (whole & ~own).any(), "a row sees another batch row"
    return whole[torch.arange(of.batch_size), :, torch.arange(of.batch_size)]


def check(mask: Mask, of: Sizes) -> list[Pack]:
    packs = packs_of(mask, of.batch_size, of.query_len, of.key_len, of.query_offset)
    assert packs is not None
    wanted = mask.dense(of.batch_size, 1, of.query_len, of.key_len, of.query_offset)[:, 0]
    found = [said(pack, of) for pack in packs]
    assert torch.equal(torch.stack(found).any(0) if found else torch.zeros_like(wanted), wanted)
    times = sum(pack.rows.int() for pack in packs)
    assert not packs or torch.equal(times, wanted.any(-1).int()), "a row must be in one pack"
    return packs


REACH = st.one_of(st.none(), st.integers(0, 9))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mask, Sizes]:
    """A band, padding in one piece and documents, at any offset that documents allow."""
    batch_size, query_len, key_len = (draw(st.integers(1, n)) for n in (3, 14, 14))
    mask: Mask = Everything()
    if draw(st.booleans()):
        mask = Window(draw(REACH), draw(REACH))
    if draw(st.booleans()):
        places = torch.arange(key_len)
        bounds = [(draw(st.integers(0, key_len)), draw(st.integers(0, key_len))) for _ in range(batch_size)]
        mask = mask & Padding(torch.stack([(places >= low) & (places < high) for low, high in bounds]))
    offset = draw(st.integers(-6, 16))
    if query_len <= key_len and draw(st.booleans()):
        offset = draw(st.integers(0, key_len - query_len))
        edges = draw(st.lists(st.booleans(), min_size=key_len, max_size=key_len))
        mask = mask & Documents(torch.tensor(edges).cumsum(0)[None])
    return mask, Sizes(batch_size, 1, query_len, key_len, offset)


@given(problem=problems())
@examples(400)
def test_packs_are_the_mask(problem: tuple[Mask, Sizes]) -> None:
    check(*problem)


def test_padding_may_have_holes_where_no_band_is() -> None:
    keep = torch.rand(2, 40) < 0.5
    ids = (torch.arange(40) // 9)[None]
    of = Sizes(2, 1, 40, 40, 0)
    assert len(check(Padding(keep), of)) == 1
    assert len(check(Padding(keep) & Documents(ids), of)) == 1
    assert packs_of(Padding(keep) & Causal(), 2, 40, 40, 0) is None


def test_what_is_no_pack() -> None:
    scattered = Documents(torch.tensor([[3, 3, 1, 1, 3]]))
    assert blocks_of([scattered], 1, 5, 5, 0) is None
    globals_, dense = Global((0,)), Dense(torch.ones(5, 5, dtype=torch.bool))
    for mask in (scattered, globals_, Window(3, 3, dilation=2), dense, Causal() | Window(0, 2)):
        assert packs_of(mask, 1, 5, 5, 0) is None


@pytest.mark.parametrize("num_rows", [1, 7, 500])
def test_few_packs_whatever_the_batch(num_rows: int) -> None:
    """Ragged padding beside a causal mask: rows beside their keys, and the padded rows behind them."""
    lengths = torch.arange(2, 66)
    mask = Causal() & Padding.from_lengths(lengths, 66)
    assert len(check(mask, Sizes(64, 1, num_rows, 66, 66 - num_rows))) <= 2


def test_rows_go_back_where_they_came_from() -> None:
    tensor = torch.randn(3, 5, 2)
    chosen = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()
    packed = pack_rows(tensor, chosen)
    assert packed.shape == (5, 2)
    back = unpack_rows(packed, chosen, 3, 5, -7.0)
    assert torch.equal(back[chosen], tensor[chosen])
    assert (back[~chosen] == -7).all()
    assert torch.equal(unpack_rows(pack_rows(tensor, None), None, 3, 5, 0.0), tensor)


def test_both_layouts_of_a_log_sum_exp() -> None:
    apart = torch.arange(12.0).view(2, 2, 3)  # two blocks, of 3 rows and of 1
    packed = torch.cat([apart[0], apart[1, :, :1]], dim=1)
    assert torch.equal(unpack_lse(packed, (3, 1), True), unpack_lse(apart, (3, 1), False))
    assert unpack_lse(packed, (3, 1), True).shape == (4, 2)
