"""Tables and report: speed-ups only between like cells, failures with their reasons, a page that stands alone."""

import io
import re
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from effattn.bench.figures import CONDITIONS
from effattn.bench.report import RUN, SUMMARY, print_table, summary_table, write_report

REASON = "device: requested cpu; supported cuda"
TIMES_MS = {"full": 12.0, "sdpa": 3.0, "lsh": 6.0}


def record(backend: str, seq_len: int = 512, pass_name: str = "forward", **fields: Any) -> dict[str, Any]:
    """One plausible line of records.jsonl; a status other than ok measured nothing."""
    identity = {
        "study": "length_sweep", "machine": "box", "cpu": "a CPU", "cpu_threads": 2, "gpu": None, "torch": "2.13.0",
        "effattn": "0.1.0", "commit": "3f2c1ab", "memory_total_bytes": 8 * 2**30, "python": "3.11.2",
        "started_at": "2026-01-02T03:04:05+00:00", "input": "captured", "dtype": "float32", "mask": "causal",
        "device": "cpu", "batch_size": 1, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "seed": 0,
        "backend": backend, "seq_len": seq_len, "pass": pass_name, "status": "ok", "reason": None,
    }  # fmt: skip
    if fields.get("status", "ok") != "ok":
        return identity | {"reason": REASON} | fields
    error = 0.0 if backend in ("full", "sdpa") else 0.2
    time_ms = TIMES_MS.get(backend, 1.0)
    measured: dict[str, Any] = {
        "forward_ms_median": time_ms, "forward_ms_p20": 0.9 * time_ms, "forward_ms_p80": 1.1 * time_ms,
        "peak_memory_bytes": 3 * 2**20, "density": 1.0, "memory_method": "profiler", "impl": "tiles",
        "implementation_rel_l2": 2e-7, "approximation_rel_l2": error, "total_rel_l2": error, "oracle_rel_l2": error / 4,
    }  # fmt: skip
    if pass_name == "forward_backward":
        measured |= {"backward_ms_median": 2 * time_ms, "grad_approximation_rel_l2": 2 * error}
    return identity | measured | fields


def table(*records: dict[str, Any]) -> pd.DataFrame:
    return summary_table(pd.DataFrame(records))


def speedup(summary: pd.DataFrame, backend: str, baseline: str = "full") -> float:
    return summary.set_index("backend").loc[backend, f"speedup_vs_{baseline}"]


def printed(*records: dict[str, Any], **console: Any) -> str:
    out = io.StringIO()
    print_table(pd.DataFrame(records), Console(file=out, width=100, **console))
    return out.getvalue()


class Page(HTMLParser):
    """What a page would load, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_summary_has_a_row_for_every_record_and_the_columns_in_order() -> None:
    records = [record(*cell) for cell in product(("lsh", "full", "flex"), (1024, 512), ("forward", "decode"))]
    records[-1] |= {"status": "timeout"}
    summary = table(*records)
    assert tuple(summary.columns) == SUMMARY
    assert list(zip(summary["pass"], summary["seq_len"], summary["backend"], strict=True)) == [
        (pass_name, seq_len, backend)
        for pass_name in ("forward", "decode")
        for seq_len in (512, 1024)
        for backend in ("full", "lsh", "flex")
    ]


def test_speedups_are_against_the_baselines_beside() -> None:
    summary = table(*map(record, TIMES_MS))
    assert [speedup(summary, name) for name in TIMES_MS] == [1, 4, 2]
    assert [speedup(summary, name, "sdpa") for name in TIMES_MS] == [0.25, 1, 0.5]


def test_the_whole_pass_counts() -> None:
    summary = table(*(record(name, pass_name="forward_backward") for name in TIMES_MS))
    assert list(summary["time_ms_median"]) == [36, 9, 18]
    assert speedup(summary, "lsh") == 2


@pytest.mark.parametrize("column", [*CONDITIONS, *RUN, "pass", "seq_len", "seed"])
def test_a_baseline_under_other_conditions_does_not_count(column: str) -> None:
    lsh = record("lsh")
    other = 7 if isinstance(lsh[column], int) else "decode" if column == "pass" else "other"
    assert speedup(table(lsh, record("full")), "lsh") == 2
    assert pd.isna(speedup(table(lsh, record("full") | {column: other}), "lsh"))


def test_a_failed_or_parameterised_baseline_does_not_count() -> None:
    summary = table(record("lsh"), record("full", status="out_of_memory"), record("sdpa(kernel='math')"))
    assert pd.isna(speedup(summary, "lsh"))
    assert pd.isna(speedup(summary, "lsh", "sdpa"))


def test_what_was_not_measured_is_empty() -> None:
    half_run = record("lsh") | {"status": "out_of_memory", "reason": REASON}
    (row,) = table(half_run, record("full"))[lambda t: t["backend"] == "lsh"].to_dict("records")
    assert (row["status"], row["reason"]) == ("out_of_memory", REASON)
    for column in ("time_ms_median", "speedup_vs_full", "peak_memory_mib", "density", "approximation_rel_l2"):
        assert pd.isna(row[column]), column


def test_summary_of_no_records() -> None:
    summary = summary_table(pd.DataFrame())
    assert (tuple(summary.columns), len(summary)) == (SUMMARY, 0)


def test_the_table_fits_a_hundred_columns() -> None:
    cells = product(
        ("full", "sdpa", "sliding_window(left=1024, right=1024, global_tokens=(0, 1, 2, 3))"), (512, 131072)
    )
    records = [record(*cell, pass_name=p) for cell in cells for p in ("forward", "forward_backward")]
    for r in records:
        r |= {"forward_ms_median": 123456.7, "peak_memory_bytes": 2**37, "grad_implementation_rel_l2": 1e-7}
    text = printed(*records)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("123,457") == 6
    assert "…" not in text


def test_the_table_ends_with_the_reasons() -> None:
    refused = [record("flex", seq_len, status="unsupported") for seq_len in (512, 1024)]
    late = record("full", 1024, status="out_of_memory", reason="needs 3 GiB\nat line 7")
    above, below = printed(record("full"), late, *refused).split("failed\n")
    assert "flex" not in above
    assert "full out of memory" in above
    assert below.splitlines() == [
        "full out of memory forward at 1k: needs 3 GiB",
        f"flex unsupported everywhere: {REASON}",
    ]


def test_the_best_of_a_length_is_bold() -> None:
    text = printed(*map(record, TIMES_MS), force_terminal=True, color_system="standard")
    assert re.search(r"\x1b\[1m *3\.00", text)
    assert not re.search(r"\x1b\[1m *(6\.00|12\.0)", text)


def test_backward_shows_the_errors_of_the_gradients() -> None:
    both, alone = (
        [record("lsh"), record("lsh", pass_name="forward_backward")],
        [record("lsh", pass_name="forward_backward")],
    )
    assert "grad approx." in printed(*both)
    assert "0.400" in printed(*both)
    assert "grad approx." not in printed(*alone)
    assert "0.200" in printed(*alone)


def test_seeds_and_conditions_are_kept_apart() -> None:
    records = [record("lsh", seed=seed, dtype=dtype) for seed in (0, 1) for dtype in ("float32", "bfloat16")]
    text = printed(*records)
    assert text.count("captured input") == 2
    assert [line.split()[:3] for line in text.splitlines() if "lsh" in line] == [
        ["512", "lsh", "0"],
        ["lsh", "1", "6.00"],
    ] * 2


def test_an_empty_table_prints_nothing() -> None:
    assert printed().strip() == ""


def test_the_report_stands_alone(tmp_path: Path) -> None:
    png, pdf = tmp_path / "time_vs_length.png", tmp_path / "time_vs_length.pdf"
    png.write_bytes(b"\x89PNG not really")
    pdf.write_bytes(b"%PDF")
    hostile = '<script src="https://x.org/a.js"></script> see https://x.org'
    records = [*map(record, TIMES_MS), record("flex", status="error", reason=hostile)]
    path = write_report(pd.DataFrame(records), [png, pdf], tmp_path, command="effattn sweep a.yaml --seq-lens 512")
    page = Page(path)
    assert path == tmp_path / "report.html"
    assert page.loads == ["data:image/png;base64,iVBORyBub3QgcmVhbGx5"]
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import", path.read_text(encoding="utf-8"))
    for said in (hostile, "effattn sweep a.yaml --seq-lens 512", "2.13.0", "3f2c1ab", "8 GiB", "3 ok, 1 error"):
        assert said in page.text
    for error in ("implementation error", "approximation error", "total error"):
        assert f"The {error} compares" in page.text


def test_the_report_names_the_study_that_runs_again(tmp_path: Path) -> None:
    assert "not recorded" in Page(write_report(pd.DataFrame([record("lsh")]), [], tmp_path)).text
    (tmp_path / "study.yaml").write_text("name: length_sweep\nseq_lens: [512]\n", encoding="utf-8")
    text = Page(write_report(pd.DataFrame([record("lsh")]), [], tmp_path)).text
    assert "effattn sweep study.yaml" in text
    assert "seq_lens: [512]" in text
    assert "not recorded" not in text


def test_equal_records_give_an_equal_report(tmp_path: Path) -> None:
    first = write_report(pd.DataFrame([record("lsh")]), [], tmp_path / "a")
    assert first.read_bytes() == write_report(pd.DataFrame([record("lsh")]), [], tmp_path / "b").read_bytes()


@pytest.mark.parametrize("records", [[], [record("flex", status="unsupported")]], ids=["nothing", "refused"])
def test_a_report_without_data_says_so(records: list[dict[str, Any]], tmp_path: Path) -> None:
    text = Page(write_report(pd.DataFrame(records), [], tmp_path)).text
    assert "No cell was measured." in text
    assert "No figures were drawn." in text
    assert (REASON in text) == bool(records)
