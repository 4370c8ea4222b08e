"""The FlexAttention engine as it is on CUDA, without CUDA: its lists of tiles, its cache, its results and gradients.

The operator has a dense definition of its own in PyTorch, which ``torch.compile(backend="eager")`` runs on a CPU:
forward, log-sum-exp and backward. In front of it stands all of the engine; only the kernels that Inductor writes are
left out, and ``test_flex.py`` runs the one for a CPU.
"""

import dataclasses
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from strategies import Sizes
from test_block_mask import true_coverage
from torch import Tensor

import effattn
from effattn import reference
from effattn.backends import flex
from effattn.bench.memory import peak_memory
from effattn.kernels import flex_engine
from effattn.kernels.tiles import Problem
from effattn.masks import Causal, Coverage, Dense, Documents, Everything, Global, Mask, Padding, Taken, Window
from effattn.testing import contract_cases
from effattn.testing.contract import Case

# PyTorch's compiler looks at the gradients of its inputs, and hides this warning in a way that "error" undoes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = torch.device("cpu")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's road for CUDA, on CPU tensors, with PyTorch's dense definition of the operator at its end."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_engine, "is_cpu", lambda device: False)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    compiled = torch.compile(flex_engine._fused, dynamic=True, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex_engine, "_compiled", lambda: compiled)
    flex_engine._cached_block_mask.cache_clear()


def listed_levels(block_mask: Any, *, by_rows: bool) -> Tensor:
    """The tiles that a block mask lists, as a table ``[batch, heads, row tiles, key tiles]`` of levels."""
    kind = "kv" if by_rows else "q"
    counts, indices, full_counts, full_indices = (
        getattr(block_mask, f"{full}{kind}_{what}") for full in ("", "full_") for what in ("num_blocks", "indices")
    )
    (query_len, key_len), (tile_len, _) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    sizes = [max(-(-n // tile_len), 2) for n in ((query_len, key_len) if by_rows else (key_len, query_len))]
    batch_size, num_heads, num_lists, width = indices.shape
    assert num_lists == sizes[0]
    levels = torch.zeros(batch_size, num_heads, *sizes, dtype=torch.int32)
    for level, count, numbers in ((Coverage.SOME, counts, indices), (Coverage.ALL, full_counts, full_indices)):
        assert count.dtype == numbers.dtype == torch.int32
        assert count.is_contiguous()
        assert numbers.is_contiguous()
        assert int(count.max()) <= width
        for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (batch_size, num_heads, num_lists))).tolist():
            mine = numbers[b, h, i, : count[b, h, i]]
            assert (mine.diff() > 0).all(), "kernels want the tiles in ascending order"
            levels[b, h, i, mine.long()] = int(level)
    return levels if by_rows else levels.mT


RAGGED = Padding.from_lengths(torch.tensor([400, 17]), 641)


@pytest.mark.parametrize(("query_len", "key_len", "offset"), [(1, 641, 640), (641, 641, 0), (200, 641, 441)])
@pytest.mark.parametrize(
    "mask",
    [
        Everything(),
        Causal(),
        Window(130, 5),
        Window(None, 3) | Global((0,)),
        Causal() & RAGGED,
        Documents((torch.arange(641) // 200)[None]) & Causal(),
        Global(torch.arange(641)[None] == 300) | Window(3, 3),
        Dense(torch.arange(641) % 300 < 20),
        Window(3, 3) & Window(500, 500),
        Window(2, 2) & Padding(torch.arange(641)[None] >= 384),  # some rows see nothing
    ],
    ids=repr,
)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_the_block_mask_lists_the_tiles(
    mask: Mask, query_len: int, key_len: int, offset: int, on_cuda: bool, request: pytest.FixtureRequest
) -> None:
    if on_cuda:
        request.getfixturevalue("as_on_cuda")
    block_mask = flex_engine.block_mask_of(mask, query_len, key_len, offset, CPU)
    assert block_mask.BLOCK_SIZE == (128, 128)
    assert block_mask.seq_lengths == (query_len, key_len)
    true = true_coverage(mask, Sizes(2, 1, query_len, key_len, offset), 128)
    true[..., -1, :].clamp_(max=Coverage.SOME)  # what hangs over the edge is masked, whatever it holds
    true[..., -1].clamp_(max=Coverage.SOME)
    rows, keys = true.shape[2:]
    for by_rows in (True, False) if on_cuda else (True,):
        levels = listed_levels(block_mask, by_rows=by_rows).expand(2, -1, -1, -1)
        assert not levels[:, :, rows:].any()
        assert not levels[:, :, :, keys:].any()
        assert torch.equal(levels[:, :, :rows, :keys], true)
    if not on_cuda:
        assert block_mask.q_indices is None
        assert block_mask.kv_indices.shape[3] * 128 >= key_len  # asked for by the kernel of a CPU


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("length", [131072, 1_000_000])
def test_the_block_mask_of_a_band_takes_kilobytes(length: int) -> None:
    """131072 squared bits would be 2 GiB."""
    keep = torch.arange(length)[None] < length - 1000

    def build(mask: Mask) -> Any:
        return flex_engine._block_mask(mask, length, length, 0, CPU)

    band = Causal() & Window(1024, 0)
    held = sum(t.untyped_storage().nbytes() for t in build(band).as_tuple() if isinstance(t, Tensor))
    assert held <= 512 * 2**10
    assert peak_memory(lambda: build(band), "cpu") <= 2 * 2**20
    assert peak_memory(lambda: build(band & Padding(keep)), "cpu") <= 2 * 2**20 + 64 * length


def test_the_block_mask_of_any_mask_is_far_from_quadratic() -> None:
    length = 131072
    ids = (torch.arange(length) // 1000)[None]
    for mask in (Causal(), Documents(ids), Causal() & Documents(ids), Window(256, 256) | Global((0, 5))):
        peak = peak_memory(lambda mask=mask: flex_engine._block_mask(mask, length, length, 0, CPU), "cpu")
        assert peak <= 64 * 2**20


def test_block_masks_are_shared_only_where_everything_agrees() -> None:
    """Failures L3 and W6: a block mask for another length, window or offset."""
    build = flex_engine.block_mask_of
    one = build(Window(5, 0), 100, 200, 100, CPU)
    assert build(Window(5, 0), 100, 200, 100, CPU) is one
    assert build(Window(5, 9) & Causal(), 100, 200, 100, CPU) is one  # the same band
    others = [(Window(6, 0), 100, 200, 100), (Window(5, 0), 101, 200, 100), (Window(5, 0), 100, 201, 100)]
    others += [(Window(5, 0), 100, 200, 99), (Causal(), 100, 200, 100), (Window(5, 0, dilation=2), 100, 200, 100)]
    assert all(build(*other, CPU) is not one for other in others)


def test_a_block_mask_is_shared_while_its_tensors_stay_as_they_are() -> None:
    keep, ids = torch.arange(200)[None] > 50, torch.arange(200)[None] // 70

    def build(*masks: Mask) -> Any:
        return flex_engine.block_mask_of(masks[0] & masks[-1] & Causal(), 200, 200, 0, CPU)

    one = build(Padding(keep), Documents(ids))
    assert build(Padding(keep), Documents(ids)) is one
    assert build(Padding(keep.clone()), Documents(ids)) is not one
    assert build(Padding(keep)) is not one
    assert one.mask_mod(*map(torch.tensor, (0, 0, 60, 51)))
    keep[0, 51] = False
    changed = build(Padding(keep), Documents(ids))
    assert changed is not one
    assert not changed.mask_mod(*map(torch.tensor, (0, 0, 60, 51)))


def test_the_cache_keeps_no_tensor_of_the_caller_alive() -> None:
    for shape in ((1, 256), (2, 256), (2, 77)):
        held = torch.ones(shape, dtype=torch.bool)
        alive = weakref.ref(held)
        flex_engine.block_mask_of(Padding(held), *shape[1:] * 2, 0, CPU)
        del held
        gc.collect()
        assert alive() is None


def test_what_cannot_be_recognised_is_made_anew() -> None:
    dense = Dense(torch.ones(30, 30, dtype=torch.bool))
    with torch.inference_mode():
        unversioned = Padding(torch.ones(1, 30, dtype=torch.bool))
    for mask in (dense, Causal() & dense, unversioned):
        assert flex_engine.block_mask_of(mask, 30, 30, 0, CPU) is not flex_engine.block_mask_of(mask, 30, 30, 0, CPU)


def test_a_block_mask_made_in_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        block_mask = flex_engine.block_mask_of(Window(77, 0), 100, 100, 0, CPU)
    assert not any(t.is_inference() for t in block_mask.as_tuple() if isinstance(t, Tensor))


MASKS = [
    Window(3, 2, dilation=2) | (Global((1, 30)) & Causal()),
    Global(torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.2)
    & Documents(torch.arange(40)[None] // 9),
    Padding(torch.arange(40)[None] > 3) & Dense(torch.rand(2, 3, 40, 40) < 0.5),
    Taken(Window(5, 2) | Global((0, 9)), slice(1, None, 3), slice(0, None, 2)),
    Taken(Documents(torch.arange(40)[None] // 9), torch.tensor([[-1, 0, 39, 5], [7, 7, -1, 1]]), slice(5, None)),
    Taken(Taken(Causal(), slice(3, None), None), torch.tensor([[0, -1, 30, 36]]), slice(0, None, 3)),
]


@pytest.mark.parametrize("mask", MASKS, ids=range(len(MASKS)))
@pytest.mark.parametrize("offset", [0, -7])
def test_a_mask_with_tensors_for_numbers_is_the_same_mask(mask: Mask, offset: int) -> None:
    lengths = {Taken: (4, 10)}.get(type(mask), (40, 40))
    if offset and any(isinstance(leaf, Documents) for leaf in flex_engine._leaves(mask)):
        offset = 0  # where a row has no document, there is no answer
    index = [torch.arange(n).view(-1, *[1] * i) for n, i in zip((2, 3, *lengths), (3, 2, 1, 0), strict=True)]
    mod = flex_engine._mask_mod(mask, 40, offset, CPU)
    assert torch.equal(mod(*index).expand(2, 3, *lengths), mask.allows(*index, offset).expand(2, 3, *lengths))


@pytest.mark.parametrize("mask", MASKS, ids=range(len(MASKS)))
def test_numbers_enter_a_graph_as_tensors(mask: Mask) -> None:
    """Else every window and offset would be a graph of its own."""

    def check(lifted: Any) -> None:
        for value in vars(lifted).values():
            for part in value if isinstance(value, tuple) else (value,):
                assert part is None or isinstance(part, Tensor | Mask), part
                if isinstance(part, Mask):
                    check(part)

    check(flex_engine.lifted(mask, 40, CPU))


# About the registered class, about aot_autograd; and what other cases show too.
ELSEWHERE = re.compile(r"spec gives|second derivatives|forward only|length (2|31|63|64|127),|on 5 keys|on 1 keys")


@dataclasses.dataclass(frozen=True)
class AsOnCuda(flex.Flex):
    def reasons(self, request: effattn.Request) -> list[str]:
        return [reason for reason in super().reasons(request) if "cpu" not in reason]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    "case",
    [case for case in contract_cases(AsOnCuda()) if not ELSEWHERE.search(case.name)],
    ids=str,
)
def test_contract(case: Case) -> None:
    case.check()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("wide_output", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_the_tiles_give(wide_output: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, dim, generator=generator).to(dtype).requires_grad_()
        for heads, length, dim in ((4, 30, 24), (2, 50, 24), (2, 50, 7))
    )
    bias = torch.randn(4, 1, 50, generator=generator).requires_grad_()
    mask = Causal() & Window(9, 0) & Padding(torch.arange(50)[None] > 25)
    problem = Problem(mask, 0.3, 15, wide_output=wide_output)
    output, lse = flex_engine.flex_tiles(query, key, value, problem, bias=bias)
    wanted, wanted_lse = reference.attention(query, key, value, mask=mask, bias=bias, scale=0.3, query_offset=15)
    assert output.dtype == (torch.float32 if wide_output else dtype)
    assert lse.dtype == torch.float32
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(output.double(), wanted, **close)
    torch.testing.assert_close(lse.double(), wanted_lse, **close)

    def grads(output: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        sees = wanted_lse > -torch.inf
        return torch.autograd.grad(
            output.double().square().sum() + lse[sees].double().sin().sum(), (query, key, value, bias)
        )

    for got, want in zip(grads(output, lse), grads(wanted, wanted_lse), strict=True):
        torch.testing.assert_close(got, want, atol=10 * close["atol"], rtol=close["rtol"])


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.filterwarnings("ignore::UserWarning")  # tracing the operator's dense definition warns
def test_it_is_a_part_of_a_graph_of_the_caller() -> None:
    backend, keep = AsOnCuda(), torch.arange(37)[None] > 4

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = (Causal() & Window(9, 0) | Global((3,))) & Padding(keep)
        output = effattn.attention(query * 2, key, value, backend=backend, mask=mask)
        assert isinstance(output, Tensor)
        return output.square().sum()

    inputs = [torch.randn(1, 2, 37, 8).requires_grad_() for _ in range(3)]
    results = []
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        total = call(*inputs)
        results.append((total, *torch.autograd.grad(total, inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("as_on_cuda")
def test_without_a_log_sum_exp_none_is_made() -> None:
    query = torch.randn(1, 1, 8, 16)
    with torch.no_grad():
        _, lse = flex_engine.flex_tiles(query, query, query, Problem(Causal(), 1.0, 0), need_lse=False)
    assert lse.shape == (0,)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 5), (16, 16), (24, 40), (200, 129)])
def test_head_dims_are_powers_of_two(head_dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    run = flex_engine._fused_alone

    def spy(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        widths.extend(t.shape[3] for t in (query, key, value))
        return run(query, key, value, *rest)

    monkeypatch.setattr(flex_engine, "_fused_alone", spy)
    query, value = torch.randn(1, 2, 9, head_dim), torch.randn(1, 2, 9, value_dim)
    output, _ = flex_engine.flex_attention(query, query, value, mask=Causal(), scale=0.1, query_offset=0)
    wanted, _ = reference.attention(query, query, value, mask=Causal(), scale=0.1)
    torch.testing.assert_close(output, wanted.float())
    assert all(width >= 16 and width & (width - 1) == 0 for width in widths)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("dtype", flex_engine.DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_shapes_strides_and_dtypes_at_full_size(dtype: torch.dtype, grouped: bool) -> None:
    """Past 65536 tokens and 2**31 elements, on tensors without data."""
    query = torch.empty(3, 128, 70_001, 96, dtype=dtype, device="meta").transpose(1, 2).contiguous().transpose(1, 2)
    key, value = (torch.empty(3, 32 if grouped else 128, 70_001, d, dtype=dtype, device="meta") for d in (96, 64))
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = Causal() & Window(1024, 0) & Padding(torch.empty(3, 70_001, dtype=torch.bool, device="meta"))
    output, lse = flex_engine.flex_attention(query, key, value, mask=mask, scale=0.1, query_offset=0, need_lse=True)
    assert lse is not None
    assert (output.shape, output.dtype, output.device.type) == ((3, 128, 70_001, 64), dtype, "meta")
    assert (lse.shape, lse.dtype) == ((3, 128, 70_001), torch.float32)
    grads = torch.autograd.grad((output, lse), (query, key, value), (torch.empty_like(output), torch.empty_like(lse)))
    assert [g.shape for g in grads] == [t.shape for t in (query, key, value)]
    assert all(g.dtype == dtype for g in grads)


def test_it_serves_what_it_can_on_cuda() -> None:
    request = effattn.Request(1, 4, 2, 8, 8, 16, 16, dtype=torch.float16, device="cuda", backward=True, bias=True)
    assert flex_engine.serves(request)
    for change in (
        {"device": "cpu"},
        {"dropout_p": 0.1},
        {"dtype": torch.float64},
        {"batch_size": 65536},
        {"num_heads": 65536},
        {"value_dim": 257},
    ):
        assert not flex_engine.serves(dataclasses.replace(request, **change)), change


def test_graphs_are_counted() -> None:
    before = flex_engine.compiled_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert flex_engine.compiled_graphs() == before + 1
