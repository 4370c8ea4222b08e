"""Contenders measured side by side: in one process, in interleaved rounds, on the same inputs.

A sweep gives each cell a process of its own, minutes apart, so a machine that slows down meanwhile slows down one
cell and not the next. What is to be compared closely runs here in rounds, A B C, then B C A, then C A B, so that a
ratio can be taken within each round. The price: whatever kills the process kills all of them.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effattn.bench import errors, memory, timing
from effattn.bench.measure import Task, refusals
from effattn.bench.study import Cell
from effattn.masks import evaluate


@dataclass(frozen=True)
class Agreement:
    """How far two outputs differ in the sampled rows that attend to the same keys with the same weight in both."""

    rel_l2: float | None  # None: there are no such rows
    share: float  # of the sampled rows, over batch rows and heads


@dataclass
class Result:
    """What was measured of one contender; empty, with reasons, where it refused."""

    cell: Cell
    reasons: Sequence[str] = ()
    times_ms: Sequence[float] = ()  # one a round
    setup_ms: float | None = None
    peak_memory_bytes: int | None = None
    agreement: Agreement | None = None  # with the race's ours

    @property
    def record(self) -> dict[str, Any]:
        record = {
            **self.cell.identity,
            "status": "unsupported" if self.reasons else "ok",
            "reason": "; ".join(self.reasons) or None,
            "setup_ms": self.setup_ms,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_method": memory.METHODS[self.cell.device] if self.peak_memory_bytes is not None else None,
        }
        if self.times_ms:
            record |= timing.quantiles("time", list(self.times_ms))
        if self.agreement is not None:
            record |= {"agreement_rel_l2": self.agreement.rel_l2, "agreement_share": self.agreement.share}
        return record


def run_rounds(cells: Sequence[Cell], rounds: int) -> list[Result]:
    """Every cell once to warm up and once for its memory, then all in turn, ``rounds`` times, the order rotated."""
    results = [Result(cell, reasons=refusals(cell)) for cell in cells]
    running = [(result, Task(result.cell)) for result in results if not result.reasons]
    for result, task in running:
        with torch.set_grad_enabled(task.trains):
            result.setup_ms = timing.time_first(task.stages)[0]
            result.peak_memory_bytes = memory.peak_memory(task.run, result.cell.device)
    times: dict[int, list[float]] = {index: [] for index in range(len(running))}
    with _garbage_collector_off():
        for number in range(rounds):
            for place in range(len(running)):
                index = (number + place) % len(running)
                task = running[index][1]
                with torch.set_grad_enabled(task.trains):
                    time_ms = timing.time_first(task.stages)[0]  # what it returned is freed before the next
                times[index].append(time_ms)
    for index, (result, _) in enumerate(running):
        result.times_ms = times[index]
    return results


@torch.no_grad()
def agree(ours: Cell, others: Sequence[Cell]) -> list[Agreement]:
    """The outputs of ``others`` beside that of ``ours``, on the same input, in the rows in which both do the same."""
    rows = errors.sample_rows(ours.seq_len, ours.error_rows, ours.seed)
    attended, output = _rows_of(ours, rows)
    found = []
    for other in others:
        other_attended, other_output = _rows_of(other, rows)
        if attended is None or other_attended is None:
            found.append(Agreement(None, 0.0))
            continue
        same = (attended == other_attended).all(-1)
        rel_l2 = errors.rel_l2(other_output[same], output[same]) if same.any() else None
        found.append(Agreement(rel_l2, float(same.double().mean())))
    return found


def _rows_of(cell: Cell, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    """For some query rows, what is added to the score of each key ``[B, H, rows, N]``, and the output.

    -inf stands for keys that are not attended to; None for a backend without a pattern.
    """
    task = Task(replace(cell, pass_name="forward"))
    rows = rows.to(cell.device)
    output = task.stages["forward"](None)[:, :, rows].double()
    pattern = task.pattern()
    if pattern is None:
        return None, output
    sizes = cell.batch_size, cell.num_heads, cell.seq_len
    batches, heads, keys = (torch.arange(size, device=cell.device) for size in sizes)
    allowed = evaluate(pattern, batches, heads, rows, keys, 0).expand(*sizes[:2], len(rows), cell.seq_len)
    weights = task.weights()
    added = torch.zeros((), device=cell.device)
    if weights is not None:
        added = weights(batches[:, None, None, None], heads[:, None, None], rows[:, None], keys).float()
    return torch.where(allowed, added, -torch.inf), output


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
