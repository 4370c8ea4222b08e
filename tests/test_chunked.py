"""Exact attention in chunks: the same for every chunk size, in memory that grows with the length alone."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from effattn import attention, get
from effattn.bench.memory import peak_memory
from effattn.masks import Causal, Documents, Mask, Padding, Window

MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(5, 3),
    "dilated": Window(3, 3, dilation=4),
    "documents and padding": Documents(torch.arange(40)[None] // 13) & Padding(torch.arange(40)[None] % 7 > 0),
}


def inputs(length: int = 40, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_chunk_sizes_make_no_difference(mask):
    tensors = inputs()
    expected, expected_lse = attention(*tensors, mask=mask, return_lse=True)
    expected_grads = torch.autograd.grad(expected.sin().sum() + expected_lse.cos().sum(), tensors)
    for query_chunk, key_chunk in itertools.product((1, 7, 40, 100), repeat=2):
        backend = get("chunked", query_chunk=query_chunk, key_chunk=key_chunk)
        output, lse = attention(*tensors, backend=backend, mask=mask, return_lse=True)
        torch.testing.assert_close((output, lse), (expected, expected_lse))
        grads = torch.autograd.grad(output.sin().sum() + lse.cos().sum(), tensors)
        torch.testing.assert_close(grads, expected_grads)


def test_bias_and_its_gradient_over_chunks():
    tensors = inputs()
    for shape in ((40,), (40, 1), (4, 40, 40), (2, 1, 1, 40), (2, 4, 40, 40), ()):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        results = []
        for backend in ("full", "chunked(query_chunk=9, key_chunk=11)"):
            output = attention(*tensors, backend=backend, bias=bias, mask=Causal())
            results.append((output, *torch.autograd.grad(output.sin().sum(), [*tensors, bias])))
        torch.testing.assert_close(*results)


def test_a_key_that_only_a_later_chunk_shows():
    """The first chunks of keys are empty for every row; the running maximum must come to no harm."""
    tensors = inputs()
    mask = Padding((torch.arange(40) >= 38)[None])
    got = attention(*tensors, backend="chunked(query_chunk=8, key_chunk=8)", mask=mask)
    torch.testing.assert_close(got, attention(*tensors, mask=mask))


@pytest.mark.parametrize("ends", [(-300, 300), (300, -300)], ids=["rising", "falling"])
def test_scores_that_change_from_chunk_to_chunk(ends):
    query, key = torch.ones(1, 1, 3, 1), torch.linspace(*ends, 40).view(1, 1, 40, 1)
    value = torch.randn(1, 1, 40, 2, generator=torch.Generator().manual_seed(0))
    tensors = [t.double() for t in (query, key, value)]
    got = attention(*tensors, backend="chunked(key_chunk=4)", scale=1.0, return_lse=True)
    torch.testing.assert_close(got, attention(*tensors, scale=1.0, return_lse=True))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_memory_grows_with_the_length(mask, backward):
    def peak(length: int) -> int:
        tensors = inputs(length, torch.float32)

        def call() -> object:
            output = attention(*tensors, backend="chunked(query_chunk=64, key_chunk=128)", mask=mask)
            return torch.autograd.grad(output.sum(), tensors) if backward else output

        return peak_memory(call, "cpu")

    assert peak(2048) <= 2.2 * peak(1024)


def test_a_backward_pass_under_checkpointing_sees_the_same_chunks():
    tensors = inputs()

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors, backend="chunked(query_chunk=9, key_chunk=9)", mask=Causal(), dropout_p=0.2)

    grads = []
    for run in (call, lambda *t: checkpoint(call, *t, use_reentrant=False)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(run(*tensors).square().sum(), tensors))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("field", ["query_chunk", "key_chunk"])
def test_chunks_hold_at_least_one(field):
    with pytest.raises(ValueError, match=f"chunked: {field} must be an integer >= 1, got 0"):
        get("chunked", **{field: 0})
