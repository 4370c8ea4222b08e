"""How the band engine cuts a problem: every allowed pair lies in exactly one span, and bands become runs."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, problems

from effattn.kernels.tile_plan import Run, Span, fits_one_span, plan_runs
from effattn.masks import Causal, Documents, Padding, Window


def plan(mask, length, *, query_tile=4, key_tile=16, least_count=2, most_scores=200):
    return plan_runs(
        mask,
        length,
        length,
        0,
        query_tile=query_tile,
        key_tile=key_tile,
        least_count=least_count,
        most_scores=most_scores,
    )


@given(st.data())
@examples(200)
def test_each_allowed_pair_lies_in_one_span_of_its_tile(data):
    of, mask = data.draw(problems(longest=30))
    runs = plan_runs(
        mask,
        of.query_len,
        of.key_len,
        of.query_offset,
        query_tile=data.draw(st.integers(1, 8)),
        key_tile=data.draw(st.integers(1, 40)),
        least_count=data.draw(st.integers(1, 4)),
        most_scores=data.draw(st.integers(1, 400)),
    )
    times = torch.zeros(of.query_len, of.key_len, dtype=torch.int64)
    rows = torch.zeros(of.query_len, dtype=torch.int64)
    for run in runs:
        assert run.count == 1 or len(run.spans) == 1
        rows[slice(*run.rows)] += 1
        for span in run.spans:
            assert 0 <= span.first < run.keys(span)[1] <= of.key_len
            for tile in range(run.count):
                first_row, first_key = (start + tile * run.height for start in (run.first, span.first))
                times[first_row : first_row + run.height, first_key : first_key + span.width] += 1
    assert (rows == 1).all()
    allowed = mask.dense(*of.shape, of.query_offset).any(0).any(0)
    assert (times <= 1).all()
    assert (times[allowed] == 1).all()


def test_the_inner_tiles_of_a_band_are_runs_and_its_ends_are_single_tiles():
    runs = plan(Window(4, 4), 32)
    assert runs == [
        Run(0, 4, 1, (Span(0, 8),)),
        Run(4, 4, 4, (Span(0, 12),)),  # 4 x 48 scores are the most
        Run(20, 4, 2, (Span(16, 12),)),
        Run(28, 4, 1, (Span(24, 8),)),
    ]


def test_a_batch_of_tiles_has_to_be_worth_it():
    assert {run.count for run in plan(Window(4, 4), 32, least_count=5)} == {1}
    assert {run.count for run in plan(Window(4, 4), 32, most_scores=90)} == {1}


def test_empty_spans_are_left_out():
    runs = plan(Causal(), 12, key_tile=4)
    assert [[span.first for span in run.spans] for run in runs] == [[0], [0, 4], [0, 4, 8]]
    keep = torch.tensor([[True] * 4 + [False] * 4 + [True] * 4])
    assert [s.first for s in plan(Padding(keep).for_batch(0), 12, key_tile=4)[0].spans] == [0, 8]
    packed = Documents(torch.tensor([[0] * 4 + [1] * 8])).for_batch(0)
    assert [run.spans for run in plan(packed, 12)] == [(Span(0, 4),), (Span(4, 8),), (Span(4, 8),)]


def test_a_row_that_sees_nothing_has_no_span():
    nothing = Padding(torch.zeros(1, 8, dtype=torch.bool)).for_batch(0)
    assert [run.spans for run in plan(nothing, 8)] == [(), ()]


def test_whether_one_span_holds_all_keys_of_a_tile():
    assert fits_one_span(Window(4, 4), 32, 32, 0, 4, 12)
    assert not fits_one_span(Window(4, 4), 32, 32, 0, 4, 11)
    assert not fits_one_span(Causal(), 32, 32, 0, 4, 31)
