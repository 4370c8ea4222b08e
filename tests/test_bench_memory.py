import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from effattn.bench.memory import Peak, measure_memory, peak_memory, running_peak

MIB = 2**20


def allocate(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_what_is_freed_counts_while_it_lives():
    def call():
        allocate(8)

    assert peak_memory(call, "cpu") == 8 * MIB


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_one_after_the_other_counts_as_the_larger(sizes):
    def call():
        for mib in sizes:
            allocate(mib)

    assert peak_memory(call, "cpu") == 5 * MIB


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_together_they_add_up(sizes):
    def call():
        held = [allocate(mib) for mib in sizes]
        return held[0]

    assert peak_memory(call, "cpu") == 8 * MIB


def test_the_result_counts():
    assert peak_memory(lambda: allocate(2), "cpu") == 2 * MIB


def test_what_was_there_before_does_not_count():
    before = allocate(16)
    assert peak_memory(lambda: before.add_(1), "cpu") < MIB
    assert peak_memory(lambda: before[: 4 * MIB].clone(), "cpu") == 4 * MIB


def test_a_peak_between_operators_is_found():
    def call():
        a, b = allocate(4), allocate(4)
        del a
        c = allocate(2)
        del b
        return c

    assert peak_memory(call, "cpu") == 8 * MIB


def test_order_does_not_matter():
    calls = {mib: lambda mib=mib: allocate(mib) for mib in (1, 16, 64)}
    ascending = [peak_memory(calls[mib], "cpu") for mib in (1, 16, 64)]
    descending = [peak_memory(calls[mib], "cpu") for mib in (64, 16, 1)]
    assert ascending == descending[::-1] == [MIB, 16 * MIB, 64 * MIB]


def test_the_graph_of_a_forward_pass_counts_until_the_backward_pass_has_used_it():
    x = torch.ones(MIB // 4, requires_grad=True)  # 1 MiB

    def call():
        kept = x.exp().exp()  # both results are kept for the backward pass
        return torch.autograd.grad(kept.sum(), x)

    assert 4 * MIB <= peak_memory(call, "cpu") <= 5 * MIB


def test_scores_are_in_the_peak_of_dense_attention_and_not_of_fused():
    q = torch.randn(1, 2, 512, 32)
    scores_bytes = 2 * 512 * 512 * 4

    def dense():
        return (q @ q.mT).softmax(-1) @ q

    assert peak_memory(dense, "cpu") >= 2 * scores_bytes
    assert peak_memory(lambda: F.scaled_dot_product_attention(q, q, q), "cpu") < scores_bytes


def test_the_running_peak_begins_at_zero():
    assert running_peak([]) == 0
    assert running_peak([-5, 3]) == 0
    assert running_peak([4, -4, 6, -6, 5]) == 6


def test_garbage_from_before_is_collected_first():
    class Loop:
        def __init__(self):
            self.itself = self

    gc.disable()
    try:
        garbage = weakref.ref(Loop())
        assert garbage() is not None
        peak_memory(lambda: None, "cpu")
        assert garbage() is None
    finally:
        gc.enable()


def test_the_workspace_is_what_is_not_the_result():
    def call():
        first = allocate(8)
        del first
        kept = allocate(3)
        return {"kept": [kept, kept[:5]], "other": None}

    assert measure_memory(call, "cpu") == Peak(8 * MIB, 5 * MIB)
    assert measure_memory(lambda: allocate(2), "cpu").record == {
        "peak_memory_bytes": 2 * MIB,
        "workspace_bytes": 0,
        "peak_reserved_bytes": None,
    }


class Allocator:
    """CUDA's allocator as ``torch.accelerator`` shows it: 1 GiB was there before, and reserved before that 2."""

    def __init__(self):
        self.allocated, self.reserved, self.cached = 2**30, 2**31, 2**30
        self.peaks = [2**40, 2**40]  # of something earlier, much larger
        self.calls = []

    def allocate(self, size):
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated + 2 * MIB)
        self.peaks = [max(self.peaks[0], self.allocated), max(self.peaks[1], self.reserved)]

    def empty_cache(self):
        self.reserved = self.allocated

    def reset_peak_memory_stats(self):
        assert self.calls[-1] == "synchronize", "work in flight would count"
        self.peaks = [self.allocated, self.reserved]

    def install(self, monkeypatch):
        for name, function in {
            "synchronize": lambda: self.calls.append("synchronize"),
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "memory_allocated": lambda: self.allocated,
            "memory_reserved": lambda: self.reserved,
            "max_memory_allocated": lambda: self.peaks[0],
            "max_memory_reserved": lambda: self.peaks[1],
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)


def test_the_peak_on_cuda_is_that_of_its_allocator(monkeypatch):
    allocator = Allocator()
    allocator.install(monkeypatch)

    def call():
        allocator.allocate(8 * MIB)
        allocator.allocate(-5 * MIB)
        return torch.empty(3 * MIB, dtype=torch.uint8)

    assert measure_memory(call, "cuda") == Peak(8 * MIB, 5 * MIB, 10 * MIB)
    assert allocator.calls == ["synchronize"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_on_cuda_is_above_what_was_there_before():
    before = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")

    def call():
        first = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")

    peak = measure_memory(call, "cuda")
    assert peak.peak_memory_bytes == 8 * MIB
    assert peak.workspace_bytes == 4 * MIB
    assert peak.peak_reserved_bytes is not None
    assert peak.peak_reserved_bytes >= 8 * MIB
    assert before.numel() == 16 * MIB
