"""xformers' memory-efficient attention, with the cheapest ``attn_bias`` that says the mask.

A mask can be said in several *forms*: not at all, as a band, as blocks on the diagonal, as a tensor. They are
tried from cheap to dear, each on the operators in their order, and xformers' own checks decide which is taken.
The operators are called themselves: through ``memory_efficient_attention`` they are all refused where xformers'
compiled extension does not load, also those that run PyTorch's kernels or Triton's and do not need it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import ALL_MASKS, Backend, Capabilities, Request, UnsupportedError, register
from ..kernels.corner import corner_band
from ..kernels.narrow import narrow
from ..kernels.packing import blocks_of, pack_rows, tables_of, unpack_lse, unpack_rows
from ..masks import Causal, Coverage, Documents, Everything, Mask, Padding, Window, band_of, conjuncts, evaluate

_PACKAGES = ("xformers.ops.fmha", "mslk.attention.fmha")  # one interface under two names: the first that is installed
_AUTO = ("flash", "cutlass")  # in the order in which they are tried
_OPS = ("auto", *_AUTO, "triton_splitk")
_ALIGNMENT = 8  # elements; of strides and head_dim, for every operator and dtype


@register
@dataclass(frozen=True)
class Xformers(Backend):
    """xformers' memory-efficient attention, for CUDA.

    Lefaudeux et al. 2022, "xFormers". Exact. Causal masks, windows, padding and contiguous documents take memory
    O(n), as do the last two together, and in self-attention with a causal mask or window where the padding has no
    holes; any other mask, and a bias, is handed over as a tensor ``[1 or batch, 1 or heads, query_len, key_len]``.
    Padding and documents are read on the host.

    ``op``: "flash" and "cutlass" (PyTorch's kernels), "triton_splitk" (forward only; for few queries and many
    keys), or "auto": flash where it can, else cutlass. With ``TRITON_INTERPRET=1``, "triton_splitk" runs on a CPU
    too, very slowly, in float16.
    """

    name = "xformers"
    op: str = "auto"

    def __post_init__(self) -> None:
        self._require(self.op in _OPS, "op", "one of " + ", ".join(map(repr, _OPS)))

    @property
    def capabilities(self) -> Capabilities:
        dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
        max_head_dim = {"flash": 256, "triton_splitk": 512}.get(self.op)
        if self.op in ("auto", "cutlass"):
            dtypes = (torch.float32, *dtypes)
        elif self._interpreted():  # at 128, xformers asks for the GPU's generation
            dtypes, max_head_dim = (torch.float16,), 64
        return Capabilities(
            masks=(Causal, Window, Padding, Documents) if self.op == "flash" else ALL_MASKS,
            bias=self.op != "flash",
            bias_grad=self.op in ("auto", "cutlass"),
            dtypes=dtypes,
            devices=("cpu",) if self._interpreted() else ("cuda",),
            max_head_dim=max_head_dim,
            dropout=False,
            backward=self.op != "triton_splitk",
            lse_grad=False,
            deterministic=self.op in ("cutlass", "triton_splitk"),
        )

    def unavailable(self) -> str | None:
        if _package() is None:
            return "requested xformers; supported where it (or mslk) is installed: pip install 'effattn[xformers]'"
        return None

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.device == "cuda" and not torch.cuda.is_available():  # xformers would be asked with tensors there
            reasons.append("requested device cuda; supported where PyTorch finds one")
        if not reasons:  # only now is xformers imported
            try:
                reasons = self._choose(request)[1]
            except ImportError as error:
                reasons.append(f"requested xformers; supported where it can be imported: {error}")
        return reasons

    def resolve(self, request: Request) -> str:
        choice, _ = self._choose(request)
        return f"xformers {choice[0]} {choice[1].name}" if choice else "xformers"

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
        request = Request.of(query, key, value, mask=mask, bias=bias, query_offset=query_offset, return_lse=return_lse)
        choice, refusals = self._choose(request)
        if choice is None:
            raise UnsupportedError(self, refusals)
        op_name, form = choice
        forward, backward = operators(op_name)
        q, k, v = to_layout(query, key, value, form, forward, grouped=not request.backward)
        attn_bias, empty, moved = form.attn_bias, None, None
        if form.is_tensor:
            attn_bias, empty, moved = tensor_bias(query, key.shape[2], mask, bias, query_offset)
            if q.dim() == 5:
                attn_bias = attn_bias.unflatten(1, q.shape[2:4])

        lse = None
        if request.backward:
            tensor = attn_bias if form.is_tensor else None
            output = _WithBackward.apply(q, k, v, tensor, attn_bias, scale, forward, backward)
        else:
            inputs = load().Inputs(q, k, v, attn_bias, scale=scale)
            inputs.validate_inputs()
            output, saved = forward.apply(inputs, needs_gradient=return_lse)
            lse = saved.lse if return_lse else None

        batch_size, query_len = query.shape[0], query.shape[2]
        output = output.flatten(2, -2)[..., : value.shape[3]]
        if form.lengths:
            output = unpack_rows(output.flatten(0, 1), form.rows, batch_size, query_len, 0.0)
        output = output.transpose(1, 2)
        if empty is not None:
            output = output.masked_fill(empty, 0.0)
        if lse is not None:
            lse = lse.flatten(1, -2).float()  # its last dimension may be padded
            if form.lengths:
                is_packed = forward.VARLEN_LSE_PACKED
                lse = unpack_lse(lse[0] if is_packed else lse, form.lengths, is_packed)
                lse = unpack_rows(lse, form.rows, batch_size, query_len, -torch.inf).transpose(1, 2)
            lse = lse[..., :query_len]
            lse = lse if moved is None else lse + moved[..., 0]
            lse = lse if empty is None else lse.masked_fill(empty[..., 0], -torch.inf)
        return output, lse

    def _interpreted(self) -> bool:
        return self.op == "triton_splitk" and os.environ.get("TRITON_INTERPRET") == "1"

    def _choose(self, request: Request) -> tuple[tuple[str, Form] | None, list[str]]:
        """The first operator and form that serve ``request``, or every reason why none does."""
        refusals = []
        for form in forms(request):
            for op_name in _AUTO if self.op == "auto" else (self.op,):
                reasons = _refusals(op_name, form, request)
                if not reasons:
                    return (op_name, form), []
                refusals.append(
                    f"requested {request.mask!r} as {form.name} from {op_name}; xformers refuses: " + ", ".join(reasons)
                )
        return None, refusals


@dataclass(frozen=True)
class Form:
    """A mask as xformers is told it: an ``attn_bias``, and which rows and keys in which layout it speaks of.

    With ``lengths``, rows and keys of the whole batch are laid end to end, ``[1, batch * seq, heads, head_dim]``:
    ``lengths`` are the rows of each block. Rows that are left out see nothing.
    """

    name: str
    attn_bias: Any = None
    is_tensor: bool = False  # made by ``tensor_bias`` when it is needed
    keys: tuple[int, int] | Tensor | None = None  # a range or bool [batch, key_len]; None: all
    rows: Tensor | None = None  # bool [batch, query_len]; None: all
    lengths: tuple[int, ...] = ()


def forms(request: Request) -> Iterator[Form]:
    """The ways to say the request's mask, from cheap to dear. All but the last leave no row without a key."""
    if not request.bias:
        band, rest = band_of(request.mask)
        if isinstance(rest, Everything):
            yield from _band_forms(request)
        elif all(isinstance(mask, Padding | Documents) for mask in conjuncts(rest)):
            yield from _block_forms(band, conjuncts(rest), request)
    yield Form("a tensor", is_tensor=True)


def _band_forms(request: Request) -> Iterator[Form]:
    """A band on the keys that any row sees at all."""
    band = corner_band(request.mask, request.query_len, request.key_len, request.query_offset)
    if band is None:
        return
    attn_bias = load().attn_bias
    seen = band.keys[1] - band.keys[0]
    left, right = (seen + request.query_len if reach is None else reach for reach in (band.left, band.right))
    if band.left is None and band.right is None:
        bias = None
    elif right > 0:
        bias = attn_bias.LocalAttentionFromBottomRightMask(left, right)
    elif left < seen - 1:
        bias = attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    elif request.query_len == seen:
        bias = attn_bias.LowerTriangularMask()
    else:
        bias = attn_bias.LowerTriangularFromBottomRightMask()
    yield Form("no bias" if bias is None else type(bias).__name__, bias, keys=band.keys)


def _block_forms(band: Window, masks: Sequence[Mask], request: Request) -> Iterator[Form]:
    """Padding and documents that lie in one piece each: blocks on the diagonal of the whole batch."""
    attn_bias = load().attn_bias
    batch_size, query_len, key_len = request.batch_size, request.query_len, request.key_len
    rows_and_keys = (0, query_len), (0, key_len)
    is_square = query_len == key_len and request.query_offset == 0
    is_plain = band.coverage(*rows_and_keys, request.query_offset) is Coverage.ALL
    has_documents = any(isinstance(mask, Documents) for mask in masks)
    is_said = is_plain or (band.right == 0 and is_square)  # xformers has no other band with packed keys
    if not is_said or (has_documents and not is_square):
        return
    left = key_len if band.left is None else band.left
    blocks = blocks_of(masks, batch_size, query_len, key_len, request.query_offset)
    if not blocks or not (is_plain or all(block.is_one_piece for block in blocks)):
        return
    if not is_plain:  # measured from the top left corner: rows begin with the keys, and end where they see none
        blocks = [replace(b, rows=slice(int(b.keys[0]), min(b.rows.stop, int(b.keys[-1]) + 1 + left))) for b in blocks]
    device = masks[0].tensors[0].device
    lengths = tuple(block.num_rows for block in blocks)
    key_lengths = [len(block.keys) for block in blocks]
    rows, keys = tables_of(blocks, batch_size, query_len, key_len, device)
    packed: dict[str, Any] = {"rows": None if rows.all() else rows, "lengths": lengths}
    if is_plain and not has_documents and all(block.is_one_piece for block in blocks):  # keys stay in place
        starts = [int(block.keys[0]) for block in blocks]
        bias: Any
        if not any(starts) and len(blocks) == batch_size:
            bias = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(lengths, key_len, key_lengths, device=device)
        else:
            places = [block.batch * key_len + start for block, start in zip(blocks, starts, strict=True)]
            bias = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens(
                lengths, [*places, batch_size * key_len], key_lengths, device=device
            )
        yield Form(type(bias).__name__, bias, **packed)
    bias = attn_bias.BlockDiagonalMask.from_seqlens(lengths, key_lengths, device=device)
    if not is_plain:
        bias = bias.make_causal() if left >= key_len - 1 else bias.make_local_attention(left + 1)
    yield Form(type(bias).__name__, bias, keys=None if keys.all() else keys, **packed)


def to_layout(
    query: Tensor, key: Tensor, value: Tensor, form: Form, forward: Any, *, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, heads, seq, head_dim]`` as xformers wants it: ``[batch, seq, heads, head_dim]``, aligned.

    With ``grouped``, fewer key than query heads give ``[batch, seq, key heads, group, head_dim]`` without a
    copy; xformers has no backward pass for that, so otherwise keys and values are repeated.
    """
    num_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    width, value_width = _head_dims(query.shape[-1], value.shape[-1], forward)
    q = _aligned(_pack(query.transpose(1, 2), form, form.rows), width)
    k = _aligned(_pack(key.transpose(1, 2), form, form.keys), width)
    v = _aligned(_pack(value.transpose(1, 2), form, form.keys), value_width)
    if group == 1:
        return q, k, v
    if grouped:
        q = q.unflatten(2, (num_kv_heads, group))
        k, v = (t[:, :, :, None].expand(-1, -1, -1, group, -1) for t in (k, v))
        return q, k, v
    return q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)


def tensor_bias(
    query: Tensor, key_len: int, mask: Mask, bias: Tensor | None, query_offset: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mask and bias as one aligned tensor ``[batch, heads, query_len, key_len]``, and the rows that see nothing.

    Those rows, bool ``[batch or 1, heads or 1, query_len, 1]``, get zeros: kernels disagree about a row of -inf. A bias
    wider than the queries' dtype, which the kernels want it in, comes back moved (``narrow``), and by how much.
    """
    sizes = (*query.shape[:3], key_len)
    allowed = evaluate(mask, *(torch.arange(n, device=query.device) for n in sizes), query_offset)  # type: ignore
    additive = query.new_zeros(()) if bias is None else bias
    additive = additive.masked_fill(~allowed, -torch.inf)
    additive = additive.expand(*additive.shape[:2], *sizes[2:])
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    additive, moved = narrow(additive.masked_fill(empty, 0.0), query.dtype)
    # Rows start at multiples of the alignment: made longer, and sliced back.
    additive = F.pad(additive, (0, -key_len % _ALIGNMENT)).contiguous()[..., :key_len]
    return additive.expand(sizes), empty, moved


def operators(name: str) -> tuple[Any, Any]:
    """xformers' operators for the forward pass, and for the backward pass or None."""
    module = getattr(load(), name)
    return module.FwOp, getattr(module, "BwOp", None)


def _package() -> str | None:
    return next((name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])), None)


@functools.cache
def load() -> Any:
    """xformers' attention, imported when it is first needed."""
    name = _package()
    if name is None:
        raise ImportError(f"none of {', '.join(_PACKAGES)} is installed")
    # The extension that it misses where it was built for another PyTorch is not used here.
    logger = logging.getLogger("xformers")
    logger.addFilter(_is_no_complaint)
    try:
        return importlib.import_module(name)
    finally:
        logger.removeFilter(_is_no_complaint)


def _is_no_complaint(record: logging.LogRecord) -> bool:
    return "can't load C++/CUDA extensions" not in record.getMessage()


def _refusals(op_name: str, form: Form, request: Request) -> list[str]:
    """What xformers says against running ``request`` in this form, asked with tensors that hold one element."""

    def shaped(*sizes: int) -> Tensor:
        return torch.empty(1, dtype=request.dtype, device=request.device).expand(*sizes)

    forward, backward = operators(op_name)
    widths = _head_dims(request.head_dim, request.value_dim, forward)
    heads: tuple[int, ...] = (request.num_heads,)
    if request.num_kv_heads != request.num_heads and not request.backward:
        heads = (request.num_kv_heads, request.num_heads // request.num_kv_heads)
    batch_size, query_len, key_len = request.batch_size, request.query_len, request.key_len
    if isinstance(form.keys, tuple):
        key_len = form.keys[1] - form.keys[0]
    if form.lengths:
        total = int(form.keys.sum()) if isinstance(form.keys, Tensor) else batch_size * key_len
        batch_size, query_len, key_len = 1, sum(form.lengths), total
    bias = form.attn_bias
    if form.is_tensor:
        bias = shaped(batch_size, *heads, query_len, key_len).requires_grad_(request.bias_grad)
    inputs = load().Inputs(
        shaped(batch_size, query_len, *heads, widths[0]),
        shaped(batch_size, key_len, *heads, widths[0]),
        shaped(batch_size, key_len, *heads, widths[1]),
        bias,
    )
    passes = [forward, backward] if request.backward else [forward]
    said = [reason for op in passes for reason in op.not_supported_reasons(inputs)]
    ignored = ["xFormers wasn't build with CUDA support"]  # of the extension; see the module's docstring
    if request.device == "cpu":
        ignored.append("device=cpu")  # interpreted
    return [reason for reason in dict.fromkeys(said) if not reason.startswith(tuple(ignored))]


def _head_dims(head_dim: int, value_dim: int, forward: Any) -> tuple[int, int]:
    """Both rounded up to what the operator takes: zeros change no score, and those of values are cut off again."""

    def rounded(size: int) -> int:
        if forward.NAME.startswith("triton"):
            return max(16, 1 << (size - 1).bit_length())
        return size + -size % _ALIGNMENT

    widths = rounded(head_dim), rounded(value_dim)
    return widths if forward.SUPPORTS_DIFFERENT_VALUE_EMBED else (max(widths), max(widths))


def _pack(tensor: Tensor, form: Form, chosen: tuple[int, int] | Tensor | None) -> Tensor:
    """The chosen rows or keys of ``[batch, seq, heads, head_dim]``, laid end to end where the form asks for it."""
    if isinstance(chosen, tuple):
        return tensor[:, slice(*chosen)]
    return pack_rows(tensor, chosen)[None] if form.lengths else tensor


def _aligned(tensor: Tensor, head_dim: int) -> Tensor:
    """``tensor`` with zeros up to ``head_dim`` and, where the operators want it, copied to aligned strides."""
    if head_dim > tensor.shape[-1]:
        tensor = F.pad(tensor, (0, head_dim - tensor.shape[-1]))
    *outer, last = tensor.stride()
    is_aligned = all(stride % _ALIGNMENT == 0 for stride in (*outer, tensor.storage_offset()))
    return tensor if is_aligned and last <= 1 else tensor.contiguous()


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensor: Tensor | None,
        attn_bias: Any,
        scale: float,
        forward: Any,
        backward: Any,
    ) -> Tensor:
        inputs = load().Inputs(query, key, value, attn_bias, scale=scale)
        inputs.validate_inputs()
        output, saved = forward.apply(inputs, needs_gradient=True)
        ctx.save_for_backward(query, key, value, tensor, output, saved.lse)
        ctx.attn_bias = None if tensor is not None else attn_bias
        ctx.scale, ctx.operator = scale, backward
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, tensor, output, lse = ctx.saved_tensors
        attn_bias = ctx.attn_bias if tensor is None else tensor
        inputs = load().Inputs(query, key, value, attn_bias, scale=ctx.scale)
        grads = ctx.operator.apply(load().Context(lse=lse, out=output), inputs, grad_output.contiguous())
        return grads.dq, grads.dk, grads.dv, grads.db, None, None, None, None
