"""How long a call takes: every repeat in milliseconds, after a warm-up.

A call is a chain of stages that are timed one by one in each repeat, each taking what the one before
returned: a forward pass and then its backward pass, on a graph that is fresh every time (some compiled
backward passes refuse a retained one). On CUDA a single stage is timed by Triton's ``do_bench``, and a chain in the
same way: with events, each stage starting with a cold second-level cache. On a CPU it is the clock of
``torch.utils.benchmark`` with the garbage collector off, as in its ``Timer``.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import timer as synchronized_clock

Stages = Mapping[str, Callable[[Any], Any]]

MAX_REPEATS = 100
_LONG_RUN_S = 1.0
_CACHE_BYTES = 256 * 2**20  # more than any second-level cache holds


def time_first(stages: Stages) -> tuple[float, Any]:
    """Milliseconds of one run of all stages, with whatever a first call sets up, and what the last returned."""
    start = synchronized_clock()
    result = _run(stages)
    return 1e3 * (synchronized_clock() - start), result


def time_repeats(stages: Stages, *, device: str, repeats: int, min_time_s: float) -> dict[str, list[float]]:
    """Milliseconds of each stage in each repeat; to be called after ``time_first``.

    Runs shorter than a second are warmed up for a quarter of ``min_time_s``, at least once; of longer ones the
    first call was warm-up enough.

    Args:
        stages: by name, in their order; the first is called with None.
        device: "cpu" or "cuda".
        repeats: how many at least.
        min_time_s: more repeats, up to ``MAX_REPEATS``, until they take this long together.
    """
    run = _run_on_cuda if device == "cuda" else _run_on_cpu
    with _garbage_collector_off():
        times = run(stages, 1)
        if device == "cuda" and len(stages) == 1 and _total_s(times) < _LONG_RUN_S:
            ((name, stage),) = stages.items()
            return {name: _by_do_bench(stage, 1e3 * _total_s(times), repeats, 1e3 * min_time_s)}
        warm_up_s = _total_s(times)
        if warm_up_s < _LONG_RUN_S:
            while warm_up_s < min_time_s / 4:
                warm_up_s += _total_s(run(stages, 1))
            times = {name: [] for name in stages}
        while (done := _count(times)) < repeats or (_total_s(times) < min_time_s and done < MAX_REPEATS):
            for name, more in run(stages, repeats - done if done < repeats else repeats).items():
                times[name] += more
    return times


def time_cuda_graph(stage: Callable[[Any], Any], *, min_time_s: float) -> list[float]:
    """Milliseconds of a stage within a CUDA graph, ten means over many runs: without what launching costs.

    By Triton's ``do_bench_cudagraph``; the second-level cache is warm. For small sizes, where launching is most of it.

    Raises:
        RuntimeError: if the stage does what a graph cannot record, such as reading a value on the host.
    """
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(lambda: stage(None), rep=1e3 * min_time_s, return_mode="all")


def quantiles(name: str, times_ms: list[float]) -> dict[str, Any]:
    """The fields of a record for the times of one stage."""
    p20, median, p80 = np.quantile(times_ms, [0.2, 0.5, 0.8])
    return {
        f"{name}_ms_median": float(median),
        f"{name}_ms_p20": float(p20),
        f"{name}_ms_p80": float(p80),
        f"{name}_ms_repeats": [round(time_ms, 6) for time_ms in times_ms],
    }


def _run(stages: Stages) -> Any:
    result = None
    for stage in stages.values():
        result = stage(result)
    return result


def _run_on_cpu(stages: Stages, count: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(count):
        result = None
        for name, stage in stages.items():
            start = synchronized_clock()
            following = stage(result)
            times[name].append(1e3 * (synchronized_clock() - start))
            result = following  # only now, so that freeing what came before is not timed
    return times


def _by_do_bench(stage: Callable[[Any], Any], estimate_ms: float, repeats: int, min_time_ms: float) -> list[float]:
    from triton.testing import do_bench

    # Its own estimate decides how many runs these times are; it may differ, so what is missing is added.
    rep_ms = min(max(min_time_ms, repeats * estimate_ms), MAX_REPEATS * estimate_ms)
    times: list[float] = []
    while len(times) < repeats:
        times += do_bench(lambda: stage(None), warmup=min_time_ms / 4, rep=rep_ms, return_mode="all")
    return times


def _run_on_cuda(stages: Stages, count: int) -> dict[str, list[float]]:
    def event() -> torch.Event:
        return torch.Event("cuda", enable_timing=True)

    laps = [{name: (event(), event()) for name in stages} for _ in range(count)]
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda")
    for lap in laps:
        result = None
        for name, stage in stages.items():
            cache.zero_()
            lap[name][0].record()
            result = stage(result)
            lap[name][1].record()
    torch.accelerator.synchronize()
    return {name: [start.elapsed_time(end) for start, end in (lap[name] for lap in laps)] for name in stages}


def _count(times: dict[str, list[float]]) -> int:
    return len(next(iter(times.values())))


def _total_s(times: dict[str, list[float]]) -> float:
    return sum(map(sum, times.values())) / 1e3


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
