"""Tables and figures from the records of an error study: what each backend gets wrong, where, and how surely.

The error of a backend at a length is the mean over layers and heads, and over texts the geometric mean; its interval
(95%) is that of Student's t over the texts, so it holds for texts like these. Backends that differ in numbers alone are
a ladder, joined by a line in figures.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.special import stdtrit

import effattn
from effattn.bench.figures import RC, add_title, length_label, log_axis, lone_point, save_figure, styles
from effattn.bench.words import broken, family, folded, number

CONDITIONS = ("model", "dtype", "device", "machine")
MEANS = ("rel_l2", "rel_l1", "rmse", "cosine", "recall", "oracle_rel_l2", "approximation_rel_l2")
GRADIENTS = ("grad_query_rel_l2", "grad_key_rel_l2", "grad_value_rel_l2")
SUMMARY = (
    *CONDITIONS, "seq_len", "backend", "texts", "layers", "grad_layers", "heads", "error_rows", "density",
    "rel_l2", "rel_l2_low", "rel_l2_high", "oracle_rel_l2", "approximation_rel_l2", "implementation_rel_l2",
    "rel_l1", "rmse", "cosine", "recall", "worst_head_rel_l2", "worst_row_rel_l2", *GRADIENTS, "status", "reason",
)  # fmt: skip
CAPTIONS = {
    "error_vs_density": (
        "Relative L2 error of the output against the share of the allowed pairs that a backend attends to; mean over "
        "layers and heads, interval over texts. Dashed: as many keys, those with the largest weights."
    ),
    "error_by_head": "Relative L2 error of each layer and head at the longest length, mean over texts.",
    "error_vs_position": (
        "Relative L2 error by position at the longest length: of sixteenths of the text, median over layers, mean over "
        "texts."
    ),
}

_EXACT = 1e-4  # relative L2 error: below is rounding
_GREY = "#666666"
_PANEL_CHARACTERS = 44  # on a panel of a layer and head figure
_DASHES = (0, (4, 2))


def summary_table(records: pd.DataFrame) -> pd.DataFrame:
    """A row a length and backend with the columns of ``SUMMARY``, by length, ladder, then density.

    ``worst_head_rel_l2`` and ``worst_row_rel_l2`` are the largest of any text, layer and head (and row);
    ``implementation_rel_l2`` is the largest of any layer; the other measures are means as the module says. Columns that
    were not measured are empty.
    """
    table = pd.DataFrame([_summary(rows) for _, rows in records.groupby(["seq_len", "backend"])], columns=list(SUMMARY))
    order = list(styles(map(ladder, table["backend"])))
    rank = table["backend"].map(lambda spec: order.index(ladder(spec)))
    return table.assign(rank=rank).sort_values(["seq_len", "rank", "density"], kind="stable", ignore_index=True)[
        list(SUMMARY)
    ]


def _summary(records: pd.DataFrame) -> dict[str, Any]:
    first = records.iloc[0]
    summary: dict[str, Any] = {name: first[name] for name in (*CONDITIONS, "seq_len", "backend", "error_rows")}
    summary |= {"texts": records["text"].nunique(), "layers": records["layer"].nunique()}
    summary["grad_layers"] = records.loc[records["gradients"], "layer"].nunique()
    failed, ok = records[records["status"] != "ok"], records[records["status"] == "ok"]
    if len(failed):
        summary |= {"status": failed["status"].iloc[0], "reason": failed["reason"].iloc[0]}
        return summary
    summary |= {"status": "ok", "reason": None, "heads": len(first["rel_l2_by_head"])}
    summary["implementation_rel_l2"] = _of(ok, "implementation_rel_l2").max()
    summary["worst_head_rel_l2"] = max(map(max, ok["rel_l2_by_head"]))
    summary["worst_row_rel_l2"] = _of(ok, "worst_row_rel_l2_by_head").map(max).max()
    summary["density"] = _of(ok, "density").mean()
    for name in (*MEANS, *GRADIENTS):
        means = np.array([np.mean(np.stack(list(rows))) for rows in _by_text(ok, f"{name}_by_head")])
        middle, low, high = text_interval(means)
        summary[name] = middle
        if name == "rel_l2":
            summary |= {"rel_l2_low": low, "rel_l2_high": high}
    return summary


def text_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The geometric mean of positive values, one a text, and its limits (95%, Student's t of their logarithms).

    The limits are NaN for a single text; where a value is not positive the mean is arithmetic and has no limits.
    """
    if not len(values) or not (values > 0).all():
        return (float(values.mean()) if len(values) else math.nan), math.nan, math.nan
    logs = np.log(values)
    middle = float(np.exp(logs.mean()))
    if len(values) == 1:
        return middle, math.nan, math.nan
    reach = float(np.exp(stdtrit(len(values) - 1, 0.975) * logs.std(ddof=1) / len(values) ** 0.5))
    return middle, middle / reach, middle * reach


def ladder(spec: str) -> str:
    """The spec without its numbers: what ``sliding_window(left=64)`` and ``sliding_window(left=256)`` share."""
    backend = effattn.get(spec)
    name, _, fields = spec.removesuffix(")").partition("(")
    numbers = {
        name for name, value in vars(backend).items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    kept = [part for part in _fields(fields) if part.partition("=")[0] not in numbers]
    return f"{name}({', '.join(kept)})" if kept else name


def _fields(fields: str) -> list[str]:
    """``"a=1, b=(2, 3)"`` as ``["a=1", "b=(2, 3)"]``."""
    parts: list[str] = []
    for piece in fields.split(", ") if fields else ():
        if parts and "=" not in piece:
            parts[-1] += f", {piece}"
        else:
            parts.append(piece)
    return parts


def _of(records: pd.DataFrame, column: str) -> pd.Series:
    """A column without what was not measured; empty where it is not there."""
    return records[column].dropna() if column in records else pd.Series(dtype=float)


def _by_text(records: pd.DataFrame, column: str) -> Iterator[pd.Series]:
    for _, rows in records.groupby("text", sort=False):
        values = _of(rows, column)
        if len(values):
            yield values


# Tables -----------------------------------------------------------------------------------------------------


def print_tables(records: pd.DataFrame, console: Console) -> None:
    """Print a row a length and backend, then what failed."""
    summary = summary_table(records)
    first, texts = summary.iloc[0], ", ".join(records["text"].unique())
    layers = f"{first['layers']} layers"
    if 0 < first["grad_layers"] < first["layers"]:
        layers += f" (gradients in {first['grad_layers']})"
    console.print(Text("\n" + " · ".join((first["model"], f"reading {texts}", layers, first["dtype"])), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    headings = ("length", "backend", "density", "rel L2", "over texts", "oracle", "recall", "worst head")
    for heading in (*headings, "gradients of q, k, v"):
        table.add_column(heading, justify="left" if heading == "backend" else "right", no_wrap=True)
    ok = summary[summary["status"] == "ok"]
    for seq_len in sorted(ok["seq_len"].unique()):
        rows = ok[ok["seq_len"] == seq_len]
        for i, row in enumerate(rows.to_dict("records")):
            interval = f"{row['rel_l2_low']:.2f} to {row['rel_l2_high']:.2f}"
            table.add_row(
                length_label(seq_len) if i == 0 else "",
                broken(row["backend"]),
                number(row["density"], ".3f"),
                _error(row["rel_l2"]),
                "" if pd.isna(row["rel_l2_low"]) or row["rel_l2"] < _EXACT else interval,
                _error(row["oracle_rel_l2"]),
                number(row["recall"], ".3f"),
                _error(row["worst_head_rel_l2"]),
                _gradients([row[name] for name in GRADIENTS]),
            )
        table.add_section()
    console.print(table)
    for row in summary[summary["status"] != "ok"].to_dict("records"):
        line = Text(str(row["backend"])).append(f" {str(row['status']).replace('_', ' ')}", style="red")
        console.print(line.append(f" at {length_label(row['seq_len'])}: {row['reason']}", style=""))


def _gradients(values: Sequence[float]) -> str:
    """Those of query, key and value in one cell."""
    if all(pd.isna(value) or value < _EXACT for value in values):
        return "" if pd.isna(values[0]) else "exact"
    return " ".join(f"{value:.2f}" for value in values)


def _error(value: float) -> str:
    return "" if pd.isna(value) else ("exact" if value < _EXACT else f"{value:.3f}")


# Figures ----------------------------------------------------------------------------------------------------


def draw_all(records: pd.DataFrame, out: Path) -> list[Path]:
    """Draw error against density, by layer and head and by position, as PNG (200 dpi) and PDF; returns their paths.

    Exact backends have no place on a logarithmic axis of errors and are left out, and those that choose no keys have no
    density; where nothing is left to draw there is no figure.
    """
    out.mkdir(parents=True, exist_ok=True)
    ok = records[records["status"] == "ok"]
    inexact = [name for name, rows in ok.groupby("backend", sort=False) if _of(rows, "rel_l2").max() > _EXACT]
    rows = ok[ok["backend"].isin(inexact)]
    if not len(rows):
        return []
    longest = rows[rows["seq_len"] == rows["seq_len"].max()]
    with mpl.rc_context(RC):
        figures = {"error_vs_density": _density_figure(rows)} if len(_of(rows, "density")) else {}
        figures |= {"error_by_head": _head_figure(longest), "error_vs_position": _position_figure(longest)}
        return [path for name, figure in figures.items() for path in save_figure(figure, out / name)]


def _density_figure(rows: pd.DataFrame) -> Figure:
    """A panel a length; a line a ladder."""
    summary = summary_table(rows)
    summary = summary[summary["density"].notna()]
    lengths = sorted(summary["seq_len"].unique())
    families = _families(rows[rows["backend"].isin(summary["backend"])])
    look = styles(families)
    figure = Figure(figsize=(2.5 + 2.6 * len(lengths), 3.0), layout="constrained")
    axes = list(figure.subplots(1, len(lengths), sharey=True, squeeze=False).flat)
    for ax, seq_len in zip(axes, lengths, strict=True):
        at_length = summary[summary["seq_len"] == seq_len].sort_values("density")
        for name, style in look.items():
            steps = at_length[at_length["backend"].isin(families[name])]
            floor = {"color": style.color, "linewidth": 0.9, "linestyle": _DASHES, "zorder": 0}
            ax.plot(steps["density"], steps["oracle_rel_l2"], **floor, **lone_point(steps, style.color))
            ax.plot(steps["density"], steps["rel_l2"], color=style.color, marker=style.marker, clip_on=False)
            ax.vlines(steps["density"], steps["rel_l2_low"], steps["rel_l2_high"], color=style.color, linewidth=0.8)
        ax.set(xscale="log", yscale="log", title=f"{length_label(seq_len)} tokens", xlabel="density")
    axes[0].set_ylabel("error against full attention\n(relative L2)")
    log_axis([ax.yaxis for ax in axes], 10)
    for ax in axes:
        log_axis([ax.xaxis], 10, count=5)
    add_title(figure, _title(rows))
    lines = [Line2D([], [], color=style.color, marker=style.marker) for style in look.values()]
    lines.append(Line2D([], [], color=_GREY, linewidth=1, linestyle=_DASHES))
    figure.legend(
        lines, [*map(broken, look), "as many keys, the\nlargest weights"], loc="outside right center", fontsize=7
    )
    return figure


def _head_figure(rows: pd.DataFrame) -> Figure:
    """A row a ladder, a panel a step of it: layers to the right, heads downwards."""
    families = _families(rows)
    means = summary_table(rows).set_index("backend")["rel_l2"]
    grids = {spec: _grid(rows[rows["backend"] == spec]) for own in families.values() for spec in own}
    values = np.concatenate([grid.to_numpy().ravel() for grid in grids.values()])
    norm = LogNorm(max(np.nanquantile(values, 0.02), 1e-3), np.nanmax(values))
    colors = sns.color_palette("rocket_r", as_cmap=True)
    columns = max(map(len, families.values()))
    heads, layers = next(iter(grids.values())).shape
    headings = [folded(heading, _PANEL_CHARACTERS) for heading in families]
    height = 0.5 + len(families) * (0.45 + min(0.085 * heads, 2)) + 0.1 * sum(1 + each.count("\n") for each in headings)
    figure = Figure(figsize=(2.5 * columns + 0.8, height), layout="constrained")
    axes = figure.subplots(len(families), columns, squeeze=False)
    for of_row, heading, own in zip(axes, headings, families.values(), strict=True):
        for ax, (spec, differing) in zip(of_row, own.items(), strict=False):
            grid = grids[spec]
            image = ax.imshow(grid.to_numpy(), aspect="auto", cmap=colors, norm=norm, interpolation="nearest")
            title = folded(f"{differing}: mean {_error(means[spec])}".removeprefix(": "), _PANEL_CHARACTERS)
            ax.set_title(f"{heading}\n{title}" if ax is of_row[0] else title, loc="left", fontsize=7)
            ax.spines[["top", "right"]].set_visible(True)
            ax.set_xticks(range(0, layers, max(layers // 6, 1)), grid.columns[:: max(layers // 6, 1)])
            ax.set_yticks(range(0, heads, max(heads // 3, 1)))
            ax.tick_params(labelsize=6.5, length=2)
            ax.set_xlabel("layer", fontsize=7, labelpad=1)
        of_row[0].set_ylabel("head", fontsize=7)
        for ax in of_row[len(own) :]:
            ax.set_axis_off()
    bar = figure.colorbar(image, ax=axes, aspect=12 * len(families), pad=0.01, label="relative L2")
    bar.ax.tick_params(labelsize=6.5)
    bar.ax.yaxis.label.set_fontsize(7)
    log_axis([bar.ax.yaxis], 10, count=8)
    add_title(figure, _title(rows))
    return figure


def _families(rows: pd.DataFrame) -> dict[str, dict[str, str]]:
    """A ladder by what its backends share, its backends by density, and of each the fields that they do not share."""
    density = rows.groupby("backend")["density"].mean() if "density" in rows else pd.Series(dtype=float)
    steps: dict[str, list[str]] = {}
    for spec in sorted(styles(rows["backend"]), key=lambda spec: density.get(spec, 0.0)):
        steps.setdefault(ladder(spec), []).append(spec)
    return dict(family(steps[name]) for name in styles(steps))


def _grid(rows: pd.DataFrame) -> pd.DataFrame:
    """Heads x layers, the geometric mean over texts."""
    logs = {layer: np.log(np.stack(list(each["rel_l2_by_head"])).clip(1e-12)) for layer, each in rows.groupby("layer")}
    return pd.DataFrame({layer: np.exp(each.mean(0)) for layer, each in logs.items()})


def _position_figure(rows: pd.DataFrame) -> Figure:
    """A panel a ladder, a line a step. Where a backend is exact there is no line."""
    families, look = _families(rows), styles(rows["backend"])
    columns = min(len(families), 4)
    lines = math.ceil(len(families) / columns)
    figure = Figure(figsize=(2.25 * columns + 0.4, 0.4 + 2.5 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, sharey=True, sharex=True, squeeze=False).flat)
    seq_len = int(rows["seq_len"].iloc[0])
    for ax, (heading, own) in zip(axes, families.items(), strict=False):
        for spec, differing in own.items():
            of_texts = [
                np.median(np.array(of_text["rel_l2_by_position"].to_list(), dtype=float), axis=0)
                for _, of_text in rows[rows["backend"] == spec].groupby("text")
            ]
            errors = np.exp(np.log(np.clip(of_texts, 1e-12, None)).mean(0))
            middle = (np.arange(len(errors)) + 0.5) * seq_len / len(errors)
            shown = np.where(errors > _EXACT, errors, np.nan)
            ax.plot(middle, shown, color=look[spec].color, marker=look[spec].marker, label=differing)
        ax.set(yscale="log", xlim=(0, seq_len))
        ax.set_title(broken(heading), loc="left", fontsize=7)
        if len(own) > 1:
            ax.legend(fontsize=6.5, loc="lower right")
        ax.set_xticks([i * seq_len // 4 for i in range(5)], [length_label(i * seq_len // 4) for i in range(5)])
        ax.tick_params(labelsize=7)
    for ax in axes[len(families) :]:
        ax.set_axis_off()
    log_axis([ax.yaxis for ax in axes[: len(families)]], 10)
    axes[0].set_ylim(bottom=axes[0].get_ylim()[0] / 1.6)  # room for the legends
    figure.supxlabel("position (tokens)", fontsize=8)
    axes[0].set_ylabel("error against full attention\n(relative L2)")
    add_title(figure, _title(rows))
    return figure


def _title(rows: pd.DataFrame) -> str:
    """What was measured."""
    first = rows.iloc[0]
    words = [f"{first['model']} reading {', '.join(rows['text'].unique())}", first["dtype"], first["machine"]]
    if rows["seq_len"].nunique() == 1:
        words.insert(1, f"{first['seq_len']:,} tokens")
    return " · ".join(words)
