"""The peak memory of a call, above what was allocated before it.

What the call returns counts, for it is allocated when the call ends. On CUDA the caching allocator keeps
the peak. On a CPU nothing does, so the profiler writes down every allocation and every release of torch's
allocator, and the peak is that of their running sum. What a library takes from the system past that
allocator is not seen.
"""

import gc
import os
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch

METHODS = {"cpu": "profiler", "cuda": "cuda_allocator"}


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Bytes at the peak of ``call()``, which runs once; on "cpu" or "cuda"."""
    gc.collect()
    return _peak_on_cuda(call) if device == "cuda" else _peak_on_cpu(call)


def running_peak(changes: Iterable[int]) -> int:
    """The highest running sum of ``changes`` in bytes, at least 0.

    A negative change may release what was allocated before; then less than before is in use, and what follows
    counts from there.
    """
    return max(accumulate(changes, initial=0))


def _peak_on_cpu(call: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell the terminal that it starts and stops
    # The same profiler as torch.profiler.profile's, which would first import the compiler, for a second or more.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        result = call()
        del result
    # The profiler's own summary by operator loses the order; the raw events keep it.
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return running_peak(event.nbytes() for event in events)


def _peak_on_cuda(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
