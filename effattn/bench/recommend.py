"""The chooser: from the records of sweeps, the cheapest backend whose error stays within a budget, and the evidence.

Only what was measured counts: nothing is interpolated between lengths or carried from one machine, dtype, mask, shape
or input to another. Where the records hold several of these, each gets an answer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effattn.bench.figures import CONDITIONS, conditions_title, tidy
from effattn.bench.records import read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cost = Literal["time", "memory"]

# The approximation error, which is 0 for exact backends; of a backend without a pattern the total one.
ERROR = "error_rel_l2"
COSTS: dict[Cost, str] = {"time": "time_ms", "memory": "peak_memory_mib"}


@dataclass(frozen=True)
class Recommendation:
    """The answer under one set of conditions.

    ``table`` has a row per measured backend, the cheapest first: ``backend, time_ms, time_ms_p20, time_ms_p80,
    peak_memory_mib, density, error_rel_l2``, ``within`` (the budget) and ``front`` (nothing measured is both cheaper
    and closer to full attention). ``failed`` says why other backends have no row.
    """

    conditions: tuple[str, str]
    seq_len: int
    max_error: float
    cost: Cost
    table: pd.DataFrame
    failed: dict[str, str]

    @property
    def backend(self) -> str | None:
        """The cheapest backend within the budget, as a spec that ``effattn.get`` takes; None where none is."""
        within = self.table[self.table["within"]]
        return str(within["backend"].iloc[0]) if len(within) else None


def load_records(paths: Sequence[Path]) -> pd.DataFrame:
    """The records of all sweeps in ``paths``: files, or folders that hold ``records.jsonl`` at any depth.

    Raises:
        ValueError: for a path that does not exist, and where there are no records of a sweep.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"recommend: records must be a file or folder that exists, got {str(path)!r}")
    files = [file for path in paths for file in (sorted(path.rglob("records.jsonl")) if path.is_dir() else [path])]
    records = [record for file in files for record in read(file).values() if "pass" in record]
    if not records:
        where = ", ".join(map(str, paths)) or "no path"
        raise ValueError(f"recommend: records must hold those of a sweep, got {where}; effattn sweep measures some")
    return pd.DataFrame(records)


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
    if not max_error >= 0:
        raise ValueError(f"recommend: max_error must be >= 0, got {max_error}")
    if cost not in COSTS:
        raise ValueError(f"recommend: cost must be one of {', '.join(COSTS)}, got {cost!r}")
    rows = tidy(records)
    rows[ERROR] = rows["approximation_rel_l2"].fillna(rows["total_rel_l2"])
    # Where no error was measured, as in a comparison of times alone, there is nothing to choose by.
    rows = rows[rows[ERROR].notna().groupby([rows[c] for c in CONDITIONS], dropna=False).transform("any")]
    asked = {
        "device": device, "pass": pass_name, "input": input_kind, "dtype": dtype, "mask": mask, "seq_len": seq_len,
    }  # fmt: skip
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
            f"recommend: nothing ran at seq_len {seq_len} of {device}: {', '.join(rows['backend'])} failed"
        )
    groups = [group for _, group in rows.groupby(list(CONDITIONS), dropna=False, sort=True)]
    groups.sort(key=lambda group: group["input"].iloc[0] != "captured")
    return [_answer(group, seq_len, max_error, cost) for group in groups]


def _answer(rows: pd.DataFrame, seq_len: int, max_error: float, cost: Cost) -> Recommendation:
    price = COSTS[cost]
    columns = ["time_ms", "time_ms_p20", "time_ms_p80", "peak_memory_mib", "density", ERROR]
    ok = rows[(rows["status"] == "ok") & rows[price].notna() & rows[ERROR].notna()]
    table = ok.groupby("backend", as_index=False)[columns].median().sort_values([price, ERROR], kind="stable")
    best_so_far = table[ERROR].cummin().shift(fill_value=float("inf"))
    table = table.assign(within=table[ERROR] <= max_error, front=table[ERROR] < best_so_far).reset_index(drop=True)
    failed = rows[~rows["backend"].isin(table["backend"])].drop_duplicates("backend")
    reasons = {
        str(row["backend"]): f"{row['status'].replace('_', ' ')}: {row['reason']}" for row in failed.to_dict("records")
    }
    return Recommendation(conditions_title(rows), seq_len, max_error, cost, table, reasons)


def print_recommendation(answer: Recommendation, console: Console) -> None:
    """Print the answer as a spec, then the evidence: every measured backend, those on the Pareto front marked."""
    for line in answer.conditions:
        console.print(Text(line, style="dim"))
    budget = f"relative L2 error of at most {answer.max_error:g} at {answer.seq_len:,} tokens"
    if answer.backend is None:
        closest = answer.table.sort_values(ERROR).head(1).to_dict("records")
        hint = f"; the closest is {closest[0]['backend']} with {closest[0][ERROR]:.3g}" if closest else ""
        console.print(Text(f"Nothing measured keeps a {budget}{hint}.", style="bold red"))
    else:
        console.print(
            Text(answer.backend, style="bold green").append(f"  least {answer.cost} with a {budget}", style="")
        )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("", "backend", "time", "20% to 80%", "memory", "density", "error", "within"):
        table.add_column(heading, justify="left" if heading == "backend" else "right", overflow="fold")
    for row in answer.table.to_dict("records"):
        chosen = row["backend"] == answer.backend
        table.add_row(
            "*" if row["front"] else "",
            row["backend"].replace("(", "(\n  ", 1) if len(row["backend"]) > 28 else row["backend"],
            f"{row['time_ms']:,.4g} ms",
            f"{row['time_ms_p20']:,.4g} to {row['time_ms_p80']:,.4g}",
            f"{row['peak_memory_mib']:,.4g} MiB",
            "" if pd.isna(row["density"]) else f"{row['density']:.3g}",
            f"{row[ERROR]:.3g}",
            "yes" if row["within"] else "no",
            style="bold" if chosen else ("" if row["within"] else "dim"),
        )
    console.print(table)
    console.print(Text(f"* on the Pareto front of {answer.cost} and error", style="dim"))
    for backend, reason in answer.failed.items():
        console.print(Text(f"{backend} {reason.partition(chr(10))[0]}", style="dim"))


def pareto_figure(answer: Recommendation) -> Figure:
    """Error against cost, the Pareto front as a line, the budget as a level; errors of rounding in a strip below."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from effattn.bench.figures import RC, styles

    floor = 1e-5  # where exact backends stand
    table = answer.table.assign(height=answer.table[ERROR].clip(lower=floor))
    look, price = styles(table["backend"]), COSTS[answer.cost]
    with mpl.rc_context(RC):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        ax = figure.subplots()
        front = table[table["front"]]
        ax.step(front[price], front["height"], where="post", color="#666666", linewidth=0.9, zorder=0)
        if answer.max_error >= floor:
            ax.axhspan(floor, answer.max_error, color="#009e73", alpha=0.08, linewidth=0)
            ax.axhline(answer.max_error, color="#009e73", linewidth=0.8, linestyle=(0, (4, 2)))
        for row in table.to_dict("records"):
            style, size = look[row["backend"]], 9 if row["backend"] == answer.backend else 5.5
            ax.plot(
                [row[price]], [row["height"]], marker=style.marker, color=style.color, markersize=size, clip_on=False
            )
        ax.set(xscale="log", yscale="log", ylabel="error against full attention\n(relative L2)")
        ax.set(xlabel="time of one call (ms)" if answer.cost == "time" else "peak memory (MiB)")
        ax.set_ylim(bottom=floor)
        ax.yaxis.set_major_formatter(lambda value, _: "exact" if value <= floor else f"{value:g}")
        figure.suptitle("\n".join((*answer.conditions, f"{answer.seq_len:,} tokens")), x=0.01, ha="left", fontsize=7)
        handles = [Line2D([], [], linestyle="none", marker=s.marker, color=s.color) for s in look.values()]
        names = [name.replace("(", "(\n  ", 1) if len(name) > 28 else name for name in look]
        chosen = [
            f"{label}  ← chosen" if name == answer.backend else label for name, label in zip(look, names, strict=True)
        ]
        figure.legend(handles, chosen, loc="outside right center", fontsize=7)
    return figure
