"""Joining attention over disjoint sets of keys through their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One output and log-sum-exp from those over disjoint key sets: ``[..., L, Dv]`` and ``[..., L]`` each.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = logsumexp_i lse_i``; differentiable through both. A row
    that sees nothing in any part gives 0 and -inf, with zero gradients.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    nothing = lses == -torch.inf
    empty = nothing.all(0)
    # Two steps keep NaN out of the gradients: fill what is absent, then give it no weight.
    peak = lses.detach().amax(0).masked_fill(empty, 0.0)
    weights = (lses.masked_fill(nothing, 0.0) - peak).exp().masked_fill(nothing, 0.0)
    total = weights.sum(0).masked_fill(empty, 1.0)
    shares = (weights / total)[..., None]
    outputs = [out.to(shares.dtype) for out, _ in parts]
    output = shares[0] * outputs[0]
    for share, out in zip(shares[1:], outputs[1:], strict=True):
        output = torch.addcmul(output, share, out)
    return output.to(parts[0][0].dtype), (peak + total.log()).masked_fill(empty, -torch.inf)
