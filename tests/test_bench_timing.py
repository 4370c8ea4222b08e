import gc
import time
from types import SimpleNamespace

import pytest
import torch

from effattn.bench import timing


class Stages:
    """Counts its calls and notes what each stage was given."""

    def __init__(self):
        self.seen = []

    def forward(self, given):
        assert not gc.isenabled() or not self.seen
        self.seen.append(("forward", given))
        return len(self.seen)

    def backward(self, given):
        self.seen.append(("backward", given))
        return "end"

    @property
    def both(self):
        return {"forward": self.forward, "backward": self.backward}


def test_the_first_run_is_timed_alone_and_gives_its_result():
    stages = Stages()
    time_ms, result = timing.time_first(stages.both)
    assert time_ms > 0
    assert result == "end"
    assert stages.seen == [("forward", None), ("backward", 1)]


def test_every_repeat_runs_the_whole_chain_and_is_kept():
    stages = Stages()
    times = timing.time_repeats(stages.both, device="cpu", repeats=7, min_time_s=0)
    assert {name: len(kept) for name, kept in times.items()} == {"forward": 7, "backward": 7}
    assert all(time_ms > 0 for kept in times.values() for time_ms in kept)
    assert len(stages.seen) == 2 * (7 + 1)  # one warm-up
    for i in range(0, len(stages.seen), 2):
        assert stages.seen[i : i + 2] == [("forward", None), ("backward", i + 1)]


def test_of_long_runs_the_first_call_is_the_warm_up(monkeypatch):
    monkeypatch.setattr(timing, "_LONG_RUN_S", 0.0)
    stages = Stages()
    times = timing.time_repeats(stages.both, device="cpu", repeats=5, min_time_s=0)
    assert len(times["forward"]) == 5
    assert len(stages.seen) == 2 * 5


def test_short_calls_are_repeated_more_often_but_not_for_ever():
    times = timing.time_repeats({"forward": lambda _: None}, device="cpu", repeats=5, min_time_s=0.01)
    assert len(times["forward"]) == timing.MAX_REPEATS


def test_the_garbage_collector_is_as_it_was_whatever_happens():
    def fails(_):
        raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timing.time_repeats({"forward": fails}, device="cpu", repeats=5, min_time_s=0)
    assert gc.isenabled()
    gc.disable()
    try:
        timing.time_repeats({"forward": lambda _: None}, device="cpu", repeats=5, min_time_s=0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_quantiles_are_named_with_their_unit():
    fields = timing.quantiles("backward", [5.0, 1.0, 2.0, 4.0, 3.0])
    assert fields == {
        "backward_ms_median": 3.0,
        "backward_ms_p20": pytest.approx(1.8),
        "backward_ms_p80": pytest.approx(4.2),
        "backward_ms_repeats": [5.0, 1.0, 2.0, 4.0, 3.0],
    }


@pytest.fixture
def as_on_cuda(monkeypatch):
    """CUDA's road on a CPU: events that read the clock, a small cache, and Triton's benchmarks as they are called."""

    class Event:
        def __init__(self, device, enable_timing):
            assert (device, enable_timing) == ("cuda", True)
            self.time_ms = None

        def record(self):
            self.time_ms = 1e3 * time.perf_counter()

        def elapsed_time(self, end):
            return end.time_ms - self.time_ms

    empty = torch.empty
    caches, asked = [], []

    def empty_on_cpu(*size, device, **options):
        assert device == "cuda"
        caches.append(empty(8, **options))
        return caches[-1]

    def do_bench(fn, *, warmup, rep, return_mode):
        assert return_mode == "all"
        asked.append({"warmup": warmup, "rep": rep})
        fn()
        return [1.0, 2.0]

    def do_bench_cudagraph(fn, *, rep, return_mode):
        assert return_mode == "all"
        asked.append({"rep": rep})
        fn()
        return [0.5] * 10

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty_on_cpu)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: asked.append("synchronize"))
    testing = pytest.importorskip("triton.testing", reason="Triton is not installed")
    monkeypatch.setattr(testing, "do_bench", do_bench)
    monkeypatch.setattr(testing, "do_bench_cudagraph", do_bench_cudagraph)
    return SimpleNamespace(asked=asked, caches=caches)


def test_a_chain_is_timed_by_events_with_a_cold_cache(as_on_cuda):
    stages = Stages()

    def forward(given):
        assert not as_on_cuda.caches[-1].any(), "the cache was not written to"
        as_on_cuda.caches[-1].fill_(1)
        time.sleep(2e-3)
        return stages.forward(given)

    chain = {"forward": forward, "backward": stages.backward}
    times = timing.time_repeats(chain, device="cuda", repeats=6, min_time_s=0)
    assert {name: len(kept) for name, kept in times.items()} == {"forward": 6, "backward": 6}
    assert min(times["forward"]) >= 2
    assert max(times["backward"]) < 2
    assert stages.seen[:2] == [("forward", None), ("backward", 1)]
    assert as_on_cuda.asked == ["synchronize", "synchronize"]  # after the warm-up and after the repeats, not between


def test_one_short_stage_is_timed_by_triton(as_on_cuda):
    stages = Stages()
    times = timing.time_repeats({"forward": stages.forward}, device="cuda", repeats=5, min_time_s=0.2)
    assert times == {"forward": [1.0, 2.0] * 3}  # what one call gives too few of, more calls give
    assert as_on_cuda.asked[0] == "synchronize"
    for asked in as_on_cuda.asked[1:]:
        assert asked["warmup"] == 50
        assert asked["rep"] <= 200
    assert all(seen == ("forward", None) for seen in stages.seen)


def test_a_long_stage_is_not_run_more_often_than_asked(as_on_cuda, monkeypatch):
    """Triton's do_bench would run it another seven times."""
    monkeypatch.setattr(timing, "_LONG_RUN_S", 0.0)
    stages = Stages()
    times = timing.time_repeats({"forward": stages.forward}, device="cuda", repeats=5, min_time_s=0)
    assert len(times["forward"]) == len(stages.seen) == 5
    assert set(as_on_cuda.asked) == {"synchronize"}


def test_a_stage_in_a_cuda_graph_is_timed_by_triton(as_on_cuda):
    stages = Stages()
    assert timing.time_cuda_graph(stages.forward, min_time_s=0.1) == [0.5] * 10
    assert as_on_cuda.asked == [{"rep": 100}]
    assert stages.seen == [("forward", None)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stages_are_timed_on_cuda():
    x = torch.randn(2048, 2048, device="cuda")
    stages = {"forward": lambda _: x @ x, "backward": lambda y: y @ x @ x}
    times = timing.time_repeats(stages, device="cuda", repeats=7, min_time_s=0)
    assert {name: len(kept) for name, kept in times.items()} == {"forward": 7, "backward": 7}
    assert all(time_ms > 0 for kept in times.values() for time_ms in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_stage_is_timed_on_cuda_in_and_out_of_a_graph():
    x = torch.randn(512, 512, device="cuda")
    times = timing.time_repeats({"forward": lambda _: x @ x}, device="cuda", repeats=7, min_time_s=0.02)
    assert len(times["forward"]) >= 7
    assert all(time_ms > 0 for time_ms in times["forward"])
    assert all(time_ms > 0 for time_ms in timing.time_cuda_graph(lambda _: x @ x, min_time_s=0.02))
