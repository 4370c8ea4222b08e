"""Sorted rounds by FlexAttention: against the eager engine and the dense oracle, as far as a CPU goes.

In place of the kernel stands a dense one that reads the block mask as the kernel does, or, where it matters what
PyTorch's compiler sees, the operator's own dense definition (see test_flex_engine.py). What Inductor writes for a CPU
gives the output alone, and is compared round by round.
"""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import effattn
from effattn import Request, attention, get, reference
from effattn.backends import flex, lsh
from effattn.bench.memory import peak_memory
from effattn.kernels import flex_engine, sorted_flex
from effattn.kernels.hashing import plan_chunks
from effattn.kernels.sorted_chunks import Chunks, chunked_rounds
from effattn.masks import Causal, Dense, Documents, Everything, Global, Mask, Padding, Window, padding_of
from effattn.testing import contract_cases
from effattn.testing.contract import Case

# PyTorch's compiler looks at the gradients of its inputs, and hides this warning in a way that "error" undoes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

missing = flex._missing_for_cpu()
compiles = pytest.mark.skipif(missing is not None, reason=f"FlexAttention on a CPU needs {missing}")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's road for CUDA, on CPU tensors, with PyTorch's dense definition of the operator at its end."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_engine, "is_cpu", lambda device: False)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    compiled = torch.compile(flex_engine._fused, dynamic=True, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex_engine, "_compiled", lambda: compiled)


@pytest.fixture
def dense_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense kernel in place of FlexAttention: it goes through each range of tiles from the first on."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float, need_lse: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert need_lse
        assert options["kernel_options"]["BLOCKS_ARE_CONTIGUOUS"]
        sizes = (*query.shape[:3], key.shape[2])
        index = [torch.arange(n).view(-1, *[1] * i) for n, i in zip(sizes, (3, 2, 1, 0), strict=True)]
        first, count = (
            block_mask.kv_indices.repeat_interleave(128, 2),
            block_mask.kv_num_blocks.repeat_interleave(128, 2),
        )
        tile = index[3] // 128
        allowed = block_mask.mask_mod(*index) & (tile >= first) & (tile < first + count[..., None])
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(wide) @ key.to(wide).mT * scale).masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
        return (weights @ value.to(wide)).to(query.dtype), lse

    monkeypatch.setattr(flex_engine, "is_cpu", lambda device: False)
    monkeypatch.setattr(flex_engine, "run", run)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    query_len: int, key_len: int | None = None, *, shared: bool = False, heads: tuple[int, int] = (4, 2)
) -> list[Tensor]:
    key_len = key_len or query_len
    query = draw(2, heads[0], query_len, 24, seed=1)
    key = F.normalize(query, dim=-1) if shared else draw(2, heads[1], key_len, 24, seed=2)
    return [query, key, draw(2, key.shape[1], key_len, 20, seed=3)]


def chunks_of(query: Tensor, key: Tensor, mask: Mask, **options: Any) -> Chunks:
    shared, once = options.pop("shared", False), options.pop("once", True)
    sizes = {"chunk_size": 16, "num_hashes": 3, "look_back": 1, "look_ahead": 0, "seed": 0}
    offset = key.shape[2] - query.shape[2]
    plan = plan_chunks(query, key, padding_of(mask), query_offset=offset, shared=shared, **{**sizes, **options})
    return Chunks(plan, mask, 0.3, offset, exclude_self=shared, once=once)


def gradients(output: Tensor, lse: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    total = output.double().sin().sum() + lse.masked_fill(lse == -torch.inf, 0).double().sin().sum()
    return torch.autograd.grad(total, tensors)


def assert_agree(tensors: list[Tensor], chunks: Chunks) -> None:
    """Output, log-sum-exp and gradients of this engine and of the eager one."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    got = sorted_flex.flex_rounds(*tensors, chunks)
    *want, _ = chunked_rounds(*tensors, chunks)
    assert [t.dtype for t in got] == [tensors[0].dtype, torch.float32]
    torch.testing.assert_close(got, tuple(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(*got, tensors), gradients(*want, tensors), atol=2e-5, rtol=1e-5)


MASKS = {
    "none": Everything(),
    "causal": Causal(),
    "window or globals": Window(90, 0) | (Global((0, 7)) & Causal()),
    "padding": Causal() & Padding(torch.rand(2, 300, generator=torch.Generator().manual_seed(5)) < 0.7),
    "documents": Documents((torch.arange(300) // 90)[None]),
    "dense": Dense(torch.rand(2, 4, 300, 300, generator=torch.Generator().manual_seed(6)) < 0.4),
    "one batch row is padding": Padding.from_lengths(torch.tensor([0, 260]), 300),
}


@pytest.mark.usefixtures("dense_kernel")
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_gives_what_the_eager_engine_gives(mask: Mask, shared: bool) -> None:
    """Grouped heads where queries and keys are apart; rows that see nothing, or themselves alone."""
    tensors = inputs(300, shared=shared)
    assert_agree(tensors, chunks_of(*tensors[:2], mask, shared=shared))


@pytest.mark.usefixtures("dense_kernel")
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_a_pair_may_count_in_every_round(shared: bool) -> None:
    tensors = inputs(300, shared=shared)
    assert_agree(tensors, chunks_of(*tensors[:2], Causal(), shared=shared, once=False))


@pytest.mark.usefixtures("as_on_cuda")
def test_the_operator_gives_what_the_eager_engine_gives() -> None:
    """And one graph, forward and backward, serves every length."""
    tensors = inputs(300)
    assert_agree(tensors, chunks_of(*tensors[:2], Causal(), num_hashes=2))
    compiled = flex_engine.compiled_graphs()
    tensors = inputs(400, 270)
    assert_agree(tensors, chunks_of(*tensors[:2], Window(99, 3), num_hashes=2))
    assert flex_engine.compiled_graphs() == compiled


@pytest.mark.usefixtures("dense_kernel")
@pytest.mark.parametrize(
    ("query_len", "key_len", "options"),
    [
        (1, 300, {}),
        (3, 2, {"chunk_size": 4}),
        (290, 131, {"look_back": 0, "look_ahead": 2}),
        (131, 290, {"chunk_size": 5, "num_hashes": 5}),  # chunks across the edges of tiles
        (257, 257, {"chunk_size": 200, "hashing": "anchors", "local": True}),
        (300, 300, {"hashing": "anchors", "local": True, "sinks": 4}),
    ],
)
def test_lengths_chunks_and_options(query_len: int, key_len: int, options: dict[str, Any]) -> None:
    tensors = inputs(query_len, key_len)
    assert_agree(tensors, chunks_of(*tensors[:2], Causal(), **options))


@pytest.mark.usefixtures("dense_kernel")
def test_heads_are_taken_as_many_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, and three of four; batch rows and heads must not be mixed up, nor strided inputs."""
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(140)]
    chunks = chunks_of(*tensors[:2], Causal() & Padding(torch.rand(2, 140) < 0.7))
    for at_once in (1, 3 * 2 * 140):
        monkeypatch.setattr(sorted_flex, "_AT_ONCE", at_once)
        assert_agree(tensors, chunks)


def true_tiles(order: sorted_flex._Round, problems: int) -> Tensor:
    """Which tiles hold an allowed pair, by looking at every pair: ``[problems, group, row tiles, key tiles]``."""
    sizes = (problems, order.rows.shape[1], order.rows.shape[2], order.keys.shape[2])
    index = [torch.arange(n).view(-1, *[1] * i) for n, i in zip(sizes, (3, 2, 1, 0), strict=True)]
    allowed = order.block_mask().mask_mod(*index)
    return allowed.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).any(5).any(3)


@pytest.mark.usefixtures("dense_kernel")
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize(("chunk_size", "look_ahead"), [(1, 0), (5, 3), (64, 0), (100, 1), (300, 0)])
def test_tiles_are_ranges_that_hold_every_pair(chunk_size: int, look_ahead: int, shared: bool) -> None:
    """The kernels go through a range from its first tile on: rows by keys, and keys by rows."""
    query, key, _ = inputs(700, shared=shared)
    key = key * (torch.arange(key.shape[2])[:, None] < 300) + 1e-3  # many keys in one bucket: windows that jump
    chunks = chunks_of(query, key, Everything(), chunk_size=chunk_size, look_ahead=look_ahead, shared=shared)
    num_kv_heads = key.shape[1]
    for index in range(3):
        order = sorted_flex._Round(sorted_flex._Share.of(chunks, num_kv_heads, slice(0, 2 * num_kv_heads)), index)
        block_mask, needed = order.block_mask(), true_tiles(order, 2 * num_kv_heads)
        listed = []
        for kind, count in (("kv", needed.shape[3]), ("q", needed.shape[2])):
            first, length = getattr(block_mask, f"{kind}_indices"), getattr(block_mask, f"{kind}_num_blocks")
            assert first.dtype == length.dtype == torch.int32
            assert first.shape[3] == 1
            assert first.is_contiguous()
            assert length.is_contiguous()
            tile = torch.arange(count)
            listed.append((tile >= first) & (tile < first + length[..., None]))
            assert int((first[..., 0] + length).max()) <= count
        by_rows, by_keys = listed[0], listed[1].mT
        assert torch.equal(by_rows, by_keys)
        assert (by_rows | ~needed).all()
        # Windows only move forward: the ranges together are no longer than the keys and what each tile needs.
        most = needed.shape[3] + needed.shape[2] * (2 + chunks.plan.width // 128)
        assert int(by_rows.sum((2, 3)).max()) <= most


def test_windows_only_move_forward() -> None:
    query, key, _ = inputs(500, 430)
    for mask in (Everything(), Padding(torch.rand(2, 430) < 0.5)):
        plan = chunks_of(query, key, mask, chunk_size=7, look_ahead=1).plan
        assert (plan.chunk_start.diff(dim=-1) >= 0).all()
        assert int(plan.chunk_start.max()) + plan.width <= 430


# As compiled for a CPU


@compiles
@pytest.mark.parametrize("masked", [False, True])
def test_rounds_compiled_for_a_cpu(masked: bool) -> None:
    """Each round's output against the dense oracle of the pairs that it counts; one graph for many lengths."""

    def check(query_len: int, key_len: int) -> None:
        query, key, value = inputs(query_len, key_len, heads=(2, 1))
        mask = Causal() & Padding(torch.rand(2, key_len) < 0.8) if masked else Everything()
        chunks = chunks_of(query, key, mask, num_hashes=3)
        order = sorted_flex._Round(sorted_flex._Share.of(chunks, 1, slice(0, 2)), 2)
        (found,) = order.attend(*order.sort(query, key, value), need_lse=False)
        output = sorted_flex._take(found, order.row_rank)
        batch, head, row, key_index = (
            torch.arange(n).view(-1, *[1] * i) for n, i in zip((2, 2, query_len, key_len), (3, 2, 1, 0), strict=True)
        )
        meets = [chunks.plan.meets(i, batch, head, head // 2, row, key_index) for i in range(3)]
        allowed = Dense(meets[2] & ~meets[0] & ~meets[1] & mask.dense(2, 2, query_len, key_len))
        wanted, _ = reference.attention(query, key, value, mask=allowed, scale=0.3)
        torch.testing.assert_close(output, wanted.float(), atol=1e-5, rtol=1e-5)

    check(300, 300)
    compiled = flex_engine.compiled_graphs()
    check(257, 400)
    check(500, 270)
    assert flex_engine.compiled_graphs() == compiled


# As a backend


def test_what_runs_is_said() -> None:
    request = Request(1, 4, 2, 8, 8, 16, 16, dtype=torch.bfloat16, device="cuda", backward=True, return_lse=True)
    backend = get("lsh")
    assert not backend.reasons(request)
    assert backend.resolve(request) == "sorted flex"
    for change in ({"device": "cpu"}, {"dropout_p": 0.1}, {"dtype": torch.float64}, {"head_dim": 512}):
        changed = dataclasses.replace(request, **change)  # type: ignore[arg-type]
        assert not backend.reasons(changed)
        assert backend.resolve(changed) == "sorted chunks"


@pytest.fixture
def by_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend take CPU tensors for such as CUDA's."""
    monkeypatch.setattr(lsh, "serves", lambda request: flex_engine.serves(dataclasses.replace(request, device="cuda")))


# What masks and lengths do is shown above; left out is what runs in the eager engine: float64, dropout.
CASES = (
    "float32, forward only",
    "float16, causal",
    "bfloat16, causal",
    "float16, scores past 65504",
    "mask: causal and padding, with log-sum-exp",
    "head_dim 1, values 1",
    "head_dim 40, values 40",
    "6 heads on 2, dense",
    "query_offset -3",
    "scale",
    "one batch row, one head",
    "padding has no influence",
    "the future has no influence",
    "layout makes no difference",
    "inputs stay as they were",
    "calls repeat bit by bit",
    "second derivatives work or are refused",
    "autocast chooses the dtype",
)


@pytest.mark.usefixtures("by_flex", "dense_kernel")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{spec}, {case}")
        for spec in ("lsh(bucket_size=4, sinks=2)", "lsh(bucket_size=4, shared_qk=True, count='per_round')")
        for case in contract_cases(spec)
        if case.name in CASES
    ],
)
def test_contract(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    rounds = sorted_flex.flex_rounds
    monkeypatch.setattr(lsh, "flex_rounds", lambda *arguments: ran.append(1) or rounds(*arguments))
    outcome = case.check()
    assert ran or outcome.value == "refused"


@pytest.mark.usefixtures("dense_kernel")
def test_under_checkpointing() -> None:
    tensors = [t.requires_grad_() for t in inputs(140)]
    chunks = chunks_of(*tensors[:2], Causal())
    again = checkpoint(sorted_flex.flex_rounds, *tensors, chunks, use_reentrant=False)
    once = sorted_flex.flex_rounds(*tensors, chunks)
    torch.testing.assert_close(gradients(*again, tensors), gradients(*once, tensors), rtol=0, atol=0)


@pytest.mark.usefixtures("by_flex", "as_on_cuda")
@pytest.mark.filterwarnings("ignore::UserWarning")  # tracing the operator's dense definition warns
def test_it_is_a_part_of_a_graph_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, keep = get("lsh(bucket_size=8, num_hashes=2, shared_qk=True)"), torch.arange(37)[None] > 4

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attention(query * 2, key, value, backend=backend, mask=Causal() & Padding(keep))
        return output.square().sum()

    torch._dynamo.reset()
    tensors = [draw(1, 2, 37, 8, seed=seed).requires_grad_() for seed in (1, 1, 2)]
    total = torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors)
    got = (total, *torch.autograd.grad(total, tensors))
    monkeypatch.setattr(lsh, "serves", lambda request: False)  # the eager engine
    total = loss(*tensors)
    for mine, wanted in zip(got, (total, *torch.autograd.grad(total, tensors)), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("dense_kernel")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_lives_at_once(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the operator itself, which the dense definition stands in for: a few times the inputs, for 4 rounds."""
    length, heads, dim = 8192, 8, 64
    query, key, value = (draw(1, heads, length, dim, seed=s, dtype=torch.bfloat16).requires_grad_() for s in range(3))
    chunks = chunks_of(query, key, Causal(), num_hashes=4, chunk_size=64)
    grad = torch.ones_like(query)

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        total = query + key[:, :, :1] + value[:, :, :1] + key.sum() + value.sum()  # reads and grads as large as theirs
        return total, total.float().sum(-1)

    monkeypatch.setattr(flex_engine, "run", run)
    monkeypatch.setattr(sorted_flex, "_AT_ONCE", 2 * length)

    def call() -> object:
        output, _ = sorted_flex.flex_rounds(query, key, value, chunks)
        return torch.autograd.grad(output, (query, key, value), grad) if backward else output

    size = sum(t.nbytes for t in (query, key, value))
    assert peak_memory(call, "cpu") <= 4 * size


@pytest.mark.usefixtures("as_on_cuda")
def test_shapes_and_dtypes_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """131072 tokens in bfloat16, on tensors without data."""
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **options: nullcontext())  # there is none for meta
    length = 131_072
    with torch.device("meta"):
        query, key, value = (
            torch.empty(1, heads, length, dim, dtype=torch.bfloat16, requires_grad=True)
            for heads, dim in ((8, 96), (2, 96), (2, 64))
        )
        mask = Causal() & Padding(torch.empty(1, length, dtype=torch.bool))
        output, lse = sorted_flex.flex_rounds(query, key, value, chunks_of(query, key, mask, num_hashes=1))
        assert (output.shape, output.dtype) == ((1, 8, length, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((1, 8, length), torch.float32)
        weights = torch.empty_like(output), torch.empty_like(lse)
        grads = torch.autograd.grad((output, lse), (query, key, value), weights)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, torch.bfloat16) for t in (query, key, value)]


def test_without_compilation_it_is_an_error() -> None:
    tensors = inputs(20)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(effattn.UnsupportedError, match=r"torch\.compile switched off"),
    ):
        sorted_flex.flex_rounds(*tensors, chunks_of(*tensors[:2], Causal()))
