"""PyTorch's FlexAttention over the whole mask algebra: fused, block-sparse, always compiled.

One graph serves many problems. Lengths are dynamic; a mask's numbers (its offset, its reach) and tables enter as
tensors, so that what is compiled depends on the mask's structure alone, and the tables' sizes are static and
rounded up to powers of two. FlexAttention without compilation is neither fused nor linear in memory: where
compilation is off, or a limit on recompilations is hit, the call is an error and no slow result.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import Backend, Capabilities, Request, UnsupportedError, register
from ..kernels.block_mask import order_tiles, tile_coverage, token_table
from ..masks import And, Coverage, Dense, Documents, Global, Mask, Or, Padding, Window, band_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_LEAST_TILE, _MOST_TILES = 128, 1024
_CUDA_HEAD_DIMS = (16, 256)  # narrower ones are padded; wider ones do not fit shared memory
_CUDA_GRID = 65535
_UNBOUNDED = 2**62


@register
@dataclass(frozen=True)
class Flex(Backend):
    """PyTorch's FlexAttention with a block mask, compiled.

    Dong et al. 2024, "Flex Attention". Exact. Tiles that the mask empties are skipped, also where padding,
    documents or a dense mask decide it; tiles that it allows entirely skip the mask. Memory O(n), and 8 bytes
    for each pair of tiles (at most 1024 x 1024). A new structure of mask, number of heads, head_dim, dtype or
    scale compiles once (seconds); new lengths, windows and offsets do not, a dense mask and a bias for each shape.
    """

    name = "flex"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=(torch.float32, torch.float16, torch.bfloat16), dropout=False)

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.device == "cpu":
            missing = _missing_for_cpu()
            if missing:
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
            widest = max(request.head_dim, request.value_dim)
            if widest > _CUDA_HEAD_DIMS[1]:
                reasons.append(f"requested head_dim {widest} on cuda; supported up to {_CUDA_HEAD_DIMS[1]}")
            for what, size in (("batch_size", request.batch_size), ("num_heads", request.num_heads)):
                if size > _CUDA_GRID:
                    reasons.append(f"requested {what} {size} on cuda; supported up to {_CUDA_GRID}")
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
        on_cpu = query.device.type == "cpu"
        if on_cpu:  # FlexAttention looks at requires_grad, also where no gradient is recorded
            query, key, value = query.detach(), key.detach(), value.detach()
            bias = None if bias is None else bias.detach()
        value_dim = value.shape[-1]
        if not on_cpu:
            query, key, value = (_widen(t, _CUDA_HEAD_DIMS[0]) for t in (query, key, value))
        band, rest = band_of(mask)  # all windows are one band, and one structure to compile
        joined = rest if band == Window(None, None) else band & rest
        build = _block_mask if joined.tensors else _cached_block_mask
        block_mask = build(joined, query.shape[2], key.shape[2], query_offset, query.device)
        output, lse = _run(query, key, value, _score_mod(bias), block_mask, scale, return_lse)
        return output[..., :value_dim], lse


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    import torch._dynamo.config as dynamo_config
    import torch.fx.experimental._config as shape_config

    # Each structure is a graph of its own, so PyTorch's limit of 8 says nothing here. Without duck shaping, two
    # sizes that happen to be equal in one call are not taken for the same in the next.
    with (
        dynamo_config.patch(recompile_limit=1024, accumulated_recompile_limit=4096),
        shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch.set_grad_enabled(torch.is_grad_enabled() and query.device.type != "cpu"),
    ):
        return _compiled()(query, key, value, score_mod, block_mask, scale, return_lse)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    with warnings.catch_warnings():  # PyTorch's compiler warns about PyTorch when it is loaded
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    return torch.compile(_fused, dynamic=True, fullgraph=True)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not torch.compiler.is_compiling():
        raise UnsupportedError(
            Flex(),
            [
                "requested FlexAttention with torch.compile switched off; supported compiled only: "
                "it is neither fused nor linear in memory otherwise"
            ],
        )
    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=return_lse),
    )
    return output, aux.lse


def _block_mask(mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    # What is cached must serve a later call that records gradients.
    with torch.inference_mode(False), torch.no_grad():
        tile_len = _tile_len(max(query_len, key_len))
        coverage = tile_coverage(mask, query_len, key_len, query_offset, tile_len, device)
        # A tile that hangs over the edge is never full: FlexAttention's kernels bound what they mask.
        coverage = coverage.contiguous()
        if query_len % tile_len:
            coverage[..., -1, :].clamp_(max=Coverage.SOME)
        if key_len % tile_len:
            coverage[..., -1].clamp_(max=Coverage.SOME)
        # At least two tiles each way, lest a graph be compiled for the one.
        rows, keys = coverage.shape[-2:]
        coverage = F.pad(coverage, (0, max(2 - keys, 0), 0, max(2 - rows, 0)), value=int(Coverage.NONE))
        return BlockMask.from_kv_blocks(
            *order_tiles(coverage == Coverage.SOME),
            *order_tiles(coverage == Coverage.ALL),
            BLOCK_SIZE=tile_len,
            mask_mod=_mask_mod(mask, query_len, key_len, query_offset, device),
            seq_lengths=(query_len, key_len),
            compute_q_blocks=device.type != "cpu",  # for the backward pass, which a CPU lacks
        )


# Masks without tensors are values: equal masks have equal tiles.
_cached_block_mask = functools.lru_cache(maxsize=8)(_block_mask)


def _tile_len(length: int) -> int:
    """128, doubled until ``length`` is at most 1024 tiles."""
    tile_len = _LEAST_TILE
    while tile_len * _MOST_TILES < length:
        tile_len *= 2
    return tile_len


def _mask_mod(
    mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    lifted = _lift(mask, query_len, key_len, query_offset, device)
    offset = torch.tensor(query_offset, device=device)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return lifted.allows(batch, head, row, key, offset)  # type: ignore[arg-type]  # a number as a tensor

    return mask_mod


def _score_mod(bias: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    if bias is None:
        return None
    while bias.dim() < 4:
        bias = bias[None]
    table = _static(_without_repeats(bias.float()))
    varies = [size > 1 for size in table.shape]

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        indices = (batch, head, row, key)
        return score + table[tuple(i if v else torch.zeros_like(i) for i, v in zip(indices, varies, strict=True))]

    return score_mod


@dataclass(frozen=True, eq=False)
class _Band(Mask):
    """``Window`` with its numbers as tensors: causal masks and all windows share one graph."""

    least: Tensor
    most: Tensor
    dilation: Tensor | None

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        back = row + query_offset - key
        inside = (back <= self.most) & (back >= self.least)
        return inside if self.dilation is None else inside & (back % self.dilation == 0)


@dataclass(frozen=True, eq=False)
class _Marked(Mask):
    """``Global`` as two tables ``[batch or 1, query_len]`` and ``[batch or 1, key_len]``, whatever it was given."""

    rows: Tensor
    keys: Tensor

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        batch = batch if self.keys.shape[0] > 1 else torch.zeros_like(batch)
        return self.rows[batch, row] | self.keys[batch, key]


def _lift(mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device) -> Mask:
    """``mask`` with every number and table as a tensor of static size."""
    match mask:
        case And() | Or():
            return type(mask)(tuple(_lift(m, query_len, key_len, query_offset, device) for m in mask.masks))
        case Window():
            most = _UNBOUNDED if mask.left is None else mask.left * mask.dilation
            least = -_UNBOUNDED if mask.right is None else -mask.right * mask.dilation
            dilation = None if mask.dilation == 1 else torch.tensor(mask.dilation, device=device)
            return _Band(torch.tensor(least, device=device), torch.tensor(most, device=device), dilation)
        case Global():
            positions = torch.arange(query_len, device=device) + query_offset
            keys = token_table(mask, torch.arange(key_len, device=device))
            return _Marked(_rounded_up(token_table(mask, positions)), _rounded_up(keys))
        case Padding():
            return Padding(_rounded_up(mask.keep))
        case Documents():
            return Documents(_rounded_up(mask.ids))
        case Dense():
            return Dense(_static(_without_repeats(mask.allowed)))
        case _:
            return mask


def _rounded_up(table: Tensor) -> Tensor:
    """``table`` ``[batch, n]`` with n rounded up to a power of two, so that few sizes are ever compiled."""
    length = table.shape[1]
    room = max(1 << (length - 1).bit_length(), _LEAST_TILE)
    return _static(F.pad(table, (0, room - length)))


def _without_repeats(table: Tensor) -> Tensor:
    """``table`` with every expanded dimension back at size 1, and contiguous."""
    for dim, (size, stride) in enumerate(zip(table.shape, table.stride(), strict=True)):
        if size > 1 and stride == 0:
            table = table.narrow(dim, 0, 1)
    return table.contiguous()


def _static(table: Tensor) -> Tensor:
    """``table`` with sizes that are compiled in: Inductor's C++ mixes up the names of dynamic ones (2.13)."""
    table = table.view_as(table)  # the mark stays off the caller's tensor
    torch._dynamo.mark_static(table)
    return table


def _widen(tensor: Tensor, head_dim: int) -> Tensor:
    """Zeros appended to the last dimension: they change no score, and the values' are cut off again."""
    missing = head_dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing > 0 else tensor


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
