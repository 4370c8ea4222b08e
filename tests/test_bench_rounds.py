import dataclasses

import pytest
import torch

from effattn.bench import rounds
from effattn.bench.rounds import agree, run_rounds
from effattn.bench.study import Cell

CELL = Cell(
    backend="full",
    batch_size=1,
    num_heads=2,
    num_kv_heads=2,
    seq_len=48,
    head_dim=8,
    dtype="float32",
    device="cpu",
    mask="none",
    input="gaussian",
    source=None,
    pass_name="forward",
    seed=0,
    repeats=5,
    min_time_s=0.0,
    error_rows=16,
    grad_error_max_len=0,
)


def change(**fields):
    return dataclasses.replace(CELL, **fields)


def test_each_warms_up_and_then_they_take_turns_in_a_rotated_order(monkeypatch):
    calls = []

    def time_first(stages):
        calls.append(stages)
        return float(len(calls)), None

    monkeypatch.setattr(rounds.Task, "stages", property(lambda task: task.cell.backend))
    monkeypatch.setattr(rounds.timing, "time_first", time_first)
    results = run_rounds([CELL, change(backend="chunked"), change(backend="sdpa")], 4)
    turns = [["full", "chunked", "sdpa"], ["chunked", "sdpa", "full"], ["sdpa", "full", "chunked"]]
    assert calls == [*turns[0], *turns[0], *turns[1], *turns[2], *turns[0]]
    assert [result.times_ms for result in results] == [[4, 9, 11, 13], [5, 7, 12, 14], [6, 8, 10, 15]]


def test_results_have_times_and_memory_and_the_record_of_their_cell():
    forward, trained = run_rounds([CELL, change(pass_name="forward_backward")], 5)
    assert len(forward.times_ms) == len(trained.times_ms) == 5
    assert forward.peak_memory_bytes is not None
    assert 2 * 48 * 48 * 4 <= forward.peak_memory_bytes < trained.peak_memory_bytes
    record = trained.record
    assert record["pass"] == "forward_backward"
    assert record["status"] == "ok"
    assert len(record["time_ms_repeats"]) == 5
    assert record["time_ms_p20"] <= record["time_ms_median"] <= record["time_ms_p80"]


def test_one_that_refuses_says_why_and_the_others_run():
    refused, ran = run_rounds([change(backend="sdpa(kernel='cudnn')"), CELL], 5)
    assert refused.record["status"] == "unsupported"
    assert "cudnn kernel on cpu" in refused.record["reason"]
    assert "time_ms_median" not in refused.record
    assert len(ran.times_ms) == 5


def test_outputs_are_compared_in_the_rows_that_attend_to_the_same():
    ours, narrow = change(backend="sliding_window(left=8, right=8)"), change(backend="sliding_window(left=8, right=7)")
    same, different, dense = agree(ours, [ours, narrow, CELL])
    assert same.share == 1.0
    assert same.rel_l2 == 0.0
    # The last 8 rows have no 8th key to the right.
    rows = rounds.errors.sample_rows(48, 16, 0)
    assert different.share == pytest.approx(float((rows >= 40).double().mean()))
    assert different.rel_l2 is not None
    assert different.rel_l2 < 1e-6
    assert dense.share == 0.0
    assert dense.rel_l2 is None


def test_rows_with_other_weights_are_not_the_same():
    ours = change(backend="lsh(bucket_size=8, count='per_round')")
    (once,) = agree(ours, [change(backend="lsh(bucket_size=8)")])
    assert once.share < 1


def test_a_backend_without_a_pattern_is_the_same_nowhere(monkeypatch):
    monkeypatch.setattr(rounds.Task, "pattern", lambda task: None)
    assert agree(CELL, [CELL])[0].share == 0.0


def test_gradients_are_recorded_where_they_are_needed_alone(monkeypatch):
    seen = []

    def time_first(stages):
        seen.append(torch.is_grad_enabled())
        return 1.0, None

    monkeypatch.setattr(rounds.timing, "time_first", time_first)
    run_rounds([CELL, change(pass_name="forward_backward")], 1)
    assert seen == [False, True, False, True]
