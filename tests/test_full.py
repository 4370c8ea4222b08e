"""The baseline: PyTorch's attention to the last digits, and everything materialised."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effattn import attention, get, reference
from effattn.bench.memory import peak_memory
from effattn.masks import Causal, Padding


def inputs(dtype: torch.dtype = torch.float64, num_kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 9, 6), (2, num_kv_heads, 11, 6), (2, num_kv_heads, 11, 3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_output_and_gradients_are_pytorchs(num_kv_heads):
    tensors = inputs(num_kv_heads=num_kv_heads)
    bias = torch.randn(4, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got = attention(*tensors, bias=bias, scale=0.3)
    want = F.scaled_dot_product_attention(*tensors, attn_mask=bias, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, want)
    leaves = [*tensors, bias]
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), leaves) for t in (got, want)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_computed_in_float32(dtype):
    halves = inputs(dtype)
    wide = attention(*(t.float() for t in halves), mask=Causal())
    assert torch.equal(attention(*halves, mask=Causal()), wide.to(dtype))


def test_log_sum_exp_has_a_gradient():
    tensors = inputs()

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors, mask=Causal(), return_lse=True)[1]

    expected = reference.attention(*tensors, mask=Causal())[1]
    torch.testing.assert_close(call(*tensors), expected)
    assert torch.autograd.gradcheck(call, [*tensors[:2], tensors[2].detach()])


def test_second_derivatives():
    """Also past rows that see nothing."""
    tensors = [t.detach()[:1, :1, :4].requires_grad_() for t in inputs()]
    mask = Causal() & Padding(torch.tensor([[0, 0, 1, 1]]))
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, mask=mask), tensors)


def test_memory_is_that_of_the_scores():
    query = torch.randn(1, 4, 512, 8)
    peak = peak_memory(lambda: attention(query, query, query), "cpu")
    assert peak >= 4 * 512 * 512 * 4


def test_names_its_implementation():
    assert get("full").resolve(None) == "baddbmm"
