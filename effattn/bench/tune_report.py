"""What a search found, on the terminal, in a file that ``effattn.swap`` can use, and as figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from effattn.bench.capture import CaptureSource
from effattn.bench.figures import RC, backend_name, save_figure, styles
from effattn.bench.machine import Machine
from effattn.bench.models import label
from effattn.bench.recommend import (
    BUDGET_COLOR,
    DENSITY,
    ERROR,
    FLOPS,
    TABLE_WIDTH,
    Measure,
    draw_trade_off,
    print_evidence,
    weighed,
)
from effattn.bench.tune import COSTS, EXACT, Tuning, candidates, save, tune
from effattn.bench.words import broken, family

_GREY = "#666666"
_LEGEND_LINE_INCHES = 0.135
_ROOM = 0.08  # of the front's extent, that a number needs


def run(
    backends: Sequence[str], *, out: Path | None, machine_label: str | None, console: Console, **options: Any
) -> Tuning:
    """``tune``, print what it finds, and where something keeps the budget write file, table and figures.

    Args:
        backends, options: as ``tune`` takes them.
        out: the YAML file; None: in ``results/tune/<machine>``, named by what was asked.
        machine_label: the machine's name where the derived one does not please.
        console: to print on.
    """
    machine = Machine.this(options.get("device", "cpu"), machine_label)
    source = options.get("source") or CaptureSource()
    count = len(candidates(backends, options.get("space"), options.get("seq_len")))
    words = f"Trying {count} candidates on what {label(source.model)} attends to while it reads {label(source.text)}"
    console.print(words, highlight=False)
    columns = ("layers", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        tuning = tune(
            backends, **options, on_layer=lambda done, total: progress.update(task, completed=done, total=total)
        )
    print_tuning(tuning, machine.machine, console)
    if tuning.qualifies:
        path = out or Path("results") / "tune" / machine.machine / f"{_name(tuning, backends)}.yaml"
        save(tuning, path, machine)
        tuning.table.to_csv(path.with_suffix(".csv"), index=False)
        draw_all(tuning, machine.machine, path.with_suffix(""))
        console.print(f"\n{path}", highlight=False, soft_wrap=True)
    return tuning


def _name(tuning: Tuning, backends: Sequence[str]) -> str:
    parts = [*dict.fromkeys(map(backend_name, backends)), label(tuning.source.model), label(tuning.source.text)]
    parts += [f"{tuning.seq_len}", f"{tuning.max_error:g}"]
    parts += [tuning.judge] if tuning.judge != "pooled" else []
    parts += ["per_layer"] if tuning.per_layer else []
    return "-".join(parts)


# The terminal -----------------------------------------------------------------------------------------------


def print_tuning(tuning: Tuning, machine: str, console: Console) -> None:
    """Print the choice as a spec or a line a layer, what it saves, and the candidates on the Pareto front."""
    for line in _conditions(tuning, machine):
        console.print(Text(line, style="dim"))
    if tuning.per_layer:
        _print_layers(tuning, console)
    else:
        _print_choice(tuning, console)
        words = f"Searched on {_named(tuning.layers)}; the file's one backend is for all layers of the model."
        console.print(Text(words, style="dim"))
    shown = tuning.table[tuning.table["front"] | tuning.table["backend"].isin([tuning.backend, EXACT])]
    console.print(
        f"\nOne backend for all layers: what of {len(tuning.table) - 1} candidates lies on the Pareto front"
        if tuning.per_layer
        else f"\nWhat of {len(tuning.table) - 1} candidates lies on the Pareto front"
    )
    print_evidence(shown.drop(columns=FLOPS.column) if tuning.cost == "time" else shown, tuning.backend, console)
    for spec, reason in tuning.failed.items():
        console.print(Text(f"{broken(spec)} failed: {reason.partition(chr(10))[0]}", style="dim"))


def _print_choice(tuning: Tuning, console: Console) -> None:
    if tuning.backend is None:
        closest = tuning.table[tuning.table["backend"] != EXACT].nsmallest(1, ERROR.column).to_dict("records")[0]
        hint = f"the closest is {closest['backend']} with {ERROR.text(closest[ERROR.column])}"
        console.print(Text(f"Nothing in the space keeps {_budget(tuning)}; {hint}.", style="bold red"))
        return
    if tuning.backend == EXACT:
        console.print(
            Text(f"{EXACT} is exact, and nothing that keeps {_budget(tuning)} costs much less.", style="bold yellow")
        )
        return
    share = tuning.cost_of(tuning.backend) / tuning.cost_of(EXACT)
    words = f"  least {COSTS[tuning.cost].name} with {_budget(tuning)}: {share:.2f} of {EXACT}'s"
    console.print(Text(tuning.backend, style="bold green").append(words, style=""))


def _print_layers(tuning: Tuning, console: Console) -> None:
    if not tuning.qualifies:
        least = tuning.errors.drop(index=EXACT).min().min()
        words = f"Nothing in the space keeps {_budget(tuning)} in any layer; the least error is {ERROR.text(least)}."
        console.print(Text(words, style="bold red"))
        return
    price, chosen = COSTS[tuning.cost], tuning.backends
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("layers", "backend", ERROR.heading, DENSITY.heading, price.heading, f"of {EXACT}'s"):
        table.add_column(heading, justify="left" if heading in ("layers", "backend") else "right", overflow="fold")
    for spec, layers in _by_spec(chosen).items():
        held = [tuning.error(spec, layer) for layer in layers]
        table.add_row(
            _spans(layers),
            broken(spec, TABLE_WIDTH),
            " to ".join(dict.fromkeys(map(ERROR.text, (min(held), max(held))))),
            DENSITY.text(tuning.value(spec, DENSITY)),
            price.text(tuning.cost_of(spec)),
            f"{tuning.cost_of(spec) / tuning.cost_of(EXACT):.2f}",
            style="dim" if spec == EXACT else "bold",
        )
    console.print(Text(f"Least {price.name} with {_budget(tuning)} in each layer", style="bold green"))
    console.print(table)
    dearer = [layer for layer, spec in chosen.items() if spec == EXACT and layer not in tuning.unkept]
    if tuning.unkept:
        console.print(f"Nothing in the space keeps it in {_named(tuning.unkept)}, where the exact {EXACT} serves.")
    if dearer:
        console.print(f"In {_named(dearer)} nothing that keeps it costs much less than {EXACT}, which serves there.")
    console.print(f"All layers together: {_saving(tuning)}.", highlight=False)


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {_spans(layers)}"


def _saving(tuning: Tuning) -> str:
    """What the choice by layer costs, beside sdpa everywhere and the best single spec."""
    price, whole = COSTS[tuning.cost], tuning.cost_of(EXACT) * len(tuning.layers)
    total = sum(map(tuning.cost_of, tuning.backends.values()))
    words = f"{price.text(total)}, {total / whole:.2f} of {EXACT}'s {price.text(whole)}"
    if tuning.backend in (None, EXACT):
        return f"{words}; no single backend keeps the budget over all layers for less"
    share = tuning.cost_of(tuning.backend) / tuning.cost_of(EXACT)
    return f"{words}; one backend for all that keeps the budget, {tuning.backend}, would take {share:.2f}"


def _conditions(tuning: Tuning, machine: str) -> tuple[str, str]:
    num_heads, num_kv_heads, head_dim = tuning.heads
    layers = "all layers" if tuning.source.layers is None and tuning.per_layer else f"layers {_spans(tuning.layers)}"
    source = f"{label(tuning.source.model)} reading {label(tuning.source.text)}"
    shape = f"{num_heads} heads · {num_kv_heads} key/value heads · head_dim {head_dim}"
    return (
        f"{source} · {layers} · {tuning.seq_len:,} tokens · {machine}",
        f"{tuning.dtype} · causal mask · {tuning.device} · {shape}",
    )


def _budget(tuning: Tuning) -> str:
    of = {
        "pooled": "" if tuning.per_layer else ", pooled over the layers,",
        "worst_layer": "" if tuning.per_layer else ", in the worst layer,",
        "worst_head": ", in the worst head,",
    }[tuning.judge]
    return f"{ERROR.name}{of} of at most {ERROR.text(tuning.max_error)}"


def _by_spec(chosen: dict[int, str]) -> dict[str, list[int]]:
    """The layers of each spec, in the order of the first one."""
    found: dict[str, list[int]] = {}
    for layer, spec in chosen.items():
        found.setdefault(spec, []).append(layer)
    return found


def _spans(layers: Sequence[int]) -> str:
    """``0-2, 5`` for 0, 1, 2 and 5."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


# Figures ----------------------------------------------------------------------------------------------------


def draw_all(tuning: Tuning, machine: str, stem: Path) -> list[Path]:
    """Draw the trade-off of all candidates, and with ``per_layer`` what each layer got, as PNG and PDF."""
    with mpl.rc_context(RC):
        figures = {"": trade_off_figure(tuning, machine)}
        if tuning.per_layer:
            figures["-layers"] = layers_figure(tuning, machine)
        return [path for end, each in figures.items() for path in save_figure(each, stem.with_name(stem.name + end))]


def trade_off_figure(tuning: Tuning, machine: str) -> Figure:
    """Error against cost of every candidate, the Pareto front numbered; where time counts, against density too."""
    measures = [DENSITY, COSTS[tuning.cost]] if tuning.cost == "time" else [COSTS[tuning.cost]]
    look = styles(map(backend_name, tuning.table["backend"]))
    front = tuning.table[tuning.table["front"]]
    numbers = {spec: number for number, spec in enumerate(_apart(front, measures[-1], tuning.backend), start=1)}
    figure = Figure(figsize=(2.5 * len(measures) + 2.9, 3.0), layout="constrained")
    axes = figure.subplots(1, len(measures), squeeze=False)[0]
    for ax, measure in zip(axes, measures, strict=True):
        table = weighed(tuning.table, ERROR, tuning.max_error, measure)
        draw_trade_off(ax, table, measure, ERROR, tuning.max_error, look, tuning.backend)
        for row in table[table["backend"].isin(numbers)].to_dict("records"):
            _number(ax, row[measure.column], row[ERROR.column], numbers[row["backend"]], (-3, -2), ("right", "top"))
    for ax in axes[1:]:  # of the same errors, so of the same limits
        ax.set(ylabel="", yticklabels=[])
    marks = {name: Line2D([], [], linestyle="none", marker=s.marker, color=s.color) for name, s in look.items()}
    handles, labels = _legend(tuning, marks, numbers)
    _finish(figure, tuning, machine, handles, labels)
    return figure


def _apart(front: pd.DataFrame, cost: Measure, chosen: str | None) -> list[str]:
    """Specs of the front with room for a number beside each point: the chosen one, then the others by cost."""
    rows = front[front[ERROR.column] > ERROR.least]
    places = {
        spec: np.log([price, error])
        for spec, price, error in zip(rows["backend"], rows[cost.column], rows[ERROR.column], strict=True)
    }
    room = _ROOM * np.ptp(list(places.values()), axis=0) if places else 0.0
    kept = [spec for spec in places if spec == chosen]
    for spec in places:
        if all((np.abs(places[spec] - places[other]) > room).any() for other in kept):
            kept.append(spec)
    return [spec for spec in places if spec in kept]


def _number(ax: Axes, x: float, y: float, number: int, offset: tuple[float, float], alignment: tuple[str, str]) -> None:
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "ha": alignment[0],
        "va": alignment[1],
        "fontsize": 6,
        "color": _GREY,
    }
    ax.annotate(f"{number}", (x, y), offset, **style)


def layers_figure(tuning: Tuning, machine: str) -> Figure:
    """Layer by layer the error and the cost of what was chosen, in the colour of its backend, with a number a spec."""
    chosen, price = tuning.backends, COSTS[tuning.cost]
    look = styles([*map(backend_name, chosen.values()), EXACT])
    colors = [look[backend_name(spec)].color for spec in chosen.values()]
    used = [spec for spec in tuning.table["backend"] if spec in chosen.values() and spec != EXACT]
    used.sort(key=lambda spec: list(look).index(backend_name(spec)))
    numbers = {spec: number for number, spec in enumerate(used, start=1)}
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.bar(tuning.layers, [tuning.error(spec, layer) for layer, spec in chosen.items()], color=colors)
    upper.axhline(tuning.max_error, color=BUDGET_COLOR, linewidth=0.8, linestyle=(0, (4, 2)))
    upper.set_ylabel("error\n(relative L2)")
    lower.bar(tuning.layers, [tuning.cost_of(spec) for spec in chosen.values()], color=colors)
    lower.axhline(tuning.cost_of(EXACT), color=look[EXACT].color, linewidth=1, linestyle=(0, (1, 1.5)))
    lower.set(xlabel="layer", ylabel=f"{price.heading}\n({price.unit.strip()})")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.set_xlim(min(tuning.layers) - 0.6, max(tuning.layers) + 0.6)
    for layer, spec in chosen.items():
        if spec in numbers:
            _number(lower, layer, tuning.cost_of(spec), numbers[spec], (0, 1.5), ("center", "bottom"))
    marks: dict[str, Any] = {name: Patch(color=s.color) for name, s in look.items()}
    marks[EXACT] = Line2D([], [], color=look[EXACT].color, linewidth=1, linestyle=(0, (1, 1.5)))
    counts = {spec: len(layers) for spec, layers in _by_spec(chosen).items()}
    handles, labels = _legend(tuning, marks, numbers, counts)
    _finish(figure, tuning, machine, handles, labels)
    return figure


def _legend(
    tuning: Tuning, marks: dict[str, Any], numbers: dict[str, int], counts: dict[str, int] | None = None
) -> tuple[list[Any], list[str]]:
    """Backends with what all their candidates share, and under each the rest of those that have a number."""
    handles: list[Any] = []
    labels = []
    for name, mark in marks.items():
        specs = [spec for spec in tuning.table["backend"] if backend_name(spec) == name]
        heading, own = family(specs)
        handles.append(mark)
        labels.append(heading)
        for spec in filter(numbers.__contains__, specs):
            mark = {"marker": f"${numbers[spec]}$", "markeredgewidth": 0, "color": _GREY, "linestyle": "none"}
            mark["markersize"] = mpl.rcParams["lines.markersize"] * (1.5 if numbers[spec] > 9 else 1)  # scaled by width
            handles.append(Line2D([], [], **mark))
            chosen = "  ← chosen" if counts is None and spec == tuning.backend else ""
            labels.append(own[spec] + (f"  in {counts[spec]} layer{'s' * (counts[spec] > 1)}" if counts else chosen))
    handles.append(Line2D([], [], color=BUDGET_COLOR, linewidth=0.8, linestyle=(0, (4, 2))))
    labels.append(f"the budget, {ERROR.text(tuning.max_error)}")
    return handles, labels


def _finish(figure: Figure, tuning: Tuning, machine: str, handles: list[Any], labels: list[str]) -> None:
    lines = sum(1 + label.count("\n") for label in labels)
    figure.set_figheight(max(figure.get_figheight(), _LEGEND_LINE_INCHES * (lines + 3)))
    figure.suptitle("\n".join(_conditions(tuning, machine)), x=0.01, ha="left", fontsize=7)
    figure.legend(handles, labels, loc="outside right center", fontsize=6.5)
