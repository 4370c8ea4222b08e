"""PyTorch's fused kernels: reached as they are, chosen by name, and refused where they are not to be had."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from effattn import Request, UnsupportedError, attention, get
from effattn.masks import Causal, Everything, Padding, Window


def inputs(query_len: int = 33, key_len: int = 33, value_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, query_len, 16), (2, 4, key_len, 16), (2, 4, key_len, value_dim)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def request(**changes: object) -> Request:
    sizes = {"batch_size": 2, "num_heads": 4, "num_kv_heads": 4, "query_len": 33, "key_len": 33}
    return Request(**{**sizes, "head_dim": 16, "value_dim": 16, **changes})


@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
def test_no_mask_and_top_left_causal_reach_the_kernel_as_they_are(kernel):
    """Bit by bit what PyTorch gives: nothing was materialised on the way."""
    tensors = inputs()
    chosen = {"auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash": SDPBackend.FLASH_ATTENTION}
    for mask, is_causal in ((None, False), (Everything(), False), (Causal(), True), (Window(99, 99), False)):
        got = attention(*tensors, backend=get("sdpa", kernel=kernel), mask=mask)
        with sdpa_kernel(chosen.get(kernel, SDPBackend.MATH)):
            want = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        assert torch.equal(got, want)


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 9), (9, 5)])
def test_causal_is_bottom_right_unless_the_offset_says_otherwise(query_len, key_len):
    tensors = inputs(query_len, key_len)
    ends, starts = (attention(*tensors, backend="sdpa", mask=Causal(), query_offset=o) for o in (None, 0))
    lower = torch.ones(query_len, key_len).bool().tril(key_len - query_len)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=lower | ~lower.any(-1, keepdim=True))
    torch.testing.assert_close(ends, expected * lower.any(-1, keepdim=True))
    torch.testing.assert_close(starts, F.scaled_dot_product_attention(*tensors, is_causal=True))


@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30])
def test_a_causal_mask_holds_whatever_the_scale(kernel, scale):
    """PyTorch's CPU kernel masks first and scales after: a scale below 0 would turn -inf to inf."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [t.detach().to(dtype).requires_grad_() for t in inputs(64, 64)]
        got, want = (
            attention(*tensors, backend=backend, mask=Causal(), scale=scale)
            for backend in (get("sdpa", kernel=kernel), "full")
        )
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got, want, **tolerance)
        grads = [torch.autograd.grad(t.float().sin().sum(), tensors) for t in (got, want)]
        torch.testing.assert_close(*grads, **tolerance)


def test_rows_that_see_nothing_are_zero_in_every_kernel():
    mask = Causal() & Padding((torch.arange(33) > 4)[None])
    for kernel in ("auto", "flash", "math"):
        tensors = inputs()
        output = attention(*tensors, backend=get("sdpa", kernel=kernel), mask=mask)
        assert not output[:, :, :5].any()
        grads = torch.autograd.grad(output.sum(), tensors)
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][:, :, :5].any()


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="sdpa: kernel must be one of auto, flash, efficient, cudnn, math, got 'fast'"):
        get("sdpa(kernel='fast')")


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_kernels_of_cuda_are_refused_on_a_cpu(kernel):
    with pytest.raises(UnsupportedError, match=f"requested the {kernel} kernel on cpu; supported flash and math"):
        attention(*inputs(), backend=get("sdpa", kernel=kernel))


def test_flash_is_refused_what_it_cannot_do():
    flash = get("sdpa(kernel='flash')")
    assert flash.reasons(request()) == []
    assert flash.reasons(request(value_dim=8)) == [
        "requested value head_dim 8 with the flash kernel on cpu; supported that of the queries, 16"
    ]
    assert flash.reasons(request(dropout_p=0.5)) == ["requested dropout_p 0.5; supported 0"]
    assert flash.reasons(request(bias=True, bias_grad=True)) == [
        "requested a gradient for the bias; supported a bias without one"
    ]
    assert get("sdpa(kernel='math')").reasons(request(bias=True, bias_grad=True, dropout_p=0.5)) == []


def test_no_log_sum_exp():
    with pytest.raises(UnsupportedError, match="requested the log-sum-exp; supported the output only"):
        attention(*inputs(), backend="sdpa", return_lse=True)


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_named_kernel_is_the_one_that_runs(kernel):
    backend = get("sdpa", kernel=kernel)
    assert backend.resolve(request()) == kernel
    with torch.profiler.profile() as profiler:
        attention(*inputs(), backend=backend)
    ran = {event.key for event in profiler.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == (kernel == "flash")
    assert ("aten::_scaled_dot_product_attention_math" in ran) == (kernel == "math")


@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("bias", [None, False, True], ids=["no bias", "bias", "bias with gradient"])
def test_resolve_says_what_pytorch_picks(value_dim, dropout_p, bias):
    tensors = [t.detach() for t in inputs(value_dim=value_dim)]
    options = {"dropout_p": dropout_p, "bias": None if bias is None else torch.zeros(33, 33, requires_grad=bias)}
    with torch.profiler.profile() as profiler:
        attention(*tensors, backend="sdpa", **options)
    ran = {event.key for event in profiler.key_averages()}
    is_flash = "aten::_scaled_dot_product_flash_attention_for_cpu" in ran
    assert get("sdpa").resolve(Request.of(*tensors, **options)) == ("flash" if is_flash else "math")


def test_an_input_with_a_strided_last_dimension_still_meets_the_fused_kernel():
    strided = [t.detach().mT.contiguous().mT for t in inputs()]
    assert all(t.stride(-1) != 1 for t in strided)
    with torch.profiler.profile() as profiler:
        output = attention(*strided, backend="sdpa")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in profiler.key_averages()}
    torch.testing.assert_close(output, attention(*(t.contiguous() for t in strided), backend="sdpa"))
