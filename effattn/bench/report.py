"""Tables and a report from records: `summary.csv`, the table at the end of a sweep, and `report.html`.

A speed-up is the ratio of two times of one run: the baseline's and the backend's, under the same conditions
and at the same length, on the same machine with the same versions. Where the baseline was not measured there
is none.
"""

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.colors import to_hex
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effattn.bench.figures import (
    CONDITIONS,
    caption,
    conditions_title,
    length_label,
    pass_title,
    passes,
    styles,
    tidy,
)

RUN = ("cpu", "cpu_threads", "gpu", "torch", "effattn")
PROVENANCE = ("commit", "python", "memory_total_bytes", "memory_method", "input_description", "started_at")
SUMMARY = (
    *CONDITIONS, "pass", "seq_len", "seed", "backend",
    "time_ms_median", "time_ms_p20", "time_ms_p80", "speedup_vs_full", "speedup_vs_sdpa",
    "peak_memory_mib", "density",
    "implementation_rel_l2", "approximation_rel_l2", "total_rel_l2", "oracle_rel_l2",
    "grad_implementation_rel_l2", "grad_approximation_rel_l2", "grad_total_rel_l2",
    "impl", "status", "reason",
)  # fmt: skip
ERRORS = (
    (
        "implementation error",
        "compares a backend with dense attention over exactly the keys that the backend chose: it is "
        "rounding, and whatever exceeds rounding is a mistake in the code.",
    ),
    (
        "approximation error",
        "compares that dense attention with full attention under the caller's mask: it is what the method "
        "gives up, and 0 for an exact backend.",
    ),
    (
        "total error",
        "compares the backend with full attention: it is what a model that uses the backend gets.",
    ),
)

_LONG_SPEC = 22  # characters; longer ones break after the name


def summary_table(records: pd.DataFrame) -> pd.DataFrame:
    """The main numbers of every cell, a row each, in the order in which they are read.

    Args:
        records: one row per cell, with the fields of `records.jsonl`; fields and rows may be absent.

    Returns:
        The columns of `SUMMARY`. Times are of the whole pass in milliseconds, speed-ups are above 1 where the
        backend is faster than `full` or `sdpa`, errors are relative L2. Not measured is empty, never 0.
    """
    frame = _complete(records)
    alike = [frame[column] for column in (*CONDITIONS, *RUN, "pass", "seq_len", "seed")]
    for name in ("full", "sdpa"):
        baseline = frame["time_ms"].where(frame["backend"] == name).groupby(alike, dropna=False)
        frame[f"speedup_vs_{name}"] = baseline.transform("median") / frame["time_ms"]
    order = {"pass": passes(frame), "backend": list(styles(frame["backend"].dropna()))}
    ranks = {f"{column}_rank": frame[column].map(known.index, na_action="ignore") for column, known in order.items()}
    frame = frame.assign(**ranks, time_ms_median=frame["time_ms"])
    frame = frame.sort_values([*CONDITIONS, "pass_rank", "seq_len", "backend_rank", "seed"], kind="stable")
    return frame[list(SUMMARY)].reset_index(drop=True)


def print_table(records: pd.DataFrame, console: Console) -> None:
    """Print a table a pass and set of conditions, and last the cells that failed, with their reasons.

    Fits 100 columns. Of each column the best at each length is bold. For forward + backward the errors are the
    gradients', unless there is no forward pass to show the output's.
    """
    summary = summary_table(records)
    conditions = ""
    for block in _blocks(summary, wide=False):
        if block.conditions != conditions:
            conditions = block.conditions
            console.print(Text(f"\n{conditions}", style="bold"))
        console.print(Text(f"\n{block.title}", style="bold"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("length", justify="right")
        table.add_column("backend", overflow="fold")
        for heading in block.headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for section in block.sections:
            for i, row in enumerate(section.rows):
                long = len(row.backend) > _LONG_SPEC
                name = Text(row.backend.replace("(", "(\n  ", 1) if long else row.backend)
                name.append(f" {row.failed}", style="red")
                values = [Text(value.text, style="bold" if value.best else "") for value in row.values]
                table.add_row(section.length if i == 0 else "", name, *values)
            table.add_section()
        console.print(table)
    failures = _failures(summary)
    if failures:
        console.print(Text("\nfailed", style="bold"))
    for failure in failures:
        line = Text(failure.backend).append(f" {failure.status}", style="red")
        first_line = failure.reason.strip().partition("\n")[0]
        console.print(line.append(f" {failure.where}: {first_line}", style=""))


def write_report(records: pd.DataFrame, figure_paths: Sequence[Path], out: Path, *, command: str | None = None) -> Path:
    """Write `report.html`: one file that needs no other and no network.

    Args:
        records: one row per cell, with the fields of `records.jsonl`; fields and rows may be absent.
        figure_paths: what `draw_all` returned; the PNG files are embedded.
        out: the folder to write to; made when missing.
        command: the command line that measured the records, as typed. None where it is not known: then the report
            says how to run `study.yaml`, if that stands in `out`, again.

    Returns:
        The path of the report.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary = summary_table(records)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    study_file = out / "study.yaml"
    study_text = study_file.read_text(encoding="utf-8") if study_file.exists() else ""
    page = environment.from_string(_PAGE).render(
        study=", ".join(sorted(summary["study"].dropna().unique())) or "no records",
        facts=_facts(_complete(records)),
        errors=ERRORS,
        figures=[
            (path.stem, base64.b64encode(path.read_bytes()).decode(), caption(path))
            for path in figure_paths
            if path.suffix == ".png"
        ],
        blocks=list(_blocks(summary, wide=True)),
        failures=_failures(summary),
        command=command or ("effattn sweep study.yaml" if study_text else ""),
        study_text=study_text,
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _complete(records: pd.DataFrame) -> pd.DataFrame:
    """Tidy records with every column that tables and the report read."""
    return tidy(records.reindex(columns=list(dict.fromkeys([*records.columns, *RUN, *PROVENANCE]))))


@dataclass(frozen=True)
class _Column:
    """A column for people: its heading, how a value reads, which is best, whether it needs a wide page."""

    name: str
    heading: str
    text: Callable[[float], str]
    best: str | None = None
    wide: bool = False


@dataclass(frozen=True)
class _Value:
    text: str
    best: bool


@dataclass(frozen=True)
class _Row:
    backend: str
    color: str
    failed: str
    values: list[_Value]


@dataclass(frozen=True)
class _Section:
    length: str
    rows: list[_Row]


@dataclass(frozen=True)
class _Block:
    """One table: a pass under one set of conditions, with a section a length."""

    conditions: str
    title: str
    headings: list[str]
    sections: list[_Section]


@dataclass(frozen=True)
class _Failure:
    """Cells of one backend that failed for one reason."""

    backend: str
    status: str
    where: str
    reason: str


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _times(value: float) -> str:
    return f"{value:.0f}x" if value >= 9.95 else f"{value:#.2g}x"


def _rounding(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _error(value: float) -> str:
    return f"{value:.3f}" if value >= 1e-3 else _rounding(value)


def _approximation(value: float) -> str:
    return "exact" if value == 0 else _error(value)


_OUTPUT_ERRORS = (
    _Column("implementation_rel_l2", "impl.", _rounding),
    _Column("approximation_rel_l2", "approx.", _approximation, best="min"),
    _Column("total_rel_l2", "total", _error, wide=True),
    _Column("oracle_rel_l2", "oracle", _error),
)
_GRADIENT_ERRORS = (
    _Column("grad_implementation_rel_l2", "grad impl.", _rounding),
    _Column("grad_approximation_rel_l2", "grad approx.", _approximation, best="min"),
    _Column("grad_total_rel_l2", "grad total", _error, wide=True),
)
_COLUMNS = (
    _Column("seed", "seed", "{:g}".format),
    _Column("time_ms_median", "ms", _three_digits, best="min"),
    _Column("spread", "±", "{:.0%}".format),
    _Column("speedup_vs_full", "vs full", _times, best="max"),
    _Column("speedup_vs_sdpa", "vs sdpa", _times, best="max"),
    _Column("peak_memory_mib", "MiB", _three_digits, best="min"),
    _Column("density", "density", "{:#.2g}".format),
    *_OUTPUT_ERRORS,
    *_GRADIENT_ERRORS,
)


def _blocks(summary: pd.DataFrame, *, wide: bool) -> Iterator[_Block]:
    """The tables for people. A backend of which no cell ran in a block is not in that block.

    On a narrow page forward + backward has the gradients' errors; the output's stand with the forward pass.
    """
    style = styles(summary["backend"].dropna())
    half_band = (summary["time_ms_p80"] - summary["time_ms_p20"]) / 2
    summary = summary.assign(spread=half_band / summary["time_ms_median"])
    for _, alike in summary.groupby(list(CONDITIONS), dropna=False, sort=False):
        for name in passes(alike):
            rows = alike[alike["pass"] == name]
            rows = rows[rows["backend"].isin(rows.loc[rows["status"] == "ok", "backend"])]
            columns = _columns(rows)
            if not wide:
                elsewhere = _OUTPUT_ERRORS if "forward" in passes(alike) else _GRADIENT_ERRORS
                left_out = elsewhere if name == "forward_backward" else ()
                columns = [column for column in columns if not column.wide and column not in left_out]
            sections = []
            for _, of_length in rows.groupby("seq_len"):
                cells = zip(of_length["backend"], of_length["status"], _values(of_length, columns), strict=True)
                lines = [
                    _Row(spec, to_hex(style[spec].color), "" if status == "ok" else _words(status), values)
                    for spec, status, values in cells
                ]
                sections.append(_Section(_lengths(of_length), lines))
            if sections:
                conditions = " · ".join(line for line in conditions_title(alike) if line)
                yield _Block(conditions, pass_title(name), [column.heading for column in columns], sections)


def _columns(rows: pd.DataFrame) -> list[_Column]:
    """The columns that say something of these rows."""
    held = [column for column in _COLUMNS if rows[column.name].notna().any()]
    return [column for column in held if column.name != "seed" or rows["seed"].nunique() > 1]


def _values(rows: pd.DataFrame, columns: list[_Column]) -> Iterator[list[_Value]]:
    """Row by row. Best is only what others can be compared with, and an error of 0 is no approximation."""
    best = {}
    for column in columns:
        known = rows.loc[rows[column.name] > 0, column.name]
        if column.best and len(known) > 1:
            best[column.name] = known.agg(column.best)
    for _, row in rows.iterrows():
        values = [(column, row[column.name]) for column in columns]
        yield [
            _Value("" if pd.isna(value) else column.text(value), value == best.get(column.name))
            for column, value in values
        ]


def _failures(summary: pd.DataFrame) -> list[_Failure]:
    """What failed, by backend and reason; cells that share a reason stand together."""
    failed = summary[summary["status"] != "ok"].fillna({"reason": "no reason given"})
    varying = [column for column in CONDITIONS if summary[column].nunique(dropna=False) > 1]
    failures = []
    for (spec, status, reason), rows in failed.groupby(["backend", "status", "reason"], sort=False):
        where = "everywhere"
        if len(rows) < (summary["backend"] == spec).sum():
            where = "; ".join(
                ", ".join([pass_title(str(name)), *map(str, conditions)]) + f" at {_lengths(cells)}"
                for (name, *conditions), cells in rows.groupby(["pass", *varying], dropna=False, sort=False)
            )
        failures.append(_Failure(str(spec), _words(str(status)), where, str(reason)))
    order = list(styles(failed["backend"]))
    return sorted(failures, key=lambda failure: order.index(failure.backend))


def _lengths(cells: pd.DataFrame) -> str:
    return ", ".join(length_label(seq_len) for seq_len in sorted(cells["seq_len"].dropna().unique()))


def _words(status: str) -> str:
    return status.replace("_", " ")


def _facts(records: pd.DataFrame) -> list[tuple[str, str]]:
    """Where and with what the records were made; several values stand side by side."""

    def distinct(column: str, text: Callable[[Any], str] = str) -> list[str]:
        return sorted({text(value) for value in records[column].dropna()})

    days = distinct("started_at", lambda moment: str(moment)[:10])
    statuses = records["status"].map(_words).value_counts()
    facts = {
        "machine": distinct("machine"),
        "processor": distinct("cpu"),
        "threads": distinct("cpu_threads", "{:g}".format),
        "accelerator": distinct("gpu"),
        "memory": distinct("memory_total_bytes", lambda size: f"{size / 2**30:.0f} GiB"),
        "effattn": distinct("effattn"),
        "commit": distinct("commit", lambda commit: re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)),
        "torch": distinct("torch"),
        "python": distinct("python"),
        "input": distinct("input_description"),
        "peak memory by": distinct("memory_method", _words),
        "lengths": [_lengths(records)],
        "measured": [" to ".join(dict.fromkeys([days[0], days[-1]]))] if days else [],
        "cells": [f"{count} {status}" for status, count in statuses.items()],
    }
    return [(name, ", ".join(values)) for name, values in facts.items() if any(values)]


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ study }} - effattn</title>
<style>
:root {
  color-scheme: light dark;
  --ink: #1f2328; --faint: #656d76; --line: #d0d7de; --soft: #f6f8fa; --page: #fff; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #8d96a0; --line: #30363d; --soft: #161b22; --page: #0d1117; --bad: #ff8a80;
  }
}
body {
  margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 68rem;
  color: var(--ink); background: var(--page); font: 15px/1.55 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .3rem; font-size: 1.2rem; border-bottom: thin solid var(--line); }
h3 { margin: 1.75rem 0 0; font-size: 1rem; }
h2, h3, h4 { break-after: avoid; }
h4 { margin: 1.25rem 0 .25rem; font-size: 1rem; font-weight: 400; }
p { max-width: 46rem; }
dt, figcaption, thead th { color: var(--faint); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .6rem 1.5rem; }
dt { font-size: .8rem; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; break-inside: avoid; }
figure img {
  display: block; box-sizing: border-box; width: 100%; max-width: 54rem; padding: .75rem;
  background: #fff; border: 1px solid var(--line); border-radius: 6px;
}
figcaption { max-width: 46rem; margin-top: .5rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; vertical-align: top; }
thead th { font-weight: 600; white-space: normal; vertical-align: bottom; border-bottom: 1px solid var(--line); }
tbody { border-bottom: 1px solid var(--line); break-inside: avoid; }
td.name, th.name { text-align: left; }
td.reason { min-width: 20rem; white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; }
td.best { font-weight: 700; }
.dot { display: inline-block; width: .65em; height: .65em; margin-right: .5em; border-radius: 50%; }
.dot { box-shadow: 0 0 0 1px var(--line); }
.bad { color: var(--bad); }
pre {
  padding: .75rem 1rem; overflow-x: auto;
  background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  table { font-size: 7pt; }
  th, td { padding: .1rem .3rem; }
  .dot { print-color-adjust: exact; }
}
</style>
</head>
<body>
<h1>{{ study }}</h1>
<dl>
{% for name, value in facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>

<h2>How to read the errors</h2>
{% for term, meaning in errors %}
<p>The <strong>{{ term }}</strong> {{ meaning }}</p>
{% endfor %}

<h2>Figures</h2>
{% for name, data, caption in figures %}
<figure>
<img src="data:image/png;base64,{{ data }}" alt="{{ name }}">
<figcaption>{{ caption }}</figcaption>
</figure>
{% else %}
<p>No figures were drawn.</p>
{% endfor %}

<h2>Numbers</h2>
<p>Median time of one call in milliseconds, its spread (half the way from the 20th to the 80th percentile),
speed-ups against <code>full</code> and <code>sdpa</code> in the same run, peak memory, the share of the
allowed pairs that is attended to, and errors as relative L2. Of each column the best at each length is
bold.</p>
{% for block in blocks %}
{% if loop.changed(block.conditions) %}
<h3>{{ block.conditions }}</h3>
{% endif %}
<h4>{{ block.title }}</h4>
<div class="scroll">
<table>
<thead>
<tr><th>length</th><th class="name">backend</th>
{% for heading in block.headings %}<th>{{ heading }}</th>{% endfor %}
</tr>
</thead>
{% for section in block.sections %}
<tbody>
{% for row in section.rows %}
<tr>
{% if loop.first %}<th rowspan="{{ section.rows | length }}">{{ section.length }}</th>{% endif %}
<td class="name"><span class="dot" style="background: {{ row.color }}"></span>{{ row.backend }}
<span class="bad">{{ row.failed }}</span></td>
{% for value in row.values %}
<td{% if value.best %} class="best"{% endif %}>{{ value.text }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
{% endfor %}
</table>
</div>
{% else %}
<p>No cell was measured.</p>
{% endfor %}

<h2>Cells that failed</h2>
{% if failures %}
<div class="scroll">
<table>
<thead>
<tr><th class="name">backend</th><th class="name">status</th><th class="name">where</th>
<th class="name">reason</th></tr>
</thead>
{% for failure in failures %}
<tbody>
<tr><td class="name">{{ failure.backend }}</td><td class="name bad">{{ failure.status }}</td>
<td class="name">{{ failure.where }}</td><td class="reason">{{ failure.reason }}</td></tr>
</tbody>
{% endfor %}
</table>
</div>
{% else %}
<p>None.</p>
{% endif %}

<h2>Command</h2>
{% if command %}
<pre>{{ command }}</pre>
{% else %}
<p>The command line was not recorded; the study is <code>{{ study }}</code>.</p>
{% endif %}
{% if study_text %}
<p><code>study.yaml</code>, beside this report, as it was resolved on this machine with what the command line said:</p>
<pre>{{ study_text }}</pre>
{% endif %}
</body>
</html>
"""
