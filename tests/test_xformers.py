"""The xformers adapter on a CPU: what it tells xformers, its layouts, and xformers' own Triton kernel interpreted.

xformers has no CPU kernel, so three things stand in for a GPU: every ``attn_bias`` can be materialised and must be
the mask; operators that compute densely, but keep xformers' own checks of shapes, strides and alignment, run
behind the adapter; and the Triton kernel runs under Triton's interpreter.
"""

import dataclasses
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import effattn
from effattn import reference
from effattn.backend import Request
from effattn.backends import xformers as adapter
from effattn.masks import Causal, Dense, Documents, Everything, Global, Mask, Padding, Window
from effattn.testing import contract_cases
from effattn.testing.contract import Case

xformers = pytest.importorskip("xformers", reason="xformers is not installed")

UNBOUNDED = st.one_of(st.none(), st.integers(0, 12))


def a_request(mask: Mask, batch_size: int, query_len: int, key_len: int, **fields: Any) -> Request:
    offset = fields.pop("query_offset", key_len - query_len)
    return Request(batch_size, 4, 4, query_len, key_len, 16, 16, mask=mask, query_offset=offset, **fields)


def said(form: adapter.Form, request: Request) -> Tensor:
    """What ``form`` allows, as bool ``[batch, query_len, key_len]``; pairs across the batch must be forbidden."""
    batch_size, query_len, key_len = request.batch_size, request.query_len, request.key_len
    allowed = torch.zeros(batch_size, query_len, batch_size, key_len, dtype=torch.bool)
    if form.lengths:
        flat = allowed.view(batch_size * query_len, batch_size * key_len)
        rows, keys = (
            torch.ones(n, dtype=torch.bool) if chosen is None else chosen.flatten()
            for n, chosen in zip(flat.shape, (form.rows, form.keys), strict=True)
        )
        assert sum(form.lengths) == int(rows.sum())
        visible = form.attn_bias.materialize((int(rows.sum()), int(keys.sum()))) == 0
        assert visible.any(-1).all(), "a row that sees nothing must be left out"
        flat[rows.nonzero(), keys.nonzero()[:, 0]] = visible
    else:
        low, high = form.keys
        shape = (query_len, high - low)
        visible = torch.zeros(shape) if form.attn_bias is None else form.attn_bias.materialize(shape)
        for b in range(batch_size):
            allowed[b, :, b, low:high] = visible == 0
    own = torch.eye(batch_size, dtype=torch.bool)[:, None, :, None]
    assert not (allowed & ~own).any()
    return allowed[torch.arange(batch_size), :, torch.arange(batch_size)]


def check_forms(request: Request) -> list[str]:
    *cheap, last = adapter.forms(request)
    assert last.is_tensor
    wanted = request.mask.dense(request.batch_size, 1, request.query_len, request.key_len, request.query_offset)[:, 0]
    for form in cheap:
        assert torch.equal(said(form, request), wanted), form.name
        assert form.lengths or wanted.any(-1).all(), "a row that sees nothing must be left out"
    return [form.name for form in cheap]


@given(left=UNBOUNDED, right=UNBOUNDED, query_len=st.integers(1, 12), key_len=st.integers(1, 12), data=st.data())
@settings(deadline=None, max_examples=300)
def test_a_band_is_said_exactly(
    left: int | None, right: int | None, query_len: int, key_len: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(-6, 16), label="query_offset")
    check_forms(a_request(Window(left, right), 2, query_len, key_len, query_offset=offset))


@pytest.mark.parametrize(
    ("mask", "query_len", "key_len", "query_offset", "names"),
    [
        (Everything(), 5, 9, 4, ["no bias"]),
        (Window(20, None), 5, 9, 4, ["no bias"]),
        (Causal(), 1, 9, 8, ["no bias"]),
        (Window(3, 0), 1, 9, 8, ["no bias"]),
        (Causal(), 9, 9, 0, ["LowerTriangularMask"]),
        (Causal(), 5, 9, 0, ["LowerTriangularMask"]),  # the keys behind the last query are cut off
        (Causal(), 5, 9, 4, ["LowerTriangularFromBottomRightMask"]),
        (Causal() & Window(3, 2), 9, 9, 0, ["LowerTriangularFromBottomRightLocalAttentionMask"]),
        (Window(3, 2), 9, 9, 0, ["LocalAttentionFromBottomRightMask"]),
        (Window(3, 2), 9, 9, 1, ["LocalAttentionFromBottomRightMask"]),
        (Causal(), 9, 5, -4, []),  # rows that see nothing
        (Window(3, 2, dilation=2), 9, 9, 0, []),
        (Causal() | Global((1,)), 9, 9, 0, []),
    ],
)
def test_the_cheapest_form_comes_first(
    mask: Mask, query_len: int, key_len: int, query_offset: int, names: list[str]
) -> None:
    assert check_forms(a_request(mask, 2, query_len, key_len, query_offset=query_offset)) == names


RIGHT = Padding.from_lengths(torch.tensor([7, 4]), 7)
LEFT = Padding(RIGHT.keep.flip(1))
EMPTY = Padding.from_lengths(torch.tensor([7, 0]), 7)
HOLES = Padding(torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0, 0]]))
PIECES = Documents(torch.tensor([[3, 3, 3, 1, 1, 2, 2], [0, 0, 5, 5, 5, 5, 5]]))
SCATTERED = Documents(torch.tensor([[3, 3, 1, 1, 3, 2, 2]]))
PADDED, GAPPY, BLOCKS, CAUSAL_BLOCKS, BAND_BLOCKS = (
    "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalLocalAttentionMask",
)


@pytest.mark.parametrize(
    ("mask", "query_len", "names"),
    [
        (RIGHT, 7, [PADDED, BLOCKS]),
        (RIGHT, 3, [PADDED, BLOCKS]),
        (LEFT, 7, [GAPPY, BLOCKS]),
        (EMPTY, 7, [GAPPY, BLOCKS]),
        (HOLES, 7, [BLOCKS]),
        (RIGHT & LEFT, 7, [GAPPY, BLOCKS]),
        (RIGHT & Causal(), 7, [CAUSAL_BLOCKS]),
        (LEFT & Causal(), 7, [CAUSAL_BLOCKS]),
        (EMPTY & Causal(), 7, [CAUSAL_BLOCKS]),
        (RIGHT & LEFT & Causal(), 7, [CAUSAL_BLOCKS]),
        (RIGHT & Causal() & Window(2, 2), 7, [BAND_BLOCKS]),
        (LEFT & Causal() & Window(0, 0), 7, [BAND_BLOCKS]),
        (RIGHT & Causal() & Window(6, 0), 7, [CAUSAL_BLOCKS]),
        (RIGHT & Causal(), 1, [PADDED, BLOCKS]),  # one query at the end: the causal mask says nothing
        (RIGHT & Causal(), 3, []),
        (HOLES & Causal(), 7, []),
        (RIGHT & Window(2, 2), 7, []),
        (PIECES, 7, [BLOCKS]),
        (PIECES & RIGHT, 7, [BLOCKS]),
        (PIECES & HOLES, 7, [BLOCKS]),
        (PIECES & Causal(), 7, [CAUSAL_BLOCKS]),
        (PIECES & Causal() & RIGHT & LEFT, 7, [CAUSAL_BLOCKS]),
        (PIECES & Causal() & Window(1, 0) & LEFT, 7, [BAND_BLOCKS]),
        (PIECES & Window(2, 2), 7, []),
        (PIECES & SCATTERED, 7, []),
        (PIECES & Documents(torch.tensor([[1, 1, 1, 1, 1, 1, 9]])), 7, [BLOCKS]),
        (PIECES, 3, []),
        (SCATTERED, 7, []),
        (Padding(torch.zeros(2, 7, dtype=torch.bool)), 7, []),
        (RIGHT | Causal(), 7, []),
    ],
)
def test_padding_and_documents_are_blocks(mask: Mask, query_len: int, names: list[str]) -> None:
    assert check_forms(a_request(mask, 2, query_len, 7)) == names
    assert next(adapter.forms(a_request(mask, 2, query_len, 7, bias=True))).is_tensor


@given(data=st.data(), length=st.integers(1, 12), left=UNBOUNDED, is_causal=st.booleans())
@settings(deadline=None, max_examples=200)
def test_blocks_say_exactly_the_mask(data: st.DataObject, length: int, left: int | None, is_causal: bool) -> None:
    mask: Mask = Window(left, 0) if is_causal else Everything()
    seed = data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(length + 1, (2, 3), generator=generator).sort(0).values
    position = torch.arange(length)
    mask = mask & Padding((position >= ends[0][:, None]) & (position < ends[1][:, None]))
    if data.draw(st.booleans()):
        mask = mask & Documents((torch.rand(3, length, generator=generator) < 0.3).cumsum(1))
    check_forms(a_request(mask, 3, length, length))


def _dense(inputs: Any, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Attention on xformers' inputs in any of its layouts; the log-sum-exp laid out as the operator's is."""
    q, k, v = (t.flatten(2, -2).float() for t in (inputs.query, inputs.key, inputs.value))
    bias = bias_given = inputs.attn_bias
    if bias is None:
        bias = torch.zeros(())
    elif isinstance(bias, Tensor):
        bias = bias.flatten(1, -3)
    else:
        bias = bias.materialize((q.shape[1], k.shape[1]))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * inputs.scale_float + bias
    output = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)
    lse = scores.logsumexp(-1)
    if not is_packed:
        starts = getattr(getattr(bias_given, "q_seqinfo", None), "seqstart_py", None)
        if starts:  # one block each, filled up to the longest
            blocks = [lse[0, :, start:stop].T for start, stop in pairwise(starts)]
            lse = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True, padding_value=torch.nan).mT
        lse = torch.nn.functional.pad(lse, (0, 3), value=torch.nan)
    groups = inputs.query.shape[2:-1]
    return output.unflatten(2, groups).to(inputs.query.dtype), lse.unflatten(1, groups)


def stand_ins(module: Any) -> tuple[Any, Any]:
    """A module's operators with xformers' own checks, computing densely on a CPU."""
    from xformers.ops.fmha.common import Context, Gradients

    able = {"OPERATOR": True, "SUPPORTED_DEVICES": {"cpu"}, "SUPPORTED_DTYPES": set(STAND_IN_DTYPES)}

    class Forward(module.FwOp):
        @classmethod
        def apply(cls, inp: Any, needs_gradient: bool) -> Any:
            assert cls.not_supported_reasons(inp) in ([], ["xFormers wasn't build with CUDA support"])
            output, lse = _dense(inp, cls.VARLEN_LSE_PACKED)
            return output, Context(out=output, lse=lse) if needs_gradient else None

    class Backward(module.BwOp):
        @classmethod
        def apply(cls, ctx: Any, inp: Any, grad: Tensor) -> Any:
            assert cls.not_supported_reasons(inp) in ([], ["xFormers wasn't build with CUDA support"])
            names = ["query", "key", "value"] + ["attn_bias"] * isinstance(inp.attn_bias, Tensor)
            with torch.enable_grad():
                leaves = {name: getattr(inp, name).detach().requires_grad_() for name in names}
                output, _ = _dense(dataclasses.replace(inp, **leaves), True)
                grads = torch.autograd.grad(output, list(leaves.values()), grad)
            return Gradients(*grads)

    for operator in (Forward, Backward):
        for name, value in able.items():
            setattr(operator, name, value)
    return Forward, Backward


STAND_IN_DTYPES = (torch.float32, torch.float16)


@dataclasses.dataclass(frozen=True)
class OnCpu(adapter.Xformers):
    @property
    def capabilities(self) -> effattn.Capabilities:
        return dataclasses.replace(super().capabilities, devices=("cpu",), dtypes=STAND_IN_DTYPES)


@pytest.fixture
def dense_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {name: stand_ins(getattr(adapter.load(), name)) for name in ("flash", "cutlass")}
    monkeypatch.setattr(adapter, "operators", pairs.__getitem__)


CASES = {
    "nothing": (None, None),
    "causal": (Causal(), None),
    "band": (Window(4, 2), None),
    "causal band": (Window(4, 0), None),
    "right padding": (RIGHT, None),
    "right padding, causal": (RIGHT & Causal(), None),
    "right padding, causal band": (RIGHT & Causal() & Window(1, 0), None),
    "left padding": (LEFT, None),
    "left padding, causal: empty rows": (LEFT & Causal(), None),
    "an empty batch row": (EMPTY, None),
    "holes": (HOLES, None),
    "documents": (PIECES, None),
    "documents, causal, padding": (PIECES & Causal() & RIGHT & LEFT, None),
    "dense": (Dense(torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.4), None),
    "bias": (Causal(), (7, 7)),
    "bias by head": (None, (4, 1, 7)),
}


def the_case(case: str) -> tuple[Mask | None, Tensor | None]:
    mask, shape = CASES[case]
    return mask, None if shape is None else torch.randn(shape)


def qkv(query_len: int = 7, num_kv_heads: int = 2, value_dim: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(4, query_len, 12), (num_kv_heads, 7, 12), (num_kv_heads, 7, value_dim)]
    return [torch.randn(2, *size) for size in sizes]


@pytest.mark.usefixtures("dense_operators")
@pytest.mark.parametrize("mask", [None, Causal()], ids=["no mask", "causal"])
def test_a_wide_bias_keeps_its_digits_beside_half_precision(mask: Mask | None) -> None:
    """The kernels want it in the queries' dtype, in which ALiBi's neighbours are one number at 4096."""
    query, key, value = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).half()
    bias = (0.25 * (4096 + torch.arange(64).float())).requires_grad_()
    results = []
    for backend, wide in ((OnCpu(), torch.float16), ("full", torch.float32)):
        tensors = [t.to(wide) for t in (query, key, value)]
        with torch.no_grad():
            output, lse = effattn.attention(*tensors, mask=mask, bias=bias, backend=backend, return_lse=True)
        (grad,) = torch.autograd.grad(
            effattn.attention(*tensors, mask=mask, bias=bias, backend=backend).float().sin().sum(), bias
        )
        results.append((output.float(), lse, grad))
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.usefixtures("dense_operators")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_layouts_output_and_lse(case: str, num_kv_heads: int) -> None:
    """Also failure L4: 7 keys are no multiple of 8; and S3, S4: layouts and head dimensions."""
    mask, bias = the_case(case)
    query, key, value = qkv(num_kv_heads=num_kv_heads)
    wanted, wanted_lse = reference.attention(query, key, value, mask=mask, bias=bias, scale=0.3)
    options: dict[str, Any] = {"mask": mask, "bias": bias, "scale": 0.3, "backend": OnCpu()}
    torch.testing.assert_close(effattn.attention(query, key, value, **options), wanted.float())
    output, lse = effattn.attention(query, key, value, return_lse=True, **options)
    torch.testing.assert_close(output, wanted.float())
    torch.testing.assert_close(lse, wanted_lse.float())


@pytest.mark.usefixtures("dense_operators")
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    mask, bias = the_case(case)
    inputs = [*qkv(), *([] if bias is None else [bias])]
    grad_output = torch.randn(2, 4, 7, 5)

    def gradients(attend: Any) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        output = attend(*leaves[:3], mask=mask, bias=leaves[3] if bias is not None else None)
        return torch.autograd.grad(output, leaves, grad_output)

    got = gradients(lambda *args, **options: effattn.attention(*args, **options, backend=OnCpu()))
    wanted = gradients(lambda *args, **options: reference.attention(*args, **options)[0].float())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("dense_operators")
@pytest.mark.parametrize(
    "case",
    # The one clause that is about the registered class and not about what it computes.
    [case for case in contract_cases(OnCpu()) if case.name != "spec gives the backend back"],
    ids=str,
)
def test_contract(case: Case) -> None:
    case.check()


@pytest.mark.usefixtures("dense_operators")
@pytest.mark.parametrize("op", ["flash", "cutlass"])
def test_strided_and_expanded_input(op: str) -> None:
    """Failure S1. The stand-ins refuse strides that xformers refuses."""
    query, key, value = qkv(num_kv_heads=4, value_dim=16)
    expanded = key[:, :1].expand_as(key)
    wanted, _ = reference.attention(query, expanded, value, mask=Causal())
    transposed, every_second = query.mT.contiguous().mT, torch.stack([value, value], -1)[..., 0]
    output = effattn.attention(transposed, expanded, every_second, mask=Causal(), backend=OnCpu(op))
    torch.testing.assert_close(output, wanted.float())


@pytest.mark.usefixtures("dense_operators")
def test_the_choice_can_be_asked() -> None:
    causal, dilated = a_request(Causal(), 2, 7, 7), a_request(Window(2, 0, dilation=2), 2, 7, 7)
    assert OnCpu().resolve(causal) == "xformers flash LowerTriangularMask"
    assert OnCpu("cutlass").resolve(causal) == "xformers cutlass LowerTriangularMask"
    assert OnCpu().resolve(dilated) == "xformers cutlass a tensor"
    assert OnCpu("flash").reasons(dataclasses.replace(dilated, dtype=torch.float16)) == [
        "requested Window(left=2, right=0, dilation=2) as a tensor from flash; "
        "xformers refuses: attn_bias type is <class 'torch.Tensor'>"
    ]


def test_without_cuda_it_is_refused() -> None:
    query, key, value = qkv()
    with pytest.raises(effattn.UnsupportedError, match="requested device cpu; supported cuda"):
        effattn.attention(query, key, value, backend="xformers")


def test_a_gpu_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reasons = adapter.Xformers().reasons(a_request(Causal(), 2, 7, 7, device="cuda"))
    assert reasons == ["requested device cuda; supported where PyTorch finds one"]


def test_what_it_does_not_declare_is_refused() -> None:
    both = OnCpu().reasons(a_request(Causal(), 2, 7, 7, backward=True, return_lse=True))
    assert both == ["requested the log-sum-exp with a backward pass; supported either of the two"]
    assert "requested dropout_p 0.1; supported 0" in OnCpu().reasons(a_request(Causal(), 2, 7, 7, dropout_p=0.1))
    assert "requested a backward pass; supported forward only" in OnCpu("triton_splitk").reasons(
        a_request(Causal(), 2, 7, 7, backward=True)
    )


def test_an_unknown_op_is_an_error() -> None:
    message = "xformers: op must be one of 'auto', 'flash', 'cutlass', 'triton_splitk', got 'fast'"
    with pytest.raises(ValueError, match=message):
        effattn.get("xformers(op='fast')")


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'effattn[xformers]'" in adapter.Xformers().reasons(a_request(Causal(), 2, 7, 7))[0]


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation that has the interface under the name mslk alone."""
    fmha = adapter.load()
    for name in ("mslk", "mslk.attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mslk.attention.fmha", fmha)
    find_spec = adapter.importlib.util.find_spec
    monkeypatch.setattr(
        adapter.importlib.util, "find_spec", lambda name: None if name == "xformers" else find_spec("json")
    )
    adapter.load.cache_clear()
    yield
    adapter.load.cache_clear()


@pytest.mark.usefixtures("dense_operators", "renamed")
def test_the_interface_is_found_under_its_other_name() -> None:
    assert adapter._package() == "mslk.attention.fmha"
    query, key, value = qkv()
    output = effattn.attention(query, key, value, mask=RIGHT & Causal(), backend=OnCpu())
    wanted, _ = reference.attention(query, key, value, mask=RIGHT & Causal())
    torch.testing.assert_close(output, wanted.float())


def test_what_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("its library does not load")

    monkeypatch.setattr(adapter.importlib, "import_module", broken)
    adapter.load.cache_clear()
    try:
        reasons = OnCpu().reasons(a_request(Causal(), 2, 7, 7))
    finally:
        adapter.load.cache_clear()
    assert reasons == ["requested xformers; supported where it can be imported: its library does not load"]


def test_without_the_package_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
    adapter.load.cache_clear()
    with pytest.raises(ImportError, match=r"none of xformers\.ops\.fmha, mslk\.attention\.fmha is installed"):
        adapter.load()


def run_python(code: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_looking_at_the_registry_does_not_import_xformers() -> None:
    run_python("""
        import sys, effattn
        assert "xformers" in effattn.names() and "requested device cpu" in str(effattn.describe("cpu"))
        assert "xformers" not in sys.modules
    """)


def test_xformers_own_triton_kernel_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_python(
        """
        import torch
        import effattn
        from effattn import Causal, Dense, Padding, Window, reference
        from effattn.backend import Request

        torch.manual_seed(0)
        backend = effattn.get("xformers(op='triton_splitk')")

        def check(resolved, *, query_len=20, key_len=33, kv_heads=2, return_lse=True, mask=None, bias=None):
            query = torch.randn(2, 4, query_len, 24, dtype=torch.float16)
            key = torch.randn(2, kv_heads, key_len, 24, dtype=torch.float16)
            value = torch.randn(2, kv_heads, key_len, 40, dtype=torch.float16)
            options = {"mask": mask, "bias": bias}
            wanted, wanted_lse = reference.attention(query, key, value, **options)
            output = effattn.attention(query, key, value, backend=backend, return_lse=return_lse, **options)
            request = Request.of(query, key, value, return_lse=return_lse, **options)
            assert backend.resolve(request) == f"xformers triton_splitk {resolved}", backend.resolve(request)
            if return_lse:
                output, lse = output
                torch.testing.assert_close(lse, wanted_lse.float(), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(output, wanted.half(), atol=2e-3, rtol=2e-3)

        right = Padding.from_lengths(torch.tensor([33, 7]), 33)
        check("no bias", kv_heads=4)
        check("no bias", query_len=1, key_len=600)
        check("no bias", query_len=1, key_len=600, mask=Window(70, 0))
        check("a tensor", mask=Causal())
        check("a tensor", mask=Causal() & Padding.from_lengths(torch.tensor([33, 0]), 33))
        check("a tensor", mask=Dense(torch.rand(2, 4, 20, 33) < 0.3))
        check("a tensor", bias=torch.randn(20, 33, dtype=torch.float16))
        left = Padding(right.keep.flip(1))
        for return_lse in (False, True):
            check("BlockDiagonalPaddedKeysMask", mask=right, return_lse=return_lse)
            check("BlockDiagonalPaddedKeysMask", mask=right, query_len=1, return_lse=return_lse)
            check("BlockDiagonalPaddedKeysMask", mask=right & Causal(), query_len=1, return_lse=return_lse)
            check("BlockDiagonalGappyKeysMask", mask=left, return_lse=return_lse)
            check("BlockDiagonalGappyKeysMask", mask=left, kv_heads=4, query_len=1, return_lse=return_lse)
        """,
        TRITON_INTERPRET="1",
    )
