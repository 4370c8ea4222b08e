"""Attention over disjoint sets of keys joins to attention over all of them."""

import math

import pytest
import torch
from torch import Tensor

from effattn import reference
from effattn.kernels.merge import merge
from effattn.masks import Dense


def problem(key_len: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 4), (2, 3, key_len, 4), (2, 3, key_len, 6)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)


def parts_of(
    query: Tensor, key: Tensor, value: Tensor, cuts: list[int], allowed: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Attention over the keys between the cuts, each for itself."""
    return [
        reference.attention(query, key[:, :, low:high], value[:, :, low:high], mask=Dense(allowed[:, low:high]))
        for low, high in zip([0, *cuts], [*cuts, key.shape[2]], strict=True)
    ]


@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 11]], ids=str)
def test_parts_join_to_the_whole(cuts):
    """Output, log-sum-exp and gradients; row 1 sees nothing, row 2 nothing in the first part."""
    inputs = problem()
    allowed = torch.rand(5, 12, generator=torch.Generator().manual_seed(1)) > 0.4
    allowed[1] = False
    allowed[2, :5] = False
    got = merge(parts_of(*inputs, cuts, allowed))
    expected = reference.attention(*inputs, mask=Dense(allowed))
    torch.testing.assert_close(got, expected)
    assert not got[0][:, :, 1].any()
    assert (got[1][:, :, 1] == -math.inf).all()

    def grads(output: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        finite = lse.masked_fill(lse == -math.inf, 0)
        return torch.autograd.grad((output.sin().sum() + finite.cos().sum()), inputs)

    torch.testing.assert_close(grads(*got), grads(*expected))


def test_gradcheck():
    outputs = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lses = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def call(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return merge(list(zip(outputs, lses, strict=True)))

    assert torch.autograd.gradcheck(call, (outputs.requires_grad_(), lses.requires_grad_()))


@pytest.mark.parametrize("size", [-1e6, -1e30, 1e6])
def test_log_sum_exps_of_any_size(size):
    """The larger part wins, nothing overflows, and an absent part leaves no NaN behind."""
    output = torch.tensor([1.0, 2.0])[:, None]
    low = torch.tensor([size, size]).requires_grad_()
    high = torch.tensor([size + abs(size) / 2, -math.inf]).requires_grad_()
    merged, lse = merge([(output, low), (output * 10, high)])
    assert merged[:, 0].tolist() == [10.0, 2.0]
    assert lse.tolist() == [high[0].item(), low[1].item()]
    grads = torch.autograd.grad(merged.sum() + lse.sum(), (low, high))
    assert [grad.tolist() for grad in grads] == [[0, 1], [1, 0]]


def test_the_order_of_parts_makes_no_difference():
    parts = parts_of(*problem(), [3, 7], torch.ones(5, 12, dtype=torch.bool))
    torch.testing.assert_close(merge(parts), merge(parts[::-1]))


def test_the_output_keeps_its_dtype():
    output, lse = torch.ones(2, 3, dtype=torch.float16), torch.zeros(2)
    merged, merged_lse = merge([(output, lse), (output * 3, lse)])
    assert merged.dtype == torch.float16
    assert merged_lse.dtype == torch.float32
    assert merged.tolist() == [[2.0] * 3] * 2
