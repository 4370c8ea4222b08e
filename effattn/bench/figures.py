"""Figures from records: time, memory and error against length, and error against time.

Every figure shows one study on one machine under one set of conditions (dtype, device, mask, input, shape);
where the records hold several, each set gets files of its own, named by what differs. A cell that failed
leaves a gap with an x at the top edge, a value that a logarithmic axis cannot show (an exact backend's
error, 0) is named in the legend, and a backend has the same colour in every figure of every study. Lines
are drawn with matplotlib, since seaborn's own line plots drop missing points and join across the gap. The
files hold no time stamp: equal records give equal bytes.
"""

import re
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from effattn.bench.words import broken, folded, on_lines

CONDITIONS = (
    "study", "machine", "input", "dtype", "mask", "device",
    "batch_size", "num_heads", "num_kv_heads", "head_dim",
)  # fmt: skip
PASSES = {"forward": "forward", "forward_backward": "forward + backward", "decode": "one decoding step"}
MEASURES = (
    "forward_ms_median", "forward_ms_p20", "forward_ms_p80",
    "backward_ms_median", "backward_ms_p20", "backward_ms_p80",
    "peak_memory_bytes", "density", "oracle_rel_l2",
    "implementation_rel_l2", "approximation_rel_l2", "total_rel_l2",
    "grad_implementation_rel_l2", "grad_approximation_rel_l2", "grad_total_rel_l2",
)  # fmt: skip
IDENTITY = (*CONDITIONS, "backend", "seq_len", "pass", "seed", "status", "reason", "impl")

CAPTIONS = {
    "time_vs_length": (
        "Time of one call: the median of the repeats, and the band from their 20th to their 80th percentile."
    ),
    "memory_vs_length": "Peak memory above what was allocated before the call.",
    "error_vs_length": (
        "Approximation error: dense attention over the keys that the backend chose, against full attention. "
        "Dashed: keeping as many keys, those with the largest weights."
    ),
    "implementation_error_vs_length": (
        "Implementation error: the backend against dense attention over the keys that it chose. "
        "Dashed: the machine epsilon of the dtype."
    ),
    "error_vs_time": (
        "What time buys: approximation error against the time of one call, at the shortest, a middle and the "
        "longest length. Exact backends stand in the strip below; thin lines carry their times upwards. Grey: the "
        "Pareto front, beside which nothing is both faster and closer to full attention."
    ),
}

# Okabe and Ito's palette, distinguishable with any colour vision. Known backends have a fixed place in it.
_KNOWN = {
    "full": ("#333333", "o"),
    "sdpa": ("#0072b2", "s"),
    "chunked": ("#56b4e9", "D"),
    "sliding_window": ("#d55e00", "^"),
    "lsh": ("#009e73", "v"),
    "xformers": ("#cc79a7", "<"),
    "flex": ("#e69f00", "p"),
}
# The others draw theirs by name from those of Paul Tol's muted palette that stay clear of the known ones.
_OTHER_COLORS = ("#332288", "#882255", "#44aa99", "#999933", "#aa4466", "#aa4499")
_MARKERS = ("o", "s", "D", "^", "v", "<", "p", ">", "h", "*")

RC = {
    **sns.axes_style("ticks"),
    **sns.plotting_context("paper", font_scale=0.9),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same letters on every machine
    "axes.linewidth": 0.8,
    "axes.titlesize": 8.5,
    "axes.xmargin": 0.08,
    "axes.ymargin": 0.08,
    "figure.titlesize": 9,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
_NOT_MEASURED = "not measured"
_GREY = "#666666"
_DASHES = (0, (4, 2))
_DASHED: dict[str, Any] = {"color": _GREY, "linewidth": 1, "linestyle": _DASHES}
_FRONT: dict[str, Any] = {"color": _GREY, "linewidth": 0.9}
_ROW_HEIGHT = 0.07  # of the axes: one row of failure marks at the top edge
_STRIP_HEIGHT = 0.08, 0.4  # of the axes: one exact backend below the error axis, and all at most
_TRADE_OFF_LENGTHS = 3
_LEGEND_LINE_INCHES = 0.15
_TITLE_CHARACTERS = 14  # an inch, at the size of titles
_TITLE_LINE_INCHES = 0.15


@dataclass(frozen=True)
class Style:
    """How one backend looks, everywhere."""

    color: tuple[float, float, float]
    marker: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a measure against length, with its band, its floor by backend and a level for all."""

    title: str
    rows: pd.DataFrame
    measure: str
    band: tuple[str, str] | None = None
    floor: str | None = None
    level: float | None = None

    def cells(self, zeros: str) -> pd.DataFrame:
        """Every cell of the panel with its `state`: empty where it is drawn, else why it cannot be."""
        value, status = self.rows[self.measure], self.rows["status"].map(lambda word: word.replace("_", " "))
        state = pd.Series("", index=self.rows.index).mask(value == 0, zeros)
        state = state.mask(value.isna(), _NOT_MEASURED).mask(status != "ok", status)
        return self.rows[["backend", "seq_len", "status"]].assign(panel=self.title, state=state)


def draw_all(records: pd.DataFrame, out: Path) -> list[Path]:
    """Draw every figure that the records allow, as PNG (200 dpi) and PDF.

    Args:
        records: one row per cell, with the fields of `records.jsonl`; fields and rows may be absent.
        out: the folder to write to; made when missing.

    Returns:
        The paths written, each PNG before its PDF. A figure without data is written too, and says why.
    """
    out.mkdir(parents=True, exist_ok=True)
    frame = tidy(records)
    style = styles(frame["backend"].dropna())
    figures: dict[str, Callable[[pd.DataFrame, dict[str, Style]], Figure]] = {
        "time_vs_length": _time_figure,
        "memory_vs_length": _memory_figure,
        "error_vs_length": _error_figure,
        "implementation_error_vs_length": _implementation_error_figure,
        "error_vs_time": _trade_off_figure,
    }
    paths = []
    with mpl.rc_context(RC):
        for suffix, rows in _by_conditions(frame):
            for name, draw in figures.items():
                paths += save_figure(draw(rows, style), out / f"{name}{suffix}")
    return paths


def caption(path: Path) -> str:
    """What the figure at `path`, one that `draw_all` wrote, shows."""
    return CAPTIONS[path.stem.partition("-")[0]]


def tidy(records: pd.DataFrame) -> pd.DataFrame:
    """Records as tables and figures read them.

    Every column of `IDENTITY` and `MEASURES` is there, empty where the records have none. Added are the
    time of the whole pass, `time_ms`, `time_ms_p20` and `time_ms_p80` (those of forward and backward summed
    where both were run), and `peak_memory_mib`. What a failed cell measured before it failed is left out:
    half a pass is no measurement.
    """
    frame = records.reindex(columns=list(dict.fromkeys([*records.columns, *IDENTITY, *MEASURES])))
    frame["status"] = frame["status"].astype(object).where(frame["status"].notna(), "no status")
    measures = frame[list(MEASURES)].astype(float)
    frame[list(MEASURES)] = measures.where(frame["status"] == "ok")
    both = frame["pass"] == "forward_backward"
    for part in ("_median", "_p20", "_p80"):
        forward, backward = frame[f"forward_ms{part}"], frame[f"backward_ms{part}"]
        frame[f"time_ms{part.removesuffix('_median')}"] = forward.mask(both, forward + backward)
    frame["peak_memory_mib"] = frame["peak_memory_bytes"] / 2**20
    return frame


def styles(backends: Iterable[str]) -> dict[str, Style]:
    """A look for each backend spec, in the order of legends and tables.

    The hue comes from the backend's name alone. Of several parameterisations of one backend the first keeps
    the full colour and the others grow lighter, each with a marker of its own.
    """
    specs: dict[str, list[str]] = {}
    for spec in sorted(set(backends), key=_backend_order):
        specs.setdefault(backend_name(spec), []).append(spec)
    return {
        spec: Style(_lighter(color, 0.5 * i / max(1, len(group) - 1)), _MARKERS[(first + i) % len(_MARKERS)])
        for name, group in specs.items()
        for color, first in [_look(name)]
        for i, spec in enumerate(group)
    }


def backend_name(spec: str) -> str:
    """The name in a spec string: `lsh` of `lsh(num_hashes=8)`."""
    return spec.partition("(")[0]


def passes(rows: pd.DataFrame) -> list[str]:
    """The passes that the rows hold, in the order in which they are shown."""
    present = rows["pass"].dropna().unique()
    return [name for name in PASSES if name in present] + sorted(set(present) - set(PASSES))


def pass_title(name: str) -> str:
    """`forward + backward` for `forward_backward`."""
    return PASSES.get(name, name)


def length_label(seq_len: float) -> str:
    """A length in the units of its axis: 512, 1k, 1.5k, 128k, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if seq_len >= size and seq_len % (size // 2) == 0:
            return f"{seq_len / size:g}{unit}"
    return f"{seq_len:g}"


def conditions_title(rows: pd.DataFrame) -> tuple[str, str]:
    """Two lines on rows of equal conditions: study, machine and input; then dtype, mask, device and shape."""
    known = {column: rows[column].iloc[0] for column in CONDITIONS if rows[column].notna().any()}
    words = {
        "input": "{} input", "mask": "{} mask", "batch_size": "batch {:g}", "num_heads": "{:g} heads",
        "num_kv_heads": "{:g} key/value heads", "head_dim": "head_dim {:g}",
    }  # fmt: skip

    def line(columns: tuple[str, ...]) -> str:
        said = [words.get(column, "{}").format(known[column]) for column in columns if column in known]
        return " · ".join(said).replace("none mask", "no mask")

    return line(CONDITIONS[:3]), line(CONDITIONS[3:])


def lone_point(values: Collection[Any], color: str | tuple[float, float, float]) -> dict[str, Any]:
    """The look of a line's points: a short dash where there is but one, of which no line can be seen."""
    dash = {"marker": "_", "markersize": 9, "markeredgecolor": color, "markeredgewidth": 1}
    return dash if len(values) == 1 else {}


def pareto_front(costs: Sequence[float], errors: Sequence[float]) -> list[bool]:
    """Which of some backends are beaten by none: by none that costs no more and errs less, or the other way around.

    Of backends that are equal in both the first counts; where a number is missing there is nothing to compare.
    """
    front, least = [False] * len(costs), np.inf
    known = [i for i in range(len(costs)) if np.isfinite(costs[i]) and np.isfinite(errors[i])]
    for i in sorted(known, key=lambda i: (costs[i], errors[i])):
        if errors[i] < least:
            front[i], least = True, errors[i]
    return front


def _by_conditions(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each set of conditions, with a file suffix naming those that differ among the sets."""
    varying = [column for column in CONDITIONS if frame[column].nunique(dropna=False) > 1]
    if not varying:
        yield "", frame
        return
    for values, rows in frame.groupby(varying, dropna=False, sort=True):
        parts = [
            f"{column}_{value}" if isinstance(value, (int, float)) else str(value)
            for column, value in zip(varying, values, strict=True)
        ]
        yield "-" + "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts), rows


def _time_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    band = ("time_ms_p20", "time_ms_p80")
    panels = [Panel(pass_title(p), rows[rows["pass"] == p], "time_ms", band=band) for p in passes(rows)]
    return _against_length(rows, panels, style, "time of one call (ms)")


def _memory_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = [Panel(pass_title(p), rows[rows["pass"] == p], "peak_memory_mib") for p in passes(rows)]
    return _against_length(rows, panels, style, "peak memory (MiB)", base=2)


def _error_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = _error_panels(rows, "approximation", floor="oracle_rel_l2")
    return _against_length(rows, panels, style, "approximation error\n(relative L2)", zeros="exact (error 0)")


def _implementation_error_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = _error_panels(rows, "implementation", level=_epsilon(rows["dtype"]))
    return _against_length(rows, panels, style, "implementation error\n(relative L2)")


def _error_panels(
    rows: pd.DataFrame, kind: str, *, floor: str | None = None, level: float | None = None
) -> list[Panel]:
    """The output's error from the pass that runs forward, the gradients' from the one that runs both ways."""
    panels = []
    for name in passes(rows):
        of_pass = rows[rows["pass"] == name]
        if name != "forward_backward" or "forward" not in set(rows["pass"]):
            title = "output of one decoding step" if name == "decode" else "output"
            panels.append(Panel(title, of_pass, f"{kind}_rel_l2", floor=floor, level=level))
        if name == "forward_backward":
            panels.append(Panel("gradients", of_pass, f"grad_{kind}_rel_l2", level=level))
    return panels


def _epsilon(dtypes: pd.Series) -> float | None:
    """The spacing of numbers at 1 in the dtype of a figure; None where the records do not name it."""
    import torch

    return torch.finfo(getattr(torch, dtypes.iloc[0])).eps if dtypes.notna().any() else None


def _against_length(
    rows: pd.DataFrame,
    panels: list[Panel],
    style: dict[str, Style],
    ylabel: str,
    *,
    base: int = 10,
    zeros: str = "exactly 0",
) -> Figure:
    """Panels side by side over one vertical axis, and a legend that accounts for every backend."""
    panels = panels or [Panel("", rows, "time_ms")]
    cells = [panel.cells(zeros) for panel in panels]
    gappy = [name for name in style if any(_has_gaps(of_panel, name) for of_panel in cells)]
    figure = Figure(figsize=(2.7 * len(panels) + 2.1, 2.9), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        ax.set(title=panel.title, xscale="log", yscale="log")
        for name, look in style.items():
            _draw_lines(ax, panel, name, look)
        _length_axis(ax, panel.rows["seq_len"])
        if panel.level is not None:
            ax.plot(ax.get_xlim(), [panel.level] * 2, color=_GREY, linewidth=0.8, linestyle=_DASHES, zorder=0)
    log_axis([ax.yaxis for ax in axes], base, top=len(gappy) * _ROW_HEIGHT)
    for ax, of_panel in zip(axes, cells, strict=True):
        for i, name in enumerate(gappy):
            if _has_gaps(of_panel, name):
                failed = of_panel[(of_panel["backend"] == name) & (of_panel["status"] != "ok")]
                height, across = 1 - (i + 0.5) * _ROW_HEIGHT, ax.get_xaxis_transform()
                ax.plot(failed["seq_len"], [height] * len(failed), transform=across, **_failure(style[name]))
        _say_no_data(ax, of_panel["state"])
    axes[0].set_ylabel(ylabel)
    figure.supxlabel("sequence length (tokens)", fontsize=mpl.rcParams["axes.labelsize"])
    others = {}
    if any(panel.floor and (panel.rows[[panel.measure, panel.floor]] > 0).all(axis=1).any() for panel in panels):
        others["oracle: best keys, as many"] = _DASHED
    if panels[0].level is not None:
        others[f"machine epsilon of {rows['dtype'].iloc[0]}"] = _DASHED
    _add_title(figure, rows)
    _add_legend(figure, pd.concat(cells), style, others)
    return figure


def _has_gaps(cells: pd.DataFrame, name: str) -> bool:
    """Whether a backend is drawn in a panel, but not at every length because some cells failed."""
    of_backend = cells[cells["backend"] == name]
    return bool((of_backend["state"] == "").any() and (of_backend["status"] != "ok").any())


def _draw_lines(ax: Axes, panel: Panel, name: str, look: Style) -> None:
    """One backend over every length of the panel, open where it has no value; of seeds, the median."""
    lengths = np.sort(panel.rows["seq_len"].dropna().unique())
    by_length = panel.rows[panel.rows["backend"] == name].groupby("seq_len")

    def at_lengths(column: str, statistic: str = "median") -> pd.Series:
        values = by_length[column].agg(statistic).reindex(lengths)
        return values.where(values > 0)

    middle = at_lengths(panel.measure)
    ax.plot(lengths, middle, color=look.color, marker=look.marker, label=name)
    if panel.band:
        low, high = at_lengths(panel.band[0], "min"), at_lengths(panel.band[1], "max")
        ax.fill_between(lengths, low, high, color=look.color, alpha=0.2, linewidth=0)
    if panel.floor:
        floor = at_lengths(panel.floor).where(middle.notna())  # of an exact backend it is rounding
        ax.plot(
            lengths,
            floor,
            color=look.color,
            linestyle=_DASHES,
            linewidth=1,
            marker="_",
            markeredgecolor=look.color,
        )


def _trade_off_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    """A column a length, a row a pass: error against time, and backends without error in a strip below."""
    rows = rows.assign(time_if_error=rows["time_ms"].where(rows["approximation_rel_l2"].notna()))
    lengths = _spread(rows.loc[rows["time_if_error"].notna(), "seq_len"], _TRADE_OFF_LENGTHS)
    shown = rows[rows["seq_len"].isin(lengths)] if lengths else rows
    panels = [Panel(pass_title(p), shown[shown["pass"] == p], "time_if_error") for p in passes(shown)]
    if not (panels and lengths):
        return _against_length(rows, panels, style, "approximation error\nagainst time")

    exact = [name for name in style if (shown.loc[shown["backend"] == name, "approximation_rel_l2"] == 0).any()]
    strip = min(_STRIP_HEIGHT[0] * len(exact), _STRIP_HEIGHT[1])
    figure = Figure(figsize=(1.75 * len(lengths) + 2.4, 2.0 * len(panels) + 0.9), layout="constrained")
    axes = figure.subplots(len(panels), len(lengths), sharex="col", sharey=True, squeeze=False)
    cells = [(panel.rows[panel.rows["seq_len"] == seq_len]) for panel in panels for seq_len in lengths]
    for ax, rows_here in zip(axes.flat, cells, strict=True):
        ax.set(xscale="log", yscale="log")
        _draw_inexact(ax, rows_here, style)
        _say_no_data(ax, Panel("", rows_here, "approximation_rel_l2").cells("exact")["state"], above=strip)
    log_axis([ax.yaxis for ax in axes.flat], 10, bottom=strip, below="exact")
    for ax, rows_here in zip(axes.flat, cells, strict=True):
        _draw_exact(ax, rows_here, style, exact, strip)
        points = _medians(rows_here)
        draw_front(ax, points["time_ms"].tolist(), points["approximation_rel_l2"].tolist())
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        ax.set_ylabel(f"approximation error\n({panel.title})")
    for column, seq_len in zip(axes.T, lengths, strict=True):
        column[0].set_title(f"{length_label(seq_len)} tokens")
        log_axis([ax.xaxis for ax in column], 10, count=4)
    figure.supxlabel("time of one call (ms)", fontsize=mpl.rcParams["axes.labelsize"])
    _add_title(figure, rows)
    _add_legend(figure, pd.concat([panel.cells("") for panel in panels]), style, {"Pareto front": _FRONT})
    return figure


def draw_front(ax: Axes, costs: Sequence[float], errors: Sequence[float]) -> None:
    """The Pareto front as steps, down to the lower end of a logarithmic axis where the last one is exact."""
    lowest, on_front = ax.get_ylim()[0], pareto_front(costs, errors)
    points = sorted((cost, max(error, lowest)) for cost, error, on in zip(costs, errors, on_front, strict=True) if on)
    if points:
        ax.step(*np.array(points).T, where="post", **_FRONT, zorder=0.5, label="_front")


def _draw_inexact(ax: Axes, rows: pd.DataFrame, style: dict[str, Style]) -> None:
    """Error against time; variants of one backend joined by a thin line in order of time."""
    points = _medians(rows)
    points = points[points["approximation_rel_l2"] > 0].sort_values("time_ms")
    for name, (error, *times) in points.iterrows():
        _draw_point(ax, times, error, style[str(name)])
    for name, family in points.groupby(points.index.map(backend_name)):
        color, errors = _look(str(name))[0], family["approximation_rel_l2"]
        ax.plot(family["time_ms"], errors, color=color, linewidth=0.8, alpha=0.5, zorder=1)


def _draw_exact(ax: Axes, rows: pd.DataFrame, style: dict[str, Style], exact: list[str], strip: float) -> None:
    """Backends without error in a strip below the axis, a row each, and thin lines up from their times."""
    ax.add_patch(Rectangle((0, 0), 1, strip, transform=ax.transAxes, color="0.95", zorder=-1))
    points = _medians(rows)
    for name, (_, *times) in points[points["approximation_rel_l2"] == 0].iterrows():
        look, height = style[str(name)], (exact.index(str(name)) + 0.5) / len(exact) * strip
        _draw_point(ax, times, height, look, transform=ax.get_xaxis_transform())
        ax.axvline(times[0], color=look.color, linewidth=0.8, alpha=0.35, zorder=0)


def _medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Error and time by backend, where both were measured; of seeds, the median."""
    columns = ["approximation_rel_l2", "time_ms", "time_ms_p20", "time_ms_p80"]
    return rows.groupby("backend")[columns].median().dropna(subset=columns[:2])


def _draw_point(ax: Axes, times_ms: list[float], height: float, look: Style, **transform: Any) -> None:
    time, p20, p80 = times_ms
    ax.plot([p20, p80], [height, height], color=look.color, linewidth=1, **transform)
    ax.plot([time], [height], **_point(look), **transform)


def _add_title(figure: Figure, rows: pd.DataFrame) -> None:
    of, shape = conditions_title(rows)
    seeds = f"median of {rows['seed'].nunique()} seeds" if rows["seed"].nunique() > 1 else ""
    add_title(figure, of, " · ".join(filter(None, (shape, seeds))))


def add_title(figure: Figure, *lines: str) -> None:
    """A title of lines, whose parts " · " joins.

    Where the figure is too narrow they are broken between parts, and it grows by the lines that this adds.
    """
    width = int(_TITLE_CHARACTERS * figure.get_figwidth())
    fitting = [on_lines(re.split("(?<= ·) ", line), width) for line in lines if line]
    added = sum(line.count("\n") for line in fitting)
    figure.set_figheight(figure.get_figheight() + _TITLE_LINE_INCHES * added)
    figure.suptitle("\n".join(fitting).replace(" ·\n", "\n"), x=0.01, ha="left")


def _add_legend(
    figure: Figure, cells: pd.DataFrame, style: dict[str, Style], others: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Every backend: with its line, and under each reason why cells of it have none; and the looks of other lines."""
    blank = Line2D([], [], linestyle="none")
    members = {str(state): set(rows["backend"]) for state, rows in cells.groupby("state")}
    drawn, failures = members.pop("", set()), set(cells.loc[cells["status"] != "ok", "state"])
    entries = [
        (Line2D([], [], color=style[name].color, marker=style[name].marker), name) for name in style if name in drawn
    ]
    entries += [(Line2D([], [], **look), label) for label, look in (others or {}).items()]
    for state in sorted(members):
        entries.append((blank, state))
        places = {name: _where(cells[cells["backend"] == name], state) for name in style if name in members[state]}
        if state == _NOT_MEASURED:  # often the same of many
            for where in dict.fromkeys(places.values()):
                entries.append((blank, ", ".join(name for name in places if places[name] == where) + where))
            continue
        for name, where in places.items():
            mark = _failure(style[name]) if state in failures else _point(style[name])
            entries.append((Line2D([], [], **mark), name + where))
    if not entries:
        return
    labels = [broken(label) if label in style else folded(label, 34) for _, label in entries]
    lines = sum(1 + label.count("\n") for label in labels)
    figure.set_figheight(max(figure.get_figheight(), _LEGEND_LINE_INCHES * (lines + 2)))
    legend = figure.legend([handle for handle, _ in entries], labels, loc="outside right center", fontsize=7)
    for text in legend.get_texts():
        if text.get_text() in members:
            text.set(color=_GREY, style="italic")


def _failure(look: Style) -> dict[str, Any]:
    """The mark of a cell that failed."""
    return {"linestyle": "none", "marker": "x", "markeredgewidth": 1.3, "markeredgecolor": look.color}


def _point(look: Style) -> dict[str, Any]:
    """A backend's mark without its line."""
    return {"linestyle": "none", "marker": look.marker, "color": look.color}


def _where(cells: pd.DataFrame, state: str) -> str:
    """Which of one backend's cells are in a state: ` at 4k`, ` from 4k (forward)`; nothing to say of all.

    All that could be, that is: not measured is a cell only if it ran, 0 only if it was measured.
    """
    chosen = cells[cells["state"] == state]
    if (chosen["status"] == "ok").all():
        cells = cells[(cells["status"] == "ok") & (cells["state"].ne(_NOT_MEASURED) | (state == _NOT_MEASURED))]
    if len(chosen) == len(cells):
        return ""
    spans = {}
    for panel, rows in chosen.groupby("panel", sort=False):
        every = sorted(cells.loc[cells["panel"] == panel, "seq_len"].unique())
        lengths = sorted(rows["seq_len"].unique())
        if lengths == every:
            spans[panel] = ""
        elif len(lengths) > 1 and lengths == every[-len(lengths) :]:
            spans[panel] = f" from {length_label(lengths[0])}"
        else:
            spans[panel] = " at " + ", ".join(map(length_label, lengths))
    if len(set(spans.values())) == 1 and len(spans) == cells["panel"].nunique():
        return next(iter(spans.values()))
    return ",".join(f"{span} ({panel})" for panel, span in spans.items())


def _say_no_data(ax: Axes, states: pd.Series, above: float = 0.0) -> None:
    """Where nothing is drawn, why."""
    if (states == "").any():
        return
    why = ", ".join(f"{count} {state}" for state, count in states.value_counts().items()) or "no cell was run"
    ax.text(
        0.5, (1 + above) / 2, textwrap.fill(f"no data: {why}", 28), transform=ax.transAxes,
        ha="center", va="center", color=_GREY, fontsize=8,
    )  # fmt: skip


def _length_axis(ax: Axes, lengths: pd.Series) -> None:
    """Half an octave of margin, and the lengths that were measured as ticks, eight at most."""
    distinct = np.sort(lengths.dropna().unique())
    ticks = distinct[:: len(distinct) // 9 + 1]
    ax.set_xticks(ticks, [length_label(seq_len) for seq_len in ticks])
    ax.set_xticks([], minor=True)
    if len(distinct):
        ax.set_xlim(distinct[0] / 2**0.5, distinct[-1] * 2**0.5)


def log_axis(
    shared: Sequence[Axis],
    base: int,
    *,
    count: int = 8,
    top: float = 0.0,
    bottom: float = 0.0,
    below: str = "",
    text: Callable[[float], str] | None = None,
) -> None:
    """At most `count` numbers, by default plain ones, as ticks where the data are; shares of the axis clear above and
    `below` them."""
    axis = shared[0]
    low, high = axis.get_view_interval()
    if high < 1.2 * low:  # a single value, up to rounding
        low, high = low / 2, high * 2
    octaves = np.log2(high / low) / (1 - bottom - top)
    limits = low / 2 ** (octaves * bottom), high * 2 ** (octaves * top)
    ticks = {}
    if any(np.isfinite(each.get_data_interval()).all() for each in shared):
        ticks = {tick: (text or _number)(tick) for tick in _log_ticks(low, high, base, count)}
    if bottom:
        ticks[(limits[0] * low) ** 0.5] = below
    axis.set_ticks([], minor=True)
    axis.set_ticks(list(ticks), list(ticks.values()))
    axis.axes.set(**{"xlim" if axis is axis.axes.xaxis else "ylim": limits})


def _log_ticks(low: float, high: float, base: int, count: int) -> list[float]:
    """At most `count`: powers of the base, between tens also 3, or 2 and 5, where there is room."""
    if high / low < 5:
        return [
            tick
            for tick in MaxNLocator(min(count, 5), steps=[1, 2, 5, 10]).tick_values(low, high)
            if low <= tick <= high
        ]
    powers = float(base) ** np.arange(np.floor(np.log(low) / np.log(base)), np.ceil(np.log(high) / np.log(base)) + 1)
    denser = [(1, (1, 2, 5)), (1, (1, 3))] if base == 10 else []
    for step, between in [*denser, *((step, (1,)) for step in range(1, len(powers) + 1))]:
        ticks = [float(tick) for tick in np.outer(powers[::step], between).flat if low <= tick <= high]
        if len(ticks) <= count:
            break
    return ticks


def _number(value: float) -> str:
    """1,000 and 0.05 in full, 10k and 2e-7 in short."""
    if value >= 10_000 and value % 1000 == 0:
        return f"{value / 1000:,.6g}k"
    if value >= 1e-4:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _spread(lengths: pd.Series, count: int) -> list[float]:
    """At most `count` of the distinct lengths, evenly spread from the shortest to the longest."""
    distinct = np.sort(lengths.unique())
    if len(distinct) <= count:
        return distinct.tolist()
    return distinct[np.linspace(0, len(distinct) - 1, count).round().astype(int)].tolist()


def _look(name: str) -> tuple[str, int]:
    """Colour, and index of the first marker, of a backend's name."""
    if name in _KNOWN:
        color, marker = _KNOWN[name]
        return color, _MARKERS.index(marker)
    number = zlib.crc32(name.encode())  # unlike hash(), the same in every process
    return _OTHER_COLORS[number % len(_OTHER_COLORS)], number // len(_OTHER_COLORS) % len(_MARKERS)


def _lighter(color: str, amount: float) -> tuple[float, float, float]:
    """A colour mixed with white; 0 leaves it."""
    red, green, blue = (channel + (1 - channel) * amount for channel in to_rgb(color))
    return red, green, blue


def _backend_order(spec: str) -> tuple[int, str, list[str | int]]:
    """Known names first and in their order, then by name, then by the numbers among the parameters."""
    name = backend_name(spec)
    rank = list(_KNOWN).index(name) if name in _KNOWN else len(_KNOWN)
    return rank, name, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", spec)]


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save as PNG (200 dpi) and as PDF, the same bytes each time; ``path`` has no suffix, its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamps = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate")}
    paths = [path.with_name(f"{path.name}.{kind}") for kind in stamps]
    for each, names in zip(paths, stamps.values(), strict=True):
        figure.savefig(each, dpi=200, metadata=dict.fromkeys(names))
    return paths
