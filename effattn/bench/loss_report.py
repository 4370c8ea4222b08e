"""Tables and figures from the records of ``evaluate``: what each backend does to a language model's loss.

Looks of backends are those of every other figure. A backend that failed at a length has no point there.
"""

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.console import Console
from rich.text import Text

from effattn.bench.figures import RC, Style, add_title, length_label, lone_point, save_figure, styles
from effattn.bench.words import broken, number, spec_table

BUDGETS = (0.01, 0.05, 0.2)  # of perplexity above full attention's
SUMMARY = (
    "model", "text", "layers", "dtype", "device", "machine", "seq_len", "backend",
    "perplexity", "full_perplexity", "perplexity_ratio", "excess_loss_nats", "excess_loss_nats_se",
    "bits_per_byte", "agreement", "kl_nats", "density", "attention_ms", "forward_ms", "impl", "status", "reason",
)  # fmt: skip
CAPTIONS = {
    "perplexity_vs_length": (
        "Perplexity on the first tokens of a text, and how far it lies above that of full attention (dashed: 1%, 5% "
        "and 20%). Backends that are no worse than 0.01% stand at the bottom."
    ),
    "loss_vs_position": (
        "Loss by position in the longest text, running means over a sixteenth of it, and its excess over full "
        "attention's."
    ),
}

FULL = "the model as loaded"
GREY = "#666666"
_FULL_LOOK: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": (0, (4, 2))}
_NARROW = 30  # characters of a spec where two stand side by side
_LEAST_EXCESS = 1e-4
_POSITION_BINS = 16


def summary_table(records: pd.DataFrame) -> pd.DataFrame:
    """A row per record with the columns of ``SUMMARY``, by length and then in the order of backends everywhere."""
    frame = records.reindex(columns=list(dict.fromkeys([*SUMMARY, *records.columns])))
    order = list(styles(frame["backend"]))
    rank = frame["backend"].map(order.index)
    return frame.assign(rank=rank).sort_values(["seq_len", "rank"], kind="stable")[list(SUMMARY)].reset_index(drop=True)


def budget_table(records: pd.DataFrame, budgets: Sequence[float] = BUDGETS) -> pd.DataFrame:
    """Which backend keeps perplexity within each budget of full attention's: the fastest, and the sparsest.

    Returns:
        A row per length and budget: ``seq_len, budget``, and for both kinds ``_backend, _perplexity_ratio, _density``
        and ``_attention_ms``; empty where none does. Of equals the first in the order of ``summary_table`` counts.
    """
    summary = summary_table(records)
    rows = []
    for seq_len, at_length in by_length(summary):
        for budget in budgets:
            within = at_length[(at_length["status"] == "ok") & (at_length["perplexity_ratio"] <= 1 + budget)]
            rows.append({"seq_len": seq_len, "budget": budget, **cheapest(within, "perplexity_ratio")})
    return pd.DataFrame(rows)


def cheapest(rows: pd.DataFrame, measure: str) -> dict[str, object]:
    """Of the rows of one length the fastest and the sparsest, each with its ``measure``, density and time."""
    found: dict[str, object] = {}
    for kind, cost in (("fastest", "attention_ms"), ("sparsest", "density")):
        best = rows[rows[cost].notna()].sort_values(cost, kind="stable").head(1).to_dict("records")
        for column in ("backend", measure, "density", "attention_ms"):
            found[f"{kind}_{column}"] = best[0][column] if best else None
    return found


def print_tables(records: pd.DataFrame, console: Console) -> None:
    """Print what keeps perplexity within each budget, then every backend at each length, then what failed."""
    summary = summary_table(records)
    print_conditions(summary, "", console)
    _print_budgets(budget_table(records), console)
    console.print()
    _print_backends(summary, console)
    print_failed(summary, console)


def print_conditions(summary: pd.DataFrame, task: str, console: Console) -> None:
    """Under what conditions all rows were measured, in a line that begins with what was asked."""
    first = summary.iloc[0]
    layers = "all layers" if first["layers"] is None else f"layers {', '.join(map(str, first['layers']))}"
    conditions = (*_model_and_text(first, task), layers, first["dtype"], first["device"], first["machine"])
    console.print(Text("\n" + " · ".join(conditions), style="bold"))


def print_failed(summary: pd.DataFrame, console: Console) -> None:
    """What failed, where and why."""
    failed = summary[summary["status"] != "ok"]
    for (backend, status, reason), rows in failed.groupby(["backend", "status", "reason"], sort=False):
        line = Text(str(backend)).append(f" {str(status).replace('_', ' ')}", style="red")
        console.print(line.append(f" at {', '.join(map(length_label, rows['seq_len']))}: {reason}", style=""))


def _print_budgets(budgets: pd.DataFrame, console: Console) -> None:
    console.print(
        "\nWhat keeps perplexity within a budget of full attention's: the fastest, and the one of fewest pairs"
    )
    table = spec_table("length", "within", "fastest", "density", "attention", "sparsest", "density", "attention")
    for seq_len, rows in by_length(budgets):
        for i, row in enumerate(rows.to_dict("records")):
            cells = [length_label(seq_len) if i == 0 else "", f"{row['budget']:.0%}"]
            table.add_row(*cells, *cheapest_cells(row))
        table.add_section()
    console.print(table)


def cheapest_cells(row: dict[Hashable, Any]) -> list[str]:
    """What ``cheapest`` found as cells of a table: backend, density and time of the fastest and of the sparsest."""
    cells: list[str] = []
    for kind in ("fastest", "sparsest"):
        spec = row[f"{kind}_backend"]
        if kind == "sparsest" and spec == row["fastest_backend"]:
            return [*cells, "the same"]
        if kind == "fastest" and pd.isna(spec):
            return ["none"]
        cells += [
            "none" if pd.isna(spec) else broken(spec, _NARROW),
            number(row[f"{kind}_density"], ".3f"),
            number(row[f"{kind}_attention_ms"], ",.0f", " ms"),
        ]
    return cells


def _print_backends(summary: pd.DataFrame, console: Console) -> None:
    table = spec_table(
        "length", "backend", "perplexity", "", "bits/byte", "agreement", "KL", "density", "attention", "body"
    )
    for seq_len, rows in by_length(summary):
        full = rows["full_perplexity"].dropna()
        if len(full):
            table.add_row(length_label(seq_len), Text(FULL, style="dim"), f"{full.iloc[0]:.2f}")
        for i, row in enumerate(rows.to_dict("records")):
            excess = None if pd.isna(row["perplexity_ratio"]) else 100 * (row["perplexity_ratio"] - 1)
            table.add_row(
                length_label(seq_len) if i == 0 and not len(full) else "",
                backend_cell(row),
                number(row["perplexity"], ".2f"),
                number(excess, "+.1f" if excess is not None and abs(excess) < 100 else "+.0f", "%"),
                number(row["bits_per_byte"], ".3f"),
                number(None if pd.isna(row["agreement"]) else 100 * row["agreement"], ".1f", "%"),
                number(row["kl_nats"], ".3f"),
                number(row["density"], ".3f"),
                number(row["attention_ms"], ",.0f", " ms"),
                number(row["forward_ms"], ",.0f", " ms"),
            )
        table.add_section()
    console.print(table)


def backend_cell(row: dict[Hashable, Any]) -> Text:
    """A backend's spec, and how it failed where it did."""
    status = "" if row["status"] == "ok" else f" {row['status']}".replace("_", " ")
    return Text(broken(row["backend"])).append(status, style="red")


def by_length(rows: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    """Each length, ascending, and its rows."""
    for seq_len in sorted(rows["seq_len"].unique()):
        yield int(seq_len), rows[rows["seq_len"] == seq_len]


# Figures ----------------------------------------------------------------------------------------------------


def draw_all(records: pd.DataFrame, out: Path) -> list[Path]:
    """Draw perplexity against length and loss against position, as PNG (200 dpi) and PDF; returns their paths.

    Where nothing was measured there is nothing to draw, and no path.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows, style = records[records["status"] == "ok"], styles(records["backend"])
    if not len(rows):
        return []
    with mpl.rc_context(RC):
        figures = {"perplexity_vs_length": _perplexity_figure, "loss_vs_position": _position_figure}
        return [path for name, draw in figures.items() for path in save_figure(draw(rows, style), out / name)]


def _perplexity_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    figure = Figure(figsize=(7.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = rows.groupby("seq_len")["full_perplexity"].first()
    lengths = full.index.to_numpy()
    left.plot(lengths, full, **_FULL_LOOK, **lone_point(lengths, GREY), zorder=5)
    for name, look in drawn(rows, style):
        of_backend = rows[rows["backend"] == name].set_index("seq_len").reindex(lengths)
        excess = (of_backend["perplexity_ratio"] - 1).clip(lower=_LEAST_EXCESS)
        for ax, values in ((left, of_backend["perplexity"]), (right, excess)):
            ax.plot(lengths, values, color=look.color, marker=look.marker, clip_on=False)
    for budget in BUDGETS:
        right.axhline(budget, color=GREY, linewidth=0.6, linestyle=(0, (1, 2)), zorder=0)
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="sequence length (tokens)")
        ax.set_xticks(lengths, [length_label(seq_len) for seq_len in lengths])
        ax.set_xlim(lengths[0] / 2**0.5, lengths[-1] * 2**0.5)
        ax.xaxis.set_minor_locator(NullLocator())
    _plain_log_axis(left)
    right.set_ylim(bottom=_LEAST_EXCESS)
    right.yaxis.set_major_formatter(FuncFormatter(_percent))
    left.set_ylabel("perplexity")
    right.set_ylabel("perplexity above full attention's")
    finish(figure, rows, style)
    return figure


def _position_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    longest = rows[rows["seq_len"] == rows["seq_len"].max()]
    block, num_blocks = longest["position_block"].iloc[0], len(longest["loss_by_position"].iloc[0])
    per_bin = max(num_blocks // _POSITION_BINS, 1)
    positions = _binned(np.arange(num_blocks) + 0.5, per_bin) * block
    figure = Figure(figsize=(7.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = np.asarray(longest["full_loss_by_position"].iloc[0])
    for name, look in drawn(longest, style):
        loss = np.asarray(longest.loc[longest["backend"] == name, "loss_by_position"].iloc[0])
        left.plot(positions, _binned(loss, per_bin), color=look.color, marker=look.marker)
        right.plot(positions, _binned(loss - full, per_bin), color=look.color, marker=look.marker)
    left.plot(positions, _binned(full, per_bin), **_FULL_LOOK, **lone_point(positions, GREY), zorder=5)
    right.axhline(0, **_FULL_LOOK, zorder=0)
    for ax in (left, right):
        ax.set(xlabel="position in the text (tokens)", xlim=(0, num_blocks * block))
    left.set_ylabel("loss (nats per token)")
    right.set_ylabel("loss above full attention's (nats)")
    finish(figure, longest, style)
    return figure


def drawn(rows: pd.DataFrame, style: dict[str, Style]) -> list[tuple[str, Style]]:
    """The backends that there are rows of, and their looks."""
    present = set(rows["backend"])
    return [(name, look) for name, look in style.items() if name in present]


def _binned(values: np.ndarray, size: int) -> np.ndarray:
    """Means over ``size`` values each; a last one of fewer is left out where there are others."""
    whole = len(values) // size * size
    return values[:whole].reshape(-1, size).mean(1)


def finish(figure: Figure, rows: pd.DataFrame, style: dict[str, Style], full: Line2D | None = None) -> None:
    """Title and legend, in which full attention comes first."""
    first = rows.iloc[0]
    task = first.get("task")  # of the oldest records none
    asked = task if isinstance(task, str) and task != "loss" else ""
    words = [*_model_and_text(first, asked), first["dtype"], first["machine"]]
    if rows["seq_len"].nunique() == 1:
        words.append(f"{first['seq_len']:,} tokens")
    add_title(figure, " · ".join(words))
    lines = [full or Line2D([], [], **_FULL_LOOK)]
    labels = ["full attention"]
    for name, look in drawn(rows, style):
        lines.append(Line2D([], [], color=look.color, marker=look.marker))
        labels.append(broken(name))
    figure.legend(lines, labels, loc="outside right center", fontsize=7)


def _model_and_text(row: pd.Series, task: str) -> list[str]:
    reading = [] if pd.isna(row["text"]) else [f"reading {row['text']}"]
    return [*([task] if task else []), row["model"], *reading]


def _plain_log_axis(ax: Axes) -> None:
    """Plain numbers at 1, 2, 3, 5 of each decade that the data reach."""
    low, high = ax.get_ylim()
    ticks = [m * 10.0**e for e in range(-2, 7) for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


def _percent(value: float, _: int) -> str:
    return f"≤ {value:.2%}" if value <= _LEAST_EXCESS else f"{100 * value:g}%"
