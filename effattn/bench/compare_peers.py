"""Ours beside the peers: ratios of time and memory from one run, with their spread, and the limits they should keep.

Whatever is compared runs in interleaved rounds (``rounds.py``); a ratio is taken within each round, and its spread
over the rounds says what it is worth.

    python -m effattn.bench.compare_peers experiments/peers.yaml

A comparison (YAML) is a list of races, and each race is one of three kinds:

* by default ``ours`` against each of ``others``, at each of ``seq_lens`` and ``dtypes`` in each of ``passes``;
* ``kind: growth``: ``ours`` at each length against itself at the one before;
* ``kind: crossover``: from which length on ``ours`` is faster than each of ``others``.

A limit says what a ratio should be at most, and which issue asks for it; it is shown beside the ratio, and whether it
holds. Results go to ``OUT/<name>/<machine>/``: ``records.jsonl`` (every time of every round), ``ratios.csv``,
``crossovers.csv``.
"""

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import tyro
import yaml
from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

import effattn
from effattn.bench.machine import Machine
from effattn.bench.measure import refusals
from effattn.bench.records import RecordWriter
from effattn.bench.rounds import Result, agree, run_rounds
from effattn.bench.running import terminal
from effattn.bench.study import Cell, Device, Dtype, Pass, pick_device
from effattn.bench.workers import load_plugin

RUN_PACKAGES = (
    "torch",
    "transformers",
    "local-attention",
    "reformer-pytorch",
    "performer-pytorch",
    "nystrom-attention",
)
_QUICK_SHARE = 8
_LEAST_QUICK_LEN = 128


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limit(_Strict):
    """The ratio of ``ours`` to ``other`` should be at most ``at_most``; fields left out mean all that the race has."""

    at_most: float = Field(gt=0)
    issue: int = Field(description="the issue that asks for it")
    measure: Literal["time", "memory"] = "time"
    ours: str | None = None
    other: str | None = None
    passes: tuple[Pass, ...] | None = None
    other_pass: Pass | None = Field(None, description="of the other, where it differs; measured too")
    dtypes: tuple[Dtype, ...] | None = None
    seq_lens: tuple[int, ...] | None = None


class Race(_Strict):
    """What is measured in the same rounds, apart from each length and dtype having rounds of its own."""

    name: str
    kind: Literal["others", "growth", "crossover"] = "others"
    ours: str
    others: tuple[str, ...] = ()
    seq_lens: tuple[int, ...] = Field(min_length=1)
    dtypes: tuple[Dtype, ...] = ("float32",)
    passes: tuple[Pass, ...] = ("forward",)
    agreeing: tuple[str, ...] = Field((), description="not timed: does its output agree with that of ours?")
    rounds: int | None = Field(None, ge=1, description="instead of the comparison's; 1 where memory alone counts")
    limits: tuple[Limit, ...] = ()


class Comparison(_Strict):
    """Races on one machine, and the shape and input that they share."""

    name: str = Field(pattern=r"^[\w-]+$")
    plugins: tuple[str, ...] = ()
    batch_size: int = 1
    num_heads: int
    head_dim: int
    input: str
    mask: str = "none"
    device: Device = "auto"
    seed: int = 0
    rounds: int = Field(5, ge=5)
    rows: int = Field(16, gt=0, description="query rows on which outputs are compared")
    races: tuple[Race, ...] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        """Read a comparison from YAML; ``ValueError`` names every field that is unknown, missing or wrong."""
        return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    def quickened(self) -> "Comparison":
        """Lengths an eighth as long: a glance at whether all of it runs, in a folder of its own."""

        def shorter(seq_lens: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(max(n // _QUICK_SHARE, _LEAST_QUICK_LEN) for n in seq_lens))

        def shorten(race: Race) -> Race:
            limits = [
                limit.model_copy(update={"seq_lens": shorter(limit.seq_lens)}) if limit.seq_lens else limit
                for limit in race.limits
            ]
            return race.model_copy(update={"seq_lens": shorter(race.seq_lens), "limits": tuple(limits)})

        return self.model_copy(update={"name": f"{self.name}-quick", "races": tuple(map(shorten, self.races))})

    def cell(self, backend: str, seq_len: int, dtype: Dtype, pass_name: Pass) -> Cell:
        """One contender."""
        return Cell(
            backend=str(effattn.get(backend)),
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            seq_len=seq_len,
            head_dim=self.head_dim,
            dtype=dtype,
            device=pick_device(self.device),
            mask=self.mask,
            input=self.input,
            source=None,
            pass_name=pass_name,
            seed=self.seed,
            repeats=self.rounds,
            min_time_s=0.0,
            error_rows=self.rows,
            grad_error_max_len=0,
        )


@dataclass(frozen=True)
class Spread:
    """A number over the rounds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        p20, median, p80 = np.quantile(values, [0.2, 0.5, 0.8])
        return cls(float(median), float(p20), float(p80))


@dataclass(frozen=True)
class Ratio:
    """``ours`` over ``other``: below 1, ours takes less."""

    race: str
    measure: Literal["time", "memory"]
    ours: Result
    other: Result
    limit: Limit | None = None

    @property
    def spread(self) -> Spread | None:
        """None where one of the two was not measured; memory is taken once and has no spread."""
        if not self.ours.times_ms or not self.other.times_ms:
            return None
        if self.measure == "time":
            return Spread.of([a / b for a, b in zip(self.ours.times_ms, self.other.times_ms, strict=True)])
        ours, other = self.ours.peak_memory_bytes, self.other.peak_memory_bytes
        return Spread.of([ours / other]) if ours is not None and other else None

    @property
    def holds(self) -> bool | None:
        """Whether the median keeps the limit; None where there is none, or nothing was measured."""
        spread = self.spread
        return None if spread is None or self.limit is None else spread.median <= self.limit.at_most

    @property
    def record(self) -> dict[str, Any]:
        ours, other, spread = self.ours.cell, self.other.cell, self.spread
        agreement = self.other.agreement
        return {
            "race": self.race,
            "measure": self.measure,
            "ours": ours.backend,
            "other": other.backend,
            "pass": ours.pass_name,
            "other_pass": other.pass_name,
            "seq_len": ours.seq_len,
            "other_seq_len": other.seq_len,
            "dtype": ours.dtype,
            "ratio_median": spread and spread.median,
            "ratio_p20": spread and spread.p20,
            "ratio_p80": spread and spread.p80,
            "rounds": len(self.ours.times_ms),
            "at_most": self.limit and self.limit.at_most,
            "issue": self.limit and self.limit.issue,
            "holds": self.holds,
            "agreement_rel_l2": agreement and agreement.rel_l2,
            "agreement_share": agreement and agreement.share,
            "reason": "; ".join([*self.ours.reasons, *self.other.reasons]) or None,
        }


@dataclass(frozen=True)
class Crossover:
    """From which length on ``ours`` is faster than ``other``, read off a ladder of lengths in each round."""

    race: str
    ours: str
    other: str
    dtype: str
    ladder: tuple[int, ...]
    lengths: tuple[float | None, ...]  # one a round; None: not faster at the last length

    @property
    def spread(self) -> Spread | None:
        """None unless there are rounds and every one crosses."""
        known = [length for length in self.lengths if length is not None]
        return Spread.of(known) if known and len(known) == len(self.lengths) else None

    @property
    def record(self) -> dict[str, Any]:
        spread = self.spread
        return {
            "race": self.race,
            "ours": self.ours,
            "other": self.other,
            "dtype": self.dtype,
            "ladder": " ".join(map(str, self.ladder)),
            "seq_len_median": spread and spread.median,
            "seq_len_p20": spread and spread.p20,
            "seq_len_p80": spread and spread.p80,
            "rounds": len(self.lengths),
            "rounds_that_cross": sum(length is not None for length in self.lengths),
        }


def crossing(ladder: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The length from which on ``ratios`` stay below 1: between two lengths on the line through both logarithms.

    The ladder's first length where they are below 1 from the start, None where the last one is not.
    """
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 1]
    if not slower:
        return float(ladder[0])
    last = slower[-1]
    if last == len(ladder) - 1:
        return None
    before, after = np.log(ratios[last]), np.log(ratios[last + 1])
    share = before / (before - after)
    return float(ladder[last] * (ladder[last + 1] / ladder[last]) ** share)


def race_groups(comparison: Comparison, race: Race) -> Iterator[list[Cell]]:
    """The cells of a race, those that share rounds together; the first is ours in the first pass."""
    if race.kind == "others":
        named = [spec for limit in race.limits for spec in (limit.ours, limit.other) if spec]
        specs = list(dict.fromkeys([race.ours, *race.others, *named]))
        for seq_len, dtype in product(race.seq_lens, race.dtypes):
            cells = _cells(comparison, specs, [seq_len], dtype, race.passes)
            in_other_pass = [
                comparison.cell(limit.other or race.ours, seq_len, dtype, limit.other_pass)
                for limit in race.limits
                if limit.other_pass
            ]
            yield list(dict.fromkeys([*cells, *in_other_pass]))
    else:
        for dtype in race.dtypes:
            yield _cells(comparison, [race.ours, *race.others], sorted(race.seq_lens), dtype, race.passes)


def _cells(
    comparison: Comparison, specs: Sequence[str], seq_lens: Sequence[int], dtype: Dtype, passes: Sequence[Pass]
) -> list[Cell]:
    cells = [comparison.cell(spec, seq_len, dtype, p) for seq_len, p, spec in product(seq_lens, passes, specs)]
    return list(dict.fromkeys(cells))


def ratios_of(race: Race, results: Sequence[Result]) -> list[Ratio]:
    """The ratios that a group's results give, with their limits."""
    ours = _canonical(race.ours)
    found: list[Ratio] = []
    measures: tuple[Literal["time", "memory"], ...] = ("time",) if race.kind == "crossover" else ("time", "memory")
    for measure in measures:
        if race.kind == "growth":
            pairs = [(longer, shorter) for shorter, longer in pairwise(results)]
        else:
            pairs = [
                (one, other)
                for one, other in product(results, results)
                if one.cell.backend == ours != other.cell.backend
                and (one.cell.pass_name, one.cell.seq_len) == (other.cell.pass_name, other.cell.seq_len)
            ]
        found += [Ratio(race.name, measure, *pair) for pair in pairs]
    if race.kind == "growth":
        limits = {limit.measure: limit for limit in race.limits}
        return [replace(ratio, limit=limits.get(ratio.measure)) for ratio in found]
    for limit in race.limits:
        for one, other in product(results, results):
            if one is not other and _is_meant(limit, race, one.cell, other.cell):
                judged = Ratio(race.name, limit.measure, one, other, limit)
                plain = replace(judged, limit=None)
                found = [judged if ratio == plain else ratio for ratio in found]
                found += [judged] if judged not in found else []
    return found


def _is_meant(limit: Limit, race: Race, ours: Cell, other: Cell) -> bool:
    return (
        ours.backend == _canonical(limit.ours or race.ours)
        and other.backend == _canonical(limit.other or race.ours)
        and ours.pass_name in (limit.passes or race.passes)
        and other.pass_name == (limit.other_pass or ours.pass_name)
        and ours.seq_len == other.seq_len
        and ours.seq_len in (limit.seq_lens or race.seq_lens)
        and ours.dtype in (limit.dtypes or race.dtypes)
    )


def crossovers_of(race: Race, results: Sequence[Result]) -> list[Crossover]:
    """For each other: the crossover of a group's results."""
    by_cell = {(r.cell.backend, r.cell.seq_len): r for r in results}
    ladder, ours = tuple(sorted(race.seq_lens)), _canonical(race.ours)
    found = []
    for other in map(_canonical, race.others):
        pairs = [(by_cell[ours, n].times_ms, by_cell[other, n].times_ms) for n in ladder]
        by_round = zip(*([a / b for a, b in zip(*pair, strict=True)] for pair in pairs), strict=True)
        lengths = tuple(crossing(ladder, ratios) for ratios in by_round)
        found.append(Crossover(race.name, ours, other, results[0].cell.dtype, ladder, lengths))
    return found


def _canonical(spec: str) -> str:
    return str(effattn.get(spec))


# The run ----------------------------------------------------------------------------------------------------


def compare(
    comparison: Comparison,
    *,
    out: Path = Path("results"),
    machine_label: str | None = None,
    console: Console | None = None,
) -> Path:
    """Run all races, print the table, write the results, and return their folder; what was there is replaced."""
    console = console or terminal()
    for plugin in comparison.plugins:
        load_plugin(plugin)
    machine = Machine.this(pick_device(comparison.device), machine_label)
    folder = out / comparison.name / machine.machine
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").unlink(missing_ok=True)
    ratios: list[Ratio] = []
    crossovers: list[Crossover] = []
    where = {**machine.record, "packages": _versions()}
    with RecordWriter(folder / "records.jsonl") as writer:
        for race in comparison.races:
            for cells in race_groups(comparison, race):
                started_at, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
                results = run_rounds(cells, race.rounds or comparison.rounds)
                untimed = [Result(replace(cells[0], backend=_canonical(spec))) for spec in race.agreeing]
                if race.kind == "others":
                    _add_agreement(results[0], [*results[1:], *untimed])
                for result in [*results, *untimed]:
                    writer.append({"race": race.name, **result.record, **where, "started_at": started_at})
                ratios += ratios_of(race, results)
                ratios += [Ratio(race.name, "time", results[0], other) for other in untimed]
                crossovers += crossovers_of(race, results) if race.kind == "crossover" else []
                seq_lens = ", ".join(str(n) for n in dict.fromkeys(cell.seq_len for cell in cells))
                took = f"{time.monotonic() - start:.0f} s"
                console.print(f"{race.name}: {seq_lens} tokens, {cells[0].dtype}: {took}", highlight=False)
    pd.DataFrame([r.record for r in ratios]).assign(**machine.record).to_csv(folder / "ratios.csv", index=False)
    pd.DataFrame([c.record for c in crossovers]).assign(**machine.record).to_csv(folder / "crossovers.csv", index=False)
    print_ratios(ratios, crossovers, console)
    console.print(f"\n{folder}", highlight=False, soft_wrap=True)
    return folder


def _add_agreement(ours: Result, others: Sequence[Result]) -> None:
    """For those that run and in the same pass alone, since all passes have the same output."""
    for other in others:
        other.reasons = other.reasons or refusals(other.cell)
    running = [other for other in others if not other.reasons and other.cell.pass_name == ours.cell.pass_name]
    if not ours.reasons:
        for other, agreement in zip(running, agree(ours.cell, [other.cell for other in running]), strict=True):
            other.agreement = agreement


def _versions() -> dict[str, str]:
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in RUN_PACKAGES if name in installed}


def print_ratios(ratios: Sequence[Ratio], crossovers: Sequence[Crossover], console: Console) -> None:
    """Print the ratios race by race: median, 20th and 80th percentile over rounds, limit, and whether it holds."""
    for name in dict.fromkeys(ratio.race for ratio in ratios):
        of_race = [ratio for ratio in ratios if ratio.race == name]
        ours = of_race[0].ours.cell.backend
        table = Table(title=f"\n{name}: {ours} / other", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("other", overflow="fold")
        for heading in ("tokens", "dtype", "pass", "what"):
            table.add_column(heading, no_wrap=True)
        for heading in ("ratio", "p20-p80", "ms or MiB", "at most", "holds", "agreement"):
            table.add_column(heading, justify="right", no_wrap=True)
        for ratio in of_race:
            table.add_row(*_row(ratio, ours), style={True: "green", False: "red", None: ""}[ratio.holds])
        console.print(table)
    for found in crossovers:
        spread = found.spread
        where = "not at every round of this ladder, up to " + str(found.ladder[-1])
        if spread is not None:
            where = f"from {spread.median:.0f} tokens on ({spread.p20:.0f}-{spread.p80:.0f})"
        console.print(f"{found.ours} is faster than {found.other}, {found.dtype}: {where}", highlight=False)
    judged = [ratio.holds for ratio in ratios if ratio.limit]
    if judged:
        held = sum(holds is True for holds in judged)
        console.print(f"{held} of {len(judged)} limits hold", highlight=False, style="bold")


def _row(ratio: Ratio, usual: str) -> list[str]:
    ours, other, spread = ratio.ours.cell, ratio.other.cell, ratio.spread
    agreement, limit = ratio.other.agreement, ratio.limit

    def of_two(one: object, two: object) -> str:
        return str(one) if one == two else f"{one} / {two}"

    agreed = ""
    if agreement is not None and agreement.rel_l2 is not None:
        agreed = f"{agreement.rel_l2:.0e}" + (f" ({agreement.share:.0%})" if agreement.share < 1 else "")
    return [
        other.backend if ours.backend == usual else f"({ours.backend} / {other.backend})",
        of_two(ours.seq_len, other.seq_len),
        ours.dtype,
        of_two(_short(ours.pass_name), _short(other.pass_name)),
        ratio.measure,
        f"{spread.median:.3g}" if spread else "",
        f"{spread.p20:.3g}-{spread.p80:.3g}" if spread and ratio.measure == "time" else "",
        f"{_size(ratio.ours, ratio)} / {_size(ratio.other, ratio)}" if spread else "not run",
        f"{limit.at_most:.3g}" if limit else "",
        {True: "yes", False: "no", None: ""}[ratio.holds],
        agreed,
    ]


def _size(result: Result, ratio: Ratio) -> str:
    if ratio.measure == "memory":
        assert result.peak_memory_bytes is not None
        return f"{result.peak_memory_bytes / 2**20:.3g}"
    return f"{Spread.of(result.times_ms).median:.3g}"


def _short(pass_name: str) -> str:
    return {"forward": "fwd", "forward_backward": "fwd+bwd"}.get(pass_name, pass_name)


def main(
    comparison: Positional[Path],
    /,
    quick: bool = False,
    out: Path = Path("results"),
    machine_label: str | None = None,
    rounds: int | None = None,
    races: tuple[str, ...] = (),
) -> None:
    """Measure ours beside others and print the ratios.

    Args:
        comparison: the YAML file.
        quick: lengths an eighth as long, for a glance.
        out: where results go, to NAME/MACHINE in it.
        machine_label: name of this machine; by default that of its GPU or CPU.
        rounds: instead of those of the file.
        races: only those whose name begins so.
    """
    asked = Comparison.load(comparison)
    chosen = [race for race in asked.races if not races or race.name.startswith(races)]
    if rounds is not None:
        chosen = [race.model_copy(update={"rounds": rounds}) for race in chosen]
    asked = Comparison.model_validate({**asked.model_dump(), "races": [race.model_dump() for race in chosen]})
    compare(asked.quickened() if quick else asked, out=out, machine_label=machine_label)
    if quick:
        print("The limits are meant for lengths eight times as long")


if __name__ == "__main__":
    tyro.cli(main)
