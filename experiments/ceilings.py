"""How near the engines come to the two limits of a machine: its matrix product and its memory bandwidth.

    .venv/bin/python experiments/ceilings.py --seq-len 8192

Prints, for each backend and pass, the time, the share of the time that the matrix products alone would take at the
rate of a large product, and that which reading the inputs and writing the results once would take.
"""

from collections.abc import Callable

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

import effattn
from effattn.bench.ceilings import measure_ceilings

BACKENDS = ("sdpa", "chunked", "sliding_window", "lsh", "lsh(shared_qk=True, count='per_round')")


def median_s(call: Callable[[], object]) -> float:
    """Seconds of a call, the median of at least five."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.adaptive_autorange(threshold=0.1, min_run_time=0.5, max_run_time=8).median


def main(seq_len: int = 8192, num_heads: int = 12, head_dim: int = 64, dtype: str = "float32") -> None:
    """Measure both limits, then each backend without a mask, forward and forward with backward."""
    of = getattr(torch, dtype)
    ceilings = measure_ceilings("cpu", dtype)
    rate, bandwidth = 1e12 * ceilings.matmul_tflops, 1e9 * ceilings.copy_gb_s
    shape = (1, num_heads, seq_len, head_dim)
    generator = torch.Generator().manual_seed(0)
    query, value, grad = (torch.randn(shape, generator=generator).to(of) for _ in range(3))
    key = torch.nn.functional.normalize(query, dim=-1)  # as shared_qk asks for; all the same to the others
    inputs = [t.requires_grad_() for t in (query, key, value)]
    console = Console()
    console.print(
        f"{torch.get_num_threads()} threads, {dtype}: product {rate / 1e9:.0f} GFLOP/s, copy {bandwidth / 1e9:.1f} GB/s"
    )
    table = Table("backend", "pass", "ms", "of the product's rate", "of the bandwidth", title=f"{list(shape)}, no mask")
    for spec in BACKENDS:
        backend = effattn.get(spec)
        pattern = effattn.pattern(query, key, backend=backend)
        rows = torch.linspace(0, seq_len - 1, 256).long()
        pairs = effattn.attended_pairs(pattern, 1, num_heads, seq_len, seq_len, rows=rows)

        def forward(backend: effattn.Backend = backend) -> torch.Tensor:
            output = effattn.attention(*inputs, backend=backend)
            assert isinstance(output, torch.Tensor)
            return output

        def both(forward: Callable[[], torch.Tensor] = forward) -> object:
            return torch.autograd.grad(forward(), inputs, grad)

        for name, call, tensors in (("forward", torch.no_grad()(forward), 4), ("forward + backward", both, 12)):
            seconds = median_s(call)
            flops = effattn.flops(pairs, head_dim, head_dim, backward=call is both)
            moved = tensors * query.nbytes  # each input, result and gradient once
            shares = (flops / rate / seconds, moved / bandwidth / seconds)
            table.add_row(spec, name, f"{1e3 * seconds:.1f}", *(f"{share:.0%}" for share in shares))
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
