"""Measure one cell, in the process that calls: time, then memory, then errors.

The runner calls this in a process of its own for each cell (``workers.py``). Everything a backend raises
comes through; nothing is caught here.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import effattn
from effattn import cost
from effattn.backend import Backend, Request
from effattn.bench import errors, memory, timing
from effattn.bench.capture import captured_info
from effattn.bench.inputs import Inputs, make_inputs
from effattn.bench.machine import gpu_state
from effattn.bench.study import Cell, parse_mask
from effattn.masks import Mask
from effattn.reference import BiasFunction

# As PyTorch 2.13 names them: of pointwise kernels and reductions, and of templates such as FlexAttention.
_AUTOTUNING = ("CachingAutotuner.benchmark_all_configs", "_template_autotuning")


def refusals(cell: Cell) -> list[str]:
    """Why ``cell`` cannot be measured, as far as its shapes tell; empty if it can. Nothing is computed."""
    reasons = effattn.get(cell.backend).reasons(_request(cell))
    if cell.source is not None:
        positions = captured_info(cell.source).max_seq_len
        if positions is not None and cell.seq_len > positions:
            reasons.append(
                f"requested {cell.seq_len} captured tokens; supported {positions}, the positions of {cell.source.model}"
            )
    return reasons


def measure(cell: Cell) -> dict[str, Any]:
    """The fields of ``cell``'s record that are measured.

    Timed are the forward pass without a graph (``forward`` and ``decode``), or with one and then the backward
    pass. Memory is taken of the whole pass in a run of its own, errors from the result of the first call.

    Raises:
        UnsupportedError: with the reasons of the backend; and whatever else the backend raises.
        ArithmeticError: if the results are not finite.
    """
    task = Task(cell)
    with torch.set_grad_enabled(task.trains):
        before = Compiler.now()
        setup_ms, first = timing.time_first(task.stages)
        set_up = Compiler.now()
        gpu_before = gpu_state(cell.device)
        times_ms = timing.time_repeats(
            task.stages, device=cell.device, repeats=cell.repeats, min_time_s=cell.min_time_s
        )
        gpu_after = gpu_state(cell.device)
        recompiled_graphs = Compiler.now().graphs - set_up.graphs
        graph_ms = timing.time_cuda_graph(task.unseeded, min_time_s=cell.min_time_s) if cell.cuda_graph else None
        peak = memory.measure_memory(task.run, cell.device)
    record: dict[str, Any] = {
        "impl": task.backend.resolve(_request(cell)),
        "input_description": task.inputs.description,
        "setup_ms": setup_ms,
        "compile_ms": (set_up.compile_ms - before.compile_ms) or None,
        "autotune_ms": (set_up.autotune_ms - before.autotune_ms) or None,
        "compiled_graphs": set_up.graphs - before.graphs,
        "recompiled_graphs": recompiled_graphs,
        **peak.record,
        "memory_method": memory.METHODS[cell.device],
        **{f"{name}_before": value for name, value in gpu_before.items()},
        **{f"{name}_after": value for name, value in gpu_after.items()},
    }
    if graph_ms is not None:
        record |= timing.quantiles("forward_graph", graph_ms)
    for stage, times in times_ms.items():
        record |= timing.quantiles(stage, times)
    with torch.no_grad():
        pattern = task.pattern()
        if pattern is not None:
            record |= _work(task, pattern, sum(record[f"{stage}_ms_median"] for stage in times_ms))
    return record | _errors(task, pattern, first)


class Task:
    """A cell made concrete: its tensors and the calls that are measured."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.backend: Backend = effattn.get(cell.backend)
        self.mask: Mask = parse_mask(cell.mask)
        self.trains = cell.pass_name == "forward_backward"
        self.inputs: Inputs = make_inputs(
            cell.input,
            batch_size=cell.batch_size,
            num_heads=cell.num_heads,
            num_kv_heads=cell.num_kv_heads,
            seq_len=cell.seq_len,
            head_dim=cell.head_dim,
            dtype=getattr(torch, cell.dtype),
            device=cell.device,
            seed=cell.seed,
            source=cell.source,
        )
        query = self.inputs.query[:, :, -1:] if cell.pass_name == "decode" else self.inputs.query
        self.query = query.contiguous().requires_grad_(self.trains)
        self.key = self.inputs.key.contiguous().requires_grad_(self.trains)
        self.value = self.inputs.value.contiguous().requires_grad_(self.trains)
        self.grad_output: Tensor | None = None
        if self.trains:
            generator = torch.Generator().manual_seed(cell.seed + 1)
            shape = (*query.shape[:3], self.value.shape[3])
            self.grad_output = torch.randn(shape, generator=generator).to(query)

    @property
    def stages(self) -> timing.Stages:
        return {"forward": self._forward, "backward": self._backward} if self.trains else {"forward": self._forward}

    def run(self) -> object:
        """The whole pass."""
        result = self._forward()
        return self._backward(result) if self.trains else result

    def pattern(self) -> Mask | None:
        """What the backend attends to here; None where it is no softmax over keys."""
        if not self.backend.capabilities.pattern:
            return None
        torch.manual_seed(self.cell.seed)
        return effattn.pattern(self.query, self.key, backend=self.backend, mask=self.mask)

    def weights(self) -> BiasFunction | None:
        """What the backend adds to the scores of its pattern."""
        torch.manual_seed(self.cell.seed)
        offset = self.key.shape[2] - self.query.shape[2]
        return self.backend.reference_bias(self.query, self.key, mask=self.mask, query_offset=offset)

    def _forward(self, _: None = None) -> Tensor:
        # A backend that draws without a seed of its own draws the same each time, here and for its pattern.
        torch.manual_seed(self.cell.seed)
        return self.unseeded()

    def unseeded(self, _: None = None) -> Tensor:
        """The forward pass alone: what a CUDA graph can record, which a generator's seed is no part of."""
        output = effattn.attention(
            self.query, self.key, self.value, backend=self.backend, mask=self.mask, scale=self.inputs.scale
        )
        assert isinstance(output, Tensor)
        return output

    def _backward(self, output: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(output, (self.query, self.key, self.value), self.grad_output)
        return output.detach(), *grads


def _request(cell: Cell) -> Request:
    query_len = 1 if cell.pass_name == "decode" else cell.seq_len
    return Request(
        batch_size=cell.batch_size,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads,
        query_len=query_len,
        key_len=cell.seq_len,
        head_dim=cell.head_dim,
        value_dim=cell.head_dim,
        dtype=getattr(torch, cell.dtype),
        device=cell.device,
        mask=parse_mask(cell.mask),
        query_offset=cell.seq_len - query_len,
        backward=cell.pass_name == "forward_backward",
    )


def _work(task: Task, pattern: Mask, time_ms: float) -> dict[str, Any]:
    done = errors.work(task.query, task.key.shape[2], mask=task.mask, pattern=pattern, rows=_rows(task))
    flops = cost.flops(done.pairs, task.key.shape[3], task.value.shape[3], backward=task.trains)
    return {
        "flops": flops,
        "tflops": flops / time_ms / 1e9,
        "density": done.density,
        "keys_per_query": done.keys_per_query,
        "bytes_min": _bytes_min(task, done.keys_per_query),
    }


def _bytes_min(task: Task, keys_per_query: float) -> float:
    """What must at least be read and written: each input, result and gradient once; of the keys, those attended to.

    A few queries touch at most so many keys; how many of theirs are the same is not looked at.
    """
    touched = min(task.query.shape[2] * keys_per_query / task.key.shape[2], 1.0)
    rows = task.query.nbytes + task.query.nbytes * task.value.shape[3] / task.query.shape[3]  # query, output
    keys = touched * (task.key.nbytes + task.value.nbytes)
    return (rows + keys) * (3 if task.trains else 1)  # then all again, and a gradient for each


def _errors(task: Task, pattern: Mask | None, first: Any) -> dict[str, Any]:
    cell, rows = task.cell, _rows(task)
    output, *grads = first if task.trains else (first,)
    tensors = (task.query.detach(), task.key.detach(), task.value.detach())
    with torch.no_grad():
        setting: Mapping[str, Any] = {
            "mask": task.mask,
            "pattern": pattern,
            "weights": task.weights(),
            "scale": task.inputs.scale,
        }
        found: dict[str, Any] = {"error_rows": len(rows)}
        found |= errors.output_errors(output, *tensors, rows=rows, **setting)
    if task.trains and cell.seq_len <= cell.grad_error_max_len:
        assert task.grad_output is not None
        found |= errors.gradient_errors(tuple(grads), *tensors, task.grad_output, **setting)
    return found


def _rows(task: Task) -> Tensor:
    rows = errors.sample_rows(task.query.shape[2], task.cell.error_rows, task.cell.seed)
    return rows.to(task.query.device)


@dataclass(frozen=True)
class Compiler:
    """What torch.compile has taken and made so far in this process."""

    compile_ms: float = 0.0
    autotune_ms: float = 0.0  # trying kernels out, which happens when they first run
    graphs: int = 0

    @classmethod
    def now(cls) -> "Compiler":
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return cls()
        spent_s = dynamo.calculate_time_spent()
        autotune_s = sum(time_s for phase, time_s in spent_s.items() if phase.endswith(_AUTOTUNING))
        return cls(1e3 * spent_s["total_wall_time"], 1e3 * autotune_s, dynamo.counters["stats"]["unique_graphs"])
