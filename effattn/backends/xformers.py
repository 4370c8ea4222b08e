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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import ALL_MASKS, Backend, Capabilities, Request, UnsupportedError, register
from ..masks import Causal, Coverage, Documents, Everything, Mask, Padding, Window, band_of, evaluate

_PACKAGE = "xformers.ops.fmha"
_AUTO = ("flash", "cutlass")  # in the order in which they are tried
_OPS = ("auto", *_AUTO, "triton_splitk")
_ALIGNMENT = 8  # elements; of strides and head_dim, for every operator and dtype


@register
@dataclass(frozen=True)
class Xformers(Backend):
    """xformers' memory-efficient attention, for CUDA.

    Lefaudeux et al. 2022, "xFormers". Exact. Causal masks, windows, padding alone or with a causal mask on the
    right, and contiguous documents take memory O(n); any other mask or combination, and a bias, is handed over
    as a tensor ``[1 or batch, 1 or heads, query_len, key_len]``. Padding and documents are read on the host.

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
        if importlib.util.find_spec(_PACKAGE.partition(".")[0]) is None:
            return "requested xformers; supported where it is installed: pip install 'effattn[xformers]'"
        return None

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.backward and request.return_lse:
            reasons.append("requested the log-sum-exp with a backward pass; supported either of the two")
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
        attn_bias, empty = form.attn_bias, None
        if form.is_tensor:
            attn_bias, empty = tensor_bias(query, key.shape[2], mask, bias, query_offset)
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

        batch_size, num_heads, query_len, _ = query.shape
        output = output.reshape(batch_size, query_len, num_heads, -1).transpose(1, 2)[..., : value.shape[3]]
        if empty is not None:
            output = output.masked_fill(empty, 0.0)
        if lse is not None:  # its last dimension may be padded
            lse = lse.reshape(batch_size, num_heads, -1)[..., :query_len].float()
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
    """A mask as xformers is told it: an ``attn_bias``, and which keys in which layout it speaks of."""

    name: str
    attn_bias: Any = None
    is_tensor: bool = False  # made by ``tensor_bias`` when it is needed
    keys: tuple[int, int] | Tensor | None = None  # a range or bool [batch, key_len]; None: all
    packed: bool = False  # the batch laid end to end: [1, batch * seq, heads, head_dim]


def forms(request: Request) -> Iterator[Form]:
    """The ways to say the request's mask, from cheap to dear. All but the last leave no row without a key."""
    if not request.bias:
        band, rest = band_of(request.mask)
        if isinstance(rest, Everything):
            yield from _band_forms(band, request)
        elif not request.return_lse:  # how packed log-sum-exps are laid out differs between operators
            plain = band == Window(None, None)
            square = request.query_len == request.key_len and request.query_offset == 0
            causal = band == Window(None, 0) and square
            if isinstance(rest, Documents) and square and (plain or causal):
                yield from _document_forms(rest, causal, request)
            if isinstance(rest, Padding) and (plain or causal):
                yield from _padding_forms(rest, causal, request)
    yield Form("a tensor", is_tensor=True)


def _band_forms(band: Window, request: Request) -> Iterator[Form]:
    """``band`` on the keys that any row sees at all, measured from the bottom right corner as xformers does."""
    attn_bias = load().attn_bias
    query_len, rows = request.query_len, (0, request.query_len)
    low, high = band.key_range(rows, request.key_len, request.query_offset)
    seen = high - low
    if seen and band.coverage(rows, (low, high), request.query_offset) is Coverage.ALL:
        yield Form("no bias", keys=(low, high))
        return
    ahead = request.query_offset - low - (seen - query_len)  # how far the queries stand off that corner
    left = seen + query_len if band.left is None else band.left - ahead
    right = seen + query_len if band.right is None else band.right + ahead
    first_row_sees = seen - query_len + right >= 0
    if not (seen and left >= 0 and right >= 0 and first_row_sees):
        return
    if right > 0:
        bias = attn_bias.LocalAttentionFromBottomRightMask(left, right)
    elif left < seen - 1:
        bias = attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    elif query_len == seen:
        bias = attn_bias.LowerTriangularMask()
    else:
        bias = attn_bias.LowerTriangularFromBottomRightMask()
    yield Form(type(bias).__name__, bias, keys=(low, high))


def _document_forms(documents: Documents, causal: bool, request: Request) -> Iterator[Form]:
    """Documents that lie in one piece each are blocks on the diagonal of the whole batch."""
    attn_bias = load().attn_bias
    ids = documents.ids.expand(request.batch_size, -1).cpu()
    lengths: list[int] = []
    for row in ids:
        found, counts = row.unique_consecutive(return_counts=True)
        if len(found) != len(found.unique()):
            return
        lengths += counts.tolist()
    kind = attn_bias.BlockDiagonalCausalMask if causal else attn_bias.BlockDiagonalMask
    yield Form(kind.__name__, kind.from_seqlens(lengths, device=documents.ids.device), packed=True)


def _padding_forms(padding: Padding, causal: bool, request: Request) -> Iterator[Form]:
    """Right padding shortens each block; elsewhere the kept keys are gathered, where their order does not matter."""
    attn_bias = load().attn_bias
    keep = padding.keep.expand(request.batch_size, -1)
    device = keep.device
    lengths = keep.sum(1)
    on_the_right = bool((keep == (torch.arange(request.key_len, device=device) < lengths[:, None])).all())
    query_lengths, key_lengths = [request.query_len] * request.batch_size, lengths.tolist()
    if 0 in key_lengths:
        return
    if causal:
        if on_the_right:
            bias = attn_bias.BlockDiagonalCausalMask.from_seqlens(query_lengths, key_lengths, device=device)
            yield Form("BlockDiagonalCausalMask", bias, keys=keep, packed=True)
        return
    if on_the_right:
        kind = attn_bias.BlockDiagonalPaddedKeysMask
        bias = kind.from_seqlens(query_lengths, request.key_len, key_lengths, device=device)
        yield Form(kind.__name__, bias, packed=True)
    bias = attn_bias.BlockDiagonalMask.from_seqlens(query_lengths, key_lengths, device=device)
    yield Form("BlockDiagonalMask", bias, keys=keep, packed=True)


def to_layout(
    query: Tensor, key: Tensor, value: Tensor, form: Form, forward: Any, *, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, heads, seq, head_dim]`` as xformers wants it: ``[batch, seq, heads, head_dim]``, aligned.

    With ``grouped``, fewer key than query heads give ``[batch, seq, key heads, group, head_dim]`` without a
    copy; xformers has no backward pass for that, so otherwise keys and values are repeated.
    """
    num_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    width, value_width = _head_dims(query.shape[-1], value.shape[-1], forward)
    q = _aligned(_pack(query.transpose(1, 2), form, None), width)
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
) -> tuple[Tensor, Tensor]:
    """Mask and bias as one aligned tensor ``[batch, heads, query_len, key_len]``, and the rows that see nothing.

    Those rows, bool ``[batch or 1, heads or 1, query_len, 1]``, get zeros: kernels disagree about a row of -inf.
    """
    sizes = (*query.shape[:3], key_len)
    allowed = evaluate(mask, *(torch.arange(n, device=query.device) for n in sizes), query_offset)  # type: ignore
    additive = query.new_zeros(()) if bias is None else bias.to(query.dtype)
    additive = additive.masked_fill(~allowed, -torch.inf)
    additive = additive.expand(*additive.shape[:2], *sizes[2:])
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    additive = additive.masked_fill(empty, 0.0)
    # Rows start at multiples of the alignment: made longer, and sliced back.
    additive = F.pad(additive, (0, -key_len % _ALIGNMENT)).contiguous()[..., :key_len]
    return additive.expand(sizes), empty


def operators(name: str) -> tuple[Any, Any]:
    """xformers' operators for the forward pass, and for the backward pass or None."""
    module = getattr(load(), name)
    return module.FwOp, getattr(module, "BwOp", None)


@functools.cache
def load() -> Any:
    """xformers' attention, imported when it is first needed. The one place that knows the package's name."""
    # The extension that it misses where it was built for another PyTorch is not used here.
    logger = logging.getLogger("xformers")
    logger.addFilter(_is_no_complaint)
    try:
        return importlib.import_module(_PACKAGE)
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
    if form.packed:
        total = int(form.keys.sum()) if isinstance(form.keys, Tensor) else batch_size * key_len
        batch_size, query_len, key_len = 1, batch_size * query_len, total
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


def _pack(tensor: Tensor, form: Form, keys: tuple[int, int] | Tensor | None) -> Tensor:
    """The chosen keys of ``[batch, seq, heads, head_dim]``, the batch laid end to end where the form asks for it."""
    if isinstance(keys, Tensor):
        return tensor[keys][None]
    if keys is not None:
        tensor = tensor[:, slice(*keys)]
    return rearrange(tensor, "b s h d -> 1 (b s) h d") if form.packed else tensor


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
