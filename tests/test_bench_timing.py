import gc

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stages_are_timed_on_cuda():
    x = torch.randn(2048, 2048, device="cuda")
    stages = {"forward": lambda _: x @ x, "backward": lambda y: y @ x @ x}
    times = timing.time_repeats(stages, device="cuda", repeats=7, min_time_s=0)
    assert {name: len(kept) for name, kept in times.items()} == {"forward": 7, "backward": 7}
    assert all(time_ms > 0 for kept in times.values() for time_ms in kept)
