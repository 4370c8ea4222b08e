"""Softmax of a tile of scores in place, and joining what tiles with different keys give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Part", "softmax_in_place"]


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


def softmax_in_place(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite ``scores`` with their softmax; peak and total come back. A row of -inf gives weights of 0."""
    peak = scores.amax(-1, keepdim=True)
    empty = peak == -torch.inf
    some_empty = bool(empty.any())
    if some_empty:
        scores.masked_fill_(empty, 0.0)
    torch.softmax(scores, -1, out=scores)
    total = scores.amax(-1, keepdim=True).reciprocal_()  # the weight of the peak is 1 / total
    if some_empty:
        scores.masked_fill_(empty, 0.0)
        total.masked_fill_(empty, 0.0)
    return peak, total
