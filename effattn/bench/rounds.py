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
def agree(ours: Cell, other: Cell) -> Agreement:
    """Compare the outputs of two cells on the same input, in the rows in which they do the same."""
    tasks = [Task(replace(cell, pass_name="forward")) for cell in (ours, other)]
    rows = errors.sample_rows(ours.seq_len, ours.error_rows, ours.seed)
    same = _rows_alike(tasks, rows.to(ours.device))
    outputs = [task.stages["forward"](None)[:, :, rows].double() for task in tasks]
    if not same.any():
        return Agreement(None, 0.0)
    return Agreement(errors.rel_l2(outputs[1][same], outputs[0][same]), float(same.double().mean()))


def _rows_alike(tasks: Sequence[Task], rows: Tensor) -> Tensor:
    """bool ``[B, H, rows]``: the same keys, with the same weights on their scores."""
    cell = tasks[0].cell
    if not all(task.backend.capabilities.pattern for task in tasks):
        return torch.zeros(cell.batch_size, cell.num_heads, len(rows), dtype=torch.bool)
    batches, heads, keys = (
        torch.arange(n, device=rows.device) for n in (cell.batch_size, cell.num_heads, cell.seq_len)
    )
    grid = batches[:, None, None, None], heads[:, None, None], rows[:, None], keys
    shape = (cell.batch_size, cell.num_heads, len(rows), cell.seq_len)
    found = []
    for task in tasks:
        allowed = evaluate(task.pattern(), batches, heads, rows, keys, 0).expand(shape)
        weights = task.weights()
        weight = weights(*grid) if weights is not None else torch.zeros((), device=rows.device)
        found.append(torch.where(allowed, weight.float(), -torch.inf))
    return (found[0] == found[1]).all(-1)


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
