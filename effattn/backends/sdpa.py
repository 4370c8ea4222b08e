"""Fused kernels as others wrote them: PyTorch's, through ``F.scaled_dot_product_attention``, and flash-attention's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backend import Backend, Capabilities, Request, UnsupportedError, register
from ..kernels.corner import CornerBand, corner_band
from ..kernels.narrow import narrow
from ..kernels.packing import Pack, pack_rows, packs_of, unpack_lse
from ..masks import Causal, Coverage, Documents, Mask, Padding, Window, evaluate

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# The modules in which a version of the package has its interface, the first that is there.
_PACKAGES = {
    "flash_attn_2": ("flash_attn",),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
}
_PACKAGE_ALIGNMENT = 8  # of head_dim


@register
@dataclass(frozen=True)
class SDPA(Backend):
    """PyTorch's fused attention (flash, efficient, cudnn, math), and the flash-attention packages.

    ``kernel="auto"`` leaves the choice to PyTorch; a name insists on that kernel, and is refused where PyTorch
    does not have it for the inputs. A mask that is neither empty nor top-left causal is materialised, O(n^2).

    "flash_attn_2" and "flash_attn_3" are Dao 2023 and Shah et al. 2024, where their packages are installed: on CUDA,
    in half precision; O(n) memory. A causal mask or window in which every row sees a key is handed over as it is. Else
    the rows that see something and their keys are laid end to end (``flash_attn_varlen_func``), which reads padding
    and documents on the host. Beside a window, rows before and behind the real keys are calls of their own: one for
    all where the window is unbounded on that side, else one for each number of such rows.
    """

    name = "sdpa"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        names = ("auto", *_KERNELS, *_PACKAGES)
        self._require(self.kernel in names, "kernel", f"one of {', '.join(names)}")

    @property
    def capabilities(self) -> Capabilities:
        if self.kernel in _PACKAGES:
            return Capabilities(
                masks=(Causal, Window, Padding, Documents),
                bias=False,
                bias_grad=False,
                dtypes=(torch.float16, torch.bfloat16),
                devices=("cuda",),
                max_head_dim=256,
                value_head_dim=False,
                dropout=False,
                lse_grad=False,
                deterministic=False,
            )
        fused = self.kernel in ("flash", "efficient", "cudnn")
        return Capabilities(lse=False, lse_grad=False, bias_grad=self.kernel in ("auto", "math"), dropout=not fused)

    def unavailable(self) -> str | None:
        if self.kernel in _PACKAGES and _module_of(self.kernel) is None:
            modules = " or ".join(_PACKAGES[self.kernel])
            return f"requested {self.kernel}; supported where the package is installed (no module {modules} is found)"
        return None

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        is_known = all(kind in self.capabilities.masks for kind in request.mask.kinds())
        if self.kernel in _PACKAGES and is_known and _band_of(request) is None and _packs_of(request) is None:
            reasons.append(
                f"requested {request.mask!r} from {self.kernel}; supported windows without dilation, padding (beside a "
                "window: without holes) and documents in one piece each"
            )
        if request.device == "cpu" and self.kernel in ("efficient", "cudnn"):
            reasons.append(f"requested the {self.kernel} kernel on cpu; supported flash and math")
        if request.device == "cpu" and self.kernel == "flash" and request.head_dim != request.value_dim:
            reasons.append(
                f"requested value head_dim {request.value_dim} with the flash kernel on cpu; "
                f"supported that of the queries, {request.head_dim}"
            )
        return reasons

    def resolve(self, request: Request) -> str:
        """The kernel that PyTorch picks for these shapes, or the one that ``kernel`` insists on."""
        if self.kernel != "auto":
            return self.kernel
        shapes = (
            (request.num_heads, request.query_len, request.head_dim),
            (request.num_kv_heads, request.key_len, request.head_dim),
            (request.num_kv_heads, request.key_len, request.value_dim),
        )
        query, key, value = (
            torch.empty(request.batch_size, *shape, dtype=request.dtype, device=request.device) for shape in shapes
        )
        query.requires_grad_(request.backward)
        is_causal, needs_tensor = _kind(request)
        attn_mask = None
        if request.bias or needs_tensor:
            dtype = request.dtype if request.bias else torch.bool
            attn_mask = torch.empty(1, 1, dtype=dtype, device=request.device, requires_grad=request.bias_grad)
            attn_mask = attn_mask.expand(request.query_len, request.key_len)
        chosen = torch._fused_sdp_choice(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=request.dropout_p,
            is_causal=is_causal,
            enable_gqa=request.num_heads != request.num_kv_heads,
        )
        return {backend.value: name for name, backend in _KERNELS.items()}.get(chosen, "math")

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
        if scale <= 0:  # kernels that mask before they scale would turn -inf around
            query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
        if self.kernel in _PACKAGES:
            request = Request.of(query, key, value, mask=mask, query_offset=query_offset)
            return _by_package(self.kernel, query, key, value, request, scale, return_lse)
        is_causal, additive, empty = _translate(query, key, value, mask, bias, query_offset)
        # PyTorch's fused kernels want the last dimension dense, and would silently leave the work to math.
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        try:
            with sdpa_kernel(_KERNELS[self.kernel]) if self.kernel != "auto" else nullcontext():
                output = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=additive,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            reason = f"requested the {self.kernel} kernel; PyTorch has none for these inputs (its warnings say why)"
            raise UnsupportedError(self, [reason]) from error
        return (output if empty is None else output.masked_fill(empty, 0.0)), None


def _kind(request: Request) -> tuple[bool, bool]:
    """Whether the mask is PyTorch's ``is_causal``, and whether it must be written out as a tensor."""
    rows, keys = (0, request.query_len), (0, request.key_len)
    if request.mask.coverage(rows, keys, request.query_offset) is Coverage.ALL:
        return False, False
    is_causal = isinstance(request.mask, Causal) and request.query_offset == 0 and not request.bias
    return is_causal, not is_causal


def _translate(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, query_offset: int
) -> tuple[bool, Tensor | None, Tensor | None]:
    """``is_causal``, ``attn_mask`` and the rows that see nothing, ``[..., query_len, 1]``.

    Those rows are opened here and zeroed afterwards: what a fused kernel makes of them is not specified.
    """
    (batch_size, num_heads, query_len, _), key_len = query.shape, key.shape[2]
    is_causal, needs_tensor = _kind(Request.of(query, key, value, mask=mask, bias=bias, query_offset=query_offset))
    if is_causal:
        return True, None, None
    allowed = None
    if needs_tensor:
        b, h, i, j = (torch.arange(n, device=query.device) for n in (batch_size, num_heads, query_len, key_len))
        allowed = evaluate(mask, b, h, i, j, query_offset)
    if bias is None:
        if allowed is None:
            return False, None, None
        empty = ~allowed.any(-1, keepdim=True)
        return False, (allowed | empty).expand(*allowed.shape[:2], query_len, key_len), empty
    # A CPU takes a bias in float32 beside half-precision queries.
    keeps = query.device.type == "cpu" and bias.dtype == torch.float32 and query.dtype.itemsize == 2
    additive = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    additive = additive.masked_fill(empty, 0.0)
    if not keeps:
        additive, _ = narrow(additive, query.dtype)
    return False, additive.expand(batch_size, num_heads, query_len, key_len), empty


def _band_of(request: Request) -> Any:
    return corner_band(request.mask, request.query_len, request.key_len, request.query_offset)


def _packs_of(request: Request, device: torch.device | str = "cpu") -> list[Pack] | None:
    sizes = request.batch_size, request.query_len, request.key_len, request.query_offset
    return packs_of(request.mask, *sizes, device)


def _by_package(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, request: Request, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """By a flash-attention package, which measures a band from the bottom right corner too."""
    head_dim = query.shape[3]
    q, k, v = (_laid_out(t) for t in (query, key, value))
    options = {"softmax_scale": scale, "return_attn_probs": need_lse}
    band = _band_of(request)
    if band is not None:
        k, v = (t[:, slice(*band.keys)] for t in (k, v))
        result = _function_of(kernel, "flash_attn_func")(q, k, v, **options, **_band_options(band))
        output, lse = result[:2] if need_lse else (result, None)  # some versions give more
        return output.transpose(1, 2)[..., :head_dim], lse

    packs = _packs_of(request, query.device)
    assert packs is not None
    output = torch.zeros_like(q) if packs else _zeros_of(q, k, v)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32) if need_lse else None
    for pack in packs:
        rows, keys, values = (pack_rows(*t) for t in ((q, pack.rows), (k, pack.keys), (v, pack.keys)))
        lengths = pack.row_lengths, pack.key_lengths
        ends = [F.pad(torch.tensor(n, device=q.device).cumsum(0, dtype=torch.int32), (1, 0)) for n in lengths]
        result = _function_of(kernel, "flash_attn_varlen_func")(
            rows, keys, values, *ends, *map(max, lengths), **options, **_band_options(pack)
        )
        output[pack.rows] = result[0] if need_lse else result
        if lse is not None:
            lse[pack.rows] = unpack_lse(result[1], pack.row_lengths, is_packed=result[1].dim() == 2)
    return output.transpose(1, 2)[..., :head_dim], None if lse is None else lse.transpose(1, 2)


def _zeros_of(query: Tensor, *others: Tensor) -> Tensor:
    """Zeros like ``query`` that are a function of all the tensors, with gradients of 0."""
    total = query.sum() + sum(t.sum() for t in others)
    return total.masked_fill(torch.ones_like(total, dtype=torch.bool), 0.0).expand_as(query)


def _band_options(band: CornerBand | Pack) -> dict[str, Any]:
    """A causal mask is said as such; of a window, -1 is unbounded."""
    is_causal = band.left is None and band.right == 0
    window = (-1, -1) if is_causal else tuple(-1 if reach is None else reach for reach in (band.left, band.right))
    return {"causal": is_causal, "window_size": window}


def _laid_out(tensor: Tensor) -> Tensor:
    """``[batch, seq, heads, head_dim]``, the last dimension dense and zeros up to a multiple of 8."""
    tensor = tensor.transpose(1, 2)
    if tensor.shape[3] % _PACKAGE_ALIGNMENT:
        tensor = F.pad(tensor, (0, -tensor.shape[3] % _PACKAGE_ALIGNMENT))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _module_of(kernel: str) -> str | None:
    """The first module of the package that is installed; nothing but its parents is imported."""
    for name in _PACKAGES[kernel]:
        parent = name.rpartition(".")[0]
        if (not parent or importlib.util.find_spec(parent)) and importlib.util.find_spec(name):
            return name
    return None


@functools.cache
def _function_of(kernel: str, function: str) -> Callable[..., Any]:
    name = _module_of(kernel)
    assert name is not None
    return getattr(importlib.import_module(name), function)
