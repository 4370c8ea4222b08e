"""Attended pairs, density and operations, against the dense mask and PyTorch's own count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, problems
from torch.utils.flop_counter import FlopCounterMode

import effattn
from effattn import cost
from effattn.masks import Causal, Documents, Everything, Padding, Window


@given(problems())
@examples(150)
def test_pairs_are_those_of_the_dense_mask(problem):
    of, mask = problem
    expected = int(mask.dense(*of.shape, of.query_offset).sum())
    assert effattn.attended_pairs(mask, *of.shape, of.query_offset) == expected
    every_row = torch.randperm(of.query_len, generator=torch.Generator().manual_seed(0))
    assert effattn.attended_pairs(mask, *of.shape, of.query_offset, rows=every_row) == expected


@given(problems(longest=12), st.integers(0, 30), st.integers(-40, 40))
@examples(100)
def test_pairs_of_a_band_are_counted_without_evaluating_it(problem, reach, query_offset):
    of, _ = problem
    for band in (Window(reach, 0), Window(0, reach), Window(None, reach), Window(reach, None), Window(None, None)):
        expected = int(band.dense(*of.shape, query_offset).sum())
        assert effattn.attended_pairs(band, *of.shape, query_offset) == expected


def test_pairs_at_a_length_that_no_dense_mask_would_fit():
    n = 2**20
    assert effattn.attended_pairs(Causal(), 2, 3, n, n) == 6 * n * (n + 1) / 2
    assert effattn.attended_pairs(Window(1, 1), 1, 1, n, n) == 3 * n - 2
    assert effattn.attended_pairs(Everything(), 2, 3, n, n) == 6 * n * n


def test_pairs_from_some_rows_are_an_estimate():
    mask = Causal() & Documents(torch.arange(64)[None] // 8)
    rows = torch.arange(0, 64, 9)
    counted = int(mask.dense(2, 3, 64, 64)[:, :, rows].sum())
    assert effattn.attended_pairs(mask, 2, 3, 64, 64, rows=rows) == counted * 64 / len(rows)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    mask = Causal() & Padding(torch.arange(10)[None] > 2)
    at_once = effattn.attended_pairs(mask, 2, 3, 10, 10)
    monkeypatch.setattr(cost, "_BLOCK_PAIRS", 1)
    assert effattn.attended_pairs(mask, 2, 3, 10, 10) == at_once


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="padding: keep must have shape"):
        effattn.attended_pairs(Padding(torch.ones(1, 9).bool()), 1, 1, 10, 10)


def test_density():
    mask = Causal()
    pairs = effattn.attended_pairs(mask & Window(1, 0), 1, 1, 4, 4)
    assert effattn.density(pairs, effattn.attended_pairs(mask, 1, 1, 4, 4)) == 7 / 10
    assert effattn.density(0, 0) == 1


def test_an_exact_backend_has_density_1_and_a_window_has_not():
    query = torch.randn(1, 2, 64, 8)
    pairs = {
        spec: effattn.attended_pairs(effattn.pattern(query, query, backend=spec, mask=Causal()), 1, 2, 64, 64)
        for spec in ("full", "chunked", "sliding_window(left=7, right=7)", "lsh(bucket_size=8)")
    }
    whole = effattn.attended_pairs(Causal(), 1, 2, 64, 64)
    density = {spec: effattn.density(count, whole) for spec, count in pairs.items()}
    assert density["full"] == density["chunked"] == 1
    assert density["sliding_window(left=7, right=7)"] == 2 * (8 * 64 - 28) / whole
    assert 0 < density["lsh(bucket_size=8)"] < 1


def test_flops_are_what_pytorch_counts():
    query, key = torch.randn(2, 3, 20, 8, requires_grad=True), torch.randn(2, 3, 30, 8, requires_grad=True)
    value = torch.randn(2, 3, 30, 5, requires_grad=True)
    pairs = 2 * 3 * 20 * 30
    with FlopCounterMode(display=False) as counter:
        output = effattn.attention(query, key, value, backend="full")
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == effattn.flops(pairs, 8, 5)
    # full keeps its scores; a backward pass that recomputes them does 2 D a pair more.
    recomputed = 2 * pairs * 8
    assert counter.get_total_flops() + recomputed == effattn.flops(pairs, 8, 5, backward=True)
