"""PyTorch's FlexAttention over the whole mask algebra."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..backend import Backend, Capabilities, Request, register
from ..kernels.flex_engine import DTYPES, cuda_limits, flex_attention
from ..masks import Mask


@register
@dataclass(frozen=True)
class Flex(Backend):
    """PyTorch's FlexAttention with a block mask, compiled.

    Dong et al. 2024, "Flex Attention". Exact. Tiles that the mask empties are skipped, also where padding,
    documents or a dense mask decide it; tiles that it allows entirely skip the mask. Memory O(n), and 8 bytes
    for each pair of tiles that meet (at most 1024 x 1024). A new structure of mask, number of heads, head_dim, dtype
    or scale compiles once (seconds); new lengths, windows and offsets do not, a dense mask and a bias for each shape.
    Forward, backward and log-sum-exp on CUDA, forward alone on a CPU.
    """

    name = "flex"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, dropout=False)

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.device == "cpu":
            if torch.compiler.is_compiling():
                reasons.append(
                    "requested FlexAttention on cpu within a graph that is being compiled; supported outside of one"
                )
            elif missing := _missing_for_cpu():
                reasons.append(f"requested device cpu; supported where there is {missing}")
            if request.backward:
                reasons.append(
                    "requested a backward pass on cpu; supported forward only: "
                    "PyTorch's FlexAttention has no backward on a CPU"
                )
            if request.return_lse:
                reasons.append(
                    "requested the log-sum-exp on cpu; supported the output only: "
                    "PyTorch's FlexAttention does not return it on a CPU"
                )
        if request.device == "cuda":
            reasons += cuda_limits(request.batch_size, request.num_heads, max(request.head_dim, request.value_dim))
        return reasons

    def resolve(self, request: Request) -> str:
        return f"flex compiled {request.device}"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        query_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return flex_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            query_offset=query_offset,
            need_lse=return_lse,
        )


@functools.cache
def _missing_for_cpu() -> str | None:
    """What compilation for this CPU lacks here, or None."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        return f"a C++ compiler ({compiler!r} is not found)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers (Python.h is not found)"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "a CPU with AVX2 (FlexAttention's CPU kernel needs it)"
    return None
