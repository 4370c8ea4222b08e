"""``torch.nn.MultiheadAttention`` through a backend: projections as PyTorch's, attention and masks as ours.

Written out because a ``TorchFunctionMode`` does not see into it: its fast path, the encoder layer's fast path and the
weights on request never call ``F.scaled_dot_product_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..masks import Causal, Dense, Everything, Mask, Padding
from .sites import ATTRIBUTE, Site, attention_dropout


def refusals(module: nn.Module) -> list[str]:
    """Why this module cannot be served."""
    reasons = []
    if getattr(module, "bias_k", None) is not None:
        reasons.append("it was made with add_bias_kv=True, a key that stands at no position")
    if getattr(module, "add_zero_attn", False):
        reasons.append("it was made with add_zero_attn=True, a key that stands at no position")
    return reasons


def needs(module: Any) -> list[dict[str, Any]]:
    """What a multi-head attention, PyTorch's or this project's, will ask of a backend: the fields of a ``Request``."""
    asked = {"dropout_p": attention_dropout(module)}
    if hasattr(module, "num_heads") and hasattr(module, "head_dim"):
        asked |= {"num_heads": module.num_heads, "num_kv_heads": getattr(module, "num_kv_heads", module.num_heads)}
        asked |= {"head_dim": module.head_dim, "value_dim": module.head_dim}
    return [asked]


def forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Stands in for ``nn.MultiheadAttention.forward``, with the same arguments and shapes.

    ``is_causal`` says, as in PyTorch, that ``attn_mask`` is the causal mask, which is then not read. Weights on
    request are those of the backend's pattern, materialised and before dropout.
    """
    if query.is_nested:
        raise ValueError(f"swap: {getattr(module, ATTRIBUTE).path} attends over nested tensors; supported are dense")
    batched = query.dim() == 3
    if is_causal and attn_mask is None:
        raise ValueError("attn_mask: must be given with is_causal=True, as PyTorch has it; got None")
    if not batched:
        query, key, value = (t[None] for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=module.num_heads) for t in _project(module, query, key, value))
    mask, bias = _mask_and_bias(module, key_padding_mask, None if is_causal else attn_mask, q)
    if is_causal:
        mask = Causal() & mask
    site: Site = getattr(module, ATTRIBUTE)
    options: dict[str, Any] = {"mask": mask, "bias": bias, "query_offset": 0}
    assert site.backend is not None, f"{site.path} is not served"
    output = site.attend(q, k, v, dropout_p=module.dropout if module.training else 0.0, **options)
    output = module.out_proj(rearrange(output, "b h n d -> b n (h d)"))
    weights = site.weights(q, k, **options) if need_weights else None
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return output[0], None if weights is None else weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights


def _project(module: nn.MultiheadAttention, *inputs: Tensor) -> tuple[Tensor, ...]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))


def _mask_and_bias(
    module: nn.MultiheadAttention, key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor
) -> tuple[Mask, Tensor | None]:
    """PyTorch's masks (True = hide, or added to the scores) as ours."""
    mask: Mask = Everything()
    biases = []
    if key_padding_mask is not None:
        if key_padding_mask.is_floating_point():
            # The encoder layers turn their bool mask into 0 and -inf; -inf hides a key, whatever it holds.
            mask = mask & Padding(key_padding_mask != -torch.inf)
            biases.append(key_padding_mask.masked_fill(key_padding_mask == -torch.inf, 0.0)[:, None, None, :])
        else:
            mask = mask & Padding(~key_padding_mask)
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = rearrange(attn_mask, "(b h) i j -> b h i j", h=module.num_heads)
        if attn_mask.is_floating_point():
            biases.append(attn_mask)
        else:
            mask = mask & Dense(~attn_mask)
    return mask, sum(biases[1:], biases[0]) if biases else None
