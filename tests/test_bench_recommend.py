"""The chooser on records written by hand, and on those of a real sweep."""

import io
import json

import pandas as pd
import pytest
from rich.console import Console

from effattn.bench.recommend import (
    load_records,
    pareto_figure,
    print_recommendation,
    recommend,
    recommend_for_perplexity,
)
from effattn.cli import main


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


def an_evaluation(backend, attention_ms, ratio, **fields):
    """A record of `effattn evaluate`."""
    return {
        "study": "evaluate", "cell": f"{backend}{fields}", "model": "m", "text": "t", "weights_sha256": "w",
        "tokens_sha256": "k", "layers": None, "dtype": "float32", "device": "cuda", "machine": "here",
        "backend": backend, "seq_len": 16384, "status": "ok", "reason": None, "perplexity_ratio": ratio,
        "density": 0.5, "attention_ms": attention_ms, "forward_ms": attention_ms and 1000 - attention_ms,
    } | fields  # fmt: skip


EVALUATIONS = [
    an_evaluation("sdpa", 100, 1.0),
    an_evaluation("sliding_window", 10, 1.9),
    an_evaluation("lsh", 50, 1.04),
    an_evaluation("lsh(num_hashes=8)", 80, 1.02),
    an_evaluation("lsh(num_hashes=2)", 60, 1.3),
    an_evaluation("flex", None, None, status="unsupported", reason="requested float32; supported none"),
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


# Perplexity -------------------------------------------------------------------------------------------------


def ask_for_perplexity(max_increase, records=EVALUATIONS, **options):
    return recommend_for_perplexity(pd.DataFrame(records), max_increase=max_increase, **FOR | options)


@pytest.mark.parametrize(
    ("max_increase", "backend"),
    [(0, "sdpa"), (0.03, "lsh(num_hashes=8)"), (0.05, "lsh"), (0.35, "lsh"), (0.9, "sliding_window")],
)
def test_the_cheapest_that_keeps_perplexity(max_increase, backend):
    (answer,) = ask_for_perplexity(max_increase)
    assert answer.backend == backend
    assert f"{backend}  least time of attention with an increase in perplexity of at most" in printed(answer)
    assert answer.failed == {"flex": "unsupported: requested float32; supported none"}
    assert answer.table["front"].tolist() == [True, True, False, True, True]


def test_the_time_of_the_whole_model_may_be_what_counts():
    (answer,) = ask_for_perplexity(0.35, cost="forward")
    assert answer.backend == "sdpa"


def test_no_backend_that_keeps_perplexity_is_said_with_the_closest():
    (answer,) = ask_for_perplexity(0.01, EVALUATIONS[1:])
    assert answer.backend is None
    text = " ".join(printed(answer).split())
    assert "Nothing measured keeps an increase in perplexity of at most 1% at 16,384 tokens" in text
    assert "the closest is lsh(num_hashes=8) with 2%" in text


def test_each_model_and_choice_of_layers_gets_its_answer():
    other = an_evaluation("lsh", 1, 1.5, model="n")
    some = an_evaluation("sdpa", 70, 1.0, layers=[0, 2])
    answers = ask_for_perplexity(0.05, [*EVALUATIONS, other, some])
    assert [(answer.conditions[0], answer.backend) for answer in answers] == [
        ("m reading t · all layers", "lsh"),
        ("m reading t · layers 0, 2", "sdpa"),
        ("n reading t · all layers", None),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1024}, "recommend: seq_len 1024 has not been measured with the rest of what is asked; 16384 have"),
        ({"device": "cpu"}, "recommend: device cpu has not been measured .*; cuda have"),
        ({"dtype": "bfloat16"}, "recommend: dtype bfloat16"),
        ({"cost": "memory"}, "recommend: cost must be one of attention, forward, got 'memory'"),
        ({"max_increase": -1}, "recommend: max_perplexity_increase must be >= 0, got -1"),
    ],
)
def test_what_was_not_evaluated_or_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        ask_for_perplexity(**{"max_increase": 0.05} | options)


def test_the_figure_for_perplexity_is_in_percent(tmp_path):
    (answer,) = ask_for_perplexity(0.05)
    figure = pareto_figure(answer)
    (ax,) = figure.axes
    ticks = [label.get_text() for label in ax.get_yticklabels()]
    assert ticks[-1] == "≤ 0.01%"
    assert all(tick.endswith("%") for tick in ticks)
    figure.savefig(tmp_path / "pareto.png")


@pytest.fixture
def results(tmp_path):
    for name, records in (("sweep", RECORDS), ("evaluate", [*EVALUATIONS, an_evaluation("x", 1, 1.0, task="needle")])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_records_of_sweeps_and_of_evaluations_are_told_apart(results):
    assert len(load_records([results])) == len(RECORDS)
    assert len(load_records([results], "evaluate")) == len(EVALUATIONS)
    with pytest.raises(ValueError, match="must hold those of an evaluation"):
        load_records([results / "sweep"], "evaluate")


def test_the_command_takes_one_budget_or_the_other(results, capsys):
    asked = ["recommend", "--seq-len", "16384", "--device", "cuda", "--records", str(results)]
    main([*asked, "--max-perplexity-increase", "0.03", "--figure", str(results / "f.png")])
    assert "lsh(num_hashes=8)  least time of attention" in capsys.readouterr().out
    assert (results / "f.png").exists()
    main([*asked, "--max-perplexity-increase", "0.03", "--cost", "forward"])
    assert "sdpa  least time of the model" in capsys.readouterr().out
    main(asked)
    assert "lsh  least time with a relative L2 error of at most 0.05" in capsys.readouterr().out
    for wrong, message in (
        (["--max-error", "0.1"], "max_error and max_perplexity_increase cannot both be given"),
        (["--cost", "memory"], "cost must be one of attention, forward, got 'memory'"),
        (["--mask", "causal"], "pass, input and mask are of sweeps"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*asked, "--max-perplexity-increase", "0.03", *wrong])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_the_command_fails_where_nothing_qualifies(results, capsys):
    asked = ["recommend", "--seq-len", "16384", "--device", "cuda", "--records", str(results)]
    lines = (json.dumps(record) + "\n" for record in EVALUATIONS[1:])
    (results / "evaluate" / "records.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--max-perplexity-increase", "0.01"])
    assert ended.value.code == 1
    assert "Nothing measured keeps an increase in perplexity of at most 1%" in capsys.readouterr().out
