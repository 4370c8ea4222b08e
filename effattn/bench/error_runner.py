"""Run an error study to its end: the model reads, its layers are measured as they come by, then tables and figures.

The model reads each text once, at the longest length, and hands its layers over one at a time (``capture.stream``): it
never looks ahead, so that a shorter length is a prefix. Every backend's output is held against full attention on
sampled query rows (``head_errors.py``).

Results go to ``OUT/<study>/<machine>/``: ``study.yaml`` (as it was resolved), ``records.jsonl`` with a record a text,
length, layer and backend, ``summary.csv`` and ``figures/``. Running the same command again measures only what has no
record yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn

import effattn
from effattn.bench import capture, models, running
from effattn.bench.capture import CaptureSource, LayerInputs
from effattn.bench.error_study import Cell, ErrorStudy
from effattn.bench.head_errors import FullRows
from effattn.bench.machine import Machine
from effattn.bench.records import RecordWriter, read
from effattn.bench.settings import read_fields
from effattn.bench.study import pick_device
from effattn.bench.workers import load_plugin


def run(
    study: ErrorStudy,
    *,
    out: Path = Path("results"),
    machine_label: str | None = None,
    retry: bool = False,
    fresh: bool = False,
    console: Console | None = None,
) -> Path:
    """Measure what ``study`` asks for and has no record yet, draw, and return the folder of the results.

    Args:
        out: where the folder ``<study>/<machine>`` is, or is made.
        machine_label: the machine's name where the derived one does not please.
        retry: measure the cells again that did not end well.
        fresh: measure all cells again.

    Raises:
        ValueError: for a study that cannot be run here, a text that is too short, lengths beyond the model's
            positions, a model that cannot be captured; or if another run is writing to the same folder.
        ModuleNotFoundError, OSError: as ``models.load``.
    """
    console = console or running.terminal()
    study = resolve(study)
    machine = Machine.this(study.device, machine_label)
    folder = out / study.name / machine.machine
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "records.jsonl") as writer:
        study.save(folder / "study.yaml")
        cells = study.cells()
        known = read(writer.path)
        if todo := running.unmeasured(cells, known, machine, console, source_of=_source_of, retry=retry, fresh=fresh):
            _measure(todo, study, machine, writer, console)
    return draw(folder, console)


def resolve(study: ErrorStudy) -> ErrorStudy:
    """``study`` as it runs here: plugins imported, backends, layers and device named.

    Raises:
        ValueError: for an unknown backend, layer or device.
    """
    for plugin in study.plugins:
        load_plugin(plugin)
    specs = [name for spec in study.backends for name in (effattn.names() if spec == "all" else (spec,))]
    depth = models.depth(models.config(study.model))
    layers = tuple(range(depth)) if study.layers is None else study.layers
    grad_layers = study.grad_layers
    if grad_layers == "telling":
        grad_layers = tuple(layers[i] for i in capture.choose_layers(CaptureSource(study.model), len(layers)))
    elif grad_layers != "all" and not set(grad_layers) <= set(layers):
        raise ValueError(
            f"errors: grad_layers must be among the layers, {', '.join(map(str, layers))}, got {list(grad_layers)}"
        )
    return study.replace(
        backends=[str(effattn.get(spec)) for spec in specs],
        layers=capture.choose_layers(CaptureSource(study.model, layers=layers), depth),
        grad_layers=grad_layers,
        device=pick_device(study.device),
    )


def _source_of(cell: Cell) -> str | None:
    return running.backend_source([effattn.get(cell.backend)])


def is_one(folder: Path) -> bool:
    """Whether ``folder`` holds the results of an error study."""
    path = folder / "study.yaml"
    return path.exists() and {"texts", "error_rows"} <= set(read_fields(path)) <= set(ErrorStudy.model_fields)


def draw(folder: Path, console: Console | None = None) -> Path:
    """Tables and figures in ``folder`` from its records of the study there; returns ``folder``.

    Raises:
        ValueError: if ``folder`` holds no results of an error study, or a file of its plugins is gone.
    """
    import pandas as pd

    from effattn.bench import error_report

    console = console or running.terminal()
    if not is_one(folder):
        raise ValueError(f"errors: {folder} must hold the study.yaml and records.jsonl of an error study")
    study, known = ErrorStudy.parse(read_fields(folder / "study.yaml")), read(folder / "records.jsonl")
    for plugin in study.plugins:  # what families its backends are of, they alone can tell
        load_plugin(plugin)
    records = pd.DataFrame([known[cell.key] for cell in study.cells() if cell.key in known])
    error_report.summary_table(records).to_csv(folder / "summary.csv", index=False)
    error_report.draw_all(records, folder / "figures")
    error_report.print_tables(records, console)
    console.print(f"\n{folder}", highlight=False, soft_wrap=True)
    return folder


def _measure(
    cells: Sequence[Cell], study: ErrorStudy, machine: Machine, writer: RecordWriter, console: Console
) -> None:
    """Let the model read each text that has cells left, and measure them as their layers come by."""
    console.print(f"Loading {study.model}", highlight=False)
    loaded = models.load(study.model)
    backends = {cell.backend: effattn.get(cell.backend) for cell in cells}
    with running.progress_bar(console, MofNCompleteColumn()) as progress:
        task = progress.add_task("", total=len(cells))
        for text in dict.fromkeys(cell.text for cell in cells):
            of_text = [cell for cell in cells if cell.text == text]

            def visit(inputs: LayerInputs, of_text: list[Cell] = of_text) -> None:
                of_layer = [cell for cell in of_text if cell.layer == inputs.layer]
                for seq_len in dict.fromkeys(cell.seq_len for cell in of_layer):
                    started_at = datetime.now(UTC).isoformat(timespec="seconds")
                    measured = [cell for cell in of_layer if cell.seq_len == seq_len]
                    first = measured[0]
                    prefix = inputs.prefix(seq_len, dtype=getattr(torch, first.dtype), device=first.device)
                    full = FullRows.of(prefix, first.error_rows, seed=first.seed, gradients=first.gradients)
                    for cell in measured:
                        outcome = running.outcome(partial(full.errors_of, backends[cell.backend]))
                        where = {"backend_source": _source_of(cell), **machine.record, "started_at": started_at}
                        writer.append({**cell.identity, **outcome, **where})
                        progress.advance(task)

            longest = max(cell.seq_len for cell in of_text)
            layers = sorted({cell.layer for cell in of_text})
            capture.stream(CaptureSource(study.model, text), longest, visit, layers=layers, loaded=loaded)
            lengths = ", ".join(map(str, sorted({cell.seq_len for cell in of_text})))
            progress.console.print(f"{text}: {len(layers)} layers at {lengths} tokens", highlight=False)
