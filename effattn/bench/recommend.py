"""The chooser: from records, the cheapest backend that stays within a budget, and the evidence.

The budget is one of error, from the records of sweeps, or one of perplexity, from those of ``effattn evaluate``. Only
what was measured counts: nothing is interpolated between lengths or carried from one machine, dtype, mask, shape,
input, model or text to another. Where the records hold several of these, each gets an answer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effattn.bench.figures import (
    CONDITIONS,
    RC,
    backend_name,
    conditions_title,
    draw_front,
    log_axis,
    pareto_front,
    styles,
    tidy,
)
from effattn.bench.records import Record, read
from effattn.bench.words import broken

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from effattn.bench.figures import Style

Cost = Literal["time", "memory"]
ModelCost = Literal["attention", "forward"]

TABLE_WIDTH = 60  # of a spec in a table
_EXACT_SHARE = 0.12  # of a figure's height, where exact backends stand
BUDGET_COLOR = "#009e73"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


@dataclass(frozen=True)
class Measure:
    """What backends are chosen or judged by: a column of the evidence, and how it is said."""

    column: str
    name: str  # in a sentence
    heading: str  # in a table
    axis: str  # in a figure
    unit: str = ""
    factor: float = 1.0  # from the column to the unit
    least: float = 0.0  # up to here, a value is as good as 0
    at_least: str = "exact"

    def text(self, value: float) -> str:
        """A value with its unit; nothing for one that is missing."""
        return "" if pd.isna(value) else _digits(self.factor * value) + self.unit


# The approximation error, which is 0 for exact backends; of a backend without a pattern the total one.
ERROR = Measure(
    "error_rel_l2", "a relative L2 error", "error", "error against full attention\n(relative L2)", least=1e-5
)
PERPLEXITY = Measure(
    "perplexity_increase",
    "an increase in perplexity",
    "increase",
    "perplexity above\nfull attention's",
    unit="%",
    factor=100,
    least=1e-4,
    at_least="≤ 0.01%",
)
TIME = Measure("time_ms", "time", "time", "time of one call (ms)", " ms")
MEMORY = Measure("peak_memory_mib", "memory", "memory", "peak memory (MiB)", " MiB")
FLOPS = Measure("gflops", "operations", "operations", "operations of one call (GFLOP)", " GFLOP")
ATTENTION = Measure("attention_ms", "time of attention", "attention", "time of attention in one pass (ms)", " ms")
FORWARD = Measure("forward_ms", "time of the model", "model", "time of one pass of the model (ms)", " ms")
DENSITY = Measure("density", "density", "density", "share of the pairs that are attended to")

COSTS: dict[Cost, Measure] = {"time": TIME, "memory": MEMORY}
MODEL_COSTS: dict[ModelCost, Measure] = {"attention": ATTENTION, "forward": FORWARD}
_SHOWN = (TIME, MEMORY, ATTENTION, FORWARD, FLOPS, DENSITY, ERROR, PERPLEXITY)


@dataclass(frozen=True)
class Recommendation:
    """The answer under one set of conditions.

    ``table`` has a row per measured backend, the cheapest first: ``backend``, the measures by their columns, ``within``
    (the budget) and ``front`` (nothing measured is both cheaper and better). ``failed`` says why other backends have
    no row.
    """

    conditions: tuple[str, ...]
    seq_len: int
    error: Measure
    budget: float
    cost: Measure
    table: pd.DataFrame
    failed: Mapping[str, str]

    @property
    def backend(self) -> str | None:
        """The cheapest backend within the budget, as a spec that ``effattn.get`` takes; None where none is."""
        within = self.table[self.table["within"]]
        return str(within["backend"].iloc[0]) if len(within) else None

    @property
    def said_budget(self) -> str:
        """The budget in words."""
        return f"{self.error.name} of at most {self.error.text(self.budget)} at {self.seq_len:,} tokens"


def load_records(paths: Sequence[Path], study: Literal["sweep", "evaluate"] = "sweep") -> pd.DataFrame:
    """The records of all sweeps, or evaluations of the loss, in ``paths``.

    Args:
        paths: files, or folders that hold ``records.jsonl`` at any depth.
        study: whose records: those of ``effattn sweep``, or of ``effattn evaluate``.

    Raises:
        ValueError: for a path that does not exist, and where there are no such records.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"recommend: records must be a file or folder that exists, got {str(path)!r}")
    files = [file for path in paths for file in (sorted(path.rglob("records.jsonl")) if path.is_dir() else [path])]
    records = [record for file in files for record in read(file).values() if _kind(record) == study]
    if not records:
        where, what = ", ".join(map(str, paths)) or "no path", {"sweep": "a sweep", "evaluate": "an evaluation"}[study]
        raise ValueError(f"recommend: records must hold those of {what}, got {where}; effattn {study} measures some")
    return pd.DataFrame(records)


def _kind(record: Record) -> str | None:
    if record.get("study") == "evaluate" and record.get("task", "loss") == "loss":
        return "evaluate"
    return "sweep" if "pass" in record else None


def recommend(
    records: pd.DataFrame,
    *,
    seq_len: int,
    max_error: float,
    device: str,
    pass_name: str = "forward",
    cost: Cost = "time",
    input_kind: str | None = None,
    dtype: str | None = None,
    mask: str | None = None,
) -> list[Recommendation]:
    """The cheapest backend within an error budget, for each set of conditions that was measured.

    Args:
        records: of sweeps, as ``load_records`` gives them.
        seq_len: in tokens; it must have been measured.
        max_error: the largest relative L2 error of the output against full attention that is allowed: what the method
            gives up, without rounding, where that is known.
        device: cpu or cuda.
        pass_name: forward, forward_backward or decode.
        cost: what is to be least: time of the pass, or peak memory.
        input_kind, dtype, mask: only records of that; None means each that there is.

    Returns:
        An answer per set of conditions, captured input first.

    Raises:
        ValueError: if ``max_error`` is negative, or nothing was measured for what is asked; the message says what was.
    """
    _check("max_error", max_error, cost, COSTS)
    rows = tidy(records)
    rows[ERROR.column] = rows["approximation_rel_l2"].fillna(rows["total_rel_l2"])
    # Where no error was measured, as in a comparison of times alone, there is nothing to choose by.
    rows = rows[rows[ERROR.column].notna().groupby([rows[c] for c in CONDITIONS], dropna=False).transform("any")]
    asked = {
        "device": device, "pass": pass_name, "input": input_kind, "dtype": dtype, "mask": mask, "seq_len": seq_len,
    }  # fmt: skip
    rows = _only(rows, asked)
    groups = [group for _, group in rows.groupby(list(CONDITIONS), dropna=False, sort=True)]
    groups.sort(key=lambda group: group["input"].iloc[0] != "captured")
    evidence = ["time_ms", "time_ms_p20", "time_ms_p80", "peak_memory_mib", "density", ERROR.column]
    return [
        _answer(group, evidence, conditions_title(group), seq_len, ERROR, max_error, COSTS[cost]) for group in groups
    ]


def recommend_for_perplexity(
    records: pd.DataFrame,
    *,
    seq_len: int,
    max_increase: float,
    device: str,
    cost: ModelCost = "attention",
    dtype: str | None = None,
) -> list[Recommendation]:
    """The cheapest backend that keeps a model's perplexity within a budget, for each model, text and so on.

    Args:
        records: of ``effattn evaluate``, as ``load_records`` gives them.
        seq_len: in tokens; it must have been measured.
        max_increase: how far perplexity may lie above that of the model as it was loaded, as a share: 0.05 is 5%.
        device: cpu or cuda.
        cost: what is to be least: the time of the attention of one pass, or of the whole pass.
        dtype: only records of that; None means each that there is.

    Raises:
        ValueError: if ``max_increase`` is negative, or nothing was measured for what is asked; the message says what
            was.
    """
    _check("max_perplexity_increase", max_increase, cost, MODEL_COSTS)
    rows = records.assign(perplexity_increase=records["perplexity_ratio"] - 1, layers=records["layers"].map(_listed))
    rows = _only(rows, {"device": device, "dtype": dtype, "seq_len": seq_len})
    alike = ["model", "text", "layers", "dtype", "device", "machine", "weights_sha256", "tokens_sha256"]
    evidence = ["attention_ms", "forward_ms", "density", PERPLEXITY.column]
    answers = []
    for (model, text, layers, *where, _, _), group in rows.groupby(alike, sort=True):
        conditions = (f"{model} reading {text} · {layers}", " · ".join(map(str, where)))
        answers.append(_answer(group, evidence, conditions, seq_len, PERPLEXITY, max_increase, MODEL_COSTS[cost]))
    return answers


def _listed(layers: Sequence[int] | None) -> str:
    return "layers " + ", ".join(map(str, layers)) if isinstance(layers, Sequence) else "all layers"


def _check(name: str, budget: float, cost: str, costs: Iterable[str]) -> None:
    if not budget >= 0:
        raise ValueError(f"recommend: {name} must be >= 0, got {budget}")
    if cost not in costs:
        raise ValueError(f"recommend: cost must be one of {', '.join(costs)}, got {cost!r}")


def _only(rows: pd.DataFrame, asked: Mapping[str, str | int | None]) -> pd.DataFrame:
    """The rows that have what is asked, in each column of which something is; at least one that ran."""
    for column, wanted in asked.items():
        if wanted is None:
            continue
        measured = sorted(rows[column].dropna().unique())
        rows = rows[rows[column] == wanted]
        if rows.empty:
            known = ", ".join(map(str, measured))
            raise ValueError(
                f"recommend: {column} {wanted} has not been measured with the rest of what is asked; {known} have"
            )
    if not (rows["status"] == "ok").any():
        raise ValueError(
            f"recommend: nothing ran at seq_len {asked['seq_len']} of {asked['device']}: "
            f"{', '.join(rows['backend'])} failed"
        )
    return rows


def _answer(
    rows: pd.DataFrame,
    evidence: list[str],
    conditions: tuple[str, ...],
    seq_len: int,
    error: Measure,
    budget: float,
    cost: Measure,
) -> Recommendation:
    ok = rows[(rows["status"] == "ok") & rows[cost.column].notna() & rows[error.column].notna()]
    table = weighed(ok.groupby("backend", as_index=False)[evidence].median(), error, budget, cost)
    failed = rows[~rows["backend"].isin(table["backend"])].drop_duplicates("backend")
    reasons = {
        str(row["backend"]): f"{row['status'].replace('_', ' ')}: {row['reason']}" for row in failed.to_dict("records")
    }
    return Recommendation(conditions, seq_len, error, budget, cost, table, reasons)


def weighed(table: pd.DataFrame, error: Measure, budget: float, cost: Measure) -> pd.DataFrame:
    """The table with ``within`` and ``front``, by cost, of equals the better first; what has no cost comes last."""
    table = table.sort_values([cost.column, error.column], kind="stable").reset_index(drop=True)
    good_as_none = table[error.column] <= error.least
    front = pareto_front(table[cost.column].tolist(), table[error.column].mask(good_as_none, 0.0).tolist())
    return table.assign(within=table[error.column] <= budget, front=front)


# Showing ----------------------------------------------------------------------------------------------------


def print_recommendation(answer: Recommendation, console: Console) -> None:
    """Print the answer as a spec, then the evidence: every measured backend, those on the Pareto front marked."""
    for line in answer.conditions:
        console.print(Text(line, style="dim"))
    if answer.backend is None:
        closest = answer.table.sort_values(answer.error.column).head(1).to_dict("records")
        hint = ""
        if closest:
            hint = f"; the closest is {closest[0]['backend']} with {answer.error.text(closest[0][answer.error.column])}"
        console.print(Text(f"Nothing measured keeps {answer.said_budget}{hint}.", style="bold red"))
    else:
        words = f"  least {answer.cost.name} with {answer.said_budget}"
        console.print(Text(answer.backend, style="bold green").append(words, style=""))
    print_evidence(answer.table, answer.backend, console)
    console.print(Text(f"* on the Pareto front of {answer.cost.name} and {answer.error.heading}", style="dim"))
    for backend, reason in answer.failed.items():
        console.print(Text(f"{backend} {reason.partition(chr(10))[0]}", style="dim"))


def print_evidence(table: pd.DataFrame, chosen: str | None, console: Console) -> None:
    """A line a backend with every measure that the table has: the chosen one bold, those beyond the budget faint."""
    shown = [measure for measure in _SHOWN if measure.column in table and table[measure.column].notna().any()]
    printed = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    printed.add_column("")
    printed.add_column("backend", overflow="fold")
    for measure in shown:
        printed.add_column(measure.heading, justify="right")
        if f"{measure.column}_p20" in table:
            printed.add_column("20% to 80%", justify="right")
    printed.add_column("within", justify="right")
    for row in table.to_dict("records"):
        values = []
        for measure in shown:
            values.append(measure.text(row[measure.column]))
            if f"{measure.column}_p20" in table:
                low, high = row[f"{measure.column}_p20"], row[f"{measure.column}_p80"]
                values.append("" if pd.isna(low) else f"{_digits(low)} to {_digits(high)}")
        style = "bold" if row["backend"] == chosen else ("" if row["within"] else "dim")
        marks = "*" if row["front"] else "", broken(row["backend"], TABLE_WIDTH)
        printed.add_row(*marks, *values, "yes" if row["within"] else "no", style=style)
    console.print(printed)


def pareto_figure(answer: Recommendation) -> Figure:
    """Error against cost, the Pareto front as steps, what keeps the budget shaded; exact backends in a strip below."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    look = styles(answer.table["backend"])
    with mpl.rc_context(RC):
        figure = Figure(figsize=(6.2, 2.9), layout="constrained")
        ax = figure.subplots()
        draw_trade_off(ax, answer.table, answer.cost, answer.error, answer.budget, look, answer.backend)
        title = (*answer.conditions, f"{answer.seq_len:,} tokens")
        figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=7)
        handles = [Line2D([], [], linestyle="none", marker=s.marker, color=s.color) for s in look.values()]
        labels = [broken(name) + ("  ← chosen" if name == answer.backend else "") for name in look]
        figure.legend(handles, labels, loc="outside right center", fontsize=7)
    return figure


def draw_trade_off(
    ax: Axes,
    table: pd.DataFrame,
    cost: Measure,
    error: Measure,
    budget: float,
    look: Mapping[str, Style],
    chosen: str | None,
) -> None:
    """The rows of a table that ``weighed`` made as points, with front and budget; ``look`` by spec or by name."""
    from matplotlib.patches import Rectangle

    rows = table.dropna(subset=[cost.column, error.column])
    is_exact = rows[error.column] <= error.least
    heights = [*rows.loc[~is_exact, error.column], *([budget] if budget > error.least else [])] or [0.1]
    ax.set(xscale="log", yscale="log", xlabel=cost.axis, ylabel=error.axis)
    ax.plot(rows[cost.column], rows[error.column].clip(lower=min(heights)), linestyle="none")  # what the axes must hold
    if budget > error.least:
        ax.axhline(budget, color=BUDGET_COLOR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    log_axis([ax.yaxis], 10, bottom=_EXACT_SHARE, below=error.at_least, text=error.text if error.unit else None)
    log_axis([ax.xaxis], 10, count=6)
    ax.axhspan(ax.get_ylim()[0], max(budget, ax.get_ylim()[0]), color=BUDGET_COLOR, alpha=0.08, linewidth=0, zorder=-1)
    ax.add_patch(Rectangle((0, 0), 1, _EXACT_SHARE, transform=ax.transAxes, color="0.93", zorder=-2))
    draw_front(ax, rows[cost.column].tolist(), rows[error.column].mask(is_exact, 0.0).tolist())
    for row, exact in zip(rows.to_dict("records"), is_exact, strict=True):
        style = look.get(row["backend"]) or look[backend_name(row["backend"])]
        height = _EXACT_SHARE / 2 if exact else row[error.column]
        place: dict[str, Any] = {"transform": ax.get_xaxis_transform()} if exact else {}
        low, high = row.get(f"{cost.column}_p20"), row.get(f"{cost.column}_p80")
        if low is not None and high is not None:
            ax.plot([low, high], [height] * 2, color=style.color, linewidth=1, **place)
        mark: dict[str, Any] = {"marker": style.marker, "color": style.color, "linestyle": "none", **place}
        if row["backend"] == chosen:
            mark |= {"markersize": 9, "zorder": 3}
        ax.plot(row[cost.column], height, **mark)
