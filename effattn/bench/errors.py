"""The errors of a backend on sampled query rows, in float64, the three kinds told apart.

* implementation: the backend against dense attention over its own pattern: rounding, or a mistake in the
code;
* approximation: that dense attention against full attention under the caller's mask: what the method gives
up;
* total: the backend against full attention.

Everything is computed for a sample of query rows, a block at a time, so that no length needs an n x n matrix.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor

from effattn import cost, reference
from effattn.masks import Mask, hide_padding


@dataclass(frozen=True)
class Work:
    """What a pattern keeps of what a mask allows."""

    pairs: float  # over all batch rows, heads and query rows
    density: float
    keys_per_query: float


def sample_rows(query_len: int, num_rows: int, seed: int) -> Int[Tensor, " rows"]:
    """Query rows in order: all, or one from each of ``num_rows`` equal stretches; the last is always among them."""
    if num_rows >= query_len:
        return torch.arange(query_len)
    within = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    limits = torch.arange(num_rows + 1) * query_len // num_rows
    rows = limits[:-1] + (within * limits.diff()).long()
    rows[-1] = query_len - 1
    return rows


def work(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key_len: int,
    *,
    mask: Mask,
    pattern: Mask,
    rows: Int[Tensor, " rows"],
) -> Work:
    """Attended pairs of ``pattern`` and their share of those that ``mask`` allows.

    The share is exact where ``pattern`` is ``mask`` and comes from ``rows`` otherwise; the mask's pairs are
    exact.
    """
    sizes = (*query.shape[:3], key_len)
    allowed = cost.attended_pairs(mask, *sizes, device=query.device)
    density = 1.0
    if pattern is not mask:
        kept, of = (cost.attended_pairs(m, *sizes, rows=rows, device=query.device) for m in (pattern, mask))
        density = cost.density(kept, of)
    pairs = density * allowed
    return Work(pairs, density, pairs / query.shape[:3].numel())


def output_errors(
    output: Float[Tensor, "batch heads query_len value_dim"],
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    *,
    mask: Mask,
    pattern: Mask | None,
    weights: reference.BiasFunction | None = None,
    scale: float,
    rows: Int[Tensor, " rows"],
) -> dict[str, float | None]:
    """The error fields of a record for a backend's ``output`` under ``mask``, where it attends to
    ``pattern`` and adds ``weights`` (``Backend.reference_bias``) to its scores.

    Without a ``pattern`` only the total error is known, and no other field is there. ``_low`` and ``_high`` are the
    limits of ``relative_interval``; None where there are too few rows for them.

    ``recall`` is the share of full attention's weight that the pattern keeps, the mean over rows.
    ``oracle_rel_l2`` is the approximation error of keeping in each row the keys with the largest weights,
    as many as the pattern keeps there. Where ``pattern`` is ``mask`` itself nothing is approximated: 0, 1
    and 0, exactly.

    Raises:
        ArithmeticError: if a sampled row of the output is not finite.
    """
    ours = output[:, :, rows].double()
    if not ours.isfinite().all():
        broken = int((~ours.isfinite()).sum())
        raise ArithmeticError(f"{broken} of {ours.numel()} sampled values of the output are NaN or infinite")
    (value,) = hide_padding(mask, value.double())
    kept_mask = mask if pattern is None else pattern
    exact = kept_mask is mask and weights is None
    blocks = list(_blocks(query, key, value, mask=mask, pattern=kept_mask, weights=weights, scale=scale, rows=rows))
    full = torch.cat([block.full for block in blocks], dim=2)
    total: dict[str, float | None] = {
        "total_rel_l2": rel_l2(ours, full),
        **_interval("total", ours, full, query.shape[2]),
        "total_cosine": float(torch.cosine_similarity(ours.flatten(), full.flatten(), dim=0)),
        "total_max_abs": float((ours - full).abs().max()),
    }
    if pattern is None:
        return total
    kept = full if exact else torch.cat([block.kept for block in blocks], dim=2)
    oracle = full if exact else torch.cat([block.oracle for block in blocks], dim=2)
    recalls = torch.cat([block.recalls for block in blocks])
    return {
        "implementation_rel_l2": rel_l2(ours, kept),
        "approximation_rel_l2": rel_l2(kept, full),
        **_interval("approximation", kept, full, query.shape[2]),
        **total,
        "recall": 1.0 if exact else float(recalls.mean()),
        "oracle_rel_l2": rel_l2(oracle, full),
    }


def gradient_errors(
    grads: tuple[Tensor, Tensor, Tensor],
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    grad_output: Float[Tensor, "batch heads query_len value_dim"],
    *,
    mask: Mask,
    pattern: Mask | None,
    weights: reference.BiasFunction | None = None,
    scale: float,
) -> dict[str, float]:
    """The three errors of the gradients of query, key and value, taken together; time O(query_len x key_len).

    Without a ``pattern`` only the total one.

    Raises:
        ArithmeticError: if a gradient is not finite.
    """
    ours = _flat(grads)
    if not ours.isfinite().all():
        broken = int((~ours.isfinite()).sum())
        raise ArithmeticError(f"{broken} of {ours.numel()} values of the gradients are NaN or infinite")
    full = _flat(reference.gradients(query, key, value, grad_output, mask=mask, scale=scale))
    if pattern is None:
        return {"grad_total_rel_l2": rel_l2(ours, full)}
    kept = full
    if pattern is not mask or weights is not None:
        kept = _flat(reference.gradients(query, key, value, grad_output, mask=pattern, bias=weights, scale=scale))
    return {
        "grad_implementation_rel_l2": rel_l2(ours, kept),
        "grad_approximation_rel_l2": rel_l2(kept, full),
        "grad_total_rel_l2": rel_l2(ours, full),
    }


def rel_l2(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; 0 where both are 0, infinite where only ``want`` is."""
    difference = (got - want).norm()
    return float(difference / want.norm()) if difference else 0.0


def relative_interval(
    squared_errors: Float[Tensor, "*groups rows"], squared_norms: Float[Tensor, "*groups rows"], query_len: int
) -> tuple[Float[Tensor, " *groups"], Float[Tensor, " *groups"]]:
    """Limits between which the relative L2 error of all ``query_len`` rows lies, with a confidence of 95%.

    The error of a sample is sqrt(sum of squared errors / sum of squared norms), a ratio. Its standard error comes from
    linearising the logarithm of that (the delta method), from the differences of neighbouring rows, since one row is
    drawn from each of equal stretches (Wolter 1985, "Introduction to variance estimation", section 8.2), and from the
    share of the rows that was not drawn. Student's t has as many degrees of freedom as the residuals' kurtosis leaves:
    few, where a few rows carry most of the error (with log-normal errors of sigma 1.2 and 128 of 2000 rows the limits
    hold in 90% of samples). The limits are equal where all rows were drawn, and NaN for fewer than 3 rows of more.
    """
    count = squared_errors.shape[-1]
    mean_error, mean_norm = squared_errors.mean(-1), squared_norms.mean(-1)
    middle = torch.where(mean_error == 0, mean_error, mean_error / mean_norm).sqrt()
    if count >= query_len:
        return middle, middle
    if count < 3:
        return middle * torch.nan, middle * torch.nan
    residual = squared_errors - (mean_error / mean_norm)[..., None] * squared_norms
    steps = residual.diff(dim=-1).square()
    variance = steps.mean(-1) / 2 * (1 - count / query_len) / count
    # Of the variance's own estimate; steps of independent normal residuals give two thirds of the rows.
    freedom = 2 * (count - 1) * steps.mean(-1).square() / (1.5 * steps.var(-1))
    quantile = torch.as_tensor(stdtrit(freedom.clamp(min=1).nan_to_num(1).cpu().numpy(), 0.975))
    spread = (quantile.to(variance) * variance.sqrt() / mean_error / 2).exp().nan_to_num(1.0, posinf=torch.inf)
    return middle / spread, middle * spread


def _interval(name: str, got: Tensor, want: Tensor, query_len: int) -> dict[str, float | None]:
    """The limits of an error over all batch rows and heads, rows being the third dimension."""
    off, norm = (x.square().sum((0, 1, 3)) for x in (got - want, want))
    limits = (float(limit) for limit in relative_interval(off, norm, query_len))
    return {
        f"{name}_rel_l2_{side}": limit if math.isfinite(limit) else None
        for side, limit in zip(("low", "high"), limits, strict=True)
    }


@dataclass(frozen=True)
class _Block:
    """Some rows of the three exact outputs, and the recall of each row, batch row and head that sees anything."""

    full: Tensor
    kept: Tensor
    oracle: Tensor
    recalls: Tensor


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    pattern: Mask,
    weights: reference.BiasFunction | None,
    scale: float,
    rows: Tensor,
) -> Iterator[_Block]:
    of_mask = reference.score_rows(query, key, mask=mask, scale=scale, rows=rows)
    if pattern is mask and weights is None:
        for block in of_mask:
            output = weigh(block.weights, value)
            yield _Block(output, output, output, output.new_ones(1))
        return
    of_pattern = reference.score_rows(query, key, mask=pattern, bias=weights, scale=scale, rows=rows)
    for full, kept in zip(of_mask, of_pattern, strict=True):
        attended = (kept.allowed & full.allowed).expand_as(full.weights)
        sees = full.allowed.any(-1).expand(full.weights.shape[:3])
        yield _Block(
            full=weigh(full.weights, value),
            kept=weigh(kept.weights, value),
            oracle=weigh(_largest(full.weights, attended.sum(-1)), value),
            recalls=(full.weights * attended).sum(-1)[sees],
        )


def _largest(weights: Tensor, budget: Tensor) -> Tensor:
    """The ``budget[..., row]`` largest weights of each row, made to sum to 1 again; the others 0."""
    most = int(budget.max())
    if most == 0:
        return torch.zeros_like(weights)
    values, index = weights.topk(most, dim=-1)
    values = values.masked_fill(torch.arange(most, device=weights.device) >= budget[..., None], 0.0)
    total = values.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, index, values / torch.where(total > 0, total, 1.0))


def weigh(
    weights: Float[Tensor, "batch heads rows key_len"], value: Float[Tensor, "batch kv_heads key_len value_dim"]
) -> Float[Tensor, "batch heads rows value_dim"]:
    """``weights @ value`` with the values' heads shared among groups of query heads."""
    grouped = rearrange(weights, "b (h_kv g) r s -> b h_kv (g r) s", h_kv=value.shape[1])
    return rearrange(grouped @ value, "b h_kv (g r) d -> b (h_kv g) r d", r=weights.shape[2])


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
