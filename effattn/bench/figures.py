"""Figures from records: time, memory and error against length, and error against time.

Every figure shows one study on one machine under one set of conditions (dtype, device, mask, input, shape); where
the records hold several, each set gets files of its own, named by what differs. A cell that failed leaves a gap
with an x at the top edge, a value that a logarithmic axis cannot show (an exact backend's error, 0) is named in
the legend, and a backend has the same colour and marker in every figure of every study. Lines are drawn with
matplotlib: seaborn's own line plots drop missing points and join across the gap. The files hold no time stamp, so
equal records give equal bytes.
"""

import colorsys
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

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
    "time_vs_length": "Time of one call: median, and the band from the 20th to the 80th percentile of the repeats.",
    "memory_vs_length": "Peak memory above what was allocated before the call.",
    "error_vs_length": "Approximation error: dense attention over the keys that the backend chose, against full "
    "attention. Dashed: the least error that any choice of as many keys could have.",
    "implementation_error_vs_length": "Implementation error: the backend against dense attention over the keys that "
    "it chose. Dashed: the spacing of the dtype's numbers at 1.",
    "error_vs_time": "What the error buys: approximation error against time, at the longest lengths. "
    "Exact backends stand in the strip below, at their time.",
}

# Okabe and Ito's palette, distinguishable with any colour vision. Known backends have a fixed place in it.
_KNOWN = {
    "full": ("#333333", "o"),
    "sdpa": ("#0072b2", "s"),
    "chunked": ("#56b4e9", "D"),
    "sliding_window": ("#d55e00", "^"),
    "lsh": ("#009e73", "v"),
    "xformers": ("#cc79a7", "P"),
    "flex": ("#e69f00", "X"),
}
# The others draw theirs by name from those of Paul Tol's muted palette that stay clear of the known ones.
_OTHER_COLORS = ("#332288", "#882255", "#44aa99", "#999933", "#aa4466", "#aa4499")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "h", "p")

_RC = {
    **sns.axes_style("ticks"),
    **sns.plotting_context("paper", font_scale=0.9),
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same letters on every machine
    "axes.linewidth": 0.8,
    "axes.titlesize": 8.5,
    "figure.titlesize": 9,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
_GREY = "#666666"
_ROW_HEIGHT = 0.06  # of the axes: one row of marks at the top edge


@dataclass(frozen=True)
class Style:
    """How one backend looks, everywhere."""

    color: tuple[float, float, float]
    marker: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a column of the records against length, with its band and its floor."""

    title: str
    rows: pd.DataFrame
    measure: str
    band: tuple[str, str] | None = None
    floor: str | None = None


def draw_all(records: pd.DataFrame, out: Path) -> list[Path]:
    """Draw every figure that the records allow, as PNG (200 dpi) and PDF.

    Args:
        records: one row per cell, with the fields of `records.jsonl`; fields may be absent, and so may all rows.
        out: the folder to write to; made when missing.

    Returns:
        The paths written, a figure's PNG before its PDF. A figure without data is written too and says why.
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
    with mpl.rc_context(_RC):
        for suffix, rows in _by_conditions(frame):
            for name, draw in figures.items():
                figure = draw(rows, style)
                paths += [_save(figure, out / f"{name}{suffix}.{kind}") for kind in ("png", "pdf")]
    return paths


def caption(path: Path) -> str:
    """What the figure at `path`, one that `draw_all` wrote, shows."""
    return CAPTIONS[path.stem.partition("-")[0]]


def tidy(records: pd.DataFrame) -> pd.DataFrame:
    """Records as tables and figures read them.

    Every column of `IDENTITY` and `MEASURES` is there, empty where the records have none. Added are `time_ms`,
    `time_ms_p20` and `time_ms_p80` (of the whole pass: forward and backward together where both were run; the
    sum of two percentiles bounds the percentile of the sum) and `peak_memory_mib`. What a failed cell measured
    before it failed is left out: half a pass is no measurement.
    """
    frame = records.reindex(columns=list(dict.fromkeys([*records.columns, *IDENTITY, *MEASURES])))
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

    The hue comes from the backend's name alone. Of several parameterisations of one backend the first keeps the
    full colour and the others grow lighter, each with a marker of its own.
    """
    specs: dict[str, list[str]] = {}
    for spec in sorted(set(backends), key=_backend_order):
        specs.setdefault(backend_name(spec), []).append(spec)
    return {
        spec: Style(_lighter(color, 0.6 * i / max(1, len(group) - 1)), _MARKERS[(first + i) % len(_MARKERS)])
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
    """Two lines on rows of one set of conditions: study, machine and input; then dtype, mask, device and shape."""
    known = {column: rows[column].iloc[0] for column in CONDITIONS if rows[column].notna().any()}
    words = {
        "input": "{} input", "mask": "{} mask", "batch_size": "batch {:g}", "num_heads": "{:g} heads",
        "num_kv_heads": "{:g} key heads", "head_dim": "head_dim {:g}",
    }  # fmt: skip

    def line(columns: tuple[str, ...]) -> str:
        return " · ".join(words.get(column, "{}").format(known[column]) for column in columns if column in known)

    return line(CONDITIONS[:3]), line(CONDITIONS[3:])


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
    panels = [Panel(pass_title(p), rows[rows["pass"] == p], "time_ms", band) for p in passes(rows)]
    return _against_length(rows, panels, style, "time of one call (ms)")


def _memory_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = [Panel(pass_title(p), rows[rows["pass"] == p], "peak_memory_mib") for p in passes(rows)]
    return _against_length(rows, panels, style, "peak memory (MiB)", base=2)


def _error_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = _error_panels(rows, "approximation")
    return _against_length(rows, panels, style, "approximation error\n(relative L2)", zeros="exact, error 0")


def _implementation_error_figure(rows: pd.DataFrame, style: dict[str, Style]) -> Figure:
    panels = _error_panels(rows, "implementation")
    figure = _against_length(rows, panels, style, "implementation error\n(relative L2)")
    if (epsilon := _epsilon(rows["dtype"])) is not None:
        for ax in figure.axes:
            ax.axhline(epsilon, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    return figure


def _error_panels(rows: pd.DataFrame, kind: str) -> list[Panel]:
    """The output's error from the forward pass, the gradients' from the backward pass."""
    measure, floor = f"{kind}_rel_l2", "oracle_rel_l2" if kind == "approximation" else None
    panels = []
    for name in passes(rows):
        of_pass = rows[rows["pass"] == name]
        if name != "forward_backward":
            title = "output" if name == "forward" else f"output, {pass_title(name)}"
            panels.append(Panel(title, of_pass, measure, floor=floor))
            continue
        if "forward" not in set(rows["pass"]):
            panels.append(Panel("output", of_pass, measure, floor=floor))
        panels.append(Panel("gradients", of_pass, f"grad_{measure}"))
    return panels
