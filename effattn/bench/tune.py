"""The tuner: the parameters of a backend that cost least and keep an error budget, on what a real model attends to.

Every candidate of a small declared space runs on the queries, keys and values of a model that reads a text, and its
output is compared with full attention, exactly, on sampled query rows. The answer is one spec for all layers, or one
for each: a heavy layer may need a wide window where its neighbour does with a narrow one. Errors come first and are
deterministic; time is taken afterwards, in interleaved rounds, because attended pairs are not time.

The space of a backend is a ladder a field and all their products, some twenty candidates, each of them measured: an
optimiser would save little of that, and could not show what the budget buys.

Errors are those of layers that are swapped one at a time: each gets what full attention gave it. What all of them do
to a model together, ``effattn evaluate FILE.yaml`` tells.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
import yaml
from torch import Tensor

import effattn
from effattn import cost as costs
from effattn import reference
from effattn.backend import UnsupportedError
from effattn.bench import errors, memory, models, timing
from effattn.bench.capture import CaptureSource, LayerInputs, load_captured, stream
from effattn.bench.machine import Machine
from effattn.bench.recommend import DENSITY, ERROR, FLOPS, TIME, Measure, weighed
from effattn.masks import Causal

Space = Mapping[str, Sequence[Any]]
Cost = Literal["time", "flops"]
Judge = Literal["pooled", "worst_layer", "worst_head"]

EXACT = "sdpa"  # serves the layers in which nothing keeps the budget, or nothing that does costs less
DTYPES = ("float32", "bfloat16", "float16")
COSTS: dict[Cost, Measure] = {"time": TIME, "flops": FLOPS}

# What is tried of each backend where nothing else is said; a backend of another package has its own in the class
# attribute ``tuning_space``. All that is captured is causal, so that keys after the query would be for nothing.
SPACES: dict[str, Space] = {
    "sliding_window": {
        "left": (64, 128, 256, 512, 1024, 2048),
        "right": (0,),
        "global_tokens": ((), tuple(range(4)), tuple(range(64))),
    },
    "lsh": {
        "bucket_size": (64, 128, 256),
        "num_hashes": (1, 2, 4),
        "hashing": ("anchors",),
        "local": (True,),
        "sinks": (4, 64),
    },
}

_WORTH_IT = 0.95  # of the exact backend's cost, at most
_STILL_IN = 1.5  # times the least time: what is slower than that after the first rounds is not timed further
_FIRST_ROUNDS = 2
_SAMPLED_ROWS = 128


@dataclass(frozen=True)
class Tuning:
    """What was found.

    ``errors`` has a row a candidate and a column a layer: the relative L2 error there, or with ``worst_head`` that of
    the worst of its heads. ``table`` has a row a candidate, the cheapest first: ``backend, error_rel_l2`` (over the
    layers, as ``judge`` says), ``worst_layer, worst_head`` (their errors), ``density, gflops``, and where time was
    taken ``time_ms, time_ms_p20, time_ms_p80, time_rounds, peak_memory_mib``; ``within`` and ``front`` as in
    ``recommend``. Costs are those of one layer. ``failed`` says why other candidates have no row.
    """

    source: CaptureSource
    seq_len: int
    device: str
    dtype: str
    heads: tuple[int, int, int]  # of queries, of keys, and their size
    max_error: float
    judge: Judge
    cost: Cost
    per_layer: bool
    table: pd.DataFrame
    errors: pd.DataFrame
    failed: Mapping[str, str]

    @property
    def layers(self) -> list[int]:
        return [int(layer) for layer in self.errors.columns]

    @property
    def qualifies(self) -> bool:
        """Whether a candidate keeps the budget: over all layers, or with ``per_layer`` in any of them."""
        return bool((self._candidates <= self.max_error).any(axis=None)) if self.per_layer else self.backend is not None

    @property
    def backend(self) -> str | None:
        """The cheapest spec that keeps the budget over all layers; None where no candidate does.

        ``sdpa`` where candidates do, but save less than a twentieth of its cost: that is not worth an error.
        """
        over_all = self.table.set_index("backend")[ERROR.column]
        return self._cheapest(over_all) if (over_all.drop(EXACT) <= self.max_error).any() else None

    @property
    def backends(self) -> dict[int, str]:
        """The same for each layer; ``sdpa`` also where no candidate keeps the budget."""
        return {layer: self._cheapest(self.errors[layer]) for layer in self.layers}

    @property
    def unkept(self) -> list[int]:
        """The layers in which no candidate keeps the budget."""
        return [layer for layer in self.layers if not (self._candidates[layer] <= self.max_error).any()]

    def cost_of(self, spec: str) -> float:
        """Of one layer."""
        return self.value(spec, COSTS[self.cost])

    def value(self, spec: str, measure: Measure) -> float:
        """A candidate's entry in ``table``."""
        (value,) = self.table.loc[self.table["backend"] == spec, measure.column]
        return float(value)

    def error(self, spec: str, layer: int) -> float:
        """A candidate's entry in ``errors``."""
        return float(self.errors[layer][spec])

    @property
    def _candidates(self) -> pd.DataFrame:
        return self.errors.drop(index=EXACT)

    def _cheapest(self, errors_by_spec: pd.Series) -> str:
        costs = self.table.set_index("backend")[COSTS[self.cost].column]  # from the least
        keeps = errors_by_spec.reindex(costs.index) <= self.max_error
        worth_it = costs.index[keeps & (costs <= _WORTH_IT * costs[EXACT])]
        return str(worth_it[0]) if len(worth_it) else EXACT


def tune(
    backends: Sequence[str],
    *,
    max_error: float,
    seq_len: int = 4096,
    per_layer: bool = False,
    source: CaptureSource | None = None,
    space: str | Mapping[str, Any] | None = None,
    judge: Judge = "pooled",
    cost: Cost = "time",
    rounds: int = 7,
    device: str = "cpu",
    dtype: str = "float32",
    on_layer: Callable[[int, int], object] = lambda done, total: None,
) -> Tuning:
    """Search the space of some backends for the least cost under an error budget.

    Args:
        backends: spec strings; a field that a spec sets is not searched.
        max_error: the largest relative L2 error of the output against full attention that is allowed.
        seq_len: tokens of the text that the model reads.
        per_layer: judge and choose layer by layer.
        source: model, text and layers, by default SmolLM2 reading Python's standard library; without ``layers``, all
            of them with ``per_layer``, else a telling choice.
        space: values to try instead of the declared ones: fields and lists of values, or that for each backend by its
            name; as a mapping or in YAML, such as ``"{left: [64, 128]}"``.
        judge: whose error must keep the budget. ``pooled``: the root mean square over the layers, which all count
            alike however large their values are; a choice by layer that keeps a budget in each keeps it there too.
            ``worst_layer``, or the strictest, ``worst_head``: a head that attends elsewhere drowns among the others
            of its layer, but not here.
        cost: what is to be least: the ``time`` of one call, the median of interleaved rounds; or ``flops``, the
            operations of the attended pairs, which are the same on every machine.
        rounds: how often what may win is timed.
        device: cpu or cuda.
        dtype: of queries, keys and values.
        on_layer: called with the number of layers that are done, and of all.

    Raises:
        ValueError: for an argument out of range, a backend without a space, a field or value that a backend does not
            have; and as ``capture.stream``.
        ModuleNotFoundError, OSError: as ``models.load``.
    """
    if not max_error >= 0:
        raise ValueError(f"tune: max_error must be >= 0, got {max_error}")
    if rounds < 1:
        raise ValueError(f"tune: rounds must be >= 1, got {rounds}")
    for name, given, known in (
        ("judge", judge, get_args(Judge)),
        ("cost", cost, get_args(Cost)),
        ("dtype", dtype, DTYPES),
    ):
        if given not in known:
            raise ValueError(f"tune: {name} must be one of {', '.join(known)}, got {given!r}")
    source = source or CaptureSource()
    specs = candidates(backends, space, seq_len)
    patternless = [spec for spec in specs if not effattn.get(spec).capabilities.pattern]
    if cost == "flops" and patternless:
        raise ValueError(f"tune: cost must be time for {patternless[0]}, which has no pattern to count, got 'flops'")
    found = _Errors(specs, seq_len, device, getattr(torch, dtype))
    layers = _visit(source, seq_len, per_layer, found, on_layer)
    if not found.squared:
        raise ValueError(f"tune: backends must be able to serve this, but {_reasons(found.failed)}")

    squared = torch.stack([torch.stack(found.squared[spec]) for spec in found.squared])  # [candidates, layers, heads]
    full = torch.stack(found.full)
    of_layers, of_heads = _ratio(squared.sum(-1), full.sum(-1)), _ratio(squared, full).amax(-1)
    judged = of_heads if judge == "worst_head" else of_layers
    table = pd.DataFrame(
        {
            "backend": [*found.squared, EXACT],
            ERROR.column: [*(judged.square().mean(-1).sqrt() if judge == "pooled" else judged.amax(-1)).tolist(), 0.0],
            "worst_layer": [*of_layers.amax(-1).tolist(), 0.0],
            "worst_head": [*of_heads.amax(-1).tolist(), 0.0],
        }
    )
    by_layer = pd.DataFrame([*judged.tolist(), [0.0] * len(layers)], index=table["backend"], columns=layers)
    assert found.middle is not None
    table = table.merge(_work(table["backend"].tolist(), found.middle), on="backend")
    if cost == "time":
        places = table.set_index("backend")[[ERROR.column]]
        places = places.join(by_layer) if per_layer else places
        table = table.merge(_times(found.middle, places <= max_error, rounds, device), on="backend")
    heads = (found.middle.query.shape[1], found.middle.key.shape[1], found.middle.query.shape[3])
    return Tuning(
        source=source,
        seq_len=seq_len,
        device=device,
        dtype=dtype,
        heads=heads,
        max_error=max_error,
        judge=judge,
        cost=cost,
        per_layer=per_layer,
        table=weighed(table, ERROR, max_error, COSTS[cost]),
        errors=by_layer[sorted(layers)],
        failed=found.failed,
    )


# The space --------------------------------------------------------------------------------------------------


def candidates(
    backends: Sequence[str], space: str | Mapping[str, Any] | None = None, seq_len: int | None = None
) -> list[str]:
    """Every spec of the spaces of some backends, without doubles. Arguments and errors as in ``tune``.

    Of what is declared, numbers that reach ``seq_len`` are left out: a window over everything is no window.
    """
    if not backends:
        raise ValueError("tune: backends must name at least one, got none")
    given = _parse_space(space)
    classes: dict[str, Any] = {spec: type(effattn.get(spec)) for spec in backends}
    by_class = {cls.name: cls for cls in classes.values()}
    by_name = {name: given.pop(name) for name in list(given) if name in by_class}
    for name, ladders in by_name.items():
        if not isinstance(ladders, Mapping):
            raise ValueError(f"tune: space must map the fields of {name} to lists of values, got {ladders!r}")
    known = {name: {field.name for field in fields(cls)} for name, cls in by_class.items()}
    for field in given:
        if not any(field in of_backend for of_backend in known.values()):
            of_each = "; ".join(f"{name} has {', '.join(sorted(of_backend))}" for name, of_backend in known.items())
            raise ValueError(f"tune: space names {field!r}, which no backend has; {of_each}")
    specs = []
    for spec, cls in classes.items():
        declared = _below(seq_len, SPACES.get(cls.name) or getattr(cls, "tuning_space", {}))
        shared = {field: values for field, values in given.items() if field in known[cls.name]}
        ladders = {**declared, **shared, **by_name.get(cls.name, {})}
        if not ladders:
            raise ValueError(
                f"tune: {cls.name} declares no values to try; give some as space, such as '{{FIELD: [1, 2, 4]}}', or "
                "in a class attribute tuning_space"
            )
        searched = {field: _values(field, values) for field, values in ladders.items() if field not in _fixed(spec)}
        for values in product(*searched.values()):
            specs.append(str(effattn.get(effattn.get(spec), **dict(zip(searched, values, strict=True)))))
    if EXACT in specs:
        raise ValueError(f"tune: backends must be others than {EXACT}, which they are compared with, got {backends}")
    return list(dict.fromkeys(specs))


def _below(seq_len: int | None, space: Space) -> Space:
    """The space without numbers that reach ``seq_len``, but for the first of a field where all do."""
    if seq_len is None:
        return space
    return {
        field: [value for value in values if not (isinstance(value, int) and value >= seq_len)] or values[:1]
        for field, values in space.items()
    }


def _parse_space(space: str | Mapping[str, Any] | None) -> dict[str, Any]:
    form = "tune: space must be fields and lists of values such as '{left: [64, 128]}'"
    if isinstance(space, str):
        try:
            space = yaml.safe_load(space)
        except yaml.YAMLError:
            raise ValueError(f"{form}, got {space!r}") from None
        if not isinstance(space, Mapping):
            raise ValueError(f"{form}, got {space!r}")
    return dict(space or {})


def _values(field: str, values: Any) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"tune: space must list the values of {field}, got {values!r}")
    return [tuple(value) if isinstance(value, list) else value for value in values]


def _fixed(spec: str) -> set[str]:
    """The fields that a spec sets."""
    call = ast.parse(spec.strip(), mode="eval").body
    return {str(keyword.arg) for keyword in call.keywords} if isinstance(call, ast.Call) else set()


# Errors -----------------------------------------------------------------------------------------------------


class _Errors:
    """Squared errors of every candidate in every layer that is visited, by head, and of full attention itself."""

    def __init__(self, specs: Sequence[str], seq_len: int, device: str, dtype: torch.dtype) -> None:
        self.running = list(specs)
        self.device, self.dtype = device, dtype
        self.rows = errors.sample_rows(seq_len, _SAMPLED_ROWS, seed=0).to(device)
        self.squared: dict[str, list[Tensor]] = {}
        self.full: list[Tensor] = []
        self.failed: dict[str, str] = {}
        self.middle: LayerInputs | None = None

    @torch.no_grad()
    def visit(self, inputs: LayerInputs, keep: bool) -> None:
        query, key, value = (x.to(self.device, self.dtype) for x in (inputs.query, inputs.key, inputs.value))
        inputs = LayerInputs(inputs.layer, query, key, value, inputs.scale)
        if keep:
            self.middle = inputs
        full, _ = reference.attention(query, key, value, mask=Causal(), scale=inputs.scale, rows=self.rows)
        self.full.append(full.square().sum((0, 2, 3)).cpu())
        for spec in list(self.running):
            try:
                output = attend(spec, inputs)[:, :, self.rows].double()
                if not output.isfinite().all():
                    raise ArithmeticError(f"its output in layer {inputs.layer} is NaN or infinite")
            except (UnsupportedError, ArithmeticError, torch.OutOfMemoryError) as error:
                self.failed[spec] = "; ".join(error.reasons) if isinstance(error, UnsupportedError) else str(error)
                self.running.remove(spec)
                self.squared.pop(spec, None)
            else:
                self.squared.setdefault(spec, []).append((output - full).square().sum((0, 2, 3)).cpu())


def attend(spec: str, inputs: LayerInputs, _: None = None) -> Tensor:
    """What a backend makes of a layer; a stage, as ``timing`` takes them."""
    output = effattn.attention(inputs.query, inputs.key, inputs.value, backend=spec, mask=Causal(), scale=inputs.scale)
    assert isinstance(output, Tensor)
    return output


def _visit(
    source: CaptureSource, seq_len: int, per_layer: bool, found: _Errors, on_layer: Callable[[int, int], object]
) -> list[int]:
    """Show every layer to ``found``: all of them as the model reads, a choice from the cache of captures."""
    if source.layers is None and per_layer:
        loaded = models.load(source.model)
        total = models.depth(loaded[0].config)

        def visit(inputs: LayerInputs) -> None:
            found.visit(inputs, keep=inputs.layer == total // 2)
            on_layer(inputs.layer + 1, total)

        return list(stream(source, seq_len, visit, loaded=loaded).layers)
    captured = load_captured(source, seq_len)
    layers = captured.info.layers
    for i, layer in enumerate(layers):
        query, key, value = (x[i : i + 1] for x in (captured.query, captured.key, captured.value))
        inputs = LayerInputs(layer, query, key, value, captured.info.scale)
        found.visit(inputs, keep=layer == sorted(layers)[len(layers) // 2])
        on_layer(i + 1, len(layers))
    return list(layers)


def _ratio(squared: Tensor, of: Tensor) -> Tensor:
    """The relative L2 error from squared norms; 0 where there is no error."""
    return torch.where(squared > 0, squared / of, 0.0).sqrt()


def _reasons(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{spec} cannot: {reason}" for spec, reason in failed.items())


# Cost -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _work(specs: Sequence[str], inputs: LayerInputs) -> pd.DataFrame:
    """Density and operations of each candidate; nothing for one without a pattern."""
    query, key, value, causal = inputs.query, inputs.key, inputs.value, Causal()
    rows = errors.sample_rows(query.shape[2], _SAMPLED_ROWS, seed=0).to(query.device)
    found: list[dict[str, Any]] = []
    for spec in specs:
        density = gflops = None
        if effattn.get(spec).capabilities.pattern:
            pattern = effattn.pattern(query, key, backend=spec, mask=causal)
            done = errors.work(query, key.shape[2], mask=causal, pattern=pattern, rows=rows)
            density, gflops = done.density, costs.flops(done.pairs, key.shape[3], value.shape[3]) / 1e9
        found.append({"backend": spec, "density": density, FLOPS.column: gflops})
    return pd.DataFrame(found)


@torch.no_grad()
def _times(inputs: LayerInputs, keeps: pd.DataFrame, rounds: int, device: str) -> pd.DataFrame:
    """Milliseconds of one call of each candidate, in interleaved rounds: all in the first, then what may yet win.

    That is what keeps the budget somewhere (``keeps`` has a column for each place) and took there no more than
    ``_STILL_IN`` times the least time.
    """
    times: dict[str, list[float]] = {spec: [] for spec in keeps.index}

    def time_in_turn(specs: Sequence[str], number: int) -> None:
        start = number % len(specs)
        for spec in (*specs[start:], *specs[:start]):
            stages: timing.Stages = {"forward": partial(attend, spec, inputs)}
            times[spec] += timing.time_repeats(stages, device=device, repeats=1, min_time_s=0.0)["forward"]

    for number in range(min(_FIRST_ROUNDS, rounds)):
        time_in_turn(list(times), number)
    least = pd.Series({spec: min(taken) for spec, taken in times.items()})
    rivals = {EXACT}
    for place in keeps.columns:
        there = least[keeps[place]]
        rivals |= set(there.index[there <= _STILL_IN * there.min()])
    still_in = [spec for spec in times if spec in rivals]
    for number in range(_FIRST_ROUNDS, rounds):
        time_in_turn(still_in, number)
    rows = []
    for spec, taken in times.items():
        spread = timing.quantiles("time", taken)
        row = {"backend": spec, "time_ms": spread["time_ms_median"], "time_rounds": len(taken)}
        rows.append(row | {f"time_ms_{part}": spread[f"time_ms_{part}"] for part in ("p20", "p80")})
    peaks = {spec: memory.peak_memory(partial(attend, spec, inputs), device) / 2**20 for spec in still_in}
    table = pd.DataFrame(rows)
    return table.assign(peak_memory_mib=table["backend"].map(peaks))


# The file ---------------------------------------------------------------------------------------------------


def save(tuning: Tuning, path: Path, machine: Machine) -> None:
    """Write the choice as YAML that ``swap.from_file`` and ``effattn evaluate`` read, with what it rests on."""
    chosen = tuning.backends if tuning.per_layer else dict.fromkeys(tuning.layers, tuning.backend or EXACT)
    price = COSTS[tuning.cost]
    evidence = {
        "model": models.label(tuning.source.model),
        "text": models.label(tuning.source.text),
        "seq_len": tuning.seq_len,
        "dtype": tuning.dtype,
        "device": tuning.device,
        "max_error": tuning.max_error,
        "judge": tuning.judge,
        "errors": {layer: _digits(tuning.error(spec, layer)) for layer, spec in chosen.items()},
        "nothing_keeps_the_budget_in": tuning.unkept if tuning.per_layer else [],
        "cost": tuning.cost,
        price.column: {layer: _digits(tuning.cost_of(spec)) for layer, spec in chosen.items()},
        f"{EXACT}_{price.column}": _digits(tuning.cost_of(EXACT)),
        "density": {layer: _digits(tuning.value(spec, DENSITY)) for layer, spec in chosen.items()},
        "candidates": len(tuning.table) - 1,
        **{name: machine.record[name] for name in ("machine", "cpu", "cpu_threads", "gpu", "commit")},
        "torch": str(machine.torch),
        "tuned_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    found: dict[str, Any] = {"backends": chosen} if tuning.per_layer else {"backend": chosen[tuning.layers[0]]}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(found, sort_keys=False, default_flow_style=False, width=10**6)
    text += yaml.safe_dump({"evidence": evidence}, sort_keys=False, default_flow_style=None, width=110)
    path.write_text(text, encoding="utf-8")


def _digits(value: float) -> float | None:
    """Six digits, which is more than was measured."""
    return None if pd.isna(value) else float(f"{value:.6g}")
