"""What only a GPU can show: `make test-gpu`. Skipped where there is none.

The contract in every dtype; sizes past what 16 and 32 bits count; compilation, autocast, checkpointing and
DistributedDataParallel; determinism; memory, also after it ran out; and the measurement itself.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import effattn
from effattn import reference
from effattn.bench.ceilings import measure_ceilings
from effattn.bench.measure import measure
from effattn.bench.memory import measure_memory
from effattn.bench.study import Cell
from effattn.kernels import flex_engine
from effattn.kernels.hashing import plan_chunks
from effattn.kernels.sorted_chunks import Chunks, chunked_rounds
from effattn.kernels.sorted_flex import flex_rounds
from effattn.kernels.tiles import Problem
from effattn.masks import Causal, Documents, Everything, Global, Mask, Padding, Window, padding_of
from effattn.testing import check_backend

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # PyTorch's compiler warns about its own workings.
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning", "ignore:The .grad attribute"),
]

SPECS = [
    "full",
    "sdpa",
    "sdpa(kernel='flash')",
    "sdpa(kernel='efficient')",
    "sdpa(kernel='cudnn')",
    "sdpa(kernel='math')",
    "sdpa(kernel='flash_attn_2')",
    "sdpa(kernel='flash_attn_3')",
    "chunked",
    "flex",
    "xformers",
    "xformers(op='triton_splitk')",
    "sliding_window(left=5, right=3)",
    "sliding_window(left=5, right=0, global_tokens=(0, 9, 36))",
    "sliding_window(left=4, right=0, dilation=3)",
    "lsh(bucket_size=4)",
    "lsh(bucket_size=4, shared_qk=True, count='per_round')",
    "lsh(bucket_size=4, hashing='anchors', local=True, sinks=2)",
]
LINEAR = ["chunked", "flex", "sliding_window(left=100, right=0)", "lsh(num_hashes=2)", "sdpa", "xformers"]


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.accelerator.empty_cache()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def need_memory(gib: float) -> None:
    free, _ = torch.accelerator.get_memory_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free memory, there are {free / 2**30:.0f}")


def backend_for(spec: str, *tensors: Tensor, **options: object) -> effattn.Backend:
    """The backend, or a skip with its reasons."""
    backend = effattn.get(spec)
    reasons = backend.reasons(effattn.Request.of(*tensors, **options))  # type: ignore[arg-type]
    if reasons:
        pytest.skip("; ".join(reasons))
    return backend


@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec: str) -> None:
    """One test a backend, since there are thousands of cases, and most machines skip them all."""
    if reason := effattn.get(spec).unavailable():
        pytest.skip(reason)
    report = check_backend(spec, DEVICE)
    assert {name: outcome for name, outcome in report.items() if outcome.startswith("broken")} == {}
    assert "holds" in report.values()


def check_rows(output: Tensor, query: Tensor, key: Tensor, value: Tensor, pattern: Mask, rows: Tensor) -> None:
    """Some rows of a long output against the reference of its pattern, as far as bfloat16 goes."""
    wanted, _ = reference.attention(query, key, value, mask=pattern, rows=rows, dtype=torch.float32)
    torch.testing.assert_close(output[:, :, rows].float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("spec", LINEAR)
@pytest.mark.parametrize("padded", [False, True])
def test_lengths_past_65536(spec: str, padded: bool) -> None:
    """Failure X4: 16-bit grids and 32-bit offsets."""
    length = 70_001
    query, key, value = (draw(1, 2, length, 64, seed=seed) for seed in range(3))
    mask: Mask = Causal()
    if padded and spec not in ("sdpa", "xformers"):  # which would write the mask out: n x n
        mask = mask & Padding(torch.arange(length, device=DEVICE)[None] < length - 77)
    backend = backend_for(spec, query, key, value, mask=mask)
    output = effattn.attention(query, key, value, backend=backend, mask=mask)
    assert isinstance(output, Tensor)
    pattern = effattn.pattern(query, key, backend=backend, mask=mask)
    check_rows(output, query, key, value, pattern, torch.tensor([0, 65_535, 65_536, length - 1], device=DEVICE))


@pytest.mark.parametrize("spec", ["full", "sdpa", "flex", "xformers", "sliding_window(left=5, right=0)"])
def test_batch_times_heads_past_65535(spec: str) -> None:
    query = draw(8200, 8, 16, 16)
    backend = backend_for(spec, query, query, query, mask=Causal())
    output = effattn.attention(query, query, query, backend=backend, mask=Causal())
    assert isinstance(output, Tensor)
    part = slice(8190, 8200)
    pattern = effattn.pattern(query[part], query[part], backend=backend, mask=Causal())
    check_rows(output[part], query[part], query[part], query[part], pattern, torch.arange(16, device=DEVICE))


@pytest.mark.parametrize("spec", ["sdpa", "flex", "xformers", "sliding_window(left=100, right=0)"])
def test_more_than_2_to_the_31_elements(spec: str) -> None:
    need_memory(30)
    query = draw(1100, 16, 2048, 64)
    assert query.numel() > 2**31
    backend = backend_for(spec, query, query, query, mask=Causal())
    with torch.no_grad():
        output = effattn.attention(query, query, query, backend=backend, mask=Causal())
    assert isinstance(output, Tensor)
    last = query[-1:, -1:]
    pattern = effattn.pattern(last, last, backend=backend, mask=Causal())
    check_rows(output[-1:, -1:], last, last, last, pattern, torch.tensor([0, 1000, 2047], device=DEVICE))


@pytest.mark.parametrize("mask_name", ["none", "causal", "padding", "documents"])
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("once", [False, True], ids=["per round", "once"])
@pytest.mark.parametrize("dtype", flex_engine.DTYPES)
def test_the_engine_of_sorted_rounds(dtype: torch.dtype, once: bool, shared: bool, mask_name: str) -> None:
    """Output, log-sum-exp and gradients against the eager tiles in float64, with one plan for both."""
    length, kv_heads = 1000, 8 if shared else 2
    masks = {
        "none": Everything(),
        "causal": Causal(),
        "padding": Causal() & Padding.from_lengths(torch.tensor([length, 300], device=DEVICE), length),
        "documents": Documents((torch.arange(length, device=DEVICE) // 150)[None]),
    }
    mask = masks[mask_name]
    query, key, value = (draw(2, h, length, 80, dtype=dtype, seed=s) for s, h in enumerate((8, kv_heads, kv_heads)))
    key = nn.functional.normalize(query, dim=-1) if shared else key
    sizes = {"query_offset": 0, "chunk_size": 48, "num_hashes": 4, "look_back": 1, "look_ahead": 1, "seed": 0}
    plan = plan_chunks(query, key, padding_of(mask), shared=shared, **sizes)
    chunks = Chunks(plan, mask, 0.1, 0, exclude_self=shared, once=once)
    results = []
    for attend, wide in ((flex_rounds, dtype), (chunked_rounds, torch.float64)):
        tensors = [t.to(wide).requires_grad_() for t in (query, key, value)]
        output, lse, *_ = attend(*tensors, chunks)
        total = output.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0).double().sin().sum()
        results.append((output, lse, *torch.autograd.grad(total, tensors)))
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), **tolerance)


def test_sorted_rounds_compile_once_for_all_lengths() -> None:
    """A graph forward, and one forward and backward, for 1, 2 and 3 to 4 rounds; then none, however many lengths."""
    compiled = []
    for length in (1000, 200, 512, 1024, 1537, 2048, 3000, 4096, 5001, 8192, 16_384):
        query = draw(2, 4, length, 64).requires_grad_()
        output = effattn.attention(query, query, query, backend="lsh", mask=Causal())
        assert isinstance(output, Tensor)
        output.sum().backward()
        compiled.append(flex_engine.compiled_graphs())
    assert compiled[-1] == compiled[0]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_sorted_rounds_take_a_few_times_their_inputs(backward: bool) -> None:
    need_memory(8)
    query, key, value = (draw(1, 12, 131_072, 64, seed=seed).requires_grad_() for seed in range(3))

    def call() -> object:
        output = effattn.attention(query, key, value, backend="lsh", mask=Causal())
        assert isinstance(output, Tensor)
        return torch.autograd.grad(output.sum(), (query, key, value)) if backward else output

    call()
    size = sum(t.nbytes for t in (query, key, value))
    assert measure_memory(call, DEVICE).peak_memory_bytes <= 4 * size


@pytest.mark.parametrize("mask_name", ["band", "padding", "documents", "globals"])
@pytest.mark.parametrize("dtype", flex_engine.DTYPES)
def test_the_engine_of_bands(mask_name: str, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients, grouped heads, a head_dim that is no power of two."""
    length = 1000
    masks = {
        "band": Causal() & Window(100, 0),
        "padding": Causal() & Padding.from_lengths(torch.tensor([length, 300], device=DEVICE), length),
        "documents": Documents((torch.arange(length, device=DEVICE) // 150)[None]),
        "globals": Causal() & (Window(50, 0) | Global((0, 1))),
    }
    mask = masks[mask_name]
    query, key, value = (draw(2, heads, length, 80, dtype=dtype, seed=heads).requires_grad_() for heads in (8, 2, 2))
    results = []
    for attend in (flex_engine.flex_tiles, None):
        if attend is not None:
            output, lse = attend(query, key, value, Problem(mask, 0.1, 0))
        else:
            output, lse = reference.attention(query, key, value, mask=mask, scale=0.1)
        total = output.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0).double().sin().sum()
        results.append((output, lse, *torch.autograd.grad(total, (query, key, value))))
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), **tolerance)


def test_a_sweep_over_lengths_never_leaves_the_fused_path() -> None:
    """Failure X1, forward and backward: one graph each, however many lengths."""
    before = flex_engine.compiled_graphs()
    for length in (200, 512, 1000, 1024, 1537, 2048, 3000, 4096, 5001, 8192, 10_000, 16_384):
        query = draw(1, 4, length, 64).requires_grad_()
        output = effattn.attention(query, query, query, backend="flex", mask=Causal() & Window(128, 0))
        assert isinstance(output, Tensor)
        output.sum().backward()
    assert flex_engine.compiled_graphs() <= before + 2


def test_the_block_mask_of_a_band_takes_kilobytes() -> None:
    def build() -> object:
        return flex_engine._block_mask(Causal() & Window(1024, 0), 131_072, 131_072, 0, torch.device(DEVICE))

    build()
    assert measure_memory(build, DEVICE).peak_memory_bytes <= 2 * 2**20


class Block(nn.Module):
    """Attention between two projections, on any backend."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        self.backend = effattn.get(spec)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        output = effattn.attention(query, key, value, backend=self.backend, mask=Causal())
        assert isinstance(output, Tensor)
        return x + self.out(output.transpose(1, 2).flatten(2))


MODULES = ["full", "sdpa", "chunked", "flex", "sliding_window(left=20, right=0)", "lsh(bucket_size=16)"]


def losses(block: nn.Module, *, autocast: bool, checkpointed: bool) -> list[float]:
    """Three steps of training."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    found = []
    x = draw(2, 100, 64, dtype=torch.float32)
    for _ in range(3):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def a_block(spec: str) -> Block:
    torch.manual_seed(0)
    return Block(spec).to(DEVICE)


@pytest.mark.parametrize("spec", MODULES)
def test_compiled_autocast_and_checkpointed_training_is_training(spec: str) -> None:
    plain = losses(a_block(spec), autocast=False, checkpointed=False)
    assert plain[2] < plain[0]
    assert losses(a_block(spec), autocast=False, checkpointed=True) == pytest.approx(plain, rel=1e-4)
    mixed = losses(a_block(spec), autocast=True, checkpointed=True)
    assert mixed == pytest.approx(plain, rel=3e-2)
    compiled = torch.compile(a_block(spec))
    assert losses(compiled, autocast=True, checkpointed=False) == pytest.approx(mixed, rel=3e-2)


@pytest.mark.parametrize("spec", MODULES)
def test_data_parallel_training_on_one_process(spec: str, tmp_path: object) -> None:
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(a_block(spec))
        got = losses(wrapped, autocast=False, checkpointed=False)
    finally:
        dist.destroy_process_group()
    assert got == pytest.approx(losses(a_block(spec), autocast=False, checkpointed=False), rel=1e-4)


@pytest.mark.parametrize("spec", ["full", "sdpa", "chunked", "flex", "sliding_window(left=100, right=0)", "lsh"])
def test_two_long_calls_are_equal_bit_by_bit(spec: str) -> None:
    query, key, value = (draw(1, 4, 4096, 64, seed=seed) for seed in range(3))
    backend = backend_for(spec, query, key, value, mask=Causal())
    first, second = (effattn.attention(query, key, value, backend=backend, mask=Causal()) for _ in range(2))
    assert torch.equal(first, second)


def test_memory_comes_back_after_it_ran_out() -> None:
    query = draw(1, 8, 1024, 64)
    effattn.attention(query, query, query, backend="full")
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    long = draw(1, 64, 300_000, 64)  # its scores would take terabytes
    with pytest.raises(torch.OutOfMemoryError):
        effattn.attention(long, long, long, backend="full")
    del long
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    output = effattn.attention(query, query, query, backend="full")
    assert isinstance(output, Tensor)
    assert output.isfinite().all()


CELL = Cell(
    backend="sdpa",
    batch_size=1,
    num_heads=4,
    num_kv_heads=2,
    seq_len=1024,
    head_dim=64,
    dtype="bfloat16",
    device=DEVICE,
    mask="causal",
    input="clustered",
    source=None,
    pass_name="forward",
    seed=0,
    repeats=5,
    min_time_s=0.02,
    error_rows=16,
    grad_error_max_len=1024,
    cuda_graph=True,
)


def test_a_cell_is_measured() -> None:
    record = measure(CELL)
    assert len(record["forward_ms_repeats"]) >= 5
    assert record["forward_ms_p20"] > 0
    assert 0 < record["forward_graph_ms_median"] < 10 * record["forward_ms_median"]
    assert record["recompiled_graphs"] == 0
    output_bytes = 4 * 1024 * 64 * 2
    assert output_bytes <= record["peak_memory_bytes"] < 2**28
    assert record["peak_reserved_bytes"] >= record["peak_memory_bytes"]
    assert record["memory_method"] == "cuda_allocator"
    assert record["implementation_rel_l2"] < 1e-2
    ceilings = measure_ceilings(DEVICE, "bfloat16")
    assert record["tflops"] < ceilings.matmul_tflops
    assert ceilings.copy_gb_s > 10
