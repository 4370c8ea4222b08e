"""FlexAttention as an engine: exact attention over the whole mask algebra, fused, block-sparse, always compiled.

One graph serves many problems. Lengths are dynamic; a mask's numbers (its offset, its reach) and tables enter as
tensors, so that what is compiled depends on the mask's structure alone, and the tables' sizes are static and
rounded up to powers of two. FlexAttention without compilation is neither fused nor linear in memory: where
compilation is off, or a limit on recompilations is hit, the call is an error and no slow result.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..backend import Request, UnsupportedError
from ..masks import (
    And,
    Coverage,
    Dense,
    Documents,
    Global,
    Mask,
    Or,
    Padding,
    Taken,
    Window,
    band_of,
    pack,
    unpack,
)
from .block_mask import candidate_tiles, order_tiles, tile_coverage, token_table

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .tiles import Problem

__all__ = [
    "DTYPES",
    "captured",
    "compiled_graphs",
    "cuda_limits",
    "flex_attention",
    "flex_tiles",
    "lifted",
    "run",
    "serves",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_LEAST_TILE, _MOST_TILES = 128, 1024
_CUDA_HEAD_DIMS = (16, 256)  # narrower ones are padded; wider ones do not fit shared memory
_CUDA_GRID = 65535
_UNBOUNDED = 2**30  # more than any length, and twice as much is still an int32: the arithmetic of pairs


def flex_attention(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    *,
    mask: Mask,
    bias: Tensor | None = None,
    scale: float,
    query_offset: int,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output in the queries' dtype and, where asked for, the log-sum-exp ``[batch, heads, query_len]`` in float32.

    Both are differentiable, once. On a CPU there is no gradient and no log-sum-exp. A row that sees nothing gives 0
    and -inf. Memory O(n), and 8 bytes for each pair of tiles that the mask lets meet.

    Raises:
        UnsupportedError: if compilation is switched off.
    """
    if bias is not None and is_cpu(query.device):
        bias = bias.detach()
    make = _block_mask if torch.compiler.is_compiling() else block_mask_of
    block_mask = make(mask, query.shape[2], key.shape[2], query_offset, query.device)
    return run(query, key, value, block_mask, scale, need_lse, score_mod=_score_mod(bias))


def flex_tiles(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    problem: Problem,
    *,
    bias: Tensor | None = None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """What ``tiles.tiled_attention`` gives, by this engine, for all that it ``serves``.

    With ``wide_output`` the output is as precise as the queries' dtype, in float32.
    """
    output, lse = flex_attention(
        query,
        key,
        value,
        mask=problem.mask,
        bias=bias,
        scale=problem.scale,
        query_offset=problem.query_offset,
        need_lse=need_lse,
    )
    wide = torch.promote_types(query.dtype, torch.float32)
    return output.to(wide) if problem.wide_output else output, query.new_empty(0, dtype=wide) if lse is None else lse


def serves(request: Request) -> bool:
    """Whether band-shaped work belongs to this engine: on CUDA, all that it can do there."""
    able = not cuda_limits(request.batch_size, request.num_heads, max(request.head_dim, request.value_dim))
    return request.device == "cuda" and request.dtype in DTYPES and request.dropout_p == 0 and able


def cuda_limits(batch_size: int, num_heads: int, head_dim: int) -> list[str]:
    """Why the engine cannot work in these sizes on CUDA, as "requested X; supported Y"; empty: it can."""
    limits = (
        ("head_dim", head_dim, _CUDA_HEAD_DIMS[1]),
        ("batch_size", batch_size, _CUDA_GRID),
        ("num_heads", num_heads, _CUDA_GRID),
    )
    return [f"requested {what} {size} on cuda; supported up to {most}" for what, size, most in limits if size > most]


def compiled_graphs() -> int:
    """How many graphs ``torch.compile`` has made in this process, for this engine and for anybody else."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    need_lse: bool,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    kernel_options: dict[str, bool] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FlexAttention, compiled, as ``flex_attention`` promises it; in a graph of the caller's, as a part of that."""
    value_dim = value.shape[-1]
    if is_cpu(query.device):  # FlexAttention looks at requires_grad, also where no gradient is recorded
        query, key, value = query.detach(), key.detach(), value.detach()
    else:
        query, key, value = (_widened(t) for t in (query, key, value))
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    arguments = (query, key, value, score_mod, block_mask, scale, need_lse, kernel_options)
    if torch.compiler.is_compiling():
        output, lse = _fused(*arguments)
    else:
        output, lse = _fused_alone(*arguments)
    return output[..., :value_dim], lse


def _fused_alone(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    import torch._dynamo.config as dynamo_config
    import torch.fx.experimental._config as shape_config

    # Each structure is a graph of its own, so PyTorch's limit of 8 says nothing here. Without duck shaping, two
    # sizes that happen to be equal in one call are not taken for the same in the next.
    with (
        dynamo_config.patch(recompile_limit=1024, accumulated_recompile_limit=4096),
        shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch.set_grad_enabled(torch.is_grad_enabled() and not is_cpu(query.device)),
    ):
        return _compiled()(query, *arguments)


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
    need_lse: bool,
    kernel_options: dict[str, bool] | None,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not torch.compiler.is_compiling():
        raise UnsupportedError(
            "flex",
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
        kernel_options=kernel_options,  # type: ignore[arg-type]
        return_aux=AuxRequest(lse=need_lse),
    )
    return output, aux.lse


def block_mask_of(mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device) -> BlockMask:
    """The block mask of a problem, made once for all that it depends on: a mask's tensors by identity and version.

    A dense mask is looked at anew each time: that costs one pass over it, as attention itself does, and to keep
    what was made of it would keep the mask.
    """
    band, rest = band_of(mask)  # all windows are one band, and one structure to compile
    mask = rest if band == Window(None, None) else band & rest
    packed, tensors = pack(mask)
    if any(isinstance(leaf, Dense) for leaf in _leaves(mask)) or any(t.is_inference() for t in tensors):
        return _block_mask(mask, query_len, key_len, query_offset, device)
    return _cached_block_mask(packed, tuple(map(_Same, tensors)), query_len, key_len, query_offset, device)


class _Same:
    """A tensor as the key of a cache, which it does not keep alive: equal while it is the same and unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self._identity = id(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._identity != other._identity:
            return False
        return self.tensor() is not None and self.tensor() is other.tensor()

    def __hash__(self) -> int:
        return hash(self._identity)


@functools.lru_cache(maxsize=16)
def _cached_block_mask(
    packed: str, tensors: tuple[_Same, ...], query_len: int, key_len: int, query_offset: int, device: torch.device
) -> BlockMask:
    alive = [same.tensor() for same in tensors]  # the caller holds them
    with torch.inference_mode(False):  # it must serve a later call that records gradients
        return _block_mask(unpack(packed, alive), query_len, key_len, query_offset, device)  # type: ignore[arg-type]


def _block_mask(mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    none, some, full = (int(level) for level in Coverage)  # which torch.compile follows where an enum stops it
    tile_len = _tile_len(max(query_len, key_len))
    on_cpu = is_cpu(device)
    num_tiles = -(-query_len // tile_len), -(-key_len // tile_len)
    if torch.compiler.is_compiling():  # a graph has no use for what would hold for one length
        of_rows, of_keys = (torch.arange(n)[None].expand(m, -1) for n, m in (num_tiles[::-1], num_tiles))
    else:
        of_rows, of_keys = candidate_tiles(mask, query_len, key_len, query_offset, tile_len)

    def listed(candidates: Tensor, *, by_rows: bool) -> tuple[Tensor, ...]:
        """Counts and numbers of the mixed tiles, then of the full ones, for each tile of rows (or of keys)."""
        others = candidates.to(device).clamp(min=0)
        each = torch.arange(len(candidates), device=device)[:, None]
        rows, keys = (each, others) if by_rows else (others, each)
        levels = tile_coverage(mask, query_len, key_len, query_offset, tile_len, device, (rows, keys))
        # A tile that hangs over the edge is never full: FlexAttention's kernels bound what they mask.
        most = torch.full_like(others, full, dtype=torch.int8)
        for tiles, length, count in ((rows, query_len, num_tiles[0]), (keys, key_len, num_tiles[1])):
            if length % tile_len:
                most.masked_fill_(tiles == count - 1, some)
        most.masked_fill_(candidates.to(device) < 0, none)
        levels = torch.minimum(levels, most)
        # At least two tiles each way, lest a graph be compiled for the one; on a CPU, FlexAttention's kernel asks
        # for a place for every tile.
        width = max(levels.shape[3], 2, num_tiles[1 if by_rows else 0] if on_cpu else 0)
        padding = (0, width - levels.shape[3], 0, max(2 - levels.shape[2], 0))
        levels, others = F.pad(levels, padding, value=none), F.pad(others, padding)
        return (*order_tiles(levels == some, others), *order_tiles(levels == full, others))

    kv_num, kv, full_kv_num, full_kv = listed(of_rows, by_rows=True)
    q_num = q = full_q_num = full_q = None  # they serve the backward pass, which a CPU lacks
    if not on_cpu:
        q_num, q, full_q_num, full_q = listed(of_keys, by_rows=False)
    return BlockMask(
        (query_len, key_len),
        *(kv_num, kv, full_kv_num, full_kv),
        *(q_num, q, full_q_num, full_q),
        (tile_len, tile_len),
        _mask_mod(mask, key_len, query_offset, device),
    )


def _tile_len(length: int) -> int:
    """128, doubled until ``length`` is at most 1024 tiles."""
    tile_len = _LEAST_TILE
    while tile_len * _MOST_TILES < length:
        tile_len *= 2
    return tile_len


def _mask_mod(
    mask: Mask, key_len: int, query_offset: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    lifted_mask = lifted(mask, key_len, device)
    offset = torch.full((), query_offset, device=device, dtype=torch.int32)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return lifted_mask.allows(batch, head, row, key, offset)  # type: ignore[arg-type]  # a number as a tensor

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
    """``Global`` as a table ``[batch or 1, positions]``, whatever it was given."""

    tokens: Tensor

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return self._is_marked(batch, row + query_offset) | self._is_marked(batch, key)

    def _is_marked(self, batch: Tensor, position: Tensor) -> Tensor:
        size = self.tokens.shape[1]
        inside = (position >= 0) & (position < size)
        return _entry(self.tokens, batch, position.clamp(0, size - 1)) & inside


@dataclass(frozen=True, eq=False)
class _Placed(Mask):
    """``Taken`` with tensors for what it takes: a table ``[batch or 1, n]``, or start and step."""

    mask: Mask
    rows: Tensor | tuple[Tensor, Tensor] | None
    keys: Tensor | tuple[Tensor, Tensor] | None

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        row, key = self._place(self.rows, batch, row), self._place(self.keys, batch, key)
        allowed = self.mask.allows(batch, head, row.clamp(min=0), key.clamp(min=0), query_offset)
        return allowed & (row >= 0) & (key >= 0)

    @staticmethod
    def _place(places: Tensor | tuple[Tensor, Tensor] | None, batch: Tensor, index: Tensor) -> Tensor:
        if isinstance(places, Tensor):
            return _entry(places, batch, index)
        return index if places is None else places[0] + index * places[1]


def lifted(mask: Mask, key_len: int, device: torch.device) -> Mask:
    """``mask`` with every number and table as a tensor of static size."""

    def number(value: int) -> Tensor:
        return torch.full((), max(-_UNBOUNDED, min(value, _UNBOUNDED)), device=device, dtype=torch.int32)

    def places(selection: slice | Tensor | None) -> Tensor | tuple[Tensor, Tensor] | None:
        if isinstance(selection, slice):
            return number(selection.start or 0), number(selection.step or 1)
        return None if selection is None else _rounded_up(selection, -1)

    match mask:
        case And() | Or():
            return type(mask)(tuple(lifted(m, key_len, device) for m in mask.masks))
        case Window():
            most = _UNBOUNDED if mask.left is None else mask.left * mask.dilation
            least = -_UNBOUNDED if mask.right is None else -mask.right * mask.dilation
            return _Band(number(least), number(most), None if mask.dilation == 1 else number(mask.dilation))
        case Global():
            tokens = mask.tokens
            if not isinstance(tokens, Tensor):
                size = max(key_len, 1 + max(tokens, default=0))  # of the keys, lest it be compiled for the last token
                tokens = token_table(mask, torch.arange(size, device=device)[None])
            return _Marked(_rounded_up(tokens))
        case Padding():
            return Padding(_rounded_up(mask.keep))
        case Documents():
            return Documents(_rounded_up(mask.ids))
        case Dense():
            return Dense(_static(_without_repeats(mask.allowed)))
        case Taken():
            return _Placed(lifted(mask.mask, key_len, device), places(mask.rows), places(mask.keys))
        case _:
            return mask


def captured(table: Tensor) -> Tensor:
    """``table`` ``[..., n]`` as a ``mask_mod`` may read it: on a CPU of a size that is compiled in."""
    return _rounded_up(table) if is_cpu(table.device) else table


def _leaves(mask: Mask) -> list[Mask]:
    return [leaf for part in mask.parts for leaf in _leaves(part)] if mask.parts else [mask]


def _entry(table: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    """``table[batch, index]`` for a table ``[batch or 1, n]``."""
    return table[batch if table.shape[0] > 1 else torch.zeros_like(batch), index]


def _rounded_up(table: Tensor, fill: int = 0) -> Tensor:
    """``table`` ``[..., n]`` with n rounded up to a power of two, so that few sizes are ever compiled."""
    length = table.shape[-1]
    room = max(1 << (length - 1).bit_length(), _LEAST_TILE)
    return _static(F.pad(table, (0, room - length), value=fill))


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


def _widened(tensor: Tensor) -> Tensor:
    """Zeros appended up to a head_dim that is a power of two: they change no score, and are cut off again."""
    head_dim = tensor.shape[-1]
    missing = max(1 << (head_dim - 1).bit_length(), _CUDA_HEAD_DIMS[0]) - head_dim
    return F.pad(tensor, (0, missing)) if missing else tensor


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"
