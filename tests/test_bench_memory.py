import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from effattn.bench.memory import peak_memory, running_peak

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_on_cuda_is_above_what_was_there_before():
    before = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")

    def call():
        first = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")

    assert peak_memory(call, "cuda") == 8 * MIB
    assert before.numel() == 16 * MIB
