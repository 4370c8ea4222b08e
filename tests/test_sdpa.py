"""PyTorch's fused kernels: reached as they are, chosen by name, and refused where they are not to be had."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from effattn import Request, UnsupportedError, attention, get, reference
from effattn.backends import sdpa
from effattn.kernels.narrow import narrow
from effattn.masks import Causal, Dense, Documents, Everything, Padding, Window
from effattn.testing import contract_cases


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
    names = "auto, flash, efficient, cudnn, math, flash_attn_2, flash_attn_3"
    with pytest.raises(ValueError, match=f"sdpa: kernel must be one of {names}, got 'fast'"):
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


def test_a_bias_and_a_mask_are_one_tensor():
    tensors, bias = inputs(), torch.randn(4, 1, 33)
    mask = Window(3, 3) & Padding((torch.arange(33) > 9)[None])
    for kernel in ("auto", "math"):
        output = attention(*tensors, backend=get("sdpa", kernel=kernel), mask=mask, bias=bias)
        wanted, _ = reference.attention(*tensors, mask=mask, bias=bias)
        torch.testing.assert_close(output, wanted.float())


def test_a_kernel_that_pytorch_does_not_have_is_refused(monkeypatch):
    def no_kernel(*tensors, **options):
        raise RuntimeError("No available kernel. Aborting execution.")

    def broken(*tensors, **options):
        raise RuntimeError("something else")

    monkeypatch.setattr(F, "scaled_dot_product_attention", no_kernel)
    with pytest.raises(UnsupportedError, match="requested the flash kernel; PyTorch has none for these inputs"):
        attention(*inputs(), backend="sdpa(kernel='flash')")
    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="something else"):
        attention(*inputs(), backend="sdpa(kernel='flash')")


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, {"is_causal": False, "attn_mask": None, "requires_grad": False}),
        ({"mask": Causal(), "backward": True}, {"is_causal": True, "attn_mask": None, "requires_grad": True}),
        ({"mask": Causal(), "query_offset": 2}, {"is_causal": False, "attn_mask": torch.bool, "requires_grad": False}),
        ({"mask": Window(3, 3)}, {"is_causal": False, "attn_mask": torch.bool, "requires_grad": False}),
        ({"mask": Causal(), "bias": True}, {"is_causal": False, "attn_mask": torch.float32, "requires_grad": False}),
    ],
)
def test_pytorch_is_asked_for_its_choice_with_the_mask_that_it_will_get(monkeypatch, fields, seen):
    """On CUDA the flash kernel takes no mask: whoever asks without one is told wrong."""
    asked = []

    def choice(query, key, value, *, attn_mask, dropout_p, is_causal, enable_gqa):
        assert not enable_gqa
        dtype = None if attn_mask is None else attn_mask.dtype
        asked.append({"is_causal": is_causal, "attn_mask": dtype, "requires_grad": query.requires_grad})
        return SDPBackend.EFFICIENT_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    assert get("sdpa").resolve(request(**fields)) == "efficient"
    assert asked == [seen]


@dataclasses.dataclass(frozen=True)
class Packaged(sdpa.SDPA):
    """A flash-attention package's adapter, let onto a CPU, where a stand-in computes."""

    kernel: str = "flash_attn_2"

    @property
    def capabilities(self):
        dtypes = (torch.float32, torch.float16, torch.bfloat16)  # the contract is for the most part in float32
        return dataclasses.replace(super().capabilities, devices=("cpu",), dtypes=dtypes)


@pytest.fixture
def calls(monkeypatch):
    """What a stand-in for both packages was called with. It checks what they check, and computes by the reference."""
    made = []

    def attend(q, k, v, softmax_scale, causal, window_size):
        """``[batch, seq, heads, head_dim]``; a band is measured from the bottom right corner."""
        assert all(t.stride(-1) == 1 and t.shape[3] % 8 == 0 for t in (q, k, v))
        assert q.shape[2] % k.shape[2] == 0
        left, right = (None if reach == -1 else reach for reach in window_size)
        mask = Causal() if causal else Window(left, right)
        output, lse = reference.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=mask, scale=softmax_scale)
        assert (lse > -torch.inf).all(), "versions differ in what a row without keys gives"
        return output.transpose(1, 2).to(q.dtype), lse.float()

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False, return_attn_probs=False
    ):
        made.append({"causal": causal, "window_size": window_size, "shape": tuple(q.shape), "keys": k.shape[1]})
        output, lse = attend(q, k, v, softmax_scale, causal, window_size)
        return (output, lse) if return_attn_probs else output

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        return_attn_probs=False,
    ):
        """Blocks end to end, ``[total, heads, head_dim]``; the log-sum-exp is ``[heads, total]``."""
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        rows, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max(rows), max(keys)) == (max_seqlen_q, max_seqlen_k)
        made.append({"causal": causal, "window_size": window_size, "rows": rows, "keys": keys})
        blocks = zip(q.split(rows), k.split(keys), v.split(keys), strict=True)
        found = [attend(*(t[None] for t in block), softmax_scale, causal, window_size) for block in blocks]
        output, lse = torch.cat([f[0][0] for f in found]), torch.cat([f[1][0] for f in found], dim=1)
        return (output, lse) if return_attn_probs else output

    def with_weights(function):
        """Version 2 also gives what it calls weights."""

        def call(*args, **options):
            result = function(*args, **options)
            return (*result, None) if options["return_attn_probs"] else result

        return call

    def blocks_apart(*args, **options):
        """An older version 2 gives the log-sum-exp as ``[blocks, heads, most rows]``."""
        result = flash_attn_varlen_func(*args, **options)
        if not options["return_attn_probs"]:
            return result
        lses = result[1].T.split(made[-1]["rows"])
        return result[0], torch.nn.utils.rnn.pad_sequence(lses, batch_first=True).transpose(1, 2), None

    functions = {
        "flash_attn": (with_weights(flash_attn_func), blocks_apart),
        "flash_attn_interface": (flash_attn_func, flash_attn_varlen_func),
    }
    for name, (function, packed) in functions.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.flash_attn_func, module.flash_attn_varlen_func = function, packed
        monkeypatch.setitem(sys.modules, name, module)
    sdpa._function_of.cache_clear()
    yield made
    sdpa._function_of.cache_clear()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    "case", [case for case in contract_cases(Packaged()) if not case.name.startswith("spec gives")], ids=str
)
def test_contract_of_the_packages(case):
    case.check()


@pytest.mark.parametrize(
    ("mask", "query_len", "query_offset", "seen"),
    [
        (None, 20, None, {"causal": False, "window_size": (-1, -1), "keys": 33}),
        (Causal(), 33, None, {"causal": True, "window_size": (-1, -1), "keys": 33}),
        (Causal(), 20, None, {"causal": True, "window_size": (-1, -1), "keys": 33}),
        (Causal(), 20, 0, {"causal": True, "window_size": (-1, -1), "keys": 20}),
        (Causal() & Window(5, 3), 33, None, {"causal": False, "window_size": (5, 0), "keys": 33}),
        (Window(5, 3), 33, None, {"causal": False, "window_size": (5, 3), "keys": 33}),
        (Window(None, 3), 33, None, {"causal": False, "window_size": (-1, 3), "keys": 33}),
        (Window(4, 0), 1, None, {"causal": False, "window_size": (-1, -1), "keys": 5}),
    ],
)
@pytest.mark.parametrize("kernel", ["flash_attn_2", "flash_attn_3"])
def test_a_band_is_said_to_a_package(calls, mask, query_len, query_offset, seen, kernel):
    query, key, value = (t.detach().half() for t in inputs(query_len))
    backend = Packaged(kernel)
    options = {"mask": mask, "query_offset": query_offset, "scale": -0.3}
    output, lse = attention(query, key[:, :2], value[:, :2], backend=backend, return_lse=True, **options)
    wanted, wanted_lse = reference.attention(query, key[:, :2], value[:, :2], **options)
    torch.testing.assert_close(output.double(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-3, rtol=2e-3)
    assert calls == [{**seen, "shape": (2, query_len, 4, 16)}]
    assert backend.resolve(request()) == kernel


RIGHT = Padding.from_lengths(torch.tensor([33, 20]), 33)
LEFT = Padding(RIGHT.keep.flip(1))
PIECES = Documents((torch.arange(33) // 12).expand(2, -1))


@pytest.mark.parametrize(
    ("mask", "query_len", "query_offset", "bands"),
    [
        (RIGHT, 33, None, {(False, (-1, -1)): ([33, 33], [33, 20])}),
        (Padding((torch.arange(33) % 5 > 0)[None]), 33, None, {(False, (-1, -1)): ([33, 33], [26, 26])}),
        (PIECES, 33, None, {(False, (-1, -1)): ([12, 12, 9] * 2, [12, 12, 9] * 2)}),
        (PIECES & RIGHT, 33, None, {(False, (-1, -1)): ([12, 12, 9, 12, 12], [12, 12, 9, 12, 8])}),
        (PIECES & Causal(), 33, None, {(True, (-1, -1)): ([12, 12, 9] * 2, [12, 12, 9] * 2)}),
        # Padded rows see all keys: a call of their own, since the corner is elsewhere.
        (RIGHT & Causal(), 33, None, {(True, (-1, -1)): ([33, 20], [33, 20]), (False, (-1, -1)): ([13], [20])}),
        (LEFT & Causal(), 33, None, {(True, (-1, -1)): ([33, 20], [33, 20])}),
        (RIGHT & Causal(), 1, None, {(True, (-1, -1)): ([1], [33]), (False, (-1, -1)): ([1], [20])}),
        (
            RIGHT & Causal() & Window(4, 0),
            33,
            None,
            {(False, (4, 0)): ([33, 20], [33, 20]), (False, (0, -1)): ([4], [4])},
        ),
        (LEFT & Window(2, 3), 33, None, {(False, (2, 3)): ([33, 20], [33, 20]), (True, (-1, -1)): ([3], [3])}),
        (Causal(), 33, -5, {(True, (-1, -1)): ([28, 28], [28, 28])}),
        (Window(3, 3), 9, 50, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["flash_attn_2", "flash_attn_3"])
def test_padding_and_documents_are_packed(calls, mask, query_len, query_offset, bands, kernel):
    query, key, value = (t.detach().half() for t in inputs(query_len))
    tensors = [query, key[:, :2], value[:, :2]]
    options = {"mask": mask, "query_offset": query_offset}
    output, lse = attention(*tensors, backend=Packaged(kernel), return_lse=True, **options)
    wanted, wanted_lse = reference.attention(*tensors, **options)
    torch.testing.assert_close(output.double(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-3, rtol=2e-3)
    assert {(c["causal"], c["window_size"]): (c["rows"], c["keys"]) for c in calls} == bands
    assert len(calls) == len(bands)
    tensors = [t.float().requires_grad_() for t in tensors]
    got, want = (attention(*tensors, backend=backend, **options) for backend in (Packaged(kernel), "full"))
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), tensors) for t in (got, want)))


@pytest.mark.usefixtures("calls")
def test_what_a_package_cannot_do_is_refused():
    half = {"dtype": torch.float16}
    supported = (
        "supported windows without dilation, padding (beside a window: without holes) and documents in one piece each"
    )
    holes = Padding((torch.arange(33) % 5 > 0)[None])
    assert Packaged().reasons(request(mask=holes, **half)) == []
    scattered = Documents((torch.arange(33) % 2)[None])
    for mask in (Window(3, 3, dilation=2), holes & Causal(), scattered):
        assert Packaged().reasons(request(mask=mask, **half)) == [f"requested {mask!r} from flash_attn_2; {supported}"]
    assert Packaged().reasons(request(mask=Dense(torch.ones(33, 33, dtype=torch.bool)), **half)) == [
        "requested a mask of Dense; supported Causal, Documents, Padding, Window"
    ]
    assert Packaged().reasons(request(backward=True, return_lse=True, **half)) == [
        "requested the log-sum-exp with a backward pass; supported either of the two"
    ]
    on_cuda = get("sdpa(kernel='flash_attn_2')").reasons(request(device="cuda", bias=True, dropout_p=0.1))
    assert on_cuda == [
        "requested a bias; supported none",
        "requested float32; supported float16, bfloat16",
        "requested dropout_p 0.1; supported 0",
    ]


@pytest.mark.parametrize(
    ("kernel", "modules"),
    [("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface or flash_attn_3.flash_attn_interface")],
)
def test_a_missing_package_is_a_reason(monkeypatch, kernel, modules):
    monkeypatch.setattr(sdpa.importlib.util, "find_spec", lambda name: None)
    (reason, *_) = get("sdpa", kernel=kernel).reasons(request(dtype=torch.float16, device="cuda"))
    assert reason == f"requested {kernel}; supported where the package is installed (no module {modules} is found)"


def test_version_3_is_found_in_its_newer_place(monkeypatch):
    there = {"flash_attn_3", "flash_attn_3.flash_attn_interface"}
    monkeypatch.setattr(sdpa.importlib.util, "find_spec", lambda name: name in there)
    assert sdpa._module_of("flash_attn_3") == "flash_attn_3.flash_attn_interface"
    assert sdpa._module_of("flash_attn_2") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_bias_keeps_its_digits_beside_half_precision(dtype):
    """ALiBi at thousands of tokens: neighbouring biases are the same number in bfloat16."""
    query, key, value = torch.randn(3, 1, 2, 256, 16).to(dtype)
    bias = -0.25 * (4096 + torch.arange(256)).float()
    got = attention(query, key, value, backend="sdpa", bias=bias).float()
    want = attention(query.float(), key.float(), value.float(), bias=bias)
    assert (got - want).norm() / want.norm() < 0.01


def test_a_bias_that_must_be_narrowed_is_moved_first():
    """As on CUDA, where a bias comes in the queries' dtype."""
    bias = -0.25 * (4096 + torch.arange(256)).float().expand(3, 256)
    for dtype in (torch.bfloat16, torch.float16):
        narrowed, moved = narrow(bias, dtype)
        assert narrowed.dtype == dtype
        torch.testing.assert_close(narrowed.float() + moved, bias, atol=0.25, rtol=0)
        assert (bias.to(dtype).float() - bias).abs().max() > 0.4
        weights = torch.softmax(narrowed.double(), -1)
        torch.testing.assert_close(weights, torch.softmax(bias.double(), -1), atol=1e-3, rtol=0)
    kept, moved = narrow(bias, torch.float64)
    assert kept.dtype == torch.float64
    assert moved is None
