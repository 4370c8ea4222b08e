"""FlexAttention: its tiles against the dense oracle, few graphs for many problems, and never an unfused result.

A graph takes seconds to compile on a CPU, so the tests that compute share the shapes that are compiled in (heads,
head dimensions) and differ in what is not (lengths, windows, offsets, tables).
"""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import effattn
from effattn import reference
from effattn.backend import Request
from effattn.backends import flex
from effattn.kernels.block_mask import tile_coverage
from effattn.masks import Causal, Coverage, Dense, Documents, Everything, Global, Mask, Padding, Window

BATCH_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 24, 20
CPU = torch.device("cpu")

missing = flex._missing_for_cpu()
compiles = pytest.mark.skipif(missing is not None, reason=f"FlexAttention on a CPU needs {missing}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mask, int, int, int]:
    """A mask of one to three leaves, with lengths and an offset that fit it."""
    query_len, key_len, offset = draw(st.integers(1, 50)), draw(st.integers(1, 50)), draw(st.integers(-20, 60))
    if query_len <= key_len and draw(st.booleans()):
        offset = draw(st.integers(0, key_len - query_len))
    generator = seeded(draw(st.integers(0, 99)))
    reach = st.one_of(st.none(), st.integers(0, 40))

    def bits(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.02, 0.5, 0.98]))

    leaves: dict[str, Any] = {
        "everything": Everything,
        "causal": Causal,
        "window": lambda: Window(draw(reach), draw(reach), draw(st.sampled_from([1, 1, 3]))),
        "padding": lambda: Padding(bits(draw(st.sampled_from([1, BATCH_SIZE])), key_len)),
        "global": lambda: Global((0, key_len - 1)),
        "ragged global": lambda: Global(bits(BATCH_SIZE, key_len)),
        "dense": lambda: Dense(bits(1, NUM_HEADS, query_len, key_len)),
        "dense keys": lambda: Dense(bits(BATCH_SIZE, 1, 1, key_len)),
    }
    if 0 <= offset <= key_len - query_len:
        leaves["documents"] = lambda: Documents(torch.arange(key_len).expand(BATCH_SIZE, -1) // 17)
    chosen = [leaves[draw(st.sampled_from(sorted(leaves)))]() for _ in range(draw(st.integers(1, 3)))]
    join = draw(st.sampled_from([Mask.__and__, Mask.__or__]))
    return functools.reduce(join, chosen), query_len, key_len, offset


def true_coverage(mask: Mask, query_len: int, key_len: int, offset: int, tile_len: int) -> Tensor:
    """The oracle: every tile of the dense mask looked at."""
    allowed = mask.dense(BATCH_SIZE, NUM_HEADS, query_len, key_len, offset)
    tiles = [rows.split(tile_len, dim=3) for rows in allowed.split(tile_len, dim=2)]
    levels = [[t.flatten(2).any(-1).int() + t.flatten(2).all(-1).int() for t in row] for row in tiles]
    return torch.stack([torch.stack(row, -1) for row in levels], -2)


@given(problem=problems(), tile_len=st.sampled_from([4, 16, 64]))
@settings(deadline=None, max_examples=300)
def test_tiles_are_never_wrong(problem: tuple[Mask, int, int, int], tile_len: int) -> None:
    said = tile_coverage(*problem, tile_len)
    true = true_coverage(*problem, tile_len)
    assert said.shape[-2:] == true.shape[-2:]
    assert ((said == true) | (said == Coverage.SOME)).all()


@pytest.mark.parametrize(
    "mask",
    [
        Everything(),
        Causal(),
        Window(14, 30),  # reaches that end one key inside a tile of 4 and of 16
        Padding.from_lengths(torch.tensor([49, 16]), 50),
        Global((0, 33)),
        Global(torch.arange(50)[None] >= 20),
        Documents((torch.arange(50) // 17)[None]),
        Dense(torch.arange(50) >= torch.arange(50)[:, None] - 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tile_len", [4, 16])
def test_tiles_of_one_mask_are_exact(mask: Mask, tile_len: int) -> None:
    said = tile_coverage(mask, 50, 50, 0, tile_len).expand(BATCH_SIZE, NUM_HEADS, -1, -1)
    assert torch.equal(said.int(), true_coverage(mask, 50, 50, 0, tile_len))


@pytest.mark.parametrize(("query_len", "key_len", "offset"), [(1, 1, 0), (300, 300, 0), (200, 641, 441), (300, 90, 7)])
@pytest.mark.parametrize("mask", [Causal(), Window(130, 5), Window(None, 3) | Global((0,))], ids=repr)
def test_block_mask_lists_the_tiles(mask: Mask, query_len: int, key_len: int, offset: int) -> None:
    block_mask = flex._block_mask(mask, query_len, key_len, offset, CPU)
    (tile_len, _), true = block_mask.BLOCK_SIZE, true_coverage(mask, query_len, key_len, offset, 128)[0, 0]
    assert tile_len == 128
    assert block_mask.seq_lengths == (query_len, key_len)
    listed = torch.zeros(block_mask.kv_indices.shape[-2:], dtype=torch.int32)
    for level, counts, indices in (
        (Coverage.SOME, block_mask.kv_num_blocks, block_mask.kv_indices),
        (Coverage.ALL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            listed[row, indices[0, 0, row, :count].long()] = level
    rows, keys = true.shape
    assert not listed[rows:].any()
    assert not listed[:, keys:].any()
    if query_len % 128:  # what hangs over the edge is masked, whatever it holds
        true[-1].clamp_(max=Coverage.SOME)
    if key_len % 128:
        true[:, -1].clamp_(max=Coverage.SOME)
    assert torch.equal(listed[:rows, :keys], true)


def test_the_block_mask_of_a_long_sequence_is_small() -> None:
    block_mask = flex._block_mask(Window(256, 256), 1_000_000, 1_000_000, 0, CPU)
    held = sum(t.untyped_storage().nbytes() for t in block_mask.as_tuple() if isinstance(t, Tensor))
    assert held <= 9 * 2**20


def test_block_masks_are_shared_only_where_everything_agrees() -> None:
    """Failures L3 and W6: a block mask for another length, window or offset."""
    build = flex._cached_block_mask
    one = build(Window(5, 0), 100, 200, 100, CPU)
    assert build(Window(5, 0), 100, 200, 100, CPU) is one
    others = [(Window(6, 0), 100, 200, 100), (Window(5, 0), 101, 200, 100), (Window(5, 0), 100, 201, 100)]
    others += [(Window(5, 0), 100, 200, 99), (Causal(), 100, 200, 100)]
    assert all(build(*other, CPU) is not one for other in others)


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


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@compiles
def test_one_graph_serves_every_length_window_and_offset() -> None:
    """Failure X1: a sweep meets PyTorch's limit of 8 recompilations and goes on without a fused kernel."""
    check(Causal(), 200, 200)
    compiled = graphs()
    for length in (2, 63, 127, 128, 129, 255, 257, 383, 500, 641):
        check(Causal(), length, length)
    for mask, query_len, key_len, offset in [
        (Window(16, 0), 200, 300, 100),
        (Window(5, 40), 130, 300, 0),
        (Window(None, 7), 300, 130, -20),
        (Window(3, 3), 40, 30, 200),  # no row sees a key
    ]:
        check(mask, query_len, key_len, query_offset=offset)
    assert graphs() == compiled


@compiles
def test_one_graph_serves_every_table_of_a_size() -> None:
    """Padding, documents, global tokens, dilation; rows that see nothing; ragged and shared tables."""

    def mask(length: int, real: int, tokens: tuple[int, ...], left: int) -> Mask:
        documents = Documents((torch.arange(length) // 90).expand(BATCH_SIZE, -1))
        padding = Padding.from_lengths(torch.tensor([real, 0]), length)
        return (Window(left, 3, dilation=2) | Global(tokens)) & documents & padding

    check(mask(260, 200, (0, 100), 20), 260, 260)
    compiled = graphs()
    check(mask(300, 299, (3,), 7), 300, 300)
    check(mask(400, 17, (0, 5, 399), 0), 257, 400)
    assert graphs() == compiled


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
        flex._run(query, query, query, None, flex._block_mask(Causal(), 8, 8, 0, CPU), 1.0, False)


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


def test_numbers_enter_a_graph_as_tensors() -> None:
    """Else every window and offset would be a graph of its own."""
    lifted = flex._lift(Window(3, 2, dilation=2) | (Global((1,)) & Causal()), 8, 8, 0, CPU)
    for leaf in lifted.leaves():
        assert all(value is None or isinstance(value, Tensor) for value in vars(leaf).values())
