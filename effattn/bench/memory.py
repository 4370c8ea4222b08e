"""The peak memory of a call, above what was allocated before it.

What the call returns counts, for it is allocated when the call ends; the rest is its workspace. On CUDA the caching
allocator keeps the peak, and that of what it reserved from the device. On a CPU nothing does, so the profiler writes
down every allocation and every release of torch's allocator, and the peak is that of their running sum. What a
library takes from the system past that allocator is not seen.
"""

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

METHODS = {"cpu": "profiler", "cuda": "cuda_allocator"}


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of a call, above what there was before it."""

    peak_memory_bytes: int
    workspace_bytes: int  # of the peak, what is not the result
    peak_reserved_bytes: int | None = None  # what CUDA's allocator took from the device; a CPU's does not tell

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        return asdict(self)


def measure_memory(call: Callable[[], object], device: str) -> Peak:
    """The peak of ``call()``, which runs once; on "cpu" or "cuda"."""
    gc.collect()
    return _peak_on_cuda(call) if device == "cuda" else _peak_on_cpu(call)


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Bytes at the peak of ``call()``, which runs once; on "cpu" or "cuda"."""
    return measure_memory(call, device).peak_memory_bytes


def running_peak(changes: Iterable[int]) -> int:
    """The highest running sum of ``changes`` in bytes, at least 0.

    A negative change may release what was allocated before; then less than before is in use, and what follows
    counts from there.
    """
    return max(accumulate(changes, initial=0))


def allocations(call: Callable[[], object]) -> tuple[list[int], int]:
    """What ``call()``, which runs once, allocates (positive) and releases on a CPU, in order; and its result's size.

    All in bytes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell the terminal that it starts and stops
    # The same profiler as torch.profiler.profile's, which would first import the compiler, for a second or more.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        result = call()
        result_bytes = _bytes_of(result)
        del result
    # The profiler's own summary by operator loses the order; the raw events keep it.
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events], result_bytes


def _peak_on_cpu(call: Callable[[], object]) -> Peak:
    changes, result_bytes = allocations(call)
    peak = running_peak(changes)
    return Peak(peak, max(peak - result_bytes, 0))


def _peak_on_cuda(call: Callable[[], object]) -> Peak:
    torch.accelerator.empty_cache()  # else it would reserve nothing more
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    allocated, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    result = call()
    torch.accelerator.synchronize()
    result_bytes = _bytes_of(result)
    del result
    peak = torch.accelerator.max_memory_allocated() - allocated
    return Peak(peak, max(peak - result_bytes, 0), torch.accelerator.max_memory_reserved() - reserved)


def _bytes_of(result: object) -> int:
    """What the tensors of a result hold, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tree_leaves(result)
        if isinstance(t, Tensor)
    }
    return sum(storages.values())
