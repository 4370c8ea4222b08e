"""The mask algebra: its oracle against the plain definition, and what is known of a mask without evaluating it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Sizes, examples, problems
from torch import Tensor

from effattn.masks import (
    And,
    Causal,
    Coverage,
    Dense,
    Documents,
    Everything,
    Global,
    Mask,
    Or,
    Padding,
    Taken,
    Window,
    band_of,
    evaluate,
    hide_padding,
    pack,
    padding_of,
    unpack,
)


def may_attend(mask: Mask, batch: int, head: int, row: int, key: int, query_offset: int) -> bool:
    """The definition of every mask on one pair, in plain Python."""
    position = row + query_offset

    def at(tensor: Tensor, *index: int) -> int:
        return tensor[tuple(i if n > 1 else 0 for i, n in zip(index, tensor.shape, strict=True))].item()

    match mask:
        case And():
            return all(may_attend(part, batch, head, row, key, query_offset) for part in mask.masks)
        case Or():
            return any(may_attend(part, batch, head, row, key, query_offset) for part in mask.masks)
        case Everything():
            return True
        case Window():
            steps, off_grid = divmod(position - key, mask.dilation)
            near = (mask.left is None or steps <= mask.left) and (mask.right is None or -steps <= mask.right)
            return near and not off_grid
        case Padding():
            return at(mask.keep, batch, key)
        case Documents():
            return at(mask.ids, batch, position) == at(mask.ids, batch, key)
        case Global(tokens=Tensor()):
            inside = 0 <= position < mask.tokens.shape[1]
            return at(mask.tokens, batch, key) or (inside and at(mask.tokens, batch, position))
        case Global():
            return key in mask.tokens or position in mask.tokens
        case Dense():
            return at(mask.allowed, batch, head, row, key)
    raise AssertionError(mask)


def table(mask: Mask, query_len: int, key_len: int, query_offset: int | None = None) -> list[str]:
    """The mask of one head as rows of '1' and '.'."""
    dense = mask.dense(1, 1, query_len, key_len, query_offset)[0, 0]
    return ["".join("1" if allowed else "." for allowed in row) for row in dense]


# The oracle


@given(problems(longest=8))
@examples(150)
def test_dense_is_the_definition(problem):
    of, mask = problem
    dense = mask.dense(*of.shape, of.query_offset)
    assert dense.dtype == torch.bool
    expected = [may_attend(mask, *index, of.query_offset) for index in itertools.product(*map(range, of.shape))]
    assert torch.equal(dense, torch.tensor(expected, dtype=torch.bool).view(of.shape))


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Everything(), ["1111", "1111", "1111", "1111"]),
        (Causal(), ["1...", "11..", "111.", "1111"]),
        (Window(1, 0), ["1...", "11..", ".11.", "..11"]),
        (Window(0, 2), ["111.", ".111", "..11", "...1"]),
        (Window(0, 0), ["1...", ".1..", "..1.", "...1"]),
        (Window(None, 1), ["11..", "111.", "1111", "1111"]),
        (Window(1, 1, dilation=2), ["1.1.", ".1.1", "1.1.", ".1.1"]),
        (Window(9, 9, dilation=3), ["1..1", ".1..", "..1.", "1..1"]),
        (Global((1,)), [".1..", "1111", ".1..", ".1.."]),
        (Global(()), ["....", "....", "....", "...."]),
        (Padding(torch.tensor([[0, 1, 1, 0]])), [".11.", ".11.", ".11.", ".11."]),
        (Documents(torch.tensor([[5, 5, 2, 5]])), ["11.1", "11.1", "..1.", "11.1"]),
        (Dense(torch.tensor([True, False, False, True])), ["1..1", "1..1", "1..1", "1..1"]),
        (Causal() & Window(1, 1), ["1...", "11..", ".11.", "..11"]),
        (Window(0, 0) | Global((3,)), ["1..1", ".1.1", "..11", "1111"]),
    ],
    ids=repr,
)
def test_small_tables(mask, rows):
    assert table(mask, 4, 4) == rows


def test_positions_are_absolute():
    assert table(Causal(), 2, 4) == ["111.", "1111"]  # the last query sees the last key
    assert table(Causal(), 2, 4, query_offset=0) == ["1...", "11.."]  # torch's is_causal
    assert table(Causal(), 3, 2) == ["..", "1.", "11"]  # the first query stands before every key
    assert table(Window(1, 0), 1, 4) == ["..11"]
    assert table(Causal(), 2, 3, query_offset=100) == ["111", "111"]
    assert table(Causal(), 2, 3, query_offset=-100) == ["...", "..."]
    assert table(Global((3,)), 2, 2, query_offset=2) == ["..", "11"]  # a query may stand past the keys


@given(problems(), st.randoms(use_true_random=False))
@examples(100)
def test_any_part_of_the_grid_can_be_evaluated(problem, random):
    of, mask = problem
    parts = [torch.tensor(random.sample(range(n), random.randint(1, n))) for n in of.shape]
    dense = mask.dense(*of.shape, of.query_offset)
    part = evaluate(mask, *parts, of.query_offset).expand([len(p) for p in parts])
    assert torch.equal(part, dense[torch.meshgrid(*parts, indexing="ij")])


def test_a_mask_is_evaluated_no_larger_than_it_is():
    grid = [torch.arange(n) for n in (2, 3, 4, 5)]
    for shape in ((1, 1, 4, 5), (2, 1, 1, 5), (1, 3, 4, 1), (1, 1, 1, 1)):
        assert evaluate(Dense(torch.ones(shape, dtype=torch.bool)), *grid, 0).shape == shape
    assert evaluate(Padding(torch.ones(1, 5, dtype=torch.bool)), *grid, 0).shape == (1, 1, 1, 5)
    assert evaluate(Causal(), *grid, 0).shape == (1, 1, 4, 5)


@pytest.mark.parametrize(
    "mask", [Causal(), Global(()), Global(torch.zeros(2, 0).bool()), Padding(torch.ones(1, 0).bool())]
)
def test_no_keys(mask):
    assert mask.dense(2, 3, 4, 0).shape == (2, 3, 4, 0)
    assert mask.key_range((0, 4), 0, -4) == (0, 0)


# What is known without evaluating


def assert_bounds_hold(mask: Mask, dense: Tensor, query_offset: int) -> None:
    """``coverage`` and ``key_range`` of every rectangle, against the dense mask."""
    query_len, key_len = dense.shape[2:]
    for first, last in itertools.combinations(range(query_len + 1), 2):
        rows = dense[:, :, first:last]
        low, high = mask.key_range((first, last), key_len, query_offset)
        assert 0 <= low <= high <= key_len
        assert not rows[..., :low].any(), f"rows {first}..{last} see keys before {low}"
        assert not rows[..., high:].any(), f"rows {first}..{last} see keys from {high}"
        for start, stop in itertools.combinations(range(key_len + 1), 2):
            tile = rows[..., start:stop]
            match mask.coverage((first, last), (start, stop), query_offset):
                case Coverage.NONE:
                    assert not tile.any()
                case Coverage.ALL:
                    assert tile.all()


@given(problems(longest=7))
@examples(100)
def test_coverage_and_key_range_are_never_wrong(problem):
    of, mask = problem
    assert_bounds_hold(mask, mask.dense(*of.shape, of.query_offset), of.query_offset)


def test_coverage_and_key_range_are_sharp_for_bands():
    band = Window(2, 1)
    assert band.coverage((0, 2), (0, 2), 10) is Coverage.NONE
    assert band.coverage((4, 6), (4, 6), 0) is Coverage.ALL
    assert band.coverage((4, 6), (3, 6), 0) is Coverage.ALL
    assert band.coverage((4, 6), (2, 6), 0) is Coverage.SOME
    assert band.key_range((4, 6), 100, 0) == (2, 7)
    assert Causal().key_range((4, 6), 100, 0) == (0, 6)
    assert (Causal() & Window(2, 9)).key_range((4, 6), 100, 0) == (2, 6)
    assert (Window(1, 0) | Global((30,))).key_range((4, 6), 100, 0) == (3, 31)


def test_coverage_of_joins():
    inside, outside = ((4, 6), (4, 6), 0), ((0, 1), (9, 10), 0)
    unknown = Dense(torch.ones(10, 10, dtype=torch.bool))
    assert (Window(3, 3) & Causal()).coverage(*outside) is Coverage.NONE
    assert (Window(3, 3) & unknown).coverage(*inside) is Coverage.SOME
    assert (Window(3, 3) | unknown).coverage(*inside) is Coverage.ALL
    assert (Everything() | unknown).coverage(*outside) is Coverage.ALL


def selections(length: int, batch_size: int) -> st.SearchStrategy[slice | Tensor | None]:
    """Every way to take some of ``length`` places: all, every d-th, or any, with -1 for nothing."""
    slices = st.builds(slice, st.integers(0, length - 1), st.none(), st.integers(1, 5))
    indices = st.builds(
        lambda rows, n, seed: torch.randint(-1, length, (rows, n), generator=torch.Generator().manual_seed(seed)),
        st.sampled_from([1, batch_size]),
        st.integers(1, 6),
        st.integers(0, 2**16),
    )
    return st.none() | slices | indices


def places(selection: slice | Tensor | None, length: int, batch_size: int) -> list[list[int]]:
    """What a selection takes, for each batch row."""
    if isinstance(selection, Tensor):
        return selection.expand(batch_size, -1).tolist()
    return [list(range(length))[selection or slice(None)]] * batch_size


@given(st.data())
@examples(150)
def test_a_taken_mask_is_that_part_of_the_whole(data):
    of, mask = data.draw(problems(longest=9))
    rows = data.draw(selections(of.query_len, of.batch_size))
    keys = data.draw(selections(of.key_len, of.batch_size))
    taken = Taken(mask, rows, keys)
    whole = mask.dense(*of.shape, of.query_offset)
    taken_rows, taken_keys = (places(s, n, of.batch_size) for s, n in ((rows, of.query_len), (keys, of.key_len)))
    dense = taken.dense(of.batch_size, of.num_heads, len(taken_rows[0]), len(taken_keys[0]), of.query_offset)
    for batch in range(of.batch_size):
        for (i, row), (j, key) in itertools.product(enumerate(taken_rows[batch]), enumerate(taken_keys[batch])):
            expected = whole[batch, :, row, key] & (row >= 0 and key >= 0)
            assert torch.equal(dense[batch, :, i, j], expected)
    assert_bounds_hold(taken, dense, of.query_offset)
    assert taken.tensors[: len(mask.tensors)] == mask.tensors


@given(st.data())
@examples(100)
def test_packing_loses_nothing(data):
    """A custom operator takes text and tensors; so every mask must survive the way there and back."""
    of, mask = data.draw(problems(longest=9))
    parts = (data.draw(selections(n, of.batch_size)) for n in (of.query_len, of.key_len))
    taken = Taken(mask, *parts)
    rows, keys = (
        len(places(taken.rows, of.query_len, of.batch_size)[0]),
        len(places(taken.keys, of.key_len, of.batch_size)[0]),
    )
    for original, sizes in ((mask, of.shape), (taken, (of.batch_size, of.num_heads, rows, keys))):
        packed, tensors = pack(original)
        again = unpack(packed, tensors)
        assert torch.equal(again.dense(*sizes, of.query_offset), original.dense(*sizes, of.query_offset))
        assert again.kinds() == original.kinds()
        assert again.is_relative == original.is_relative


def test_a_taken_mask_knows_its_place_in_the_whole():
    batch, row, key = torch.tensor([[0]]), torch.arange(3)[:, None], torch.arange(2)
    taken = Taken(Causal(), slice(1, None, 4), torch.tensor([[7, -1]]))
    rows, keys = taken.place(batch, row, key)
    assert rows[:, 0].tolist() == [1, 5, 9]
    assert keys.flatten().tolist() == [7, -1]
    assert Causal().place(batch, row, key) == (row, key)


@given(problems())
@examples(150)
def test_a_relative_mask_is_constant_along_diagonals(problem):
    of, mask = problem
    dense = mask.dense(*of.shape, of.query_offset)
    if mask.is_relative:
        assert torch.equal(dense[:, :, 1:, 1:], dense[:, :, :-1, :-1])
        assert torch.equal(dense, dense[:1, :1].expand_as(dense))


def test_which_masks_are_relative():
    assert (Causal() & Window(3, 3)).is_relative
    assert (Causal() | Window(3, 3, dilation=2)).is_relative
    assert not (Causal() & Global((0,))).is_relative
    assert not (Causal() & Padding(torch.ones(1, 4, dtype=torch.bool))).is_relative
    assert Taken(Causal(), slice(1, None, 3), slice(0, None, 3)).is_relative
    assert not Taken(Causal(), slice(0, None, 2), slice(0, None, 3)).is_relative
    assert not Taken(Causal(), torch.tensor([[0]]), None).is_relative


# Joins


def test_joins_are_flat_and_hold_each_mask_once():
    padding = Padding(torch.ones(1, 4, dtype=torch.bool))
    joined = Causal() & (Window(3, 0) & padding) & Causal()
    assert joined.parts == (Causal(), Window(3, 0), padding)
    assert list(joined.leaves()) == [Causal(), Window(3, 0), padding]
    assert (Causal() | Window(3, 0) | Causal()).parts == (Causal(), Window(3, 0))
    assert (Causal() & Causal()) == Causal()


def test_everything_is_neutral_in_and_wins_in_or():
    assert Everything() & Causal() == Causal()
    assert Causal() & Everything() == Causal()
    assert Everything() & Everything() == Everything()
    assert Causal() | Everything() == Everything()


def test_masks_join_with_masks_only():
    for other in (torch.ones(4, 4, dtype=torch.bool), 3, None):
        with pytest.raises(TypeError):
            Causal() & other
        with pytest.raises(TypeError):
            Causal() | other


def test_kinds_name_what_a_backend_has_to_understand():
    padding = Padding(torch.ones(1, 4, dtype=torch.bool))
    assert Everything().kinds() == ()
    assert set((Causal() & padding).kinds()) == {Causal, Padding}
    assert set((Causal() & (padding | Window(1, 1))).kinds()) == {Causal, Or, Padding, Window}


def test_tensors_of_the_whole_tree():
    keep, tokens = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    mask = Causal() & Padding(keep) & (Window(1, 1) | Global(tokens))
    assert len(mask.tensors) == 2
    assert mask.tensors[0] is keep
    assert mask.tensors[1] is tokens
    assert Global((1,)).tensors == ()


def test_equality_and_hashing():
    assert Window(2, 1) == Window(2, 1)
    assert Window(2, 1) != Window(2, 1, dilation=2)
    assert Global((3, 1, 3)) == Global((1, 3))
    assert len({Causal(), Causal(), Window(None, 0), Global((1, 3)), Global((3, 1))}) == 3
    tokens = torch.zeros(1, 4, dtype=torch.bool)
    assert Global(tokens) == Global(tokens)
    assert Global(tokens) != Global(tokens.clone())
    assert Global(tokens) != Global((1,))
    assert hash(Global(tokens)) == hash(Global(tokens))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Causal(), "Causal()"),
        (Window(2, None), "Window(left=2, right=None, dilation=1)"),
        (Padding(torch.ones(2, 5, dtype=torch.int64)), "Padding(bool[2, 5])"),
        (Documents(torch.zeros(1, 5, dtype=torch.int32)), "Documents(int32[1, 5])"),
        (Global((4, 0)), "Global((0, 4))"),
        (Global(torch.ones(2, 5, dtype=torch.bool)), "Global(bool[2, 5])"),
        (Dense(torch.ones(5, dtype=torch.bool)), "Dense(bool[1, 1, 1, 5])"),
        (Causal() & (Window(1, 1) | Global((0,))), "Causal() & (Window(left=1, right=1, dilation=1) | Global((0,)))"),
    ],
)
def test_repr_shows_kinds_and_shapes(mask, expected):
    assert repr(mask) == expected


# Padding


def test_padding_takes_integers_and_keeps_what_is_1():
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.int8):
        padding = Padding(torch.tensor([[1, 0, 1]]).to(dtype))
        assert padding.keep.dtype == torch.bool
        assert padding.keep.tolist() == [[True, False, True]]


def test_padding_from_lengths():
    padding = Padding.from_lengths(torch.tensor([2, 0, 3]), 3)
    assert padding.keep.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert Padding.from_lengths([1], 2).keep.tolist() == [[True, False]]
    assert Padding.from_lengths(torch.zeros(0, dtype=torch.int64), 3).keep.shape == (0, 3)


def test_hide_padding_leaves_no_trace_of_what_is_hidden():
    mask = Causal() & Padding(torch.tensor([[True, False], [False, True]]))
    key = torch.full((2, 3, 2, 4), torch.nan).requires_grad_()
    value = torch.ones(2, 1, 2, 5)
    hidden_key, hidden_value = hide_padding(mask, key, value)
    assert not hidden_key[0, :, 1].any()
    assert not hidden_key[1, :, 0].any()
    assert hidden_key[0, :, 0].isnan().all()
    assert hidden_value[:, 0, :, 0].tolist() == [[1, 0], [0, 1]]
    (grad,) = torch.autograd.grad(hidden_key.sum(), key)
    assert grad[:, 0, :, 0].tolist() == [[1, 0], [0, 1]]


def test_hide_padding_touches_nothing_where_nothing_is_padded():
    key = torch.ones(1, 1, 2, 3)
    assert hide_padding(Causal(), key)[0] is key
    # Not all of the join is padding: the other side may show the key.
    assert hide_padding(Causal() | Padding(torch.tensor([[True, False]])), key)[0] is key


def test_padding_of_joins_all_that_hides_keys():
    first, second = torch.tensor([[1, 1, 0]]).bool(), torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    assert padding_of(Causal()) is None
    assert padding_of(Padding(first) & Causal() & Padding(second)).tolist() == [[0, 1, 0], [1, 1, 0]]
    # What transformers passes: [batch, 1, 1, key_len].
    assert padding_of(Dense(second[:, None, None])).tolist() == second.tolist()
    assert padding_of(Dense(torch.ones(3, 3, dtype=torch.bool))) is None
    # What a join by | hides is what every side hides.
    assert padding_of(Padding(first) | Causal()) is None
    assert padding_of(Padding(first) & Causal() | Padding(second) & Window(0, 1)).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert padding_of(Padding(first) & Causal() | Padding(first) & Window(0, 1)).tolist() == [[1, 1, 0]]


# Bands


def test_band_of_joins_the_plain_windows():
    padding = Padding(torch.ones(1, 4, dtype=torch.bool))
    assert band_of(Everything()) == (Window(None, None), Everything())
    assert band_of(Causal()) == (Window(None, 0), Everything())
    assert band_of(Causal() & Window(5, 3) & padding) == (Window(5, 0), padding)
    assert band_of(Window(5, None) & Window(2, 9)) == (Window(2, 9), Everything())
    dilated = Window(2, 0, dilation=2)
    assert band_of(Causal() & dilated) == (Window(None, 0), dilated)
    union = Causal() | Window(0, 3)
    assert band_of(union) == (Window(None, None), union)


@given(problems())
@examples(100)
def test_band_and_rest_are_the_mask(problem):
    of, mask = problem
    band, rest = band_of(mask)
    assert torch.equal((band & rest).dense(*of.shape, of.query_offset), mask.dense(*of.shape, of.query_offset))


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(-1, 0), "window: left must be None or an integer >= 0, got -1"),
        (lambda: Window(0, 1.5), "window: right must be None or an integer >= 0, got 1.5"),
        (lambda: Window(True, 0), "window: left must be None or an integer >= 0, got True"),
        (lambda: Window(1, 1, dilation=0), "window: dilation must be an integer >= 1, got 0"),
        (lambda: Causal(3), r"causal: takes no arguments; for a band use Window\(left, right\)"),
        (lambda: Padding([[1, 0]]), "padding: keep must be a tensor, got list"),
        (lambda: Padding(torch.ones(4).bool()), r"padding: keep must have shape \[batch, key_len\], got \[4\]"),
        (lambda: Padding(torch.ones(1, 4)), "padding: keep must be bool or 0/1 integers, got torch.float32"),
        (lambda: Padding(torch.tensor([[0, 2]])), "padding: keep must hold only 0 and 1, got values up to 2"),
        (lambda: Padding.from_lengths(torch.tensor([5]), 4), r"padding: lengths must lie in 0..4, got \[5\]"),
        (lambda: Padding.from_lengths(torch.tensor([-1]), 4), r"padding: lengths must lie in 0..4, got \[-1\]"),
        (lambda: Padding.from_lengths(torch.tensor([1.0]), 4), "padding: lengths must be integers"),
        (lambda: Padding.from_lengths(torch.tensor([[1]]), 4), r"padding: lengths must be integers \[batch\]"),
        (lambda: Documents(torch.ones(4).long()), r"documents: ids must be a tensor of shape \[batch, key_len\]"),
        (lambda: Documents(torch.ones(1, 4)), "documents: ids must be integers, got torch.float32"),
        (lambda: Documents(torch.ones(1, 4).bool()), "documents: ids must be integers, got torch.bool"),
        (lambda: Global((0, -2)), "global: tokens must be positions >= 0, got -2"),
        (lambda: Global(None), "global: tokens must be a tuple of positions or a bool tensor, got None"),
        (lambda: Global((1.5,)), "global: tokens must be positions >= 0, got 1.5"),
        (lambda: Global(torch.ones(1, 4)), r"global: tokens as a tensor must be bool \[batch, key_len\], got torch.fl"),
        (lambda: Global(torch.ones(4).bool()), r"must be bool \[batch, key_len\], got torch.bool\[4\]"),
        (lambda: Dense(torch.ones(4, 4)), "dense: allowed must be a bool tensor .* got torch.float32; .* is a bias"),
        (lambda: Dense([[True]]), "dense: allowed must be a bool tensor .* got list"),
        (lambda: Dense(torch.ones(1, 1, 1, 1, 1).bool()), "dense: allowed must have at most 4 dimensions"),
    ],
)
def test_bad_masks_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SIZES = Sizes(batch_size=3, num_heads=2, query_len=4, key_len=6, query_offset=2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Padding(torch.ones(3, 5).bool()), r"padding: keep must have shape .* = \[3, 6\], got \[3, 5\]"),
        (Padding(torch.ones(2, 6).bool()), r"padding: keep must have shape .* = \[3, 6\], got \[2, 6\]"),
        (Documents(torch.ones(3, 7).long()), r"documents: ids must have shape .* = \[3, 6\], got \[3, 7\]"),
        (Global(torch.ones(2, 6).bool()), r"global: tokens must have shape .* = \[3, 6\], got \[2, 6\]"),
        (Global((0, 6)), "global: tokens must be positions below 6, got 6"),
        (Dense(torch.ones(4, 5).bool()), r"dense: allowed must be broadcastable to .* = \[3, 2, 4, 6\], got \[1, 1, 4"),
        (Dense(torch.ones(2, 1, 1, 1).bool()), r"dense: allowed must be broadcastable .* got \[2, 1, 1, 1\]"),
    ],
    ids=repr,
)
def test_a_mask_for_other_sizes_is_refused(mask, message):
    for joined in (mask, Causal() & mask, Causal() | mask):
        with pytest.raises(ValueError, match=message):
            joined.dense(*SIZES.shape, SIZES.query_offset)


@pytest.mark.parametrize("query_offset", [-1, 3])
def test_documents_know_no_query_outside_of_their_ids(query_offset):
    mask = Documents(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"queries stand at positions {query_offset}..{query_offset + 3}, but ids"):
        mask.dense(*SIZES.shape, query_offset)


@pytest.mark.parametrize(
    "mask",
    [Padding(torch.ones(1, 6).bool()), Documents(torch.zeros(1, 6).long()), Global(torch.ones(1, 6).bool())],
    ids=repr,
)
def test_one_batch_row_serves_all(mask):
    dense = mask.dense(*SIZES.shape, SIZES.query_offset)
    assert dense.shape == SIZES.shape
    assert torch.equal(dense, dense[:1].expand_as(dense))


@given(st.data())
@examples(60)
def test_the_mask_of_one_batch_row_is_that_row(data):
    of, mask = data.draw(problems(longest=7))
    whole = mask.dense(*of.shape, of.query_offset)
    for index in range(of.batch_size):
        one = mask.for_batch(index)
        dense = evaluate(one, torch.tensor([index]), *of.indices()[1:], of.query_offset).expand(1, *of.shape[1:])
        assert torch.equal(dense, whole[index : index + 1])
        assert_bounds_hold(one, dense, of.query_offset)


def test_one_batch_row_tells_what_no_shape_can():
    padded = Padding(torch.arange(8) < torch.tensor([[5], [0]])).for_batch(0)
    assert padded.key_range((0, 8), 8, 0) == (0, 5)
    assert [padded.coverage((0, 8), keys, 0) for keys in ((0, 5), (4, 6), (5, 8))] == [
        Coverage.ALL,
        Coverage.SOME,
        Coverage.NONE,
    ]
    assert Padding(torch.zeros(2, 8, dtype=torch.bool)).for_batch(1).key_range((0, 8), 8, 0) == (0, 0)
    packed = Documents(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])).for_batch(0)
    assert packed.key_range((3, 4), 8, 0) == (3, 5)
    assert packed.coverage((0, 3), (0, 3), 0) is Coverage.ALL
    assert packed.coverage((0, 3), (3, 8), 0) is Coverage.NONE
    out_of_order = Documents(torch.tensor([[1, 0, 1]])).for_batch(0)
    assert out_of_order.key_range((0, 1), 3, 0) == (0, 3)


@given(st.data())
@examples(200)
def test_a_mask_within_a_rectangle_agrees_there(data):
    of, mask = data.draw(problems(longest=12))
    rows, keys = (data.draw(ranges(n)) for n in (of.query_len, of.key_len))
    simpler = mask.within(rows, keys, of.query_offset)
    corner = (slice(None), slice(None), slice(*rows), slice(*keys))
    whole, within = (m.dense(*of.shape, of.query_offset)[corner] for m in (mask, simpler))
    assert torch.equal(within, whole)
    if mask.coverage(rows, keys, of.query_offset) is Coverage.ALL:
        assert simpler == Everything()


def test_a_rectangle_leaves_out_what_it_does_not_need():
    padding = Padding(torch.arange(8)[None] < 5)
    mask = (Window(1, 1) & padding.for_batch(0)) | Global((0,))
    assert mask.within((2, 5), (2, 5), 0) == Window(1, 1)
    assert mask.within((2, 3), (2, 3), 0) == Everything()
    assert (Causal() & padding.for_batch(0)).within((2, 5), (2, 5), 0) == Causal()


def ranges(length: int) -> st.SearchStrategy[tuple[int, int]]:
    """Half-open, with something in it."""
    ends = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True)
    return ends.map(lambda pair: (min(pair), max(pair)))
