"""Softmax of a tile of scores in place, and joining what tiles with different keys give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Part", "calm_empty_rows", "product_dtype", "softmax_gradient_in_place", "softmax_in_place"]


@dataclass
class Part:
    """Attention over some of the keys: the output, and its rows' largest score and sum of ``exp(score - peak)``.

    Peak and sum are kept apart, since their log-sum-exp has few digits left for the sum where scores are large.
    """

    output: Tensor  # [..., rows, value_dim]
    peak: Tensor  # [..., rows, 1]; -inf in a row that sees nothing
    total: Tensor  # [..., rows, 1]; 0 in a row that sees nothing

    @property
    def lse(self) -> Tensor:
        return self.peak + self.total.log()

    def join(self, other: Part) -> Part:
        """Both sets of keys together; the outputs given are overwritten."""
        peak = torch.maximum(self.peak, other.peak)
        finite = peak.clamp(min=torch.finfo(peak.dtype).min)  # -inf minus -inf would be NaN
        own, others = (part.total * (part.peak - finite).exp_() for part in (self, other))
        total = own + others
        share = total.clamp(min=torch.finfo(total.dtype).tiny).reciprocal_()
        output = self.output.mul_(own.mul_(share)).addcmul_(other.output, others.mul_(share))
        return Part(output, peak, total)


def softmax_in_place(
    scores: Tensor, empty: Tensor | None, *, need_statistics: bool = True
) -> tuple[Tensor, Tensor] | None:
    """Overwrite ``scores`` with their softmax; peak and total come back where they are asked for.

    ``empty`` marks the rows that see nothing, ``[..., rows, 1]``: finite scores there give weights of 0, a peak of
    -inf and a total of 0. Elsewhere some score of each row is finite.
    """
    peak = scores.amax(-1, keepdim=True) if need_statistics else None
    torch.softmax(scores, -1, out=scores)
    total = scores.amax(-1, keepdim=True).reciprocal_() if need_statistics else None  # the peak's weight is 1 / total
    if empty is not None:
        scores.masked_fill_(empty, 0.0)
    if peak is None or total is None:
        return None
    if empty is not None:
        peak.masked_fill_(empty, -torch.inf)
        total.masked_fill_(empty, 0.0)
    return peak, total


def softmax_gradient_in_place(d_weights: Tensor, weights: Tensor) -> Tensor:
    """Overwrite the gradient of softmax's result with that of the scores."""
    return torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, weights.dtype, grad_input=d_weights)


def calm_empty_rows(scores: Tensor) -> Tensor | None:
    """Overwrite rows of nothing but -inf with 0, and mark them ``[..., rows, 1]``; None: there are none."""
    empty = scores.amax(-1, keepdim=True) == -torch.inf
    if not empty.any():
        return None
    scores.masked_fill_(empty, 0.0)
    return empty


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of products of weights for inputs of ``dtype``, where the sum is rounded to ``dtype`` anyway.

    As fused attention does it: weights of bfloat16, summed in float32, where the processor is fast at that.
    """
    is_fast = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if is_fast else torch.promote_types(dtype, torch.float32)
