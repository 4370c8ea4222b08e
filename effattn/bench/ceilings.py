"""The two limits of a machine, the rate of a matrix product and that of a copy, and how near a measurement comes.

Both are measured once a sweep, on the device and in the dtypes that it uses: a time says more beside what the
machine could do (the roofline model, Williams, Waterman & Patterson 2009).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from effattn.bench import timing

_MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most."""

    matmul_tflops: float  # of a product of two large square matrices
    copy_gb_s: float  # read and written, of a large copy

    @property
    def record(self) -> dict[str, float]:
        """The fields of a record."""
        return asdict(self)


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """The medians of a few repeats; takes a second or two on a CPU, less on CUDA."""
    of, size, copied = getattr(torch, dtype), _MATMUL_SIZE[device], _COPY_BYTES[device]
    a, b = torch.randn(2, size, size, device=device).to(of)
    product_ms = _median_ms(lambda _: a @ b, device)
    source = torch.zeros(copied, dtype=torch.int8, device=device)
    target = torch.ones_like(source)
    copy_ms = _median_ms(lambda _: target.copy_(source), device)
    return Ceilings(2 * size**3 / product_ms / 1e9, 2 * copied / copy_ms / 1e6)


def against(record: Mapping[str, Any], ceilings: Ceilings) -> dict[str, float]:
    """The fields that put a record beside the ceilings; without flops and bytes, the ceilings alone."""
    fields = ceilings.record
    if record.get("flops") is None:
        return fields
    time_ms = sum(record.get(f"{stage}_ms_median") or 0.0 for stage in ("forward", "backward"))
    roofline_ms = max(
        record["flops"] / ceilings.matmul_tflops / 1e9,
        record["bytes_min"] / ceilings.copy_gb_s / 1e6,
    )
    return fields | {
        "fraction_of_peak": record["flops"] / time_ms / 1e9 / ceilings.matmul_tflops,
        "roofline_ms": roofline_ms,
        "fraction_of_roofline": roofline_ms / time_ms,
    }


def _median_ms(call: Any, device: str) -> float:
    stages = {"forward": call}
    timing.time_first(stages)
    times = timing.time_repeats(stages, device=device, repeats=5, min_time_s=0.1)
    return timing.quantiles("forward", times["forward"])["forward_ms_median"]
