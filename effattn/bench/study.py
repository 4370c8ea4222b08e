"""What to measure: a study, written in YAML, and the cells that it expands to.

A study is the cross product of backends, lengths, dtypes, masks, inputs and passes. A cell is one point of
it; its key is the hash of everything that its numbers depend on apart from code and machine, so that a
sweep that was interrupted, or a study that was widened, measures only what is missing.
"""

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import Field, field_validator, model_validator

import effattn
from effattn import masks
from effattn.bench.capture import CaptureSource
from effattn.bench.inputs import kinds
from effattn.bench.settings import Settings, read_fields
from effattn.bench.texts import TEXTS

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Pass = Literal["forward", "forward_backward", "decode"]

_OF_THE_WHOLE = ("name", "plugins", "device", "model", "text", "layers", "timeout_s", "memory_limit")
_WHEN_CUDA = "when_cuda"  # a block of a study's YAML: fields that differ where the study runs on CUDA
_NAMED_MASKS: dict[str, masks.Mask] = {"none": masks.Everything(), "causal": masks.Causal()}
_MASK_CLASSES = {cls.__name__: cls for cls in (masks.Causal, masks.Everything, masks.Global, masks.Window)}


@dataclass(frozen=True)
class Cell:
    """One measurement: a backend on one input, and how carefully it is measured."""

    backend: str  # canonical spec string
    batch_size: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    dtype: Dtype
    device: str  # "cpu" or "cuda"
    mask: str
    input: str
    source: CaptureSource | None  # of a captured input
    pass_name: Pass
    seed: int
    repeats: int
    min_time_s: float
    error_rows: int
    grad_error_max_len: int
    cuda_graph: bool = False  # also time the call in a CUDA graph

    @property
    def key(self) -> str:
        """16 hexadecimal digits: equal for equal cells, on every machine."""
        fields = asdict(self)
        if not self.cuda_graph:  # cells keep the keys that they had before there was this
            del fields["cuda_graph"]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of the record that say what was measured."""
        fields = asdict(self)
        shared = (
            "batch_size",
            "num_heads",
            "num_kv_heads",
            "seq_len",
            "head_dim",
            "dtype",
            "device",
            "mask",
            "input",
        )
        return {
            "cell": self.key,
            "backend": self.backend,
            "backend_name": self.backend.partition("(")[0],
            **{name: fields[name] for name in shared},
            "pass": self.pass_name,
            "seed": self.seed,
        }

    def __str__(self) -> str:
        return f"{self.backend} {self.seq_len} {self.pass_name}"


class Study(Settings):
    """What to measure and how: the fields of a study's YAML and, by the same names, of the command line."""

    name: str = Field(pattern=r"^[\w-]+$", description="names the folder of the results")
    plugins: tuple[str, ...] = Field(
        (), description="files (from the working directory) or modules that register more backends"
    )
    backends: tuple[str, ...] = Field(
        ("all",),
        min_length=1,
        description="spec strings such as 'lsh(num_hashes=8)'; all = each at its defaults",
    )
    seq_lens: tuple[Count, ...] = Field(min_length=1, description="lengths in tokens, measured in this order")
    batch_size: Count = Field(1, description="of a captured input: how many of its layers")
    num_heads: Count | None = Field(None, description="query heads; None = those of the captured model")
    num_kv_heads: Count | None = Field(
        None, description="key and value heads; None = as many as the model or num_heads"
    )
    head_dim: Count | None = Field(None, description="None = that of the captured model")
    dtypes: tuple[Dtype, ...] = Field(("float32",), min_length=1, description="of query, key and value")
    device: Device = Field("auto", description="auto = CUDA where there is one")
    masks: tuple[str, ...] = Field(
        ("causal",),
        min_length=1,
        description="none, causal, or a term such as 'causal & Window(256, 0) | Global((0,))'",
    )
    inputs: tuple[str, ...] = Field(("captured",), min_length=1, description=f"of {', '.join(kinds())}")
    model: str = Field(CaptureSource.model, description="captured: a model's PyPI package, folder or id")
    text: str = Field(CaptureSource.text, description=f"captured: of {', '.join(TEXTS)}, or a text file")
    layers: tuple[int, ...] | None = Field(None, description="captured: which layers; None = a telling choice")
    passes: tuple[Pass, ...] = Field(("forward", "forward_backward"), min_length=1, description="what is timed")
    repeats: int = Field(5, ge=5, description="timed runs of a cell, at least")
    min_time_s: float = Field(0.2, ge=0, description="more runs, up to 100, until they took this long")
    error_rows: Count = Field(256, description="query rows on which errors are computed exactly")
    grad_error_max_len: int = Field(
        2048, ge=0, description="no gradient errors above this length: they cost its square"
    )
    cuda_graph_max_len: int = Field(
        0, ge=0, description="up to this length, forward passes and decoding on CUDA are timed in a CUDA graph too"
    )
    variants: tuple[str, ...] = Field(
        (), description="more cells: each the study with other values for some fields, such as '{head_dim: 128}'"
    )
    timeout_s: float = Field(300, gt=0, description="of a cell, after its process has started")
    memory_limit: Share = Field(0.8, description="share of the machine's memory that a cell may take")
    seed: int = Field(0, ge=0, description="of random inputs, sampled rows and gradients")

    @field_validator("masks")
    @classmethod
    def _canonical_masks(cls, specs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(mask_name(parse_mask(spec)) for spec in specs)

    @field_validator("inputs")
    @classmethod
    def _known_inputs(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in kinds():
                raise ValueError(f"must be of {', '.join(kinds())}")
        return names

    @field_validator("variants", mode="before")
    @classmethod
    def _canonical_variants(cls, variants: Any) -> Any:
        if not isinstance(variants, list):
            return variants
        try:
            read = [yaml.safe_load(variant) if isinstance(variant, str) else variant for variant in variants]
        except yaml.YAMLError:
            raise ValueError(f"must be YAML such as '{{head_dim: 128}}', got {variants}") from None
        return tuple(json.dumps(fields, sort_keys=True) for fields in read)

    @model_validator(mode="after")
    def _variants_are_studies(self) -> "Study":
        for variant in self.variants:
            fields = json.loads(variant)
            if not isinstance(fields, dict) or not fields:
                raise ValueError(f"must be fields of a study such as '{{head_dim: 128}}', got {variant}")
            for name in ("variants", *_OF_THE_WHOLE):
                if name in fields:
                    raise ValueError(f"must leave {name} to the study, got {variant}")
            try:
                self._varied(fields)
            except ValueError as error:
                raise ValueError(f"{variant}: {str(error).removeprefix('study: ')}") from None
        return self

    def _varied(self, fields: Mapping[str, Any]) -> "Study":
        return self.replace(**{**fields, "variants": []})

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None, *, quick: bool = False) -> "Study":
        """Read a study from YAML.

        What is given later counts more: the fields of the file, its block ``when_cuda`` where the study
        runs on CUDA, ``quick`` (see ``quickened``), ``overrides``.

        Raises:
            ValueError: for a file that is no YAML, and naming every field that is unknown, missing or wrong.
        """
        fields = read_fields(path)
        overrides = overrides or {}
        when_cuda = fields.pop(_WHEN_CUDA, None) or {}
        study, on_cuda = cls.parse(fields), cls.parse({**fields, **when_cuda})
        device = overrides.get("device", study.device)
        if when_cuda and pick_device(device) == "cuda":
            study = on_cuda
        if quick:
            study = study.quickened()
        return study.replace(**overrides)

    def quickened(self) -> "Study":
        """The two shortest lengths, no variants, few repeats and rows: a glance, with a folder of its own."""
        return self.replace(
            name=f"{self.name}-quick",
            variants=[],
            seq_lens=sorted(self.seq_lens)[:2],
            repeats=5,
            min_time_s=0.02,
            error_rows=min(self.error_rows, 64),
        )

    @property
    def source(self) -> CaptureSource:
        """Where captured input comes from."""
        return CaptureSource(model=self.model, text=self.text, layers=self.layers)

    def cells(self) -> list[Cell]:
        """All cells, without doubles; within an input, dtype and mask by length, in the order given.

        The study must be resolved (``runner.resolve``): backends and device named, no size left to the model.
        """
        num_heads, num_kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        assert num_heads is not None
        assert num_kv_heads is not None
        assert head_dim is not None
        assert self.device != "auto"
        assert "all" not in self.backends
        points = product(self.inputs, self.dtypes, self.masks, self.seq_lens, self.passes, self.backends)
        cells = [
            Cell(
                backend=backend,
                batch_size=self.batch_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                seq_len=seq_len,
                head_dim=head_dim,
                dtype=dtype,
                device=self.device,
                mask=mask,
                input=input_kind,
                source=self.source if input_kind == "captured" else None,
                pass_name=pass_name,
                seed=self.seed,
                repeats=self.repeats,
                min_time_s=self.min_time_s,
                error_rows=self.error_rows,
                grad_error_max_len=self.grad_error_max_len,
                cuda_graph=(
                    self.device == "cuda" and seq_len <= self.cuda_graph_max_len and pass_name != "forward_backward"
                ),
            )
            for input_kind, dtype, mask, seq_len, pass_name, backend in points
        ]
        for variant in self.variants:
            varied = self._varied(json.loads(variant))
            cells += varied.replace(backends=[str(effattn.get(spec)) for spec in varied.backends]).cells()
        return list(dict.fromkeys(cells))


def pick_device(device: str) -> str:
    """``cuda`` or ``cpu`` for ``auto``; ``ValueError`` for CUDA where torch finds none."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError(f"study: device must be cpu where torch {torch.__version__} finds no CUDA device, got 'cuda'")
    return device if device != "auto" else ("cuda" if has_cuda else "cpu")


def parse_mask(spec: str) -> masks.Mask:
    """A mask from ``none``, ``causal``, calls with literals such as ``Window(256, 0)``, and ``&`` and ``|``
    of these.

    Raises:
        ValueError: for anything else, and for values that the mask refuses.
    """
    form = "must look like 'none', 'causal' or 'causal & Window(256, 0) | Global((0, 1))'"

    def build(node: ast.expr) -> masks.Mask:
        match node:
            case ast.Name(name) if name in _NAMED_MASKS:
                return _NAMED_MASKS[name]
            case ast.BinOp(left, ast.BitAnd(), right):
                return build(left) & build(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return build(left) | build(right)
            case ast.Call(ast.Name(name), args, keywords) if name in _MASK_CLASSES:
                named = {str(keyword.arg): literal(keyword.value) for keyword in keywords}
                return _MASK_CLASSES[name](*map(literal, args), **named)
        raise ValueError(f"{form}, got {spec!r}")

    def literal(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise ValueError(f"{form}, got {spec!r}") from None

    try:
        return build(ast.parse(spec, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{form}, got {spec!r} ({error})") from None


def mask_name(mask: masks.Mask) -> str:
    """The spec of ``mask`` in its one canonical form; ``parse_mask`` reads it."""
    return next((name for name, named in _NAMED_MASKS.items() if mask == named), repr(mask))
