"""PyTorch's own fused kernels, through ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backend import Backend, Capabilities, Request, UnsupportedError, register
from ..masks import Causal, Coverage, Mask, evaluate

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@register
@dataclass(frozen=True)
class SDPA(Backend):
    """PyTorch's fused attention (flash, efficient, cudnn, math).

    ``kernel="auto"`` leaves the choice to PyTorch; a name insists on that kernel, and is refused where PyTorch
    does not have it for the inputs. A mask that is neither empty nor top-left causal is materialised, O(n^2).
    """

    name = "sdpa"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        self._require(self.kernel in ("auto", *_KERNELS), "kernel", f"one of auto, {', '.join(_KERNELS)}")

    @property
    def capabilities(self) -> Capabilities:
        fused = self.kernel in ("flash", "efficient", "cudnn")
        return Capabilities(lse=False, lse_grad=False, bias_grad=self.kernel in ("auto", "math"), dropout=not fused)

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
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
        bias = None
        if request.bias:
            bias = torch.empty(1, 1, dtype=request.dtype, device=request.device, requires_grad=request.bias_grad)
            bias = bias.expand(request.query_len, request.key_len)
        chosen = torch._fused_sdp_choice(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=request.dropout_p,
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
        is_causal, additive, empty = _translate(query, key.shape[2], mask, bias, query_offset)
        # PyTorch's fused kernels want the last dimension dense, and would silently leave the work to math.
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        if scale <= 0:  # its CPU kernel masks before it scales: -inf would turn
            query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
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


def _translate(
    query: Tensor, key_len: int, mask: Mask, bias: Tensor | None, query_offset: int
) -> tuple[bool, Tensor | None, Tensor | None]:
    """``is_causal``, ``attn_mask`` and the rows that see nothing, ``[..., query_len, 1]``.

    Those rows are opened here and zeroed afterwards: what a fused kernel makes of them is not specified.
    """
    batch_size, num_heads, query_len, _ = query.shape
    if mask.coverage((0, query_len), (0, key_len), query_offset) is Coverage.ALL:
        allowed = None
    elif isinstance(mask, Causal) and query_offset == 0 and bias is None:
        return True, None, None
    else:
        b, h, i, j = (torch.arange(n, device=query.device) for n in (batch_size, num_heads, query_len, key_len))
        allowed = evaluate(mask, b, h, i, j, query_offset)
    if bias is None:
        if allowed is None:
            return False, None, None
        empty = ~allowed.any(-1, keepdim=True)
        return False, (allowed | empty).expand(*allowed.shape[:2], query_len, key_len), empty
    additive = bias.to(query.dtype)
    if allowed is not None:
        additive = additive.masked_fill(~allowed, -torch.inf)
    additive = additive.expand(batch_size, num_heads, query_len, key_len)
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    return False, additive.masked_fill(empty, 0.0), empty
