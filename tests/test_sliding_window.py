"""The sliding window: exact counts of keys, dilation, global tokens, and memory linear in the length."""

import itertools

import pytest
import torch
from torch import Tensor

import effattn
from effattn import attention, get, pattern, reference
from effattn.bench.memory import peak_memory
from effattn.kernels import tiles
from effattn.masks import Causal, Documents, Global, Padding, Window

BATCH, HEADS, KV_HEADS = 2, 4, 2


def inputs(query_len: int = 41, key_len: int = 41, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, HEADS, query_len, 8), (BATCH, KV_HEADS, key_len, 8), (BATCH, KV_HEADS, key_len, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def keys_seen(spec: str, length: int = 20, row: int = 10, **options: object) -> list[int]:
    """Which keys reach a row of the output: value j is the j-th unit vector."""
    query, key = torch.randn(1, 1, length, 4), torch.randn(1, 1, length, 4)
    value = torch.eye(length)[None, None]
    return attention(query, key, value, backend=spec, **options)[0, 0, row].nonzero()[:, 0].tolist()


def assert_attends_to(
    expected: effattn.Mask, backend: effattn.Backend, tensors: list[Tensor], **options: object
) -> None:
    """Output, log-sum-exp and gradients are those of the reference under ``expected``."""
    got = attention(*tensors, backend=backend, return_lse=True, **options)
    want = reference.attention(*tensors, mask=expected, query_offset=options.get("query_offset"))
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.sin().sum() + lse.clamp(min=-9).sin().sum(), tensors) for out, lse in (got, want)]
    torch.testing.assert_close(*grads)


# Exact counts


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("sliding_window(left=3, right=2)", [7, 8, 9, 10, 11, 12]),
        ("sliding_window(left=3, right=0)", [7, 8, 9, 10]),
        ("sliding_window(left=0, right=1)", [10, 11]),
        ("sliding_window(left=0, right=0)", [10]),
        ("sliding_window(left=None, right=0)", list(range(11))),
        ("sliding_window(left=1, right=None)", list(range(9, 20))),
        ("sliding_window(left=2, right=1, dilation=3)", [4, 7, 10, 13]),
        ("sliding_window(left=9, right=9, dilation=4)", [2, 6, 10, 14, 18]),
        ("sliding_window(left=1, right=0, global_tokens=(2, 15))", [2, 9, 10, 15]),
        ("sliding_window(left=1, right=0, global_tokens=(10,))", list(range(20))),
        ("sliding_window(left=1, right=0, dilation=2, global_tokens=(0, 9))", [0, 8, 9, 10]),
        ("sliding_window(left=1, right=0, global_tokens=(0, 100))", [0, 9, 10]),
    ],
)
def test_a_row_sees_exactly_these_keys(spec, keys):
    assert keys_seen(spec) == keys
    query = torch.randn(1, 1, 20, 4)
    assert pattern(query, query, backend=spec).dense(1, 1, 20, 20)[0, 0, 10].nonzero()[:, 0].tolist() == keys


def test_every_row_counts_its_keys():
    query = torch.randn(1, 1, 50, 4)
    for left, right in itertools.product((0, 1, 7, 49, 200), repeat=2):
        dense = pattern(query, query, backend=get("sliding_window", left=left, right=right)).dense(1, 1, 50, 50)[0, 0]
        expected = [min(i, left) + 1 + min(49 - i, right) for i in range(50)]
        assert dense.sum(-1).tolist() == expected


def test_the_callers_mask_holds_too():
    assert keys_seen("sliding_window(left=3, right=2)", mask=Causal()) == [7, 8, 9, 10]
    assert keys_seen("sliding_window(left=3, right=2, global_tokens=(0, 15))", mask=Causal()) == [0, 7, 8, 9, 10]
    ids = (torch.arange(20)[None] >= 9).long()
    assert keys_seen("sliding_window(left=3, right=2, global_tokens=(0, 15))", mask=Documents(ids)) == [
        9,
        10,
        11,
        12,
        15,
    ]


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_a_window_larger_than_the_length_is_full_attention(length):
    tensors = inputs(length, length)
    for spec in ("sliding_window", "sliding_window(left=1000, right=1000)", "sliding_window(left=None, right=None)"):
        torch.testing.assert_close(attention(*tensors, backend=spec), attention(*tensors))


@pytest.mark.parametrize("dilation", [40, 41, 1000])
def test_a_dilation_past_the_length_leaves_each_token_itself(dilation):
    tensors = inputs()
    output = attention(*tensors, backend=get("sliding_window", left=2, right=2, dilation=dilation))
    ends = [0, 40] if dilation == 40 else []  # these two still see each other
    rest = [i for i in range(41) if i not in ends]
    torch.testing.assert_close(output[:, :, rest], tensors[2].repeat_interleave(2, dim=1)[:, :, rest])


# Lengths, offsets, global tokens


@pytest.mark.parametrize(("query_len", "key_len"), [(41, 41), (1, 41), (7, 41), (41, 7), (41, 1)])
@pytest.mark.parametrize("query_offset", [None, 0, 3, -5, 100, -100])
def test_global_tokens_under_any_lengths_and_offset(query_len, key_len, query_offset):
    backend = get("sliding_window(left=3, right=1, global_tokens=(0, 5, 30))")
    tokens = Global(torch.isin(torch.arange(key_len), torch.tensor(backend.global_tokens))[None])
    expected = Causal() & (Window(3, 1) | tokens)
    assert_attends_to(expected, backend, inputs(query_len, key_len), mask=Causal(), query_offset=query_offset)


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_ragged_global_tokens(dilation):
    tokens = torch.zeros(BATCH, 41, dtype=torch.bool)
    tokens[0, [0, 7, 40]] = True
    tokens[1, 20] = True
    backend = get("sliding_window", left=2, right=3, dilation=dilation, global_tokens=tokens)
    assert backend.global_tokens == ((0, 7, 40), (20,))
    assert get(str(backend)) == backend
    padding = Padding(torch.arange(41)[None] % 5 > 0)
    expected = padding & (Window(2, 3, dilation) | Global(tokens))
    assert_attends_to(expected, backend, inputs(), mask=padding)


def test_a_batch_row_without_global_tokens():
    backend = get("sliding_window(left=1, right=1, global_tokens=((), (4, 9)))")
    tokens = torch.zeros(BATCH, 41, dtype=torch.bool)
    tokens[1, [4, 9]] = True
    assert_attends_to(Window(1, 1) | Global(tokens), backend, inputs())
    nobody = get("sliding_window", left=1, right=1, global_tokens=torch.zeros(BATCH, 41, dtype=torch.bool))
    assert_attends_to(Window(1, 1), nobody, inputs())


def test_one_table_of_global_tokens_serves_all_batch_rows():
    tokens = torch.zeros(1, 41, dtype=torch.bool)
    tokens[:, [5, 30]] = True
    assert_attends_to(
        Window(2, 2) | Global(tokens), get("sliding_window", left=2, right=2, global_tokens=tokens), inputs()
    )


def test_a_bias_reaches_band_and_global_tokens_alike():
    tensors = inputs()
    for shape in ((41,), (41, 1), (HEADS, 41, 41), (BATCH, 1, 41, 41)):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        for dilation in (1, 2):
            spec = f"sliding_window(left=2, right=2, dilation={dilation}, global_tokens=(0, 33))"
            mask = Window(2, 2, dilation) | Global((0, 33))
            got, want = attention(*tensors, backend=spec, bias=bias), attention(*tensors, mask=mask, bias=bias)
            torch.testing.assert_close(got, want)
            leaves = [*tensors, bias]
            torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), leaves) for t in (got, want)))


# Errors


def test_one_tuple_of_global_tokens_for_each_batch_row():
    backend = get("sliding_window(global_tokens=((0,), (1,), (2,)))")
    for call in (lambda: attention(*inputs(), backend=backend), lambda: pattern(*inputs()[:2], backend=backend)):
        with pytest.raises(ValueError, match="global_tokens must have one tuple for each of 2 batch rows, got 3"):
            call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"left": -1}, "left must be an integer >= 0 or None, got -1"),
        ({"right": 2.5}, "right must be an integer >= 0 or None, got 2.5"),
        ({"dilation": 0}, "dilation must be an integer >= 1, got 0"),
        ({"dilation": None}, "dilation must be an integer >= 1, got None"),
        ({"global_tokens": (0, -1)}, r"global_tokens must be positions >= 0, .* got \(0, -1\)"),
        ({"global_tokens": (0, (1,))}, r"global_tokens must be positions >= 0, .* got \(0, \(1,\)\)"),
        ({"global_tokens": (1.5,)}, r"global_tokens must be positions >= 0, .* got \(1.5,\)"),
        ({"global_tokens": 3}, "global_tokens must be positions, one tuple of them a batch row, or bool .* got 3"),
        ({"global_tokens": torch.ones(2, 3)}, "global_tokens must be positions, .* or bool"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=f"sliding_window: {message}"):
        get("sliding_window", **fields)


# Memory


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "spec",
    [
        "sliding_window(left=32, right=32)",
        "sliding_window(left=32, right=0, dilation=2)",
        "sliding_window(left=32, right=32, global_tokens=(0, 1, 500))",
    ],
)
def test_memory_grows_with_the_length(spec, backward):
    def peak(length: int) -> int:
        tensors = inputs(length, length, torch.float32)

        def call() -> object:
            output = attention(*tensors, backend=spec, mask=Padding(torch.arange(length)[None] > 3))
            return torch.autograd.grad(output.sum(), tensors) if backward else output

        return peak_memory(call, "cpu")

    assert peak(2048) <= 2.2 * peak(1024)


@pytest.mark.parametrize("spec", ["sliding_window(left=16, right=16)", "sliding_window(left=16, right=16, dilation=2)"])
def test_the_gradient_of_a_broadcast_bias_takes_no_more(spec):
    def peak(length: int) -> int:
        leaves = [*inputs(length, length, torch.float32), torch.zeros(length, requires_grad=True)]

        def call() -> object:
            return torch.autograd.grad(attention(*leaves[:3], backend=spec, bias=leaves[3]).sum(), leaves)

        return peak_memory(call, "cpu")

    assert peak(2048) <= 2.2 * peak(1024)


@pytest.mark.parametrize("workspace_bytes", [2**17, 2**18, 3 * 2**17, 2**22])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_runs_of_tiles_and_single_tiles_agree_whatever_fits_the_workspace(workspace_bytes, num_kv_heads, monkeypatch):
    monkeypatch.setattr(tiles, "_WORKSPACE_BYTES", workspace_bytes)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(2, heads, 1000, 8, generator=generator) for heads in (4, num_kv_heads, num_kv_heads, 4)
    )
    mask = Causal() & Padding(torch.arange(1000) >= torch.tensor([[0], [300]]))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    for spec in ("sliding_window(left=70, right=0)", "sliding_window(left=100, right=30)"):
        backend = get(spec)
        output = attention(*inputs, backend=backend, mask=mask)
        seen = backend.pattern(query, key, mask=mask, query_offset=0)
        expected, _ = reference.attention(query, key, value, mask=seen)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
        got, want = (torch.autograd.grad(o, inputs, grad.to(o.dtype)) for o in (output, expected))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
