"""FlexAttention compiled for a CPU: few graphs for many problems, and never an unfused result.

A graph takes seconds to compile, so the tests share the shapes that are compiled in (heads, head dimensions) and
differ in what is not (lengths, windows, offsets, tables). What the engine does around it is in test_flex_engine.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import effattn
from effattn import reference
from effattn.backend import Request
from effattn.backends import flex
from effattn.kernels import flex_engine
from effattn.masks import Causal, Dense, Documents, Global, Mask, Padding, Taken, Window

BATCH_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 24, 20

missing = flex._missing_for_cpu()
compiles = pytest.mark.skipif(missing is not None, reason=f"FlexAttention on a CPU needs {missing}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(query_len: int, key_len: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = [(NUM_HEADS, query_len, HEAD_DIM), (NUM_KV_HEADS, key_len, HEAD_DIM), (NUM_KV_HEADS, key_len, VALUE_DIM)]
    return [torch.randn(BATCH_SIZE, *size, generator=seeded(i)).to(dtype) for i, size in enumerate(sizes)]


def check_output(inputs: list[Tensor], **options: Any) -> None:
    output = effattn.attention(*inputs, backend="flex", **options)
    wanted, _ = reference.attention(*inputs, **options)
    error = (output - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error <= {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[output.dtype]
    sees_nothing = (wanted == 0).all(-1)
    assert (output[sees_nothing] == 0).all()


def check(mask: Mask, query_len: int, key_len: int, **options: Any) -> None:
    check_output(qkv(query_len, key_len), mask=mask, **options)


@compiles
def test_one_graph_serves_every_length_window_and_offset() -> None:
    """Failure X1: a sweep meets PyTorch's limit of 8 recompilations and goes on without a fused kernel."""
    check(Causal(), 200, 200)
    compiled = flex_engine.compiled_graphs()
    for length in (2, 63, 127, 128, 129, 255, 257, 383, 500, 641):
        check(Causal(), length, length)
    for mask, query_len, key_len, offset in [
        (Window(16, 0), 200, 300, 100),
        (Window(5, 40), 130, 300, 0),
        (Window(None, 7), 300, 130, -20),
        (Window(3, 3), 40, 30, 200),  # no row sees a key
    ]:
        check(mask, query_len, key_len, query_offset=offset)
    assert flex_engine.compiled_graphs() == compiled


@compiles
def test_one_graph_serves_every_table_of_a_size() -> None:
    """Padding, documents, global tokens, dilation; rows that see nothing; ragged and shared tables."""

    def mask(length: int, real: int, tokens: tuple[int, ...], left: int) -> Mask:
        documents = Documents((torch.arange(length) // 90).expand(BATCH_SIZE, -1))
        padding = Padding.from_lengths(torch.tensor([real, 0]), length)
        return (Window(left, 3, dilation=2) | Global(tokens)) & documents & padding

    check(mask(260, 200, (0, 100), 20), 260, 260)
    compiled = flex_engine.compiled_graphs()
    check(mask(300, 299, (3,), 7), 300, 300)
    check(mask(400, 17, (0, 5, 399), 0), 257, 400)
    assert flex_engine.compiled_graphs() == compiled


@compiles
def test_one_graph_serves_every_part_of_a_problem() -> None:
    """Every n-th row and key, as a dilated window is computed, and some rows by index."""

    def check_part(mask: Mask, rows: slice | Tensor, keys: slice | None, query_len: int, key_len: int) -> None:
        part, whole = Taken(mask, rows, keys), qkv(query_len, key_len)
        output, _ = flex_engine.flex_attention(*whole, mask=part, scale=0.2, query_offset=0)
        allowed = Dense(part.allows(*grid(query_len, key_len), 0).expand(BATCH_SIZE, NUM_HEADS, -1, -1))
        wanted, _ = reference.attention(*whole, mask=allowed, scale=0.2)
        torch.testing.assert_close(output, wanted.float())

    def grid(query_len: int, key_len: int) -> list[Tensor]:
        sizes = (BATCH_SIZE, NUM_HEADS, query_len, key_len)
        return [torch.arange(n).view(-1, *[1] * i) for n, i in zip(sizes, (3, 2, 1, 0), strict=True)]

    check_part(Window(40, 8), slice(1, None, 3), slice(0, None, 3), 200, 300)
    compiled = flex_engine.compiled_graphs()
    check_part(Window(9, None), slice(0, None, 7), slice(5, None, 2), 130, 257)
    assert flex_engine.compiled_graphs() == compiled
    check_part(Causal(), torch.tensor([[0, -1, 399, 200], [3, 3, 5, -1]]), None, 4, 400)


@compiles
def test_dense_mask_and_bias() -> None:
    allowed = torch.rand(BATCH_SIZE, 1, 150, 170, generator=seeded(0)) < 0.4
    allowed[0, 0, 7] = False
    bias = torch.randn(NUM_HEADS, 1, 170, generator=seeded(1)).double()  # failure N5: cast to the compute dtype
    bias[2, :, 60:] = -torch.inf
    check(Dense(allowed), 150, 170, bias=bias.expand(NUM_HEADS, 150, 170))


@compiles
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check_output(qkv(190, 190, dtype), mask=Causal())


@compiles
def test_decoding() -> None:
    """One query; and scores far below zero: keys that are skipped may take no part in the maximum."""
    query, key, value = qkv(1, 700)
    check_output([query, key, value], mask=Window(100, 0))
    low = [torch.full_like(query, 10.0), -key.abs() - 9, value]  # scores about -480, rounded to 3e-5
    output = effattn.attention(*low, mask=Window(100, 0), backend="flex")
    wanted, _ = reference.attention(*low, mask=Window(100, 0))
    torch.testing.assert_close(output, wanted.float(), atol=1e-4, rtol=0)


@compiles
def test_inputs_that_want_a_gradient_elsewhere() -> None:
    """Under no_grad, a parameter is no reason to refuse a CPU."""
    inputs = [t.requires_grad_() for t in qkv(150, 150)]
    with torch.no_grad():
        check_output(inputs, mask=Causal())


@compiles
def test_another_number_of_threads() -> None:
    """The kernel's buffers are compiled for a number of threads."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        check(Causal(), 400, 400)
    finally:
        torch.set_num_threads(threads)


def test_without_compilation_it_is_an_error() -> None:
    query = torch.randn(1, 1, 8, HEAD_DIM)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(effattn.UnsupportedError, match=r"torch\.compile switched off"),
    ):
        flex_engine.flex_attention(query, query, query, mask=Causal(), scale=1.0, query_offset=0)


def a_request(**fields: Any) -> Request:
    return Request(1, 4, 4, 8, 8, 16, 16, mask=Causal(), **fields)


def test_what_a_cpu_cannot_do_is_refused() -> None:
    """Failure G3 among them: FlexAttention has no backward pass on a CPU."""
    reasons = flex.Flex().reasons(a_request(backward=True, return_lse=True, dropout_p=0.5, dtype=torch.float64))
    assert [reason.partition(";")[0] for reason in reasons if missing is None or missing not in reason] == [
        "requested float64",
        "requested dropout_p 0.5",
        "requested a backward pass on cpu",
        "requested the log-sum-exp on cpu",
    ]
    assert flex.Flex().resolve(a_request()) == "flex compiled cpu"


def test_limits_of_a_gpu_are_reasons() -> None:
    assert not flex.Flex().reasons(a_request(device="cuda", backward=True, return_lse=True))
    wide = Request(70_000, 4, 4, 8, 8, 512, 16, device="cuda")
    assert flex.Flex().reasons(wide) == [
        "requested head_dim 512 on cuda; supported up to 256",
        "requested batch_size 70000 on cuda; supported up to 65535",
    ]


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    flex._missing_for_cpu.cache_clear()
    try:
        (reason,) = flex.Flex().reasons(a_request())
    finally:
        flex._missing_for_cpu.cache_clear()
    assert reason == ("requested device cpu; supported where there is a C++ compiler ('no-such-compiler' is not found)")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("Python.h", "Python's C headers (Python.h is not found)"), ("AVX", "a CPU with AVX2")],
)
def test_what_else_a_cpu_may_lack_is_a_reason(monkeypatch: pytest.MonkeyPatch, missing: str, reason: str) -> None:
    monkeypatch.setattr(flex.shutil, "which", lambda name: name)
    monkeypatch.setattr(flex.Path, "exists", lambda path: missing != "Python.h")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    flex._missing_for_cpu.cache_clear()
    try:
        (said,) = flex.Flex().reasons(a_request())
    finally:
        flex._missing_for_cpu.cache_clear()
    assert said.startswith(f"requested device cpu; supported where there is {reason}")


def test_on_a_cpu_it_is_no_part_of_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert flex.Flex().reasons(a_request()) == [
        "requested FlexAttention on cpu within a graph that is being compiled; supported outside of one"
    ]
