"""The chooser on records written by hand, and on those of a real sweep."""

import io
import json

import pandas as pd
import pytest
from rich.console import Console

from effattn.bench.recommend import load_records, pareto_figure, print_recommendation, recommend


def a_record(backend, time_ms, error, *, memory_mib=10, **fields):
    return {
        "study": "s", "cell": f"{backend}{fields}", "machine": "here", "backend": backend, "input": "captured",
        "dtype": "float32", "mask": "causal", "device": "cuda", "batch_size": 1, "num_heads": 4, "num_kv_heads": 4,
        "head_dim": 64, "seq_len": 16384, "pass": "forward", "seed": 0, "status": "ok", "reason": None,
        "forward_ms_median": time_ms, "forward_ms_p20": time_ms, "forward_ms_p80": time_ms, "density": 0.5,
        "peak_memory_bytes": memory_mib * 2**20, "approximation_rel_l2": error, "total_rel_l2": error + 1e-7,
    } | fields  # fmt: skip


RECORDS = [
    a_record("sdpa", 100, 0.0, memory_mib=5),
    a_record("chunked", 120, 0.0),
    a_record("sliding_window", 10, 0.9),
    a_record("lsh", 50, 0.04),
    a_record("lsh(num_hashes=8)", 80, 0.02),
    a_record("lsh(num_hashes=2)", 60, 0.3),
    a_record("flex", None, 0.0, status="out_of_memory", reason="CUDA out of memory\nmore lines"),
]
FOR = {"seq_len": 16384, "device": "cuda"}


def ask(max_error, records=RECORDS, **options):
    return recommend(pd.DataFrame(records), max_error=max_error, **FOR | options)


def printed(answer):
    console = Console(width=120, file=io.StringIO(), record=True)
    print_recommendation(answer, console)
    return console.export_text()


@pytest.mark.parametrize(
    ("max_error", "backend"),
    [(0, "sdpa"), (0.02, "lsh(num_hashes=8)"), (0.05, "lsh"), (0.5, "lsh"), (0.9, "sliding_window")],
)
def test_the_cheapest_within_the_budget(max_error, backend):
    (answer,) = ask(max_error)
    assert answer.backend == backend
    assert backend in printed(answer).splitlines()[2]


def test_memory_may_be_what_counts():
    (answer,) = ask(0.05, cost="memory")
    assert answer.backend == "sdpa"


def test_the_front_is_what_nothing_beats_in_both():
    (answer,) = ask(0.05)
    assert answer.table["backend"].tolist() == [
        "sliding_window", "lsh", "lsh(num_hashes=2)", "lsh(num_hashes=8)", "sdpa", "chunked",
    ]  # fmt: skip
    assert answer.table["front"].tolist() == [True, True, False, True, True, False]
    assert answer.table["within"].tolist() == [False, True, False, True, True, True]


def test_nothing_that_qualifies_is_said_with_the_closest():
    (answer,) = ask(0.01, [record for record in RECORDS if record["approximation_rel_l2"] > 0])
    assert answer.backend is None
    text = printed(answer)
    assert "Nothing measured keeps a relative L2 error of at most 0.01 at 16,384 tokens" in text
    assert "the closest is lsh(num_hashes=8) with 0.02" in text


def test_what_failed_is_named_with_its_reason():
    (answer,) = ask(0.05)
    assert answer.failed == {"flex": "out of memory: CUDA out of memory\nmore lines"}
    assert "flex out of memory: CUDA out of memory\n" in printed(answer)


def test_without_a_pattern_the_total_error_counts():
    low_rank = a_record("low_rank", 1, 0.0, total_rel_l2=0.5, approximation_rel_l2=None)
    assert ask(0.4, [*RECORDS, low_rank])[0].backend == "lsh"
    assert ask(0.6, [*RECORDS, low_rank])[0].backend == "low_rank"


def test_each_set_of_conditions_gets_its_answer_captured_input_first():
    gaussian = a_record("lsh", 1, 0.01, input="gaussian")
    other = a_record("lsh", 1, 0.01, machine="there")
    answers = ask(0.05, [gaussian, *RECORDS, other])
    assert [answer.backend for answer in answers] == ["lsh", "lsh", "lsh"]
    assert [answer.conditions[0] for answer in answers] == [
        "s · here · captured input", "s · there · captured input", "s · here · gaussian input",
    ]  # fmt: skip
    (answer,) = ask(0.05, [gaussian, *RECORDS], input_kind="captured")
    assert "captured" in answer.conditions[0]


def test_records_without_an_error_do_not_count():
    timed = a_record("lsh", 1, 0.0, study="peers", approximation_rel_l2=None, total_rel_l2=None)
    assert len(ask(0.05, [*RECORDS, timed])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1024}, "recommend: seq_len 1024 has not been measured with the rest of what is asked; 16384 have"),
        ({"device": "cpu"}, "recommend: device cpu has not been measured .*; cuda have"),
        ({"pass_name": "decode"}, "recommend: pass decode"),
        ({"dtype": "bfloat16"}, "recommend: dtype bfloat16"),
        ({"mask": "none"}, "recommend: mask none"),
        ({"cost": "money"}, "recommend: cost must be one of time, memory, got 'money'"),
        ({"max_error": -1}, "recommend: max_error must be >= 0, got -1"),
        ({"max_error": float("nan")}, "recommend: max_error must be >= 0, got nan"),
    ],
)
def test_what_was_not_measured_or_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        ask(**{"max_error": 0.05} | options)


def test_records_are_found_at_any_depth(tmp_path):
    for name, records in (("a", RECORDS[:2]), ("b/c", RECORDS[2:])):
        (tmp_path / name).mkdir(parents=True)
        lines = [json.dumps(record) for record in records]
        (tmp_path / name / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert len(load_records([tmp_path])) == len(RECORDS)
    assert len(load_records([tmp_path / "a" / "records.jsonl"])) == 2
    with pytest.raises(ValueError, match="recommend: records must be a file or folder that exists"):
        load_records([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="effattn sweep measures some"):
        load_records([tmp_path / "empty"])


@pytest.mark.parametrize("max_error", [0, 0.05])
def test_the_figure_marks_what_is_chosen(max_error, tmp_path):
    (answer,) = ask(max_error)
    figure = pareto_figure(answer)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sum("chosen" in label for label in labels) == 1
    assert len(labels) == len(answer.table)
    figure.savefig(tmp_path / "pareto.png")
