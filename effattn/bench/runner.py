"""Run a study to its end: what is refused, what is measured, what is already known; then figures and report.

Results go to ``OUT/<study>/<machine>/``: ``study.yaml`` (as it was resolved), ``records.jsonl``,
``summary.csv``, ``figures/`` and ``report.html``. Running the same command again measures only cells that
have no record yet.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress, TextColumn

import effattn
from effattn.bench import models, running
from effattn.bench.capture import CaptureInfo, CaptureSource, captured_info, ensure_captured
from effattn.bench.ceilings import against
from effattn.bench.machine import Machine
from effattn.bench.records import RecordWriter, read
from effattn.bench.study import Cell, Study, pick_device
from effattn.bench.workers import Outcome, Workers, load_plugin, memory_limit_bytes


def sweep(
    study: Study,
    *,
    out: Path = Path("results"),
    machine_label: str | None = None,
    retry: bool = False,
    fresh: bool = False,
    console: Console | None = None,
) -> Path:
    """Measure every cell of ``study`` that has no record yet, draw, and return the folder of the results.

    Args:
        out: where the folder ``<study>/<machine>`` is, or is made.
        machine_label: the machine's name where the derived one does not please.
        retry: measure the cells again that did not end well.
        fresh: begin anew; the old folder is moved aside, not deleted.

    Raises:
        ValueError: for a study that cannot be run here, before anything is measured; or if another sweep is
            writing to the same folder.
    """
    console = console or running.terminal()
    study = resolve(study, console)
    machine = Machine.this(study.device, machine_label)
    folder = out / study.name / machine.machine
    if fresh and folder.exists():
        console.print(f"Moved the results so far to {_set_aside(folder)}", highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "records.jsonl") as writer:
        study.save(folder / "study.yaml")
        cells = study.cells()
        known = read(writer.path)
        if todo := running.unmeasured(cells, known, machine, console, source_of=_source_of, retry=retry):
            _measure(todo, study, machine, writer, console)
    return draw(folder, console)


def resolve(study: Study, console: Console) -> Study:
    """``study`` as it runs here: plugins imported, backends and device named, input captured, its sizes
    filled in.

    Raises:
        ValueError: for an unknown backend, a device that is not there, or sizes that are missing or do not
        fit.
    """
    for plugin in study.plugins:
        load_plugin(plugin)
    specs = [name for spec in study.backends for name in (effattn.names() if spec == "all" else (spec,))]
    backends = dict.fromkeys(str(effattn.get(spec)) for spec in specs)
    device = pick_device(study.device)
    captured = _capture(study.source, study.seq_lens, console) if "captured" in study.inputs else None
    return study.replace(backends=list(backends), device=device, **_sizes(study, captured))


def draw(folder: Path, console: Console | None = None) -> Path:
    """Tables, figures and report in ``folder`` from its records of the study there; returns ``folder``.

    Raises:
        ValueError: if ``folder`` holds no results.
    """
    import pandas as pd

    from effattn.bench.figures import draw_all
    from effattn.bench.report import print_table, summary_table, write_report

    console = console or running.terminal()
    if not (folder / "study.yaml").exists():
        raise ValueError(f"plot: {folder} must be a folder of results, with study.yaml and records.jsonl")
    known = read(folder / "records.jsonl")
    cells = Study.load(folder / "study.yaml").cells()
    records = pd.DataFrame([known[cell.key] for cell in cells if cell.key in known])
    summary_table(records).to_csv(folder / "summary.csv", index=False)
    figures = draw_all(records, folder / "figures")
    report = write_report(records, figures, folder)
    print_table(records, console)
    console.print(f"\n{report}", highlight=False, soft_wrap=True)
    return folder


def _capture(source: CaptureSource, seq_lens: Sequence[int], console: Console) -> CaptureInfo:
    """See that captured input is there for every length that the model can read."""
    try:
        known = captured_info(source)
        positions, captured_len = known.max_seq_len, known.seq_len
    except ValueError:  # nothing is captured yet: only the model can tell, which takes longer
        positions, captured_len = models.positions(models.config(source.model)), 0
    readable = [seq_len for seq_len in seq_lens if positions is None or seq_len <= positions]
    if not readable:
        raise ValueError(f"study: seq_lens must hold one up to {positions}, the positions of {source.model}")
    if max(readable) > captured_len:
        console.print(f"Capturing {max(readable)} tokens of {source}, which is done once", highlight=False)
    return ensure_captured(source, max(readable))


def _sizes(study: Study, captured: CaptureInfo | None) -> dict[str, int]:
    """The sizes of heads that the study leaves open, from the captured model; and whether all fits."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    model = {name: getattr(captured, name) for name in names if captured}
    asked = {name: size for name in names if (size := getattr(study, name)) is not None}
    for name, size in asked.items():
        if size != model.get(name, size):
            raise ValueError(f"study: {name} must be that of {study.model}, {model[name]}, got {size}")
    sizes = {**asked, **model}
    for name in ("num_heads", "head_dim"):
        if name not in sizes:
            raise ValueError(f"study: {name} must be given where no input is captured from a model")
    num_heads, num_kv_heads = sizes["num_heads"], sizes.setdefault("num_kv_heads", sizes["num_heads"])
    if num_heads % num_kv_heads:
        raise ValueError(f"study: num_heads must be a multiple of num_kv_heads, {num_kv_heads}, got {num_heads}")
    if captured and study.batch_size > len(captured.layers):
        raise ValueError(
            f"study: batch_size must be at most {len(captured.layers)}, the captured layers, got {study.batch_size}"
        )
    return sizes


def _measure(cells: list[Cell], study: Study, machine: Machine, writer: RecordWriter, console: Console) -> None:
    _warn_if_busy(console)
    limit = memory_limit_bytes(study.memory_limit)
    with Workers(study.device, study.plugins, limit, study.timeout_s) as workers, _progress(cells, console) as advance:
        refusals = workers.refusals(cells)
        ceilings = workers.ceilings(study.device, sorted({cell.dtype for cell in cells}))
        for cell in cells:
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            refusal = refusals.get(cell.key)
            outcome = Outcome("unsupported", refusal) if refusal else workers.measure(cell)
            writer.append(
                {
                    "study": study.name,
                    **cell.identity,
                    "backend_source": _source_of(cell),
                    "status": outcome.status,
                    "reason": outcome.reason,
                    **outcome.measured,
                    **(against(outcome.measured, ceilings[cell.dtype]) if cell.dtype in ceilings else {}),
                    **machine.record,
                    "started_at": started_at,
                    "wall_s": outcome.wall_s,
                }
            )
            advance(cell, outcome)


def _source_of(cell: Cell) -> str | None:
    return running.backend_source([effattn.get(cell.backend)])


class _Advance:
    """Shows each cell as it ends: a line, and on a terminal a bar with the time left below the lines."""

    def __init__(self, cells: Sequence[Cell], progress: Progress) -> None:
        self.progress, self.count, self.done = progress, len(cells), 0
        self.task = progress.add_task("", total=sum(map(_expected_work, cells)), cells=f"0/{self.count}")

    def __call__(self, cell: Cell, outcome: Outcome) -> None:
        self.done += 1
        place = f"{self.done}/{self.count}"
        self.progress.update(self.task, advance=_expected_work(cell), cells=place)
        style = "" if outcome.status == "ok" else "red"
        line = f"[{place}] {cell}: {_summary(outcome)}"
        self.progress.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(cells: Sequence[Cell], console: Console) -> Iterator[_Advance]:
    with running.progress_bar(console, TextColumn("{task.fields[cells]}")) as progress:
        yield _Advance(cells, progress)


def _expected_work(cell: Cell) -> float:
    """What a cell takes, in cells of no work: a process start, and something between linear and quadratic."""
    return 1 + (cell.seq_len / 2048) ** 1.5 * (2.5 if cell.pass_name == "forward_backward" else 1)


def _summary(outcome: Outcome) -> str:
    if outcome.status != "ok":
        return f"{outcome.status.replace('_', ' ')}: {outcome.reason}"
    got: Mapping[str, Any] = outcome.measured
    time_ms = got["forward_ms_median"] + got.get("backward_ms_median", 0.0)
    if "approximation_rel_l2" in got:
        error = f"{got['implementation_rel_l2']:.1e} + {got['approximation_rel_l2']:.3g}"
    else:
        error = f"{got['total_rel_l2']:.3g} in total"
    return f"{time_ms:.4g} ms, {got['peak_memory_bytes'] / 2**20:.4g} MiB, error {error}"


def _warn_if_busy(console: Console) -> None:
    """Two threads that wait for each other on a core that others use are slowed down tenfold and more."""
    busy = psutil.cpu_percent(interval=0.5)
    if busy > 25:
        console.print(
            f"Other processes take {busy:.0f}% of the CPU: times will be too long, and vary",
            style="yellow",
            highlight=False,
        )


def _set_aside(folder: Path) -> Path:
    """Rename ``folder`` to the first of ``folder.1``, ``folder.2``, ... that is free."""
    free = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
    os.rename(folder, free)
    return free
