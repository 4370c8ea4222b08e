"""Tables and figures from the records of ``evaluate`` where answers are right or wrong: needle, recall and masked.

Looks of backends are those of every other figure, full attention is black. A backend that failed at a length has no
point there.
"""

import math
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, PercentFormatter
from rich.console import Console
from rich.text import Text

from effattn.bench.figures import RC, Style, length_label, save_figure, styles
from effattn.bench.loss_report import (
    FULL,
    GREY,
    backend_cell,
    by_length,
    cheapest,
    cheapest_cells,
    drawn,
    finish,
    print_conditions,
    print_failed,
)  # fmt: skip
from effattn.bench.tasks import wilson
from effattn.bench.words import number, spec_table

SUMMARY = (
    "task", "model", "text", "layers", "dtype", "device", "machine", "samples", "seed", "seq_len", "backend", "answers",
    "accuracy", "accuracy_low", "accuracy_high", "full_accuracy", "full_accuracy_low", "full_accuracy_high",
    "answer_log_prob_nats", "full_answer_log_prob_nats", "loss_nats", "full_loss_nats", "excess_loss_nats",
    "agreement", "kl_nats", "density", "attention_ms", "forward_ms", "impl", "status", "reason",
)  # fmt: skip
CAPTIONS = {
    "accuracy_vs_distance": (
        "Answers that are right, by the distance in tokens from where they stand to where they are asked for, in "
        "octaves; bars are 95% intervals (Wilson)."
    ),
    "accuracy_vs_length": (
        "Masked tokens that are filled in right, and the loss of these above that of full attention; bands are 95% "
        "intervals (Wilson)."
    ),
}

_FULL_LOOK: dict[str, Any] = {"color": "#000000", "linewidth": 1.0, "zorder": 5}
_MOST_PANELS = 3
_RANGE_OCTAVES = 2  # of distance in a column of the table
_SPREAD_OCTAVES = 0.5  # of distance, over which the backends stand side by side


def summary_table(records: pd.DataFrame) -> pd.DataFrame:
    """A row per record with the columns of ``SUMMARY``, by length and then in the order of backends everywhere."""
    return _ordered(records)[list(SUMMARY)]


def budget_table(records: pd.DataFrame) -> pd.DataFrame:
    """Which backend answers as well as full attention: the fastest, and the sparsest.

    As well means that the 95% interval of its accuracy holds full attention's accuracy, or lies above it.

    Returns:
        A row per length: ``seq_len, full_accuracy``, and for both kinds ``_backend, _accuracy, _density`` and
        ``_attention_ms``; empty where none does.
    """
    rows = []
    for seq_len, at_length in by_length(summary_table(records)):
        as_well = at_length[(at_length["status"] == "ok") & (at_length["accuracy_high"] >= at_length["full_accuracy"])]
        full = at_length["full_accuracy"].dropna()
        rows.append(
            {
                "seq_len": seq_len,
                "full_accuracy": full.iloc[0] if len(full) else None,
                **cheapest(as_well, "accuracy"),
            }
        )
    return pd.DataFrame(rows)


def print_tables(records: pd.DataFrame, console: Console) -> None:
    """Print what answers as well as full attention, then every backend at each length, then what failed."""
    summary = summary_table(records)
    print_conditions(summary, str(summary["task"].iloc[0]), console)
    console.print(
        "\nWhat answers as well as full attention (its 95% interval reaches that accuracy): the fastest, and the "
        "sparsest"
    )
    table = spec_table(
        "length", "full attention", "fastest", "density", "attention", "sparsest", "density", "attention"
    )
    for row in budget_table(records).to_dict("records"):
        table.add_row(length_label(row["seq_len"]), _percent(row["full_accuracy"]), *cheapest_cells(row))
    console.print(table)
    _print_backends(_ordered(records), console)
    print_failed(summary, console)


def _print_backends(rows: pd.DataFrame, console: Console) -> None:
    ranges = _ranges(rows)
    far = ", and the share at distances from so many tokens to the next column's" if ranges else ""
    console.print(f"\nShare of answers that are right, its 95% interval{far}")
    columns = [f"{length_label(start)}+" for start in ranges] or ["agreement"]
    table = spec_table("length", "backend", "right", "interval", "log-prob", *columns, "density", "attention")
    for seq_len, of_length in by_length(rows):
        measured = of_length[of_length["status"] == "ok"].to_dict("records")
        if measured:
            cells = _accuracy_cells(measured[0], ranges, "full_")
            table.add_row(length_label(seq_len), Text(FULL, style="dim"), *cells)
        for i, row in enumerate(of_length.to_dict("records")):
            is_ok = row["status"] == "ok"
            table.add_row(
                length_label(seq_len) if i == 0 and not measured else "",
                backend_cell(row),
                *(_accuracy_cells(row, ranges, "") if is_ok else [""] * (3 + len(ranges))),
                *([] if ranges else [_percent(row["agreement"])]),
                number(row["density"], ".3f"),
                number(row["attention_ms"], ",.0f", " ms"),
            )
        table.add_section()
    console.print(table)


def _accuracy_cells(row: dict[Hashable, Any], ranges: list[int], prefix: str) -> list[str]:
    """Share that is right, its interval, the log-probability of an answer, and the shares by range of distance."""
    low, high = (100 * row[f"{prefix}accuracy_{end}"] for end in ("low", "high"))
    shares = []
    for start in ranges:
        inside = [start <= edge < start * 2**_RANGE_OCTAVES for edge in row["distance_bins"]]
        asked, right = (
            sum(count for count, is_inside in zip(row[field], inside, strict=True) if is_inside)
            for field in ("answers_by_distance", f"{prefix}correct_by_distance")
        )
        shares.append(f"{right / asked:.0%}" if asked else "")
    nats = number(row[f"{prefix}answer_log_prob_nats"], ".2f")
    return [_percent(row[f"{prefix}accuracy"]), f"{low:.0f}\N{EN DASH}{high:.0f}%", nats, *shares]


def _ranges(rows: pd.DataFrame) -> list[int]:
    """Where the ranges of distance begin that the table has columns for."""
    if "distance_bins" not in rows:
        return []
    edges = [edge for edges in rows.loc[rows["status"] == "ok", "distance_bins"] for edge in edges]
    step = 2**_RANGE_OCTAVES
    return sorted({step ** (int(math.log2(edge)) // _RANGE_OCTAVES) for edge in edges})


def _ordered(records: pd.DataFrame) -> pd.DataFrame:
    frame = records.reindex(columns=list(dict.fromkeys([*SUMMARY, *records.columns])))
    order = list(styles(frame["backend"]))
    rank = frame["backend"].map(order.index)
    return frame.assign(rank=rank).sort_values(["seq_len", "rank"], kind="stable").reset_index(drop=True)


def _percent(share: float | None) -> str:
    return number(None if share is None or pd.isna(share) else 100 * share, ".1f", "%")


# Figures ----------------------------------------------------------------------------------------------------


def draw_all(records: pd.DataFrame, out: Path) -> list[Path]:
    """Draw accuracy against distance or, where there is none, length, as PNG (200 dpi) and PDF; returns the paths.

    Where nothing was measured there is nothing to draw, and no path.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows, style = records[records["status"] == "ok"], styles(records["backend"])
    if not len(rows):
        return []
    name, draw = "accuracy_vs_length", _length_figure
    if "distance_bins" in rows:
        name, draw = "accuracy_vs_distance", _distance_figure
    with mpl.rc_context(RC):
        return save_figure(draw(rows, style), out / f"{rows['task'].iloc[0]}_{name}")


def _distance_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    """A panel a length, the longest three at most; full attention's line lies above all others."""
    lengths = sorted(rows["seq_len"].unique())[-_MOST_PANELS:]
    shown = rows[rows["seq_len"].isin(lengths)]
    figure = Figure(figsize=(2.4 * len(lengths) + 2.4, 2.9), layout="constrained")
    axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    names = [name for name, _ in drawn(shown, style)]
    shift = {name: ((i + 0.5) / len(names) - 0.5) * _SPREAD_OCTAVES for i, name in enumerate(names)}
    for ax, seq_len in zip(axes, lengths, strict=True):
        of_length = shown[shown["seq_len"] == seq_len]
        first = of_length.iloc[0]
        _draw_by_distance(ax, first, "full_correct_by_distance", _FULL_LOOK)
        for name, look in drawn(of_length, style):
            row = of_length[of_length["backend"] == name].iloc[0]
            _draw_by_distance(ax, row, "correct_by_distance", asdict(look), shift[name])
        edges = [*first["distance_bins"], 2 * first["distance_bins"][-1]]
        ax.set(xscale="log", xlim=(edges[0], edges[-1]), ylim=(-0.02, 1.02))
        ax.set_xticks(edges[::2], [length_label(edge) for edge in edges[::2]])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        if len(lengths) > 1:
            ax.set_title(f"{length_label(seq_len)} tokens")
    axes[0].set_ylabel("answers that are right")
    figure.supxlabel("distance from answer to question (tokens)", fontsize=mpl.rcParams["axes.labelsize"])
    finish(figure, shown, style, Line2D([], [], **_FULL_LOOK))
    return figure


def _draw_by_distance(ax: Axes, row: pd.Series, field: str, look: dict[str, Any], shift: float = 0.0) -> None:
    """A line through the middles of the bins, ``shift`` octaves to the right, and bars that others leave visible."""
    middles = 2 ** (0.5 + shift) * np.asarray(row["distance_bins"])
    pairs = list(zip(row[field], row["answers_by_distance"], strict=True))
    low, high = zip(*(wilson(right, asked) for right, asked in pairs), strict=True)
    ax.vlines(middles, low, high, color=look["color"], linewidth=0.8, zorder=look.get("zorder", 2))
    ax.plot(middles, [right / asked for right, asked in pairs], clip_on=False, **look)


def _length_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    figure = Figure(figsize=(7.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = np.sort(rows["seq_len"].unique())
    full = rows.groupby("seq_len").first()
    _draw_by_length(left, lengths, full, "full_accuracy", _FULL_LOOK)
    right.axhline(0, color=GREY, linewidth=1, linestyle=(0, (4, 2)), zorder=0)
    for name, look in drawn(rows, style):
        of_backend = rows[rows["backend"] == name].set_index("seq_len").reindex(lengths)
        _draw_by_length(left, lengths, of_backend, "accuracy", asdict(look))
        right.plot(lengths, of_backend["excess_loss_nats"], color=look.color, marker=look.marker, clip_on=False)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="sequence length (tokens)", xlim=(lengths[0] / 2**0.5, lengths[-1] * 2**0.5))
        ax.set_xticks(lengths, [length_label(seq_len) for seq_len in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.set_ylabel("masked tokens that are right")
    right.set_ylabel("loss above full attention's (nats)")
    finish(figure, rows, style, Line2D([], [], **_FULL_LOOK))
    return figure


def _draw_by_length(ax: Axes, lengths: np.ndarray, rows: pd.DataFrame, field: str, look: dict[str, Any]) -> None:
    low, high = (rows[f"{field}_{end}"].astype(float) for end in ("low", "high"))
    ax.fill_between(lengths, low, high, color=look["color"], alpha=0.12, linewidth=0)
    ax.plot(lengths, rows[field], clip_on=False, **look)
